"""Report of `bench attention`: slopes, crossovers, tables, failures, files."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.bench.attention_report import (
    FILES,
    crossover,
    document,
    log_log_slope,
    notes,
    slope_lengths,
    summarize,
    tables,
    write_report,
)
from tformer.bench.speed import Row
from tformer.bench.workloads.attention import AttentionBench

LENGTHS = (512, 1024, 2048, 4096)


@given(st.floats(0.1, 3.0), st.floats(1e-6, 1e3))
def test_the_slope_of_a_power_law_is_its_exponent(exponent: float, factor: float) -> None:
    costs = {length: factor * length**exponent for length in LENGTHS}
    assert log_log_slope(costs) == pytest.approx(exponent, abs=1e-6)


def test_a_slope_takes_two_lengths() -> None:
    assert log_log_slope({512: 1.0}) is None
    assert log_log_slope({}) is None
    assert log_log_slope({512: 1.0, 1024: 0.0}) is None  # no memory at all has no logarithm


def test_slopes_are_fitted_over_long_lengths_where_there_are_two() -> None:
    assert slope_lengths([512, 2048, 4096]) == [2048, 4096]
    assert slope_lengths([512, 1024, 2048]) == [512, 1024, 2048]
    assert slope_lengths([]) == []


@given(st.floats(600, 4000))
def test_linear_and_quadratic_costs_cross_where_they_are_equal(equal_at: float) -> None:
    linear = {length: length * equal_at for length in LENGTHS}
    quadratic = {length: float(length**2) for length in LENGTHS}
    assert crossover(linear, quadratic) == pytest.approx(equal_at, rel=1e-6)


def test_always_never_and_not_comparable() -> None:
    full = dict.fromkeys(LENGTHS, 2.0)
    assert crossover(dict.fromkeys(LENGTHS, 1.0), full) == 0.0
    assert crossover(dict.fromkeys(LENGTHS, 3.0), full) == math.inf
    assert crossover(full, full) == math.inf
    assert crossover({8: 1.0}, full) is None


def test_equal_costs_at_a_length_are_a_crossing() -> None:
    full = dict.fromkeys((512, 1024, 2048), 2.0)
    assert crossover({512: 2.0, 1024: 1.0, 2048: 1.0}, full) == pytest.approx(512)
    assert crossover({512: 3.0, 1024: 2.0, 2048: 1.0}, full) == pytest.approx(1024)


def test_of_several_crossings_the_last_counts() -> None:
    wavering = {512: 1.0, 1024: 4.0, 2048: 1.0}
    found = crossover(wavering, dict.fromkeys(LENGTHS, 2.0))
    assert found is not None and 1024 < found < 2048


ENVIRONMENT = {"line": "torch 0, fp32, a CPU", "ceilings": {"failed": "over 3 s"}}


@pytest.fixture
def bench(make_bench: Any) -> AttentionBench:
    return make_bench(lengths=(512, 1024, 2048, 4096))


@pytest.fixture
def rows(bench: AttentionBench, make_row: Any) -> list[Row]:
    """Full: time T^2, memory T. Dense-masked: time T, equal at 1,536; memory T^2, too much at 4,096."""
    found = []
    for length in bench.lengths:
        found.append(make_row("full", length, (length / 1000) ** 2, 1000 * length))
        if length < 4096:
            found.append(make_row("dense-masked", length, 1.536 * length / 1000, 10 * length**2))
    return [*found, make_row("dense-masked", 4096, failed="out of memory: the system ended the process")]


def test_slopes_crossover_and_factors(bench: AttentionBench, rows: list[Row]) -> None:
    full, masked = summarize(bench, rows)
    assert full.slope_lengths == (2048, 4096) and masked.slope_lengths == (512, 1024, 2048)
    assert (full.time_slope, full.memory_slope) == (pytest.approx(2), pytest.approx(1))
    assert (masked.time_slope, masked.memory_slope) == (pytest.approx(1), pytest.approx(2))
    assert full.crossover is None and masked.crossover == pytest.approx(1536)
    assert masked.compared_at == masked.masked_at == full.masked_at == 2048
    assert masked.speedup == pytest.approx(2048 / 1536)
    assert full.memory_share == pytest.approx(100 / 2048)


def test_tables_hold_numbers_or_why_there_are_none(bench: AttentionBench, rows: list[Row]) -> None:
    time, memory, growth = tables(bench, rows)
    assert time.headings == ("kind", "512", "1,024", "2,048", "4,096")
    assert time.rows[0] == ("full", "262 ms", "1.05 s", "4.19 s", "16.8 s")
    assert time.rows[1][-1] == memory.rows[1][-1] == "out of memory"
    assert memory.rows[1][1] == "2.50 MiB"
    assert growth.rows[1][:4] == ("dense-masked", "1.00 (512 to 2,048)", "2.00", "from about 1,500")
    assert growth.rows[1][4] == "1.33 x (at 2,048)"


def test_failures_are_told_in_full_and_unsteady_times_named(
    bench: AttentionBench, rows: list[Row], make_row: Any
) -> None:
    rows[0] = make_row("full", 512, failed="rank: 600 is more than the length 512")
    rows[2] = make_row("full", 1024, spread=0.5)
    found = notes(rows)
    assert found[0] == "full at 512: rank: 600 is more than the length 512"
    assert found[1] == "dense-masked at 4,096: out of memory: the system ended the process"
    assert "full at 1,024" in found[2] and len(found) == 3
    assert tables(bench, rows)[0].rows[0][1] == "failed"


def test_what_was_not_tried_needs_no_note(bench: AttentionBench, rows: list[Row], make_row: Any) -> None:
    rows[-1] = make_row("dense-masked", 4096, failed="not tried: over 5 s at 2,048")
    assert notes(rows) == []
    assert tables(bench, rows)[0].rows[1][-1] == "not tried"


def test_nothing_measured_still_reports(bench: AttentionBench, make_row: Any) -> None:
    rows = [make_row(kind, length, failed="over 1 s") for kind in bench.kinds for length in bench.lengths]
    assert tables(bench, rows)[2].rows[0] == ("full", "", "", "", "", "")


def test_the_files(bench: AttentionBench, rows: list[Row], tmp_path: Path) -> None:
    out = tmp_path / "new" / "report"
    write_report(bench, rows, out, environment=ENVIRONMENT)
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    text = (out / "table.md").read_text()
    assert "torch 0, fp32, a CPU; batch 1, 4 heads of 64" in text and "| full | 262 ms |" in text
    with (out / "table.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == len(rows) and float(cells[0]["median"]) == rows[0].seconds and cells[0]["failed"] == ""
    assert json.loads((out / "table.json").read_text())["cells"][-1]["failed"].startswith("out of memory")
    for name in ("time", "memory"):
        picture = (out / f"{name}.svg").read_text()
        assert picture.startswith("<?xml") and f"Attention: {name} against length" in picture


def test_without_a_measurement_there_is_no_picture(bench: AttentionBench, make_row: Any, tmp_path: Path) -> None:
    write_report(bench, [make_row(kind, n, failed="x: y") for kind in bench.kinds for n in bench.lengths], tmp_path,
                 environment=ENVIRONMENT)  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv", "table.json", "table.md"]


def test_memory_that_shows_as_nothing_has_no_picture(bench: AttentionBench, make_row: Any, tmp_path: Path) -> None:
    write_report(bench, [make_row(kind, n, 1.0, 0) for kind in bench.kinds for n in bench.lengths], tmp_path,
                 environment=ENVIRONMENT)  # fmt: skip
    assert {path.name for path in tmp_path.glob("*.svg")} == {"time.svg"}


def test_the_document_says_in_words_what_json_has_no_number_for(bench: AttentionBench, make_row: Any) -> None:
    rows = [make_row(kind, n, 1.0 + (kind != "full")) for kind in bench.kinds for n in bench.lengths]
    found = document(bench, rows, environment=ENVIRONMENT)
    assert found["summary"][1]["faster_than_full"] == "not up to 4,096"
    assert found["settings"]["lengths"] == (512, 1024, 2048, 4096)
