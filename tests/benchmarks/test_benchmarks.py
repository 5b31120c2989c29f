"""Scripts of `tests/benchmarks`: their tables and the README's chart, without measuring."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import all_cases, attention, chart, classification, race
from tests.benchmarks.attention import AttentionBench, Cell
from tformer.bench.speed import Measurement, SpeedBench
from tformer.bench.workloads import BenchTask
from tformer.support.errors import InputError

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "tformer/guide/results.md").read_text()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a made-up machine: ours twice as fast as other libraries."""

    def run(bench: SpeedBench, *, on_row: Callable[[Measurement], None], **_: Any) -> list[Measurement]:
        cost = {"flops": 1e9, "bytes_read": 1e6, "steps": 10, "examples": 2, "memory": {}}
        memory = {"peak_rss_bytes": 2**30}
        rows = [
            Measurement(
                entry,
                size,
                seconds=1.0 if entry.name == "tformer" else 2.0,
                tokens=100 * size,
                cost=cost,
                memory=memory,
            )
            for size in bench.batch_sizes
            for entry in bench.entries
        ]
        for row in rows:
            on_row(row)
        return rows

    monkeypatch.setattr(race, "run_speed", run)
    monkeypatch.setattr("tformer.decoding.inference.can_quantize", lambda *_: True)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


WORDS = ("--precision", "fp32", "--device", "cpu")


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("work", ["train", "generate", "classify"])
def test_a_race_prints_both_libraries_and_their_ratio(work: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    model = ("--arch", "bert") if work == "classify" else ("--arch", "gpt")
    race.main([work, *model, "--preset", "tiny", "--batch-size", "2", "--peer", "transformers", *WORDS])
    told = capsys.readouterr()
    assert "| tformer fp32 | 2 | 200 |" in told.out and "| transformers bf16 | 2 | 100 |" in told.out
    assert "2.00 x" in told.out and "transformers fp32, batch 2: 100 tokens/s" in told.err


def test_a_library_that_cannot_do_the_work_is_one_line() -> None:
    with pytest.raises(InputError, match=r"--peer llama\.cpp: not available for train; available: transformers"):
        race.prepare(["train", "--preset", "gpt/tiny", "--peer", "llama.cpp", *WORDS])


@pytest.mark.usefixtures("measured")
def test_every_case_is_a_race_and_the_report_has_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries that are missing are left out. GPU cases are prepared on the CPU, where they are not compiled."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    out = tmp_path / "report.md"
    monkeypatch.setattr("sys.argv", ["all_cases", "--quick", "--device", "cpu", "--out", str(out)])
    all_cases.main()
    page = out.read_text()
    assert page.count("\n## ") == len(all_cases.CPU_CASES) and "not measured" not in page
    assert "--peer transformers: transformers is not installed" in page
    written = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("report-*.json"))]
    assert {found["settings"]["work"] for found in written} == {"train", "generate", "translate", "classify"}
    for words in all_cases.GPU_CASES.values():
        plain = [word for word in shlex.split(words) if word != "--compile"]
        assert race.prepare([*plain, *WORDS], may_lack=True).bench.entries


def document(work: str, batch_size: int, **speeds: float) -> dict[str, Any]:
    rows = [
        {"name": name, "precision": precision, "batch_size": batch_size, "failed": None, "tokens_per_second": speed}
        for (name, precision), speed in ((label.split(" "), speed) for label, speed in speeds.items())
    ]
    return {"settings": {"work": work}, "rows": rows}


def figures(line: str) -> list[float]:
    """The first number of each cell of a row of the guide's tables of speed."""
    [row] = re.findall(rf"^\| {re.escape(line)} \|(.+)\|$", RESULTS, re.MULTILINE)
    numbers = [re.match(r" ([\d,]+)", cell) for cell in row.split("|")]
    return [float(number[1].replace(",", "")) for number in numbers if number]


def test_the_readme_s_chart_is_drawn_from_the_guide_s_figures() -> None:
    tables = {
        ("train", 2): (
            ("tformer bf16", "transformers fp32", "transformers bf16"),
            figures("GPT-2 124M, T 512, batch 2"),
        ),
        ("generate", 8): (("tformer bf16",), figures("eight texts")),
        ("generate", 1): (
            ("tformer bf16", "tformer int8", "tformer int4", "transformers fp32", "transformers bf16"),
            figures("one text"),
        ),
        ("generate", 1, "llama.cpp"): (
            ("llama.cpp bf16", "llama.cpp q8_0", "llama.cpp q4_0"),
            figures("writing, one text, tok/s")[4:],
        ),
        ("translate", 64): (
            ("tformer bf16", "tformer int8", "ctranslate2 fp32", "ctranslate2 int8"),
            figures("batch 64, bf16"),
        ),
    }
    documents = [
        document(work, size, **dict(zip(labels, speeds, strict=False)))
        for (work, size, *_), (labels, speeds) in tables.items()
    ]
    assert chart.draw(documents) == (ROOT / "tformer/guide/pictures/speed.svg").read_text()


def cells_of(seconds: Callable[[int], float], kind: str, lengths: Sequence[int]) -> list[Cell]:
    return [Cell(kind, length, seconds(length), 0.0, 5, 2**20 * length) for length in lengths]


def test_tables_of_attention_have_slopes_crossovers_and_reasons() -> None:
    lengths = (1024, 2048, 4096)
    bench = AttentionBench(("full", "sliding_window", "linformer"), lengths, {})
    cells = cells_of(lambda n: n**2 / 2048, "full", lengths) + cells_of(lambda n: float(n), "sliding_window", lengths)
    cells += [Cell("linformer", length, failed="over 3 s") for length in lengths]
    time, memory, growth = attention.tables(bench, cells)
    assert time.headings == ("kind", "1,024", "2,048", "4,096") and time.rows[2] == ("linformer", *3 * ["over 3 s"])
    assert memory.rows[0][1] == "1.00 GiB"
    assert growth.rows[0][1:3] == ("2.00", "1.00") and growth.rows[1][1] == "1.00"
    assert growth.rows[1][3] == "from about 2,000" and growth.rows[1][4] == "2.00 x"
    assert growth.rows[2][1:] == 5 * ("",)


@pytest.mark.parametrize("kind", attention.KINDS)
def test_every_attention_kind_goes_forward_and_back(kind: str) -> None:
    options = {"linformer": {"rank": 8}}
    bench: dict[str, Any] = {"kinds": (kind,), "lengths": (40,), "options": options, "heads": 2, "head_dim": 4}
    contender = attention.AttentionContender(bench=bench, kind=kind, length=40)
    contender.prepare()
    assert contender.run() == 40 and contender.peak_memory()["peak_bytes"] >= 0


def test_classification_reads_every_token() -> None:
    bench = race.prepare(["classify", "--preset", "tiny", "--texts", "20", "--batch-size", "4", *WORDS]).bench
    task: BenchTask = bench.task(4)
    ours = classification.Classification(task, "fp32")
    ours.prepare()
    assert ours.run() == classification.Texts(task).tokens
