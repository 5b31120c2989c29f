"""Validations that suit the length of a training: a share of the held-out data, evenly spread, the same every time."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tformer
from tests.end_to_end.labelled_examples import sentences, write_images, write_table
from tests.quick import first_is_quick
from tests.training.pair_makers import metrics, records, weights_of
from tests.training.small_steps import small_recipe
from tformer.cli import train as command
from tformer.evaluation.lm import evenly_spread, windows
from tformer.evaluation.translation import translate_pairs
from tformer.recipe import load_recipe
from tformer.tasks import pairs
from tformer.training import clock, reporter, validations
from tformer.training.clock import Pace
from tformer.training.loop import score
from tformer.training.reporter import RunReporter
from tformer.training.validations import _share

Cli = Callable[..., Any]
Train = Callable[..., Path]


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No validation is so short that it is free."""
    monkeypatch.setattr(validations, "FEW_OPERATIONS", 0.0)


def share_of(run: Path) -> float | None:
    return load_recipe(config=run / "recipe.yaml").recipe.training.valid_share


def succeed(outcome: Any) -> str:
    assert outcome.code == 0, outcome.err
    return " ".join(outcome.err.split())


# --- the share -------------------------------------------------------------------------------------------------------


def test_a_long_validation_reads_a_share_and_says_so(tiny: Cli, cli: Cli, costly: None) -> None:
    said = succeed(tiny("--out", "run"))
    share = share_of(Path("run"))
    assert share is not None and 0 < share < 1
    assert f"validation reads {100 * share:.2g} % of the held-out texts, to save time" in said
    capped = [record["tokens"] for record in metrics(Path("run"))]
    whole = json.loads(cli("evaluate", "run", "--json").out)
    assert len(capped) == 2 and capped[0] == capped[1] < whole["tokens"]
    assert capped[0] == pytest.approx(share * whole["tokens"], abs=16)


def test_full_validation_reads_all(tiny: Cli, cli: Cli, costly: None) -> None:
    said = succeed(tiny("--out", "run", "--full-validation"))
    assert "of the held-out texts" not in said and share_of(Path("run")) == 1.0
    whole = json.loads(cli("evaluate", "run", "--checkpoint", "latest", "--json").out)
    last = metrics(Path("run"))[-1]
    assert (last["tokens"], last["loss"]) == (whole["tokens"], pytest.approx(whole["loss"]))


def test_what_takes_seconds_is_read_whole(tiny: Cli) -> None:
    assert "of the held-out texts" not in succeed(tiny("--out", "run"))
    assert share_of(Path("run")) is None


def test_a_share_of_the_recipe_is_taken_as_it_is(tiny: Cli, costly: None) -> None:
    succeed(tiny("--out", "run", "--set", "training.valid_share=0.5"))
    assert share_of(Path("run")) == 0.5


def test_a_resumed_and_a_repeated_run_are_exact(tiny: Cli, cli: Cli, costly: None, monkeypatch: Any) -> None:
    """The share is that of the run's recipe, also where it would be planned otherwise today."""
    succeed(tiny("--out", "whole"))
    succeed(tiny("--out", "cut", "--stop-at-step", "7"))
    monkeypatch.setattr(validations, "MOST_OF_OPERATIONS", 0.9)
    succeed(cli("train", "--resume", "--out", "cut"))
    succeed(cli("train", "--config", "whole/recipe.yaml", "--out", "again"))
    for other in ("cut", "again"):
        assert weights_of(Path(other)) == weights_of(Path("whole"))
        assert share_of(Path(other)) == share_of(Path("whole"))
    assert records(Path("again")) == records(Path("whole"))
    assert metrics(Path("cut"))[-1] == metrics(Path("whole"))[-1]


def test_a_resumed_run_goes_on_with_all_of_the_data(tiny: Cli, cli: Cli, monkeypatch: Any) -> None:
    succeed(tiny("--out", "run", "--stop-at-step", "6"))
    monkeypatch.setattr(validations, "FEW_OPERATIONS", 0.0)
    succeed(cli("train", "--resume", "--out", "run"))
    assert share_of(Path("run")) is None and len({record["tokens"] for record in metrics(Path("run"))}) == 1


def test_fine_tuning_plans_for_its_own_data(tiny: Cli, cli: Cli, costly: None, text_file: Path) -> None:
    succeed(tiny("--out", "run"))
    succeed(cli("train", "--init-from", "run", "--data", text_file, "--out", "longer", "--max-steps", "40"))
    shares = [share_of(Path(run)) for run in ("run", "longer")]
    assert shares[0] != shares[1]
    kept = ("--init-from", "run", "--data", text_file, "--full-validation", "--out", "full", "--max-steps", "4")
    succeed(cli("train", *kept))
    assert share_of(Path("full")) == 1.0


