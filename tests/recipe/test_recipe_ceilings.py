"""Ceilings of whole numbers: no recipe makes a command that does no heavy work run or allocate without end."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from tformer.build import build_model
from tformer.recipe.load import leaves, load_recipe, recipe_to_data
from tformer.support.errors import InputError

PRESETS = ("gpt/tiny", "transformer/base", "electra/small", "vit/tiny", "longformer/classify", "performer/classify")
SECONDS = 5.0


def recipe_of(preset: str, *sets: str) -> Any:
    arch, name = preset.split("/")
    return load_recipe(arch=arch, preset=name, sets=list(sets)).recipe


def whole_numbers(preset: str) -> list[str]:
    """The keys that hold a whole number in the resolved preset."""
    data = recipe_to_data(recipe_of(preset))
    found = []
    for path in leaves(data):
        value: Any = data
        for key in path:
            value = value[int(key)] if isinstance(value, list) else value[key]
        if type(value) is int and path[0] not in ("schema", "seed"):
            found.append(".".join(path))
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_every_whole_number_has_a_ceiling_and_is_refused_above_it_at_once(preset: str) -> None:
    keys = whole_numbers(preset)
    assert len(keys) > 10
    began = time.monotonic()
    for key in keys:
        for value in (10**13, 10**30):
            with pytest.raises(InputError, match="expected at most"):
                recipe_of(preset, f"{key}={value}")
    assert time.monotonic() - began < SECONDS * len(keys)


@pytest.mark.parametrize(
    ("preset", "sets"),
    [
        ("gpt/tiny", ["model.d_model=1048576", "model.decoder.num_heads=524288"]),
        ("gpt/tiny", ["model.max_seq_len=1000000000000"]),
        ("transformer/base", ["model.d_model=1048576"]),
        ("transformer/base", ["model.encoder.num_layers=1024"]),
        ("vit/tiny", ["model.patches.image_size=1048576"]),
        ("electra/small", ["generator.d_model=1048576"]),
    ],
)
def test_the_largest_model_is_described_without_allocating_it(preset: str, sets: list[str]) -> None:
    began = time.process_time()
    build_model(recipe_of(preset, *sets).model, vocab_size=2**32, num_labels=2, device="meta")
    assert time.process_time() - began < SECONDS


def test_the_time_limit_of_several_processes_is_a_time_that_the_system_can_wait() -> None:
    assert timedelta(
        minutes=recipe_of("gpt/tiny", "training.parallel.timeout_minutes=1e6").training.parallel.timeout_minutes
    )
    with pytest.raises(InputError, match="expected at most"):
        recipe_of("gpt/tiny", "training.parallel.timeout_minutes=1e300")


def test_a_seed_may_have_63_bits() -> None:
    assert recipe_of("gpt/tiny", f"seed={2**63 - 1}").seed == 2**63 - 1
