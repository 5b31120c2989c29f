"""Tiny models whose every parameter is random, for what has to agree between two ways of decoding."""

from __future__ import annotations

from typing import Any

import torch

from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe.model import Model


def random_model(
    stack: dict[str, Any], *, encoder: bool, vocab_size: int, max_seq_len: int, seed: int = 0
) -> Transformer:
    """Two layers of width 24; `stack` goes over what both sides have."""
    torch.manual_seed(seed)
    side = {"num_layers": 2, "num_heads": 4, "feedforward": {"d_ff": 24}, **stack}
    sides = {"encoder": side, "decoder": side} if encoder else {"decoder": side}
    sizes = {"d_model": 24, "max_seq_len": max_seq_len, "vocab_size": vocab_size}
    model = build_model(Model.model_validate(sizes | sides))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()
