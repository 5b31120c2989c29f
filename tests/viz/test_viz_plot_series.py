"""From metrics.jsonl to lines: what is read, by which name, along which axis, how smooth."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.viz.plot_runs import train_record, valid_record, write_run
from tformer.errors import InputError
from tformer.viz.plot.records import read_runs, unique_names
from tformer.viz.plot.series import better, choose_metrics, make_panels, metrics_of, smooth_values, time_unit
from tformer.viz.plot.ticks import plain, ticks

NUMBERS = st.floats(-100, 100)


def test_a_damaged_line_a_half_line_and_foreign_values_are_passed_over(tmp_path: Path) -> None:
    records = [train_record(20, 2.0), train_record(10, 3.0), train_record(20, 1.0), train_record(30, None)]
    records += [{"split": "train", "step": "x", "loss": 1}, {"step": 5}, {"split": 3, "step": 4, "loss": 1}]
    records += [train_record(40, 0.5, lists=[1, 2], flag=True, words="a", huge=10**400)]
    tail = '{"split": "train", "step": 50,\nnot json\n[1]\n{"split": "train", "step": 60, "loss": 9'
    [run] = read_runs([write_run(tmp_path / "a", records, tail=tail)])
    track = run.tracks["train"]
    assert track.step.tolist() == [10, 20, 30, 40], "in order, and of two records of a step the later"
    assert np.array_equal(track.values["loss"], [3.0, 1.0, math.nan, 0.5], equal_nan=True)
    assert set(track.values) == {"loss", "lr", "grad_norm", "tokens_per_second"}


def test_validation_stands_at_the_tokens_and_seconds_of_training(tmp_path: Path) -> None:
    records = [train_record(10, 4.0), train_record(20, 3.0), valid_record(5, 9, 0), valid_record(15, 5, 0.1)]
    [run] = read_runs([write_run(tmp_path / "a", [*records, valid_record(30, 4, 0.2)])])
    valid = run.tracks["valid"]
    assert valid.tokens.tolist() == [500, 1500, 3000]
    assert valid.seconds.tolist() == [10, 30, 60]


def test_a_run_is_read_once_and_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / place) for place in ("a/x", "b/x", "b/y")]
    (tmp_path / "link").symlink_to(paths[0])
    runs = read_runs([*paths, paths[1], tmp_path / "link"])
    assert [run.name for run in runs] == ["a/x", "b/x", "y"]


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), max_size=6, unique_by=tuple))
def test_names_are_unique_for_distinct_paths(parts: list[list[str]]) -> None:
    names = unique_names([Path("/", *part) for part in parts])
    assert len(set(names)) == len(names)


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.floats(0, 0.99))
def test_smoothing_is_a_weighted_mean_without_bias(values: list[float], weight: float) -> None:
    smoothed = smooth_values(np.array(values), weight)
    for n in range(len(values)):
        shares = [weight ** (n - k) for k in range(n + 1)]
        mean = sum(share * value for share, value in zip(shares, values, strict=False)) / sum(shares)
        assert smoothed[n] == pytest.approx(mean, abs=1e-9)


def test_smoothing_passes_over_what_is_missing_and_zero_changes_nothing() -> None:
    values = np.array([math.nan, 2.0, math.nan, 4.0])
    assert np.array_equal(smooth_values(values, 0.0), values, equal_nan=True)
    assert smooth_values(values, 0.5)[3] == pytest.approx((0.5 * 2 + 4) / 1.5)


def test_metrics_by_name_by_split_and_all(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a")])
    assert list(metrics_of(runs)) == ["loss", "accuracy", "lr", "tokens_per_second", "grad_norm"]

    def chosen(*asked: str) -> list[tuple[str, tuple[str, ...]]]:
        return [(choice.metric, choice.splits) for choice in choose_metrics(runs, asked)]

    assert chosen() == chosen("loss") == chosen("train.loss", "valid.loss") == [("loss", ("train", "valid"))]
    assert chosen("valid.loss", "lr") == [("loss", ("valid",)), ("lr", ("train",))]
    assert len(chosen("all")) == 5
    for wrong in ("acuracy", "train.accuracy", ".loss", "loss."):
        with pytest.raises(InputError, match="loss, accuracy, lr, tokens_per_second, grad_norm, or all") as error:
            chosen(wrong)
        if wrong == "acuracy":
            assert error.value.hint == "did you mean 'accuracy'?"


def test_without_a_loss_the_first_metric_there_is_shown(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a", [{"split": "valid", "step": 1, "bleu": 2.0}])])
    assert [choice.metric for choice in choose_metrics(runs, ())] == ["bleu"]


def test_smoothing_spares_validation_and_the_learning_rate(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a")])
    loss, lr = make_panels(runs, choose_metrics(runs, ("loss", "lr")), x="step", smooth=0.9)
    assert [(series.label, series.raw is not None) for series in loss.series] == [("train", True), ("valid", False)]
    assert lr.series[0].raw is None


def test_axes_are_steps_tokens_and_time_in_a_unit_that_suits(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "a")])
    choices = choose_metrics(runs, ("valid.loss",))

    def places(x: str) -> list[float]:
        return make_panels(runs, choices, x=x, smooth=0)[0].series[0].x.tolist()  # type: ignore[arg-type]

    assert (places("step"), places("tokens")) == ([50, 100], [5000, 10000])
    assert time_unit(runs) == ("minutes", 60.0) and places("time") == pytest.approx([100 / 60, 200 / 60])
    bare = read_runs([write_run(tmp_path / "b", [{"split": "valid", "step": 1, "loss": 2.0}])])
    with pytest.raises(InputError, match="--x tokens: no run logged its tokens"):
        make_panels(bare, choose_metrics(bare, ()), x="tokens", smooth=0)


def test_lines_of_many_runs_and_splits_all_look_different(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / str(n)) for n in range(12)])
    [panel] = make_panels(runs, choose_metrics(runs, ()), x="step", smooth=0)
    assert len({(series.colour % 6, series.dash % 4) for series in panel.series}) == 24
    assert panel.series[3].label == "1 · valid"


def test_which_end_of_a_metric_is_the_best() -> None:
    assert [better(name) for name in ("loss", "masked_lm_loss", "perplexity", "bits_per_byte")] == ["lower"] * 4
    assert [better(name) for name in ("accuracy", "bleu", "mcc")] == ["higher"] * 3
    assert better("lr") is None and better("grad_norm") is None


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 12))
def test_linear_ticks_are_even_few_and_inside(low: float, span: float, most: int) -> None:
    found = ticks(low, low + span, log=False, most=most)
    slack = 1e-6 * (abs(low) + span)
    assert len(found) <= most + 1 and all(low - slack <= value <= low + span + slack for value in found)
    gaps = np.diff(found)
    assert len(gaps) < 2 or np.allclose(gaps, gaps[0], rtol=1e-3)


def test_logarithmic_ticks_and_plain_numbers() -> None:
    assert ticks(1, 1000, log=True, most=4) == [1, 10, 100, 1000]
    assert ticks(2, 4, log=True, most=4) == [2, 2.5, 3, 3.5, 4], "a small range is divided evenly"
    shown = {16384: "16,384", 1536000: "1.536M", 2.0219: "2.022", 6e-5: "6e-5", 0.0: "0", 12345.6: "12,346"}
    assert {value: plain(value) for value in shown} == shown
