"""Time to quality: the command of each seed, when it ends, what is told of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tformer.bench.quality import (
    QualityBench,
    QualityRow,
    check,
    quality_command,
    quality_document,
    quality_table,
    run_quality,
    spread_of,
)
from tformer.bench.report import markdown
from tformer.metrics import Stat
from tformer.support.errors import InputError
from tformer.support.processes import python_command

BENCH = QualityBench(preset="char-12s", data="train.txt", valid="val.txt", target=1.5, seeds=(1, 2), device="cpu")

TRAINING = """#!{python}
import json, pathlib, sys, time
words = sys.argv[{skip}:]
seed, run = words[words.index("--seed") + 1], pathlib.Path(words[words.index("--out") + 1])
pathlib.Path({log!r}).open("a").write(json.dumps(words) + "\\n")
if seed == "13":
    sys.exit("some talk\\nerror: data.txt:3: invalid UTF-8\\nhint: none")
run.mkdir()
def say(**record):
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(record) + "\\n")
for step, loss in ((10, 3.0), (20, 1.5), (30, 1.25)):
    say(split="train", step=step, loss=loss, tokens=1000 * step, seconds=step / 10, peak_share=0.5)
    say(split="valid", step=step, loss=loss + 0.125)
    time.sleep(100 if seed == "7" and step == 20 else 0.1)
"""


@pytest.fixture
def trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Instead of Python a program that writes a log as training would; the command lines that it was called with."""
    log = tmp_path / "log"
    program = tmp_path / "program"
    program.write_text(TRAINING.format(python=sys.executable, skip=len(python_command("tformer")), log=str(log)))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return log


def run(**changes: Any) -> list[QualityRow]:
    reported: list[QualityRow] = []
    rows = run_quality(
        QualityBench(**{**BENCH.to_json(), **changes}), on_row=reported.append, should_stop=lambda: False
    )
    assert rows is not None and rows == reported
    return rows


def test_a_training_ends_at_the_first_validation_that_reaches_the_target(trainings: Path) -> None:
    [row] = run(target=1.625, seeds=(7,))
    assert row.reached is True and (row.loss, row.steps) == (1.625, 20)
    assert row.seconds is not None and 0.1 <= row.seconds < 100  # training would go on for longer
    assert (row.training_seconds, row.tokens_per_second, row.step_ms, row.share_of_peak) == (2.0, 10000.0, 100.0, 0.5)
    assert row.peak_rss_bytes is None or row.peak_rss_bytes > 2**20


def test_a_missed_target_is_said_and_without_one_training_goes_to_its_end(trainings: Path) -> None:
    [missed] = run(target=1.0, seeds=(1,))
    assert missed.reached is False and (missed.loss, missed.steps) == (1.375, 30)
    [plain] = run(target=None, seeds=(1,))
    assert plain.reached is None and plain.loss == 1.375 and plain.seconds is not None and plain.seconds >= 0.3


def test_every_seed_is_the_command_that_a_person_types(trainings: Path) -> None:
    run(seeds=(3, 4), sets=("model.d_model=8",), threads=2, target=None)
    lines = [json.loads(line) for line in trainings.read_text().splitlines()]
    assert [words[words.index("--seed") + 1] for words in lines] == ["3", "4"]
    first = " ".join(lines[0])
    assert first.startswith("train --arch gpt --preset char-12s --data train.txt --valid val.txt --seed 3 --device cpu")
    assert first.endswith("--set model.d_model=8 --set training.threads=2")
    folders = {words[words.index("--out") + 1] for words in lines}
    assert len(folders) == 2 and not any(Path(folder).parent.exists() for folder in folders)


def test_one_that_fails_says_why_and_the_next_goes_on(trainings: Path) -> None:
    first, second = run(seeds=(13, 1), target=None)
    assert first.failed == "training ended with 1: data.txt:3: invalid UTF-8" and first.loss is None
    assert second.failed is None and second.loss == 1.375


def test_one_over_the_limit_is_ended(trainings: Path) -> None:
    [row] = run(seeds=(7,), target=None, max_seconds=0.5)
    assert row.failed == "over 0.5 s"


def test_a_stop_ends_the_training(trainings: Path) -> None:
    def has_begun() -> bool:
        return trainings.exists() and trainings.read_text().endswith("\n")

    stopped = run_quality(BENCH, on_row=lambda _: None, should_stop=has_begun)
    assert stopped is None
    assert len(trainings.read_text().splitlines()) == 1


def test_mean_and_spread_over_the_seeds() -> None:
    assert spread_of([1.0, None, 3.0]) == Stat(2.0, pytest.approx(2**0.5), 2)  # type: ignore[arg-type]
    assert spread_of([4.0]) == Stat(4.0, None, 1) and spread_of([None]) is None


ROWS = [
    QualityRow(1, seconds=10.0, loss=1.5, reached=True, steps=330, tokens_per_second=9000.0, peak_rss_bytes=2**30),
    QualityRow(2, seconds=12.0, loss=1.7, reached=False, steps=330, tokens_per_second=9000.0),
    QualityRow(3, failed="over 3 s"),
]


def test_the_table_has_seconds_losses_and_their_spread() -> None:
    text = markdown(quality_table(BENCH, ROWS))
    assert "| 1 | 10.0 | 1.5000 | 330 |  | 9,000 | 1.00 GiB |" in text
    assert "| 2 | 12.0 | 1.7000 (target not reached) |" in text and "| 3 | over 3 s |" in text
    assert "| mean ± std | 11.0 ± 1.4 | 1.6000 ± 0.1414 |" in text


def test_the_document_has_the_keys_of_every_bench() -> None:
    found = quality_document(BENCH, ROWS, environment={}, command="x")
    assert all(
        {"tokens_per_second", "step_ms", "peak_rss_bytes", "share_of_peak"} <= row.keys() for row in found["rows"]
    )
    assert found["spread"]["seconds"]["mean"] == 11.0 and found["spread"]["training_seconds"] is None


def test_the_command_asks_for_the_same(cli: Any, monkeypatch: pytest.MonkeyPatch, text_file: Path) -> None:
    asked: list[QualityBench] = []

    def note(bench: QualityBench, **_: Any) -> Sequence[QualityRow]:
        asked.append(bench)
        return [QualityRow(1, seconds=1.0, loss=1.0)]

    monkeypatch.setattr("tformer.bench.quality.run_quality", note)
    bench = QualityBench("char-12s", str(text_file), str(text_file), target=1.5, seeds=(4, 5), device="cpu", threads=1)
    bench = QualityBench(**{**bench.to_json(), "sets": ("model.d_model=64",)})
    assert cli(*quality_command(bench).split()[1:]).code == 0
    assert asked == [bench]


def test_what_cannot_be_read_is_refused_ahead(text_file: Path, tmp_path: Path) -> None:
    def refused(**changes: Any) -> str:
        values = {**BENCH.to_json(), "data": str(text_file), "valid": str(text_file), **changes}
        with pytest.raises(InputError) as caught:
            check(QualityBench(**values))
        return caught.value.message

    (tmp_path / "bad.txt").write_bytes(b"a\n\xff\n")
    assert "bad.txt:2: invalid UTF-8" in refused(valid=str(tmp_path / "bad.txt"))
    assert "missing" in refused(data=str(tmp_path / "missing"))
    assert refused(data="-") == "--data: found '-', expected a file: every seed reads it"
    assert "no-such" in refused(preset="no-such")
