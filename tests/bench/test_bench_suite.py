"""`bench all`: its cases, their commands, and the report."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tformer.bench import suite
from tformer.bench.options import ModelOptions, ProductOptions, TrainOptions
from tformer.bench.peers import PEERS
from tformer.bench.speed import Row, SpeedBench, resolve
from tformer.bench.suite import CPU_CASES, GPU_CASES, Case, Progress, cases_for, run_all

FP32 = ProductOptions(precision="fp32", device="cpu")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SILENT = Progress(on_case=lambda *_: None, on_row=lambda _: None, on_note=lambda _: None)


@pytest.mark.parametrize("case", [*CPU_CASES, *GPU_CASES], ids=lambda case: f"{case.options.work}: {case.title}")
def test_the_command_asks_for_the_case(case: Case, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("tformer.cli.bench._measure_speed", asked.append)
    assert cli(*shlex.split(case.options.command)[1:]).code == 0
    assert asked == [case.options]


@pytest.mark.parametrize("case", [*CPU_CASES, *GPU_CASES], ids=lambda case: case.title)
@pytest.mark.usefixtures("int8")
def test_every_case_can_be_asked_for(case: Case) -> None:
    bench, _ = resolve(replace(case.options, products=FP32, peer=()))
    assert bench.work == case.options.work and all((bench.work, name) in PEERS for name in case.options.peer)


def test_a_gpu_has_cases_of_its_own() -> None:
    cases = cases_for(CUDA, threads=3)
    training = [case.options for case in cases if case.options.work == "train"]
    assert [options.model.preset for options in training] == ["small", "medium", "xl"]
    assert all(options.products.compile and options.length == 1024 for options in training)
    generation = [case.options for case in cases if case.options.work == "generate"]
    assert [(options.model.preset, options.batch_sizes) for options in generation] == [("small", (1,)), ("xl", (1,))]
    commands = [case.options.command for case in cases]
    assert all("--device cuda:0" in command and "--threads 3" in command for command in commands)


def test_quick_sweeps_nothing() -> None:
    for case in cases_for(CPU, quick=True):
        assert len(case.options.batch_sizes) == 1 and case.options.repeats <= 3
        assert case.options.own.get("texts", 0) <= 1000


def measured(bench: SpeedBench, **_: Any) -> list[Row]:
    """Ours twice as fast as everybody else; the first batch size of peers fails."""
    cost = {"flops": 1e9, "bytes_read": 1e6, "steps": 10, "examples": 2, "memory": {}}
    memory = {"peak_rss_bytes": 2**30}
    rows = []
    for size in bench.batch_sizes:
        for entry in bench.entries:
            seconds = 1.0 if entry.name == "tformer" else 2.0
            rows.append(Row(entry, size, seconds=seconds, repeats=3, tokens=100 * size, cost=cost, memory=memory))
    return rows


@pytest.mark.usefixtures("int8")
def test_the_report_has_commands_ratios_and_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run_speed", measured)
    translate = next(case for case in CPU_CASES if case.options.work == "translate")
    usable = Case(translate.title, replace(translate.options, products=FP32, peer=("transformers",)))
    model = ModelOptions(arch="gpt", preset="no-such")
    broken = Case("Broken", TrainOptions(model=model, peer=("no-such-library",)))
    notes: list[str] = []
    progress = replace(SILENT, on_note=notes.append)
    report = run_all([usable, broken], CPU, progress=progress, should_stop=lambda: False)
    assert report is not None and not report.nothing_measured
    page = report.markdown
    assert usable.options.command in page and "transformers fp32 2.00 x" in page and "int8, batch 64" in page
    assert "| Broken | not measured |" in page and "no-such" in page and len(notes) == 1
    assert torch.__version__ in page and "Python 3" in page
    first, second = report.document["cases"]
    assert first["rows"][0]["tokens_per_second"] == 800.0 and second["rows"] == []
    assert {"tokens_per_second", "step_ms", "peak_rss_bytes", "share_of_peak"} <= first["rows"][0].keys()


def test_a_library_that_is_missing_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run_speed", measured)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    case = Case("One", replace(CPU_CASES[0].options, products=FP32))
    report = run_all([case], CPU, progress=SILENT, should_stop=lambda: False)
    assert report is not None and "--peer transformers: transformers is not installed" in report.markdown
    assert {row["name"] for row in report.document["cases"][0]["rows"]} == {"tformer"}


@pytest.mark.parametrize("int8", [False], indirect=True)
def test_8_bits_are_left_out_and_said_where_there_are_none(int8: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run_speed", measured)
    case = next(case for case in CPU_CASES if case.options.work == "generate")
    case = Case("One", replace(case.options, products=FP32, peer=()))
    report = run_all([case], CPU, progress=SILENT, should_stop=lambda: False)
    assert report is not None and "--quantize int8 needs a CPU" in report.markdown
    assert [row["precision"] for row in report.document["cases"][0]["rows"]] == ["fp32"]


def test_peers_are_swept_where_the_shape_leaves_the_batch_free_and_else_it_is_said() -> None:
    for case in (*CPU_CASES, *GPU_CASES):
        sizes = case.options.batch_sizes
        assert len(sizes) > 1 or f"the batch size is fixed at {sizes[0]}" in case.note
    translate = next(case for case in CPU_CASES if case.options.work == "translate")
    assert translate.options.batch_sizes == (8, 32, 64)


def test_a_note_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run_speed", measured)
    case = CPU_CASES[0]
    case = replace(case, options=replace(case.options, products=FP32, peer=()))
    report = run_all([case], CPU, progress=SILENT, should_stop=lambda: False)
    assert report is not None and f"- {case.note}" in report.markdown
    assert case.note in report.document["cases"][0]["notes"]


def test_a_stop_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run_speed", lambda *_, **__: None)
    assert run_all([CPU_CASES[0]], CPU, progress=SILENT, should_stop=lambda: True) is None
