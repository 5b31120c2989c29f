"""The expected time of a training, and the default preset that fits the machine; nothing is timed here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tformer.checkpoint.run import RunDirectory
from tformer.cost.duration import (
    FIRST_RUN_SECONDS,
    about,
    expected_note,
    fitting,
    fitting_preset,
    seconds_per_step,
    training_work,
)
from tformer.recipe import DEFAULT_PRESETS, load_recipe
from tformer.recipe.recipe import Recipe
from tformer.support import device
from tformer.support.device import ELEMENTS_PER_SECOND, CpuSpeed, cpu_speed
from tformer.support.errors import InputError

LAPTOP = CpuSpeed({"fp32": 95e9, "bf16": 15e9}, 2 * ELEMENTS_PER_SECOND, "two cores with AVX2")
SERVER = CpuSpeed({"fp32": 180e9, "bf16": 800e9}, 2 * ELEMENTS_PER_SECOND, "two cores with AVX512-BF16")
SEVERAL = [(arch, table["cpu"]) for arch, table in DEFAULT_PRESETS.items() if len(table["cpu"]) > 1]


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The machine multiplies at 95 GFLOP/s in fp32 and 15 in bf16; the list grows with each measurement."""
    asked: list[str] = []

    def measure(dtype: torch.dtype, where: torch.device, **shape: float) -> float:
        name = "fp32" if dtype is torch.float32 else "bf16"
        asked.append(name)
        return LAPTOP.rates[name] + len(asked)

    monkeypatch.delenv(device.SPEED)
    monkeypatch.setattr(device, "matmul_flops_per_second", measure)
    monkeypatch.setattr(device, "has_bf16_instructions", lambda: False)
    return asked


def seconds_of(arch: str, preset: str, speed: CpuSpeed) -> float:
    recipe = load_recipe(arch=arch, preset=preset).recipe
    return recipe.training.max_steps * seconds_per_step(training_work(recipe), speed, "fp32")


@pytest.mark.parametrize(("arch", "presets"), SEVERAL)
def test_every_arch_has_a_preset_that_two_avx2_cores_train_in_two_minutes(arch: str, presets: tuple[str, ...]) -> None:
    fit = fitting_preset(arch, presets, LAPTOP, "fp32")
    assert fit.preset == presets[-1] and seconds_of(arch, fit.preset, LAPTOP) <= FIRST_RUN_SECONDS


@pytest.mark.parametrize(("arch", "presets"), SEVERAL)
def test_the_presets_of_a_cpu_go_from_the_largest_to_the_smallest(arch: str, presets: tuple[str, ...]) -> None:
    seconds = [seconds_of(arch, preset, LAPTOP) for preset in presets]
    assert seconds == sorted(seconds, reverse=True)


def test_the_first_run_on_avx512_is_gpt_tiny_and_on_avx2_gpt_mini() -> None:
    presets = DEFAULT_PRESETS["gpt"]["cpu"]
    assert fitting_preset("gpt", presets, SERVER, "bf16").preset == "tiny"
    assert fitting_preset("gpt", presets, SERVER, "fp32").preset == "mini"
    assert fitting_preset("gpt", presets, LAPTOP, "fp32").preset == "mini"


def test_two_lines_say_what_was_chosen_what_others_get_and_how_to_ask_for_it() -> None:
    small, large = (
        fitting_preset("gpt", ("tiny", "mini"), speed, precision).notes
        for speed, precision in ((LAPTOP, "fp32"), (SERVER, "bf16"))
    )
    assert small[0].startswith(
        "preset gpt/mini: the default on a CPU of this speed, 95 GFLOP/s in matrix products (two"
    )
    assert small[0].endswith(f"it trains for {about(seconds_of('gpt', 'mini', LAPTOP))}")
    larger = about(seconds_of("gpt", "tiny", LAPTOP))
    assert small[1].startswith("from ") and small[1].endswith(f"is gpt/tiny ({larger} here): --preset tiny")
    assert large[1].startswith("below ") and large[1].endswith(": --preset mini")
    assert len(small) == len(large) == 2


def test_the_named_limit_is_where_the_choice_changes() -> None:
    note = fitting_preset("gpt", ("tiny", "mini"), LAPTOP, "fp32").notes[1]
    limit = float(note.split()[1]) * 1e9
    for rate, preset in ((limit * 1.01, "tiny"), (limit * 0.99, "mini")):
        speed = CpuSpeed({"fp32": rate, "bf16": 1.0}, LAPTOP.elements_per_second, "")
        assert fitting_preset("gpt", ("tiny", "mini"), speed, "fp32").preset == preset


def test_where_no_rate_is_enough_more_threads_are_named() -> None:
    slow = CpuSpeed({"fp32": 1e12, "bf16": 1e12}, 1e6, "")
    assert fitting_preset("gpt", ("tiny", "mini"), slow, "auto").notes[1].startswith("with more threads the default is")


def test_a_preset_that_is_named_is_taken_and_nothing_is_measured(rates: list[str]) -> None:
    resolved = load_recipe(arch="gpt", preset="tiny", fitting=fitting({}))
    assert (resolved.recipe.preset, resolved.notes, rates) == ("tiny", [], [])
    assert load_recipe(arch="vit", fitting=fitting({})).recipe.preset == "mnist" and rates == []
    assert load_recipe(arch="gpt", device="cuda", fitting=fitting({})).recipe.preset == "small" and rates == []


