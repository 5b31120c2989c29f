"""GPT2LMHeadModel, there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.interop.parity import assert_parity, padding, tokens


def config(**values: Any) -> Any:
    sizes = {"vocab_size": 61, "n_positions": 23, "n_embd": 20, "n_layer": 3, "n_head": 5, "n_inner": 36}
    return transformers.GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **values})


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_gpt2(tmp_path: Path, left: bool) -> None:
    reference = transformers.GPT2LMHeadModel(config(layer_norm_epsilon=0.02))
    mask = padding(11, 11, 8, 5, left=left)
    inputs = {"input_ids": tokens(3, 11, vocabulary=61), "attention_mask": mask}
    places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    assert_parity(reference, inputs, tmp_path, mask=mask, their_inputs=inputs | places)


def test_an_untied_output_and_another_activation(tmp_path: Path) -> None:
    reference = transformers.GPT2LMHeadModel(config(tie_word_embeddings=False, activation_function="relu"))
    model, _ = assert_parity(reference, {"input_ids": tokens(2, 23, vocabulary=61)}, tmp_path)
    assert not model.tied_names()
