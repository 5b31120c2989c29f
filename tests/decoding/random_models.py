"""Tiny models whose every parameter is random, for what has to agree between two ways of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tformer.build import build_model
from tformer.decoding.completion import Completion
from tformer.model import Transformer
from tformer.recipe.model import Model

VOCAB = 23
POSITIONS = {
    "none": {"kind": "none"},
    "sinusoidal": {"kind": "sinusoidal"},
    "sinusoidal-halves": {"kind": "sinusoidal", "layout": "halves"},
    "learned": {"kind": "learned"},
    "learned-offset": {"kind": "learned", "offset": 2},
    "rope": {"kind": "rope"},
    "rope-interleaved": {"kind": "rope", "layout": "interleaved"},
    "alibi": {"kind": "alibi"},
    "t5_bias": {"kind": "t5_bias", "buckets": 8, "max_distance": 16},
    "shaw": {"kind": "shaw", "clip": 4},
}
PROMPTS = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10], [11, 12, 13, 14]]


def shaken(model: Transformer, by: float) -> Transformer:
    """The model with noise on every parameter: tables and biases that start at zero would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return model.eval()


def random_model(
    stack: dict[str, Any], *, encoder: bool, vocab_size: int, max_seq_len: int, seed: int = 0, **sections: Any
) -> Transformer:
    """Two layers of width 24; `stack` goes over what both sides have, `sections` into the model's section."""
    torch.manual_seed(seed)
    side = {"num_layers": 2, "num_heads": 4, "feedforward": {"d_ff": 24}, **stack}
    sides = {"encoder": side, "decoder": side} if encoder else {"decoder": side}
    sizes = {"d_model": 24, "max_seq_len": max_seq_len, "vocab_size": vocab_size}
    model = build_model(Model.model_validate(sizes | sides | sections))
    return shaken(model, 0.15)


def tiny_model(positions: str = "rope", *, max_seq_len: int = 48, **stack: Any) -> Transformer:
    """A decoder of two layers with positions of `POSITIONS`; `stack` goes over its options."""
    torch.manual_seed(4)
    section = Model(
        d_model=24,
        max_seq_len=max_seq_len,
        decoder={"num_layers": 2, "num_heads": 4, "positions": POSITIONS[positions], **stack},
        init={"std": 0.3},
    )
    model = build_model(section, vocab_size=VOCAB).eval()
    return shaken(model, 0.1)


def tokens(results: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    """The ids of every completion of every prompt."""
    return [[completion.ids for completion in completions] for completions in results]
