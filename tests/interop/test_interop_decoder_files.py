"""Weight files of decoders as older versions wrote them: bare names, stored buffers, repeated tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.interop.parity import assert_agree, imported, randomised, tokens
from tests.interop.tiny_models import config_of
from tformer.interop.read_model import read_model
from tformer.support.errors import InputError

SIZES = {"Llama": {"head_dim": 6}}


def written(folder: Path, reference: Any, tensors: dict[str, Tensor], **keys: Any) -> Path:
    folder.mkdir()
    config = reference.config.to_dict() | {"architectures": [type(reference).__name__]} | keys
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "rename", "stored"),
    [
        ("GPT2", "transformer.", {"h.0.attn.bias": (1, 1, 23, 23), "h.1.attn.masked_bias": (1,)}),
        ("GPT2", "", {"transformer.h.0.attn.bias": (1, 1, 23, 23)}),
        ("Llama", "", {"model.layers.1.self_attn.rotary_emb.inv_freq": (2,), "model.rotary_emb.inv_freq": (2,)}),
        ("OPT", "model.", {"decoder.version": (1,)}),
        ("Bloom", "transformer.", {}),
    ],
    ids=["gpt2-bare", "gpt2", "llama", "opt-bare", "bloom-bare"],
)
def test_bare_names_stored_buffers_and_repeated_outputs_are_read(
    tmp_path: Path, name: str, rename: str, stored: dict[str, tuple[int, ...]]
) -> None:
    """Each file holds lm_head.weight too, as files of pickled times did."""
    reference = randomised(transformers.AutoModelForCausalLM.from_config(config_of(name, **SIZES.get(name, {}))))
    tensors = {name.removeprefix(rename): value for name, value in reference.state_dict().items()}
    assert "lm_head.weight" in tensors
    buffers = {name: torch.ones(shape) for name, shape in stored.items()}
    model, foreign = imported(written(tmp_path / "model", reference, tensors | buffers))
    assert set(foreign.skipped) == set(stored)
    ids = tokens(2, 9, vocabulary=61)
    with torch.no_grad():
        assert_agree(model(ids).logits, reference(input_ids=ids).logits)


def test_a_tied_output_that_is_not_the_embeddings_is_refused(tmp_path: Path) -> None:
    reference = randomised(transformers.GPT2LMHeadModel(config_of("GPT2")))
    tensors = dict(reference.state_dict()) | {"lm_head.weight": torch.zeros(61, 20)}
    foreign = read_model(written(tmp_path / "model", reference, tensors))
    with pytest.raises(InputError, match=r"lm_head\.weight and transformer\.wte\.weight are one tensor"):
        foreign.weights()


@pytest.mark.parametrize("name", ["GPT2", "Llama", "OPT", "Bloom"])
def test_an_unknown_and_a_missing_tensor_are_named(tmp_path: Path, name: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_config(config_of(name, **SIZES.get(name, {})))
    tensors = dict(reference.state_dict())
    lost = list(tensors)[3]
    kept = {name: value for name, value in tensors.items() if name != lost}
    folder = written(tmp_path / "model", reference, kept | {"score.weight": torch.ones(2)})
    with pytest.raises(InputError) as refused:
        read_model(folder)
    assert f"missing {lost}" in refused.value.message and "unknown score.weight" in refused.value.message
