"""Every family's published preset, made small: exported, opened in `transformers`, the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import Tensor

from tests.interop.exports import checkpoint, letters
from tests.interop.parity import assert_agree, padding, tokens
from tformer.interop.exporting import export_checkpoint
from tformer.loading import load

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = {"d_model": 16, "max_seq_len": 24, "vocab_size": None}
STACK = {"num_layers": 2, "num_heads": 2}
PRESETS = {  # preset -> (the class that opens it, the template of its tokenizer)
    "gpt/small": ("AutoModelForCausalLM", "gpt"),
    "gpt/char": ("AutoModelForCausalLM", "gpt"),
    "llama/tiny": ("AutoModelForCausalLM", "gpt"),
    "bert/base": ("AutoModelForPreTraining", "bert"),
    "roberta/base": ("AutoModelForMaskedLM", "roberta"),
    "electra/small": ("AutoModelForPreTraining", "bert"),
    "t5/small": ("AutoModelForSeq2SeqLM", "t5"),
    "t5/v1_1-base": ("AutoModelForSeq2SeqLM", "t5"),
    "bart/base": ("AutoModelForSeq2SeqLM", "roberta"),
    "transformer/base": ("AutoModelForSeq2SeqLM", "seq2seq"),
    "vit/base": ("AutoModelForImageClassification", ""),
}


def small(preset: str) -> dict[str, Any]:
    """The preset's recipe with two layers of width 16 and the tokenizer's own vocabulary."""
    values: dict[str, Any] = yaml.safe_load((CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8"))
    model = {**values["model"], **SMALL, "init": {}}
    for side in ("encoder", "decoder"):
        if side in model:
            sizes = {"head_dim": 8} if "head_dim" in model[side] else {}
            hidden = {"feedforward": {**model[side]["feedforward"], "d_ff": 24}}
            model[side] = {**model[side], **STACK, **sizes, **hidden, "num_kv_heads": 1 if "llama" in preset else None}
    if model.get("embedding", {}).get("size"):
        model["embedding"] = {**model["embedding"], "size": 12}
    if "patches" in model:
        model["patches"] = {**model["patches"], "image_size": 8, "size": 4}
        del model["vocab_size"]
    recipe = {"arch": preset.split("/")[0], "model": model}
    if "patches" in model:
        recipe["data"] = {"labels": ["cat", "dog", "owl"], "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.2]}
    return recipe


def inputs(model: dict[str, Any]) -> dict[str, Tensor]:
    if "patches" in model:
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    found = {"input_ids": tokens(2, 9, vocabulary=12)}
    if "encoder" in model:  # a row of the batch is padded
        found["attention_mask"] = padding(9, 9, 6)
    if "encoder" in model and "decoder" in model:
        found["decoder_input_ids"] = tokens(2, 7, vocabulary=12)
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_opens_in_transformers_with_the_same_logits(preset: str, tmp_path: Path) -> None:
    assert_opens_alike(preset, small(preset), tmp_path)


@pytest.mark.parametrize("preset", ["bert/base", "roberta/base", "electra/small"])
def test_an_encoder_without_token_types_is_one_with_types_of_zeros(preset: str, tmp_path: Path) -> None:
    recipe = small(preset)
    recipe["model"]["embedding"]["token_types"] = 0
    assert_opens_alike(preset, recipe, tmp_path)


@pytest.mark.parametrize(("types", "given"), [(0, True), (1, False), (2, True)])
def test_only_a_model_of_several_token_types_is_given_them(types: int, given: bool, tmp_path: Path) -> None:
    """A pair has the types 0 and 1: the second would lie outside of a table of one. None become two, of zeros."""
    recipe = small("bert/base")
    recipe["model"]["embedding"]["token_types"] = types
    export_checkpoint(checkpoint(tmp_path / "run", recipe, tokenizer=letters("bert")), tmp_path / "out")
    pair = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("ab", "cd", return_tensors="pt")
    assert ("token_type_ids" in pair) == given
    with torch.no_grad():
        transformers.AutoModel.from_pretrained(tmp_path / "out")(**pair)


def assert_opens_alike(preset: str, recipe: dict[str, Any], tmp_path: Path) -> None:
    auto, template = PRESETS[preset]
    tokenizer = letters(template) if template else None
    report = export_checkpoint(checkpoint(tmp_path / "run", recipe, tokenizer=tokenizer), tmp_path / "out")
    assert report.auto_class == auto
    theirs, info = getattr(transformers, auto).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    run, batch = load(tmp_path / "run"), inputs(recipe["model"])
    if tokenizer is not None and "attention_mask" in batch:
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, tokenizer.special.pad or 0)
    with torch.no_grad():
        ours, found = run.model(**batch), theirs.eval()(**batch)
        mask = batch.get("attention_mask")
        if preset.startswith("bert"):
            assert_agree(run.model.heads["masked_lm"](ours.hidden), found.prediction_logits, mask)
            assert_agree(run.model.heads["next_sentence"](ours.hidden, mask), found.seq_relationship_logits)
        else:
            assert_agree(ours.logits, found.logits, None if "decoder" in recipe["model"] else mask)


def test_the_labels_of_images_go_along(tmp_path: Path) -> None:
    export_checkpoint(checkpoint(tmp_path / "run", small("vit/base")), tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.id2label == {0: "cat", 1: "dog", 2: "owl"} and config.label2id["owl"] == 2
