"""x-transformers as a peer: a training loop around its decoder, and its attention.

The decoder has learned positions and pre-norm; attention is PyTorch's fused one (`flash=True`).

Shape legend: B batch, T positions, H heads, K heads of keys and values, h head_dim.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from tformer.bench.peers.transformers import TrainingLoop
from tformer.bench.workloads import Task
from tformer.build import resolve_sizes
from tformer.nn.attention import AttentionSizes, FullAttentionOptions, Mechanism
from tformer.nn.attention.context import AttentionInputs
from tformer.support.errors import InputError


class Training(TrainingLoop):
    name = "x-transformers"

    def build(self) -> nn.Module:
        return LanguageModel(self.task)


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


class Attention(Mechanism):
    """`Attend`, which the library's layers go through."""

    def __init__(self, sizes: AttentionSizes, implementation: str) -> None:
        super().__init__(FullAttentionOptions(), sizes)
        from x_transformers.attend import Attend

        self._attend = Attend(causal=sizes.causal, heads=sizes.num_heads, flash=True)

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        out_BHTh, _ = self._attend(*inputs[:3])
        return out_BHTh, None