def test_the_machine_is_measured_once_and_every_call_reads_the_same(
    rates: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path))
    first = cpu_speed()
    assert first == cpu_speed() and rates == ["fp32", "bf16"]
    assert str(tmp_path) in first.source
    assert cpu_speed(torch.get_num_threads() + 1).rates != first.rates, "another number of threads is another machine"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    cpu_speed()
    assert len(rates) == 6, "so are other instructions"


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"fp32": 1.0}', '{"fp32": -1.0, "bf16": 1.0}', '{"fp32": "a", "bf16": 1}']
)
def test_a_damaged_measurement_is_made_again(
    damage: str, rates: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path))
    cpu_speed()
    [file] = (tmp_path / "speed").iterdir()
    file.write_text(damage)
    assert cpu_speed().rates == json.loads(file.read_text()) and len(rates) == 4


def test_a_cache_that_cannot_be_written_is_no_error(rates: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFORMER_CACHE", "/dev/null/cache")
    assert cpu_speed().rate("auto") == 95e9 + 1


def test_the_variable_fixes_the_choice_on_every_machine(rates: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {}
    for value in ("80", "5000"):
        monkeypatch.setenv(device.SPEED, value)
        chosen[value] = [
            load_recipe(arch="gpt", fitting=fitting({"training.threads": n})).recipe.preset for n in (1, 9)
        ]
    assert chosen == {"80": ["mini", "mini"], "5000": ["tiny", "tiny"]} and rates == []
    for wrong in ("", "0", "-3", "fast", "1e3"):
        monkeypatch.setenv(device.SPEED, wrong)
        with pytest.raises(InputError, match=r"TFORMER_GFLOPS=.*expected a whole number above 0"):
            cpu_speed()


def test_the_choice_is_frozen_in_the_recipe_and_a_resumed_run_keeps_it(
    cli: Callable[..., Any], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(device.SPEED, "80")
    words = ["--max-steps", 1, "--batch-size", 2, "--set", "tokenizer.train.vocab_size=300", "--set", "data.seq_len=32"]
    done = cli("train", "--arch", "gpt", "--data", text_file, "--out", tmp_path / "run", "--device", "cpu", *words)
    assert done.code == 0, done.err
    assert "preset gpt/mini: the default on a CPU of this speed, 80 GFLOP/s" in done.err
    assert RunDirectory(tmp_path / "run").recipe().preset == "mini"
    monkeypatch.setenv(device.SPEED, "10000")
    done = cli("train", "--resume", "--out", tmp_path / "run", "--max-steps", 2)
    assert done.code == 0 and RunDirectory(tmp_path / "run").recipe().preset == "mini"


def test_a_dry_run_and_config_show_name_the_same_preset(
    cli: Callable[..., Any], text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(device.SPEED, "80")
    words = ["--arch", "gpt", "--device", "cpu"]
    shown = cli("config", "show", *words)
    tried = cli("train", *words, "--data", text_file, "--set", "tokenizer.train.vocab_size=300", "--dry-run")
    for done in (shown, tried):
        assert "preset: mini\n" in done.out and "preset gpt/mini: the default on a CPU of this speed" in done.err


def settled(arch: str, preset: str) -> Recipe:
    training = {"training.precision": "fp32", "training.threads": 1}
    return load_recipe(arch=arch, preset=preset, flags=training).recipe


def test_train_says_how_long_it_takes_here_and_of_which_machine_the_figures_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(device.SPEED, "1")
    note = expected_note(settled("gpt", "char-12s"), first_step=0, lengths=(128, 128))
    seconds = seconds_of("gpt", "char-12s", CpuSpeed({"fp32": 1e9, "bf16": 1e9}, float("inf"), ""))
    assert note.startswith(f"expected on this CPU: {about(seconds)} of training (330 steps); ")
    assert "hardware of gpt/char-12s's figures: two AMD EPYC cores with AVX512-BF16" in note


def test_a_resumed_run_expects_the_rest_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.SPEED, "1")
    whole, rest = (expected_note(settled("gpt", "char-12s"), first_step=step, lengths=(128, 128)) for step in (0, 165))
    assert "(165 steps)" in rest and rest != whole


@pytest.mark.parametrize("name", ["char-12s", "char-6m", "char-15m"])
def test_a_preset_named_after_a_time_names_its_machine(name: str) -> None:
    from tformer.support.shipped import preset_hardware, preset_summary

    assert "AVX512-BF16" in preset_summary("gpt", name)
    assert "AVX512-BF16" in str(preset_hardware("gpt", name))


def test_the_work_of_a_step_follows_the_batch_and_the_lengths() -> None:
    recipe = load_recipe(arch="gpt", preset="tiny").recipe
    flops, elements = training_work(recipe)
    assert elements == 16 * 256 * 4 * 192
    double = recipe.model_copy(update={"training": recipe.training.model_copy(update={"grad_accum": 2})})
    assert training_work(double) == (2 * flops, 2 * elements)
    short = training_work(recipe, lengths=(64, 64))
    assert short[0] < flops / 4 and short[1] == elements / 4


def test_the_decoder_of_t5_reads_what_was_removed() -> None:
    recipe = load_recipe(arch="t5", preset="tiny").recipe
    _, elements = training_work(recipe)
    removed, spans = round(128 * 0.15), round(19 / 3)
    assert elements == 64 * 4 * 256 * (128 + removed + spans + 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "about 1 s"), (7.4, "about 7 s"), (12, "about 10 s"), (101, "about 100 s"), (390, "about 6 min")],
)
def test_estimates_are_in_words(seconds: float, text: str) -> None:
    assert about(seconds) == text
