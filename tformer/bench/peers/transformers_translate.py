"""Beam search of transformers with a Marian model of the recipe's sizes: `generate` with a cache, batches in order.

Marian is the original encoder-decoder: post-norm, sinusoids, one table of embeddings for both sides and the output.
"""

from __future__ import annotations

from typing import Any

import torch

from tformer.bench.peers.transformers_models import quiet
from tformer.bench.workloads import (
    SEED,
    Task,
    synchronise,
)
from tformer.bench.workloads.decoding import sources_of
from tformer.bench.workloads.train import SPECIAL
from tformer.device import DTYPES


def make(task: Task, precision: str) -> TransformersTranslating:
    return TransformersTranslating(task, precision)


class TransformersTranslating:
    """fp32, or the whole model in bf16."""

    name = "transformers"

    def __init__(self, task: Task, precision: str) -> None:
        self.task, self.precision = task, precision

    def prepare(self) -> None:
        torch.manual_seed(SEED)
        model = marian(self.task).eval()
        self._model = model.to(device=self.task.device, dtype=DTYPES[self.precision])
        self._batches = [torch.tensor(rows, device=self.task.device) for rows in sources_of(self.task)]

    def run(self) -> int:
        new_tokens, tokens = self.task.options["new_tokens"], 0
        for ids in self._batches:
            with torch.inference_mode():
                found = self._model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    num_beams=self.task.options["beam"],
                    min_new_tokens=new_tokens,
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    early_stopping=True,
                )
            tokens += found.shape[0] * (found.shape[1] - 1)  # the start token is not written
        synchronise(self.task.device)
        return tokens


def marian(task: Task) -> Any:
    """`MarianMTModel` with random weights."""
    from transformers import MarianConfig, MarianMTModel

    quiet()
    model = task.recipe.model
    encoder, decoder = model.encoder, model.decoder
    assert encoder is not None and decoder is not None
    sizes: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "d_model": model.d_model,
        "encoder_layers": encoder.num_layers,
        "decoder_layers": decoder.num_layers,
        "encoder_attention_heads": encoder.num_heads,
        "decoder_attention_heads": decoder.num_heads,
        "encoder_ffn_dim": encoder.feedforward.hidden_size(model.d_model),
        "decoder_ffn_dim": decoder.feedforward.hidden_size(model.d_model),
        "max_position_embeddings": model.max_seq_len + 1,  # the start token is read beside the longest target
        "activation_function": "relu",
        "scale_embedding": model.embedding.scale,
        "attn_implementation": "sdpa",
        "pad_token_id": SPECIAL.pad,
        "bos_token_id": SPECIAL.bos,
        "eos_token_id": SPECIAL.eos,
        "forced_eos_token_id": None,
        "decoder_start_token_id": SPECIAL.bos,
    }
    return MarianMTModel(MarianConfig(**sizes))
