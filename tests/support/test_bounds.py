"""Bounds of numbers: one table for the flags of every command, the keys of recipes and keywords in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tformer
from tests.cli.test_cli_rules import all_commands, bare
from tests.end_to_end.translate_runs import DECODER, build_run
from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.recipe.load import load_recipe
from tformer.support.bounds import COUNT, FLOAT, SEED, Bound, Must, expected_of, out_of_bounds
from tformer.support.decoding import SETTINGS
from tformer.support.errors import InputError
from tformer.support.options import declared_fields, facts_of

Cli = Callable[..., Any]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("home"), DECODER)


def test_every_bound_says_why() -> None:
    of_settings = [fact for facts in SETTINGS.values() for fact in facts if isinstance(fact, Bound)]
    assert all(bound.why and 0 < bound.least <= bound.most for bound in (*of_settings, FLOAT, COUNT, SEED))


def test_floats_are_bounded_by_what_float32_carries() -> None:
    smallest, largest = 2.0**-149, torch.finfo(torch.float32).max
    assert FLOAT.least == smallest and 0.99 * largest < FLOAT.most <= largest
    assert not any(expected_of(value) for value in (0, 0.0, -1.5, smallest, 3.4e38, True, None, "1e-300"))
    for value, words in (
        (1e-300, "0 or at least 1.4e-45"),
        (1e300, "at most 3.4e+38"),
        (-1e300, "at least -"),
    ):
        assert words in str(expected_of(value))
    assert all(expected_of(value) == "a finite number" for value in (NAN, INF, -INF))


@pytest.mark.parametrize("value", [1e-300, 1e-46, 1e300, NAN, INF])
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_a_flag_a_keyword_a_setting_and_a_key_are_refused_alike(name: str, value: float, run: Path, cli: Cli) -> None:
    flag = f"--{name.replace('_', '-')}"
    outcome = cli("generate", run, "--prompt", "a", flag, value)
    [line] = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.code == 2 and line.startswith((f"error: {flag} must be ", f"error: {flag}: found"))
    with pytest.raises(InputError, match=name):
        tformer.load(run).generate("a", **{name: value})
    with pytest.raises(InputError, match=f"{name} must be"):
        GenerationSettings(**{name: value})
    with pytest.raises(InputError, match=rf"generation\.{name}"):
        load_recipe(arch="gpt", preset="tiny", sets=[f"generation.{name}={value}"])


@pytest.mark.parametrize("name", ["top_p", "min_p", "length_penalty"])
@pytest.mark.parametrize("value", [1e-300, NAN])
def test_every_number_of_decoding_is_bounded(name: str, value: float, run: Path, cli: Cli) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert f"error: {flag}" in cli("generate", run, "--prompt", "a", flag, value).err
    kind = BeamSettings if hasattr(BeamSettings, name) else GenerationSettings
    with pytest.raises(InputError, match=f"{name} must be"):
        kind(**{name: value})


@pytest.mark.parametrize("value", [10**13, 10**30, -(10**13)])
def test_whole_numbers_are_bounded_in_commands_and_recipes(value: int, run: Path, cli: Cli) -> None:
    assert "--batch-size must be at " in cli("generate", run, "--prompt", "a", "--batch-size", value).err
    assert "--max-examples must be at " in cli("prune", run, "--out", "x", "--max-examples", value).err
    with pytest.raises(InputError, match=r"training\.log_every"):
        load_recipe(arch="gpt", preset="tiny", sets=[f"training.log_every={value}"])
    with pytest.raises(InputError, match="batch_size"):
        tformer.load(run).generate("a", batch_size=value)


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_the_extremes_that_are_allowed_generate(name: str, run: Path) -> None:
    bound = next((fact for fact in SETTINGS[name] if isinstance(fact, Bound)), FLOAT)
    for value in (bound.least, bound.most):
        assert tformer.load(run).generate("ab", max_new_tokens=8, **{name: value}).text is not None


def test_the_extremes_of_a_beam_are_finite(run: Path) -> None:
    bound = next((fact for fact in SETTINGS["repetition_penalty"] if isinstance(fact, Bound)), FLOAT)
    for value in (bound.least, bound.most):
        tformer.load(run).generate("ab", max_new_tokens=8, beam_size=3, repetition_penalty=value)


@pytest.mark.parametrize(("command", "options_type"), dict(all_commands()).items())
def test_every_number_of_every_command_is_bounded(command: str, options_type: type[Any]) -> None:
    for path, _, hint in declared_fields(options_type):
        kind, facts = bare(hint), facts_of(hint)
        if kind in (int, float):
            assert str(out_of_bounds(kind(10**30) if kind is int else NAN, facts)).startswith("must be "), path
        conditions = [fact for fact in facts if isinstance(fact, Must) and kind in (int, float)]
        for fact in conditions:
            [wrong, *_] = [value for value in (-1, 0, 1.5, 11, 10**8, 10**10) if not fact.holds(value)]
            assert out_of_bounds(wrong, facts) == f"must be {fact.words}, found {wrong}"


def test_a_command_names_the_flag_of_a_number(cli: Cli) -> None:
    assert "error: --port must be 0 to 65,535, found 65536" in cli("serve", "x", "--port", 65536).err
    assert "error: --grace must be 0 to 2,147,483,647, found inf" in cli("serve", "x", "--grace", INF).err
