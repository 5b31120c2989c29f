"""Units, Markdown tables, ratios, shares, the best of a sweep, the JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tformer.bench.report import ReportTable, best_rows, document, lines, markdown, report, tables
from tformer.bench.speed import ContenderSpec, Measurement, SpeedBench


def test_markdown() -> None:
    text = markdown(ReportTable("Times", ("kind", "512"), (("full", "1 ms"), ("a|b", ""))))
    assert text.splitlines() == ["Times", "", "| kind | 512 |", "| --- | ---: |", "| full | 1 ms |", "| a\\|b |  |"]


Make = Callable[..., SpeedBench]
CEILINGS = {
    "flops_per_second": {"bf16": 800e9, "fp32": 200e9},
    "product": [4096, 384, 1536],
    "bytes_per_second": 50e9,
    "data_sheet": None,
}
SHEET = {"bf16_flops": 1600e9, "bytes_per_second": 100e9, "source": "a data sheet"}


def row(name: str, precision: str, tokens_per_second: float, *, batch_size: int = 2, **changes: Any) -> Measurement:
    """A round of one second whose operations are 1e8 a token."""
    cost = {"flops": 1e8 * tokens_per_second, "bytes_read": 5e9, "steps": 4, "examples": 8, "memory": {}}
    values: dict[str, Any] = {
        "seconds": 1.0,
        "spread": 0.03,
        "repeats": 5,
        "tokens": tokens_per_second,
        "cost": cost,
        "memory": {"peak_rss_bytes": 2**30},
        "ceilings": CEILINGS,
    }
    maker = "tformer.bench.workloads.train:TrainingSteps" if name == "tformer" else ""
    return Measurement(ContenderSpec(name, precision, maker), batch_size, **{**values, **changes})


ROWS = [
    row("tformer", "bf16", 4800),
    row("transformers", "fp32", 1200),
    row("transformers", "bf16", 2400),
]


def entries(bench: SpeedBench, rows: list[Measurement]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document(bench, rows)["rows"]
    return found


def test_every_row_has_what_the_issue_names(make_speed_bench: Make) -> None:
    found = entries(make_speed_bench(), ROWS)
    assert [(one["name"], one["precision"], one["batch_size"]) for one in found] == [
        ("tformer", "bf16", 2), ("transformers", "fp32", 2), ("transformers", "bf16", 2),
    ]  # fmt: skip
    ours = found[0]
    assert (ours["tokens_per_second"], ours["step_ms"], ours["spread"]) == (4800, 250, 0.03)
    assert ours["peak_rss_bytes"] == 2**30 and ours["share_of_peak"] == pytest.approx(0.6)
    assert ours["ratios"] == {"transformers fp32": 4.0, "transformers bf16": 2.0}
    assert ours["bound"] == "arithmetic" and ours["examples_per_second"] == 8
    (slower,) = entries(make_speed_bench(), [replace(ROWS[0], seconds=2 * ROWS[0].seconds)])
    assert slower["examples_per_second"] == 4


def test_shares_of_peak_compare_all_with_the_best_format(make_speed_bench: Make) -> None:
    """fp32 is at 60 % of what fp32 can do, and at 15 % of what the machine can."""
    plain = entries(make_speed_bench(), ROWS)[1]
    assert plain["share_of_arithmetic"] == pytest.approx(0.6) and plain["share_of_peak"] == pytest.approx(0.15)


def test_the_nearer_ceiling_counts() -> None:
    slow = row("tformer", "bf16", 10, cost={**ROWS[0].cost, "bytes_read": 35e9, "flops": 1e9})  # type: ignore[dict-item]
    assert slow.share_of_peak == pytest.approx(0.7)


def test_the_data_sheet_of_a_known_gpu() -> None:
    known = row("tformer", "bf16", 4800, ceilings={**CEILINGS, "data_sheet": SHEET})
    assert known.share_of_data_sheet == pytest.approx(0.3) and ROWS[0].share_of_data_sheet is None
    assert "(a data sheet)" in lines([known])[0]
    assert lines([known])[1].endswith("; 30% of the data sheet")
    assert not any("data sheet" in line for line in lines(ROWS))


def test_the_page_says_who_is_compiled(make_speed_bench: Make) -> None:
    (table,) = tables(make_speed_bench(compile=True), ROWS)
    assert table.title.endswith("tformer compiled")


def test_the_document_is_json_with_settings_and_ceilings(make_speed_bench: Make) -> None:
    found = json.loads(json.dumps(document(make_speed_bench(), ROWS)))
    assert found["ceilings"] == [{"batch_size": 2, **CEILINGS}]
    assert found["settings"]["work"] == "train" and found["settings"]["batch_sizes"] == [2]


def test_the_best_of_a_sweep(make_speed_bench: Make) -> None:
    rows = [*ROWS, row("tformer", "bf16", 4000, batch_size=8), row("transformers", "fp32", 1600, batch_size=8),
            row("transformers", "bf16", 1, batch_size=8, failed="out of memory")]  # fmt: skip
    assert [(one.entry.label, one.batch_size) for one in best_rows(rows)] == [
        ("tformer bf16", 2), ("transformers fp32", 8), ("transformers bf16", 2),
    ]  # fmt: skip
    bench = make_speed_bench(batch_sizes=(2, 8))
    best = document(bench, rows)["best"]
    assert best[0]["ratios"] == {"transformers fp32": 3.0, "transformers bf16": 2.0}
    every, chosen = tables(bench, rows)
    assert len(every.rows) == 6 and len(chosen.rows) == 3
    assert chosen.rows[1][-1] == "3.00 x" and every.rows[4][-1] == "2.50 x"
    assert every.rows[5][:3] == ("transformers bf16", "8", "out of memory")


def test_the_table(make_speed_bench: Make) -> None:
    (table,) = tables(make_speed_bench(), ROWS)
    text = markdown(table)
    assert text.startswith("bench train: gpt/tiny, length 8, cpu")
    assert "| batch | tokens/s | ms per optimizer step | spread | peak memory | share of peak |" in text
    assert "| tformer bf16 | 2 | 4,800 | 250 | 3% | 1.00 GiB | 60% |  |" in text
    assert "| transformers fp32 | 2 | 1,200 | 250 | 3% | 1.00 GiB | 15% | 4.00 x |" in text


def test_lines_say_ceilings_what_binds_memory_and_unrest() -> None:
    memory = {"weights_bytes": 2**20, "total_bytes": 2**21}
    told = lines([row("tformer", "bf16", 4800, spread=0.5, cost={**ROWS[0].cost, "memory": memory}), *ROWS[1:]])  # type: ignore[dict-item]
    assert told[0] == (
        "ceilings, batch 2: bf16 800 GFLOP/s, fp32 200 GFLOP/s (product 4096 x 384 x 1536), memory read at 50 GB/s"
    )
    assert told[1].startswith("tformer bf16, batch 2: 60% of the matrix-product rate")
    assert told[2].startswith("expected memory: 2.00 MiB (weights 1.00 MiB)")
    assert "1 of 3 spread by more than 20%" in told[3]


def test_a_failed_row_says_why(make_speed_bench: Make) -> None:
    rows = [ROWS[0], Measurement(ContenderSpec("transformers", "fp32"), 2, failed="out of memory")]
    failed = entries(make_speed_bench(), rows)[1]
    assert {name: value for name, value in failed.items() if value} == {
        "name": "transformers", "precision": "fp32", "batch_size": 2, "failed": "out of memory",
    }  # fmt: skip


def test_every_row_of_every_bench_has_the_same_keys(make_speed_bench: Make) -> None:
    """What was measured, what failed, with memory that was expected and on a GPU."""
    assert ROWS[0].cost is not None
    rows = [
        row("tformer", "bf16", 4800, cost={**ROWS[0].cost, "memory": {"total_bytes": 3}}),
        row("tformer", "bf16", 4800, memory={"peak_rss_bytes": 5, "peak_gpu_bytes": 7}),
        Measurement(ContenderSpec("transformers", "fp32"), 2, failed="out of memory"),
    ]
    found = entries(make_speed_bench(), rows)
    assert len({frozenset(one) for one in found}) == 1
    assert {"tokens_per_second", "step_ms", "peak_rss_bytes", "share_of_peak"} <= found[0].keys()


def test_who_was_measured_alone_is_said(make_speed_bench: Make) -> None:
    rows = [ROWS[0], row("transformers", "fp32", 1200, alone=True)]
    assert [one["measured_alone"] for one in entries(make_speed_bench(), rows)] == [False, True]
    assert "measured alone, because memory was too small for all at once: transformers fp32, batch 2" in lines(rows)


def test_the_report_has_the_command(make_speed_bench: Make) -> None:
    text = report(make_speed_bench(), ROWS, line="torch x", command="tformer bench train")
    assert text.startswith("    tformer bench train\n\ntorch x\n\nbench train: ") and "- ceilings, batch 2" in text
