"""A plain training loop around x-transformers' decoder: learned positions, pre-norm, PyTorch's fused attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from tformer.bench.peers.plain_training import PlainTraining
from tformer.bench.workloads import Task
from tformer.build import resolve_sizes
from tformer.errors import InputError


def make(task: Task, precision: str) -> PlainTraining:
    return PlainTraining("x-transformers", task, precision, LanguageModel)


class LanguageModel(nn.Module):
    """`AutoregressiveWrapper` of a decoder of the recipe's sizes. InputError for a recipe with an encoder."""

    def __init__(self, task: Task) -> None:
        from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

        super().__init__()
        model = task.recipe.model
        stack = model.decoder
        if stack is None or model.encoder is not None:
            raise InputError("--peer x-transformers: it trains decoders here, this model has an encoder")
        if stack.feedforward.gated:
            raise InputError("--peer x-transformers: the decoder that it trains here has no gates, this model has")
        sizes = resolve_sizes(model, "decoder")
        layers: dict[str, Any] = {
            "dim": model.d_model,
            "depth": stack.num_layers,
            "heads": sizes.num_heads,
            "attn_dim_head": sizes.head_dim,
            "attn_kv_heads": sizes.num_kv_heads,
            "attn_flash": True,
            "attn_dropout": stack.attention_dropout,
            "ff_mult": (stack.feedforward.hidden_size(model.d_model)) / model.d_model,
            "ff_dropout": stack.dropout,
        }
        net = TransformerWrapper(
            num_tokens=model.vocab_size,
            max_seq_len=model.max_seq_len,
            emb_dropout=model.embedding.dropout,
            tie_embedding=model.tie.output,
            attn_layers=Decoder(**layers),
        )
        self.wrapped = AutoregressiveWrapper(net, pad_value=0)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.wrapped(input_ids))
