"""Trainings that are followed: what changes is read again, what does not is not, and nothing is written."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.viz.plot_runs import write_run
from tests.workflows.run_makers import make_run, train_line, valid_line
from tformer.checkpoint.logs import MAX_SAMPLE_BYTES, last_sample, sample_text
from tformer.checkpoint.run import LOCK_NAME, RunDirectory, RunLock, writer
from tformer.support.errors import InputError, RunInUseError
from tformer.workflows.runs import watching
from tformer.workflows.runs.watching import Watch


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "REST", 0)
    monkeypatch.setattr(watching, "LEAST_REST", 0.0)


def data_of(watch: Watch) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(watch.data())
    return found


def test_a_training_is_followed_with_its_progress_and_last_sample(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=(2,), records=[train_line(2), valid_line(2, 2.5, is_best=True)])
    watch = Watch([tmp_path])
    before = data_of(watch)
    assert before["progress"][0]["state"] == "stopped" and before["progress"][0]["left"] is None
    with RunDirectory.open(path, lock=True) as run:
        run.append_metrics(train_line(6))
        run.append_sample(4, "too early")
        run.append_sample(6, "once upon\na time")
        after = data_of(watch)
    [progress] = after["progress"]
    assert (progress["state"], progress["step"], progress["max_steps"]) == ("training", 6, 12)
    assert progress["best"] == {"metric": "loss", "value": 2.5, "step": 2}
    assert progress["left"] == pytest.approx(12.0), "6 steps took 12 seconds"
    assert progress["sample"] == "once upon\na time"
    assert after["runs"][0]["tracks"]["train"]["step"] == [2, 6]


def test_new_runs_appear_and_removed_ones_go(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first")
    watch = Watch([tmp_path])
    write_run(tmp_path / "second")
    assert [run["name"] for run in data_of(watch)["runs"]] == ["first", "second"]
    (first / "metrics.jsonl").unlink()
    (first / "recipe.yaml").unlink()
    assert [run["name"] for run in data_of(watch)["runs"]] == ["second"]


def test_a_run_is_read_again_only_when_its_files_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [make_run(tmp_path / name) for name in "ab"]
    read: list[Path] = []
    summarize = watching.summarize_run
    monkeypatch.setattr(watching, "summarize_run", lambda path: (read.append(path), summarize(path))[1])
    watch = Watch([tmp_path])
    first = watch.data()
    assert read == paths and watch.data() == first and read == paths
    with RunDirectory.open(paths[1], lock=True) as run:
        run.append_metrics(train_line(12))
    watch.data()
    assert read[2:] == [paths[1]]


def test_readings_are_as_far_apart_as_they_take_times_twenty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "REST", 20)
    now = iter([0.0, 2.0, 41.9, 42.1, 43.0])  # asked and read, asked, asked and read
    monkeypatch.setattr(watching.time, "monotonic", lambda: next(now))
    found: list[object] = []
    monkeypatch.setattr(watching, "find_runs", lambda folders: found.append(folders) or [])
    watch = Watch([tmp_path])
    found.clear()
    for readings in (1, 1, 2):
        watch.data()
        assert len(found) == readings


def test_watching_changes_no_file(tmp_path: Path) -> None:
    make_run(tmp_path / "run")

    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != LOCK_NAME}

    before = state()
    watch = Watch([tmp_path])
    assert watch.page() and watch.data()
    assert state() == before


def test_a_training_starts_while_others_ask_who_writes(tmp_path: Path) -> None:
    """A reader holds the lock for a moment: a training that starts just then must not be refused."""
    RunLock(tmp_path).release()
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            writer(tmp_path)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            RunLock(tmp_path).release()
        with RunDirectory.create(tmp_path / "run", arch="gpt", preset=None), pytest.raises(RunInUseError):
            RunLock(tmp_path / "run")
    finally:
        ended.set()
        for thread in threads:
            thread.join()


LITTLE = {
    "none yet": [],
    "a validation": [valid_line(1, 3.0, is_best=False)],
    "no time": [train_line(1, seconds=5e-324)],
}


@pytest.mark.parametrize("records", LITTLE.values(), ids=LITTLE)
def test_a_run_that_logged_little_is_a_page(records: list[dict[str, Any]], tmp_path: Path) -> None:
    write_run(tmp_path / "run", records)
    watch = Watch([tmp_path])
    assert "</html>" in watch.page() and len(data_of(watch)["runs"]) == len(records)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        Watch([tmp_path / "absent"])


def test_the_last_sample_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.txt"
    assert last_sample(path) == ""
    path.write_text("".join(sample_text(step, f"text {step}\n=== step 1 ===") for step in range(1000)))
    assert last_sample(path) == "text 999\n === step 1 ==="
    path.write_text(sample_text(1, "é" * 10_000))
    assert 0 < len(last_sample(path)) <= MAX_SAMPLE_BYTES
