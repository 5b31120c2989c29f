"""Every shipped preset: a valid recipe, built on the meta device, and sane at its first step when scaled down."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tformer.build import build_model
from tformer.recipe import load_recipe
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = (path for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "sweeps")
PRESETS = sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in FILES)
VOCABULARY = 97


def read(preset: str) -> Recipe:
    return load_recipe(preset=preset).recipe


@pytest.mark.parametrize("preset", PRESETS)
def test_builds_on_the_meta_device(preset: str) -> None:
    model = build_model(read(preset).model, vocab_size=4096, num_labels=2, device="meta")
    assert model.num_parameters() > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_header_says_what_it_is_for(preset: str) -> None:
    head = (CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8").split("\n\n")[0]
    for word in ("Purpose", "Command", "Expected", "Hardware"):
        assert word.lower() in head.lower(), f"{preset}.yaml: no {word.lower()} in its header"


COUNTS = {
    "gpt/small": 124_439_808,
    "gpt/medium": 354_823_168,
    "gpt/large": 774_030_080,
    "gpt/xl": 1_557_611_200,
    "gpt/gpt3-175b": 174_604_259_328,
    "gpt/modern": 162_129_408,
    "llama/1b": 1_235_814_400,
    "llama/8b": 8_030_261_248,
}


@pytest.mark.parametrize("preset", COUNTS)
def test_stated_parameter_count(preset: str) -> None:
    assert build_model(read(preset).model, device="meta").num_parameters() == COUNTS[preset]
    assert f"{COUNTS[preset]:,}" in (CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8")


def scaled_down(model: Model) -> Model:
    """The same variant with two layers of width 32."""
    values = model.model_dump()
    values |= {"d_model": 32, "max_seq_len": min(model.max_seq_len, 32), "vocab_size": VOCABULARY}
    if values["embedding"]["size"]:
        values["embedding"]["size"] = 16
    for side in ("encoder", "decoder"):
        stack: dict[str, Any] | None = values[side]
        if stack is None:
            continue
        kv_heads = 2 if stack["num_kv_heads"] else None
        stack |= {"num_layers": 2, "num_heads": 4, "num_kv_heads": kv_heads, "head_dim": None, "value_dim": None}
        stack |= {"layers": {}, "d_model": None}
        stack["feedforward"]["d_ff"] = 64
    return Model.model_validate(values)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith(("gpt/", "llama/"))])
def test_first_loss_is_that_of_a_uniform_guess(preset: str) -> None:
    torch.manual_seed(0)
    model = build_model(scaled_down(read(preset).model)).eval()
    ids, labels = torch.randint(0, VOCABULARY, (2, 8, 24))
    loss, _, count, _ = model(ids).loss_terms("lm", labels)
    assert float(loss.detach() / count) == pytest.approx(math.log(VOCABULARY), rel=0.05)


def test_char_settings_are_nanogpts() -> None:
    """config/train_shakespeare_char.py and the README's CPU command, number by number."""
    shapes = {"gpt/char": (6, 6, 384, 256, 64, 5000, 0.2), "gpt/char-cpu": (4, 4, 128, 64, 12, 2000, 0.0)}
    for preset, expected in shapes.items():
        recipe = read(preset)
        model, stack, training = recipe.model, recipe.model.decoder, recipe.training
        shape = (stack.num_layers, stack.num_heads, model.d_model, model.max_seq_len)
        assert (*shape, training.batch_size, training.max_steps, stack.dropout) == expected
        assert stack.attention_dropout == model.embedding.dropout == stack.dropout
        assert (training.eval_every, training.grad_accum) == (250, 1)
        optimizer, schedule = recipe.optimizer, recipe.schedule
        assert (optimizer.kind, optimizer.lr, optimizer.betas) == ("adamw", 1e-3, (0.9, 0.99))
        assert (optimizer.weight_decay, optimizer.clip_grad_norm) == (0.1, 1.0)
        assert (schedule.kind, schedule.warmup_steps, schedule.decay_steps) == ("cosine", 100, training.max_steps)
        assert schedule.min_ratio == 0.1
        assert (recipe.tokenizer.train.model, recipe.tokenizer.train.template) == ("char", "none")
        built = build_model(model, vocab_size=65, device="meta")
        assert not [name for name, _ in built.named_parameters() if name.endswith("bias")]
        # nanoGPT prints 10.65M and 0.80M: its counts without the position table
        table = model.max_seq_len * model.d_model
        printed = {"gpt/char": 10.65, "gpt/char-cpu": 0.80}[preset]
        assert (built.num_parameters() - table) / 1e6 == pytest.approx(printed, abs=0.006)
