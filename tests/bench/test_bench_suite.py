"""`bench all`: its cases, their commands, and the report."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tformer.bench import suite
from tformer.bench.options import ModelOptions, SpeedOptions, TrainOptions
from tformer.bench.peers import PEERS
from tformer.bench.speed import Row, SpeedBench, resolve
from tformer.bench.suite import CPU_CASES, GPU_CASES, Cases, SuiteReport, cases_for, placed, run_all

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ALL = [*CPU_CASES.values(), *GPU_CASES.values()]
TRAINING = "Training, 6 layers of width 384 (nanoGPT's baby shape)"
TRANSLATION = "Translation, 6 + 6 layers of width 512, beam 4"


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.command)
def test_the_command_asks_for_the_case(
    case: SpeedOptions, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("tformer.cli.bench._measure_speed", asked.append)
    assert cli(*shlex.split(case.command)[1:]).code == 0
    assert asked == [case]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.command)
@pytest.mark.usefixtures("int8")
def test_every_case_can_be_asked_for(case: SpeedOptions) -> None:
    bench, _ = resolve(replace(case, precision="fp32", device="cpu", compile=False, peer=()))
    assert bench.work == case.work and all((bench.work, name) in PEERS for name in case.peer)


def test_a_gpu_has_cases_of_its_own() -> None:
    cases = list(cases_for(CUDA).values())
    assert list(cases_for(CPU)) == list(CPU_CASES)
    training = [case for case in cases if case.work == "train"]
    assert [case.model.preset for case in training] == ["small", "medium", "xl"]
    assert all(case.compile and case.length == 1024 for case in training)
    generation = [case for case in cases if case.work == "generate"]
    assert [(case.model.preset, case.batch_sizes) for case in generation] == [("small", (1,)), ("xl", (1,))]
    commands = [placed(case, CUDA, quick=False, threads=3).command for case in cases]
    assert all("--device cuda:0" in command and "--threads 3" in command for command in commands)


def test_quick_sweeps_nothing() -> None:
    for case in (placed(case, CPU, quick=True, threads=None) for case in CPU_CASES.values()):
        assert len(case.batch_sizes) == 1 and case.repeats <= 3 and case.own.get("texts", 0) <= 1000


def measured(bench: SpeedBench, **_: Any) -> list[Row]:
    """Ours twice as fast as everybody else."""
    cost = {"flops": 1e9, "bytes_read": 1e6, "steps": 10, "examples": 2, "memory": {}}
    memory = {"peak_rss_bytes": 2**30}
    rows = []
    for size in bench.batch_sizes:
        for entry in bench.entries:
            seconds = 1.0 if entry.name == "tformer" else 2.0
            rows.append(Row(entry, size, seconds=seconds, repeats=3, tokens=100 * size, cost=cost, memory=memory))
    return rows


@pytest.fixture
def report_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[SuiteReport, list[str]]]:
    """`report_of(cases)`: the report, and what was said; nothing is measured."""
    monkeypatch.setattr(suite, "run_speed", measured)

    def make(cases: Cases, **changes: Any) -> tuple[SuiteReport, list[str]]:
        said: list[str] = []
        fp32 = {title: replace(case, precision="fp32", **changes) for title, case in cases.items()}
        return run_all(fp32, CPU, say=said.append, should_stop=lambda: False), said

    return make


Make = Callable[..., tuple[SuiteReport, list[str]]]


@pytest.mark.usefixtures("int8")
def test_the_report_has_commands_ratios_and_what_failed(report_of: Make) -> None:
    usable = replace(CPU_CASES[TRANSLATION], peer=("transformers",))
    broken = TrainOptions(model=ModelOptions(arch="gpt", preset="no-such"), peer=("no-such-library",))
    report, said = report_of({TRANSLATION: usable, "Broken": broken})
    page = report.markdown
    command = placed(replace(usable, precision="fp32"), CPU, quick=False, threads=None).command
    assert not report.nothing_measured and said[0] == f"1 of 2  {TRANSLATION}: {command}"
    assert command in page and "transformers fp32 2.00 x" in page and "int8, batch 64" in page
    assert "| Broken | not measured |" in page and "no-such" in page
    assert [line for line in said if line.startswith("  note: ")] == said[-1:]
    assert torch.__version__ in page and "Python 3" in page
    first, second = report.document["cases"]
    assert first["rows"][0]["tokens_per_second"] == 800.0 and second["rows"] == []
    assert {"tokens_per_second", "step_ms", "peak_rss_bytes", "share_of_peak"} <= first["rows"][0].keys()


def test_a_library_that_is_missing_is_left_out_and_said(report_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    report, _ = report_of({TRAINING: CPU_CASES[TRAINING]})
    assert "--peer transformers: transformers is not installed" in report.markdown
    assert {row["name"] for row in report.document["cases"][0]["rows"]} == {"tformer"}


@pytest.mark.parametrize("int8", [False], indirect=True)
def test_8_bits_are_left_out_and_said_where_there_are_none(int8: None, report_of: Make) -> None:
    title = "Generation, GPT-2 of 124M, one text"
    report, _ = report_of({title: CPU_CASES[title]}, peer=())
    assert "--quantize int8 needs a CPU" in report.markdown
    assert [row["precision"] for row in report.document["cases"][0]["rows"]] == ["fp32"]


@pytest.mark.usefixtures("int8")
def test_a_batch_size_that_is_part_of_the_shape_is_said(report_of: Make) -> None:
    report, _ = report_of({title: CPU_CASES[title] for title in (TRAINING, TRANSLATION)}, peer=())
    fixed, swept = (case["notes"] for case in report.document["cases"])
    assert fixed[0] == "the batch size is fixed at 16, as part of the measured shape" and "fixed" not in "".join(swept)
    assert f"- {fixed[0]}" in report.markdown and CPU_CASES[TRANSLATION].batch_sizes == (8, 32, 64)
