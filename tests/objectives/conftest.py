"""A tiny encoder-decoder for the objectives that need one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe.model import Model


@pytest.fixture
def encoder_decoder() -> Callable[..., Transformer]:
    """`encoder_decoder(vocabulary, max_seq_len, ...)`; its learned positions refuse what is longer."""

    def make(vocab_size: int, max_seq_len: int, target_vocab_size: int | None = None) -> Transformer:
        torch.manual_seed(0)
        stack = {"num_layers": 1, "num_heads": 2, "positions": {"kind": "learned"}, "feedforward": {"d_ff": 24}}
        values = {"d_model": 16, "max_seq_len": max_seq_len, "encoder": stack, "decoder": stack}
        if target_vocab_size is not None:
            values["tie"] = {"source_target": False}
        model = build_model(Model.model_validate(values), vocab_size=vocab_size, target_vocab_size=target_vocab_size)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
        return model.eval()

    return make