def test_a_training_by_time_has_a_share_too(tiny: Cli, cli: Cli, costly: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(validations, "MOST_VALIDATING", 1e-6)
    assert "of the held-out texts, to save time" in succeed(tiny("--out", "run", "--minutes", "0.05"))
    share, every = share_of(Path("run")), load_recipe(config="run/recipe.yaml").recipe.training.eval_every
    assert share is not None and isinstance(every, int)
    succeed(cli("train", "--config", "run/recipe.yaml", "--out", "again"))
    assert share_of(Path("again")) == share and metrics(Path("again")) == metrics(Path("run"))


@given(
    steps=st.integers(1, 10**7),
    validations=st.integers(1, 500),
    valid_tokens=st.integers(0, 10**12),
    parameters=st.integers(1, 10**11),
    of_step=st.integers(1, 10**7),
)
def test_validations_take_less_than_the_training(
    steps: int, validations: int, valid_tokens: int, parameters: int, of_step: int
) -> None:
    """Whatever is asked for, in operations, but for what takes two seconds."""
    data = SimpleNamespace(valid_tokens=float(valid_tokens))
    prepared: Any = SimpleNamespace(tokens_per_step=of_step, data=data, num_parameters=parameters)
    validations = min(validations, steps)
    share, times = _share(prepared, steps, validations, 0.2)
    read = validations * valid_tokens * 2 * parameters * (1.0 if share is None else share)
    trained = steps * of_step * 6 * parameters
    assert read <= 1.01 * max(0.2 * trained, trained / 3, 1e11)
    assert share is None or times > 0


# --- the end: the best checkpoint on all of it -----------------------------------------------------------------------


@first_is_quick("flags", [(), ("--lr", "0.5"), ("--set", "training.ema_decay=0.5")], ids=" ".join)
def test_the_best_checkpoint_is_measured_on_all_of_it_at_the_end(
    flags: tuple[str, ...], tiny: Cli, cli: Cli, costly: None
) -> None:
    """Its figures are those of `tformer evaluate`; which checkpoint is the best is decided on the share."""
    outcome = tiny("--out", "run", "--json", *flags)
    said, run = succeed(outcome), Path("run")
    whole, summary = json.loads(cli("evaluate", run, "--json").out), json.loads(outcome.out)
    [final], capped = metrics(run, "final"), metrics(run)
    best = [record for record in capped if record["is_best"]][-1]
    assert best["loss"] == min(record["loss"] for record in capped) and final["step"] == best["step"]
    assert final["tokens"] == whole["tokens"] > best["tokens"] and final["loss"] == pytest.approx(whole["loss"])
    assert summary["final"]["loss"] == final["loss"] and summary["valid"]["loss"] == capped[-1]["loss"]
    assert "the best checkpoint is measured on all of it at the end" in said and "; on all held-out data" in said
    assert f"step {best['step']} all held-out data: loss {final['loss']:.4f}" in said
    shown = json.loads(cli("runs", "show", run, "--json").out)
    assert (shown["best"]["value"], shown["best"]["step"]) == (final["loss"], final["step"])
    assert "all held-out data" in cli("runs", "show", run).out


@first_is_quick(
    "flags",
    [
        ("--full-validation",),
        ("--minutes", "0.03"),
        ("--set", "training.valid_share=0.5"),
        ("--set", "training.final_validation=false"),
        ("--max-steps", "1"),  # shorter than a validation on all of it
        ("--stop-at-step", "7"),
    ],
    ids=" ".join,
    quick=3,
)
def test_the_time_and_options_forbid_it(flags: tuple[str, ...], tiny: Cli, costly: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(validations, "MOST_VALIDATING", 1e-6)
    said = succeed(tiny("--out", "run", *flags))
    assert not metrics(Path("run"), "final") and "all held-out data" not in said
    assert ("measured on all of it" in said) == (flags[0] == "--stop-at-step")


def test_a_run_that_was_out_of_time_measures_it_once_when_it_is_resumed(
    tiny: Cli, cli: Cli, costly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, again = RunReporter.measure_best, ("train", "--resume", "--out", "run")

    def too_late(found: RunReporter, *parts: Any) -> None:
        found.deadline = 0.0
        measure(found, *parts)

    with monkeypatch.context() as patch:
        patch.setattr(RunReporter, "measure_best", too_late)
        said = succeed(tiny("--out", "run"))
    assert "out of time for all held-out data; continue with: tformer train --resume" in said
    assert not metrics(Path("run"), "final")
    assert "nothing to do" not in succeed(cli(*again)) and len(metrics(Path("run"), "final")) == 1
    assert "nothing to do" in succeed(cli(*again)) and len(metrics(Path("run"), "final")) == 1
    succeed(cli(*again, "--max-steps", "18"))
    assert metrics(Path("run"), "final")[-1]["step"] == [x["step"] for x in metrics(Path("run")) if x["is_best"]][-1]


def test_max_minutes_that_end_during_a_validation_do_not_break_it_off(
    tiny: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate = RunReporter._validate

    def too_late(found: RunReporter, *parts: Any) -> dict[str, Any]:
        found.deadline = 0.0
        return validate(found, *parts)

    monkeypatch.setattr(RunReporter, "_validate", too_late)
    succeed(tiny("--out", "run", "--max-minutes", "60"))
    assert metrics(Path("run"), "valid")


@pytest.mark.parametrize("flags", [(), ("--parallel", "fsdp")], ids=" ".join)
@pytest.mark.slow
def test_several_processes_measure_what_one_does(flags: tuple[str, ...], tiny: Cli) -> None:
    """The quick twin is `test_training_devices.py::test_two_processes_make_the_run_of_one`."""
    dropouts = ("model.decoder.dropout=0", "model.decoder.attention_dropout=0", "model.embedding.dropout=0")
    sets = ("training.valid_share=0.5", "training.final_validation=true", *dropouts)
    asked = [word for text in sets for word in ("--set", text)]
    succeed(tiny("--out", "one", *asked))
    succeed(tiny("--out", "two", "--devices", "2", *flags, *asked))
    [one], [two] = metrics(Path("one"), "final"), metrics(Path("two"), "final")
    assert (one["step"], one["tokens"]) == (two["step"], two["tokens"])
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)


def test_it_is_part_of_the_time_that_is_expected(tiny: Cli, costly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "FORECAST_SECONDS", 0.0)
    monkeypatch.setattr(reporter, "SHORT_TRAINING", 0.0)
    assert "of them for all held-out data at the end" in succeed(tiny("--out", "run"))
    pace = Pace()
    pace.seconds["end"] = 9.0
    assert pace.to_come(4, 8, eval_every=2, save_every=2) == 9.0


# --- the same part of each kind of data ------------------------------------------------------------------------------


@given(st.integers(2, 3000), st.integers(1, 70), st.floats(0.001, 1))
def test_windows_are_evenly_spread(num_tokens: int, seq_len: int, share: float) -> None:
    every = list(windows(num_tokens, seq_len, seq_len))
    chosen = list(evenly_spread(iter(every), len(every), share))
    assert len(chosen) == max(1, round(share * len(every)))
    places = [every.index(window) for window in chosen]
    gaps = {after - before for before, after in pairwise(places)}
    assert places[0] == 0 and max(gaps, default=1) - min(gaps, default=1) <= 1


@first_is_quick("kind", ["labels", "images", "masked", "sentences"])
def test_every_kind_of_data_is_read_in_part(kind: str, cli: Cli, tmp_path: Path, text_file: Path) -> None:
    words: list[object] = ["--set", "model.d_model=32"]
    if kind == "images":
        data = write_images(tmp_path / "images", 80)
        words = ["--arch", "vit", *words]
    elif kind == "labels":
        data = write_table(tmp_path / "rows.tsv", ("label", "text"), sentences(80, 1))
        words = ["--arch", "bert", *words]
    else:
        data = tmp_path / "documents.txt"
        data.write_text(text_file.read_text().replace("\n", ". ").replace("mat. ", "mat.\n\n") * 3)
        words = ["--arch", "roberta" if kind == "masked" else "bert", *words]
        words += ["--preset", "pretrain"] if kind == "sentences" else ["--set", "data.seq_len=32"]
    found = []
    for share in ("1.0", "0.5"):
        out = tmp_path / share
        short = ("--max-steps", "2", "--batch-size", "4", "--set", f"training.valid_share={share}")
        succeed(cli("train", *words, "--data", data, *short, "--out", out))
        found.append(metrics(out)[-1]["examples"])
    assert found[1] == max(1, round(found[0] / 2)) < found[0]


def test_pairs_are_read_and_decoded_in_part(train: Train, aligned: tuple[Path, Path]) -> None:
    run = train("--source", aligned[0], "--target", aligned[1], "--set", "training.valid_share=0.5")
    assert {record["examples"] for record in metrics(run)} == {3} and "bleu" in metrics(run)[-1]


# --- outputs that are not worth decoding -----------------------------------------------------------------------------


def test_nothing_is_decoded_before_the_loss_says_that_it_makes_sense(
    cli: Cli, recipe: Path, aligned: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best checkpoint is the one with the lowest loss until something is decoded."""
    monkeypatch.setattr(pairs, "LONG_DECODING", 0.0)
    words = ("train", "--config", recipe, "--source", aligned[0], "--target", aligned[1])
    said = succeed(cli(*words, "--out", tmp_path / "run"))
    found = metrics(tmp_path / "run")
    assert not any("bleu" in record for record in found) and said.count("not decoded: perplexity") == 2
    assert [record["is_best"] for record in found] == [True, found[1]["loss"] < found[0]["loss"]]
    assert "result" in said
    monkeypatch.setattr(pairs, "DECODABLE", 1e9)
    assert "not decoded" not in succeed(cli("train", "--resume", "--out", tmp_path / "run", "--max-steps", 12))
    last = metrics(tmp_path / "run")[-1]
    assert "bleu" in last and last["is_best"]  # any decoded output beats none


def test_a_training_by_time_tries_out_decoding_and_validates_on_what_leaves_it_time(
    cli: Cli, recipe: Path, aligned: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding is tried out though the outputs are poor: the first validation that decodes comes without a surprise."""
    monkeypatch.setattr(pairs, "LONG_DECODING", 0.0)
    monkeypatch.setattr(clock, "MOST_VALIDATING", 1e-9)
    monkeypatch.setattr(reporter, "SHORT_TRAINING", 0.0)
    monkeypatch.setattr(reporter, "FORECAST_SECONDS", 0.0)
    monkeypatch.setattr(command, "STARTED", time.monotonic())  # the tests may run for longer than the minutes
    tried = []

    def translate(*given: Any, work: Any) -> Any:
        tried.append(work.is_trial)
        return translate_pairs(*given, work=work)

    monkeypatch.setattr(pairs, "translate_pairs", translate)
    words = ("train", "--config", recipe, "--source", aligned[0], "--target", aligned[1], "--minutes", "5",
             "--max-steps", "12")  # fmt: skip
    said = succeed(cli(*words, "--out", tmp_path / "run"))
    assert tried == [True] and "not decoded" in said
    assert share_of(tmp_path / "run") == clock.LEAST_SHARE and "validation reads 5 % of the held-out texts" in said
    assert {record["examples"] for record in metrics(tmp_path / "run")} == {1}


def test_short_decoding_takes_place_at_once(train: Train, aligned: tuple[Path, Path]) -> None:
    assert all("bleu" in record for record in metrics(train("--source", aligned[0], "--target", aligned[1])))


def test_the_guides_faster_validation_of_pairs_works_as_it_is_written(
    cli: Cli, aligned: tuple[Path, Path], tmp_path: Path
) -> None:
    """Each command line of the row, with the default preset, whose best_metric needs decoded outputs."""
    guide = (Path(tformer.__file__).parent / "guide" / "troubleshooting.md").read_text()
    [row] = re.findall(r"^\| validation takes longer than the steps \| (.*) \|$", guide, re.M)
    options = [shlex.split(span.replace("=N", "=1")) for span in re.findall("`(--[^`]+)`", row)]
    assert len(options) == 4 and any("training.valid_beam_size=0" in each for each in options)
    words = ("train", "--arch", "transformer", "--preset", "modern", "--source", aligned[0], "--target", aligned[1])
    for each in options:
        succeed(cli(*words, *each, "--max-steps", 2, "--dry-run"))


def test_any_decoded_output_is_better_than_none() -> None:
    training = small_recipe("gpt/tiny", dropout=False).training.model_copy(update={"best_metric": "bleu"})
    values: list[dict[str, Any]] = [
        {"loss": 7.0},
        {"loss": 3.0},
        {"loss": 3.5, "bleu": 0.0},
        {"loss": 3.4, "bleu": 1.0},
    ]
    scores = [score(each, training) for each in values]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4


# --- how often -------------------------------------------------------------------------------------------------------


@first_is_quick(("every", "expected"), [("0.9", [10, 12]), ("0.25", [3, 6, 9, 12]), ("0.01", list(range(1, 13)))])
def test_a_share_of_all_steps_between_validations(every: str, expected: list[int], tiny: Cli) -> None:
    succeed(tiny("--out", "run", "--set", f"training.eval_every={every}", "--set", "training.sample_every=0"))
    assert [record["step"] for record in metrics(Path("run"))] == expected
    assert load_recipe(config="run/recipe.yaml").recipe.training.eval_every == expected[0]
