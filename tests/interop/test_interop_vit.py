"""ViTForImageClassification, there and back, under the names of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.interop.parity import assert_agree, assert_parity, imported, randomized, saved, section_of
from tests.interop.tiny_folders import change_weights, edit_json
from tformer.build import build_model
from tformer.interop.architectures.vit import VIT
from tformer.interop.choose import choose_class
from tformer.interop.config import Config
from tformer.interop.mapping import to_ours
from tformer.interop.read_model import read_model
from tformer.interop.weight_files import outgoing
from tformer.recipe.model import Model
from tformer.support.errors import InputError

SIZES: dict[str, Any] = {
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 36,
    "image_size": 15,
    "patch_size": 5,
    "num_channels": 2,
    "num_labels": 7,
    "layer_norm_eps": 0.02,
}
BASE_PATCH16_224 = {
    "architectures": ["ViTForImageClassification"],
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 768,
    "id2label": {str(number): f"class {number}" for number in range(1000)},
    "image_size": 224,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "label2id": {f"class {number}": number for number in range(1000)},
    "layer_norm_eps": 1e-12,
    "model_type": "vit",
    "num_attention_heads": 12,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "qkv_bias": True,
    "transformers_version": "4.13.0.dev0",
}


def make(**values: Any) -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**{**SIZES, **values}))


def pixels(side: int = 15, channels: int = 2) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(3, channels, side, side, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"qkv_bias": False, "hidden_act": "gelu_new"},
        {"head_dim": 6},
        {"num_attention_heads": 3},  # 20 / 3 is cut to 6
        {"num_labels": 1},
        {"problem_type": "multi_label_classification"},
    ],
    ids=lambda values: ",".join(values) or "plain",
)
def test_vit(tmp_path: Path, values: dict[str, Any]) -> None:
    model, foreign = assert_parity(make(**values), pixels(), tmp_path)
    assert model.max_seq_len == 10 == foreign.model.max_seq_len
    assert (foreign.model.heads[0].kind == "regression") == (values.get("num_labels") == 1)


def test_the_square_may_be_written_as_two_equal_sides(tmp_path: Path) -> None:
    assert_parity(make(image_size=[15, 15], patch_size=[5, 5]), pixels(), tmp_path)


def test_a_linear_stem_is_the_same_kernel_under_another_shape() -> None:
    section = VIT.read(Config({"hidden_size": 20, "num_attention_heads": 5, "image_size": 15, "patch_size": 5}), "")
    conv, linear = (
        Model.model_validate({**section, "patches": {**section["patches"], "stem": stem}})
        for stem in ("conv", "linear")
    )
    first, second = (build_model(model).eval() for model in (conv, linear))
    stored = outgoing(VIT.links(conv, ""), [], first.state_dict())
    second.load_state_dict(to_ours(VIT.links(linear, ""), {name: stored.make(name) for name in stored.shapes}))
    inputs = pixels(channels=3)
    assert torch.equal(first(**inputs).logits, second(**inputs).logits)
    assert choose_class(linear, family="vit").config == choose_class(conv, family="vit").config


def test_poolers_and_mask_tokens_that_a_file_carries_along_are_left_out(tmp_path: Path) -> None:
    reference = randomized(make())
    folder = saved(reference, tmp_path / "original")
    extra = {"vit.pooler.dense.weight": torch.ones(20, 20), "vit.embeddings.mask_token": torch.ones(1, 1, 20)}
    change_weights(folder, lambda tensors: tensors.update(extra))
    model, foreign = imported(folder)
    assert set(foreign.skipped) == set(extra)
    with torch.no_grad():
        assert_agree(model(**pixels()).logits, reference(**pixels()).logits)


def test_the_published_config_has_the_published_number_of_parameters() -> None:
    assert build_model(section_of(BASE_PATCH16_224), device="meta").num_parameters() == 86_567_656


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_size", [15, 20]),
        ("patch_size", [5, 3]),
        ("patch_size", 4),
        ("image_size", 0),
        ("hidden_act", "gelu_10"),
        ("qkv_bias", "yes"),
        ("layerscale_value", 0.1),
        ("problem_type", "regression"),
    ],
)
def test_what_tformer_lacks_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    folder = saved(make(), tmp_path / "original")
    edit_json(folder / "config.json", {key: value})
    with pytest.raises(InputError, match=rf"config\.json: {key}: "):
        read_model(folder)


def test_positions_of_another_resolution_are_refused(tmp_path: Path) -> None:
    """They would have to be interpolated."""
    folder = saved(make(), tmp_path / "original")
    edit_json(folder / "config.json", {"image_size": 20})
    with pytest.raises(InputError, match=r"position_embeddings has the shape \[1, 10, 20\], expected \[1, 17, 20\]"):
        read_model(folder)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"patches": {"cls": False}}, "model.patches.cls"),
        ({"encoder": {"positions": {"kind": "patch2d"}}}, "patch2d"),
        ({"encoder": {"norm": {"place": "post"}}}, "model.encoder.norm.place"),
        ({"embedding": {"norm": True}}, "model.embedding.norm"),
    ],
)
def test_an_export_that_would_be_another_function_is_refused(change: dict[str, Any], field: str) -> None:
    section = VIT.read(Config({"num_hidden_layers": 1, "id2label": {"0": "a", "1": "b"}}), "")
    for part, values in change.items():
        section[part] = {**section[part], **values}
    with pytest.raises(InputError, match=field):
        choose_class(Model.model_validate(section), family="vit")
