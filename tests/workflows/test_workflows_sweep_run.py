"""Running a sweep: child processes, failures, resuming, files."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.workflows.played import Children
from tformer.support import processes
from tformer.support.errors import InputError, Interrupted, RunInUseError, StorageError
from tformer.support.processes import python_command
from tformer.workers.work import Work, never
from tformer.workflows.sweep import cells, pictures
from tformer.workflows.sweep.cells import Ended, Result, run_child
from tformer.workflows.sweep.plan import SweepPlan, SweepTask
from tformer.workflows.sweep.run import resolve_plan, run_sweep


def plays(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Children run this Python instead of tformer."""

    class Popen(processes.subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: object) -> None:
            words = command[len(python_command("tformer")) :]
            super().__init__([sys.executable, "-c", code, *words], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(processes.subprocess, "Popen", Popen)


def test_output_and_talk_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, "import sys; print('data', sys.argv[1:]); print('talk', file=sys.stderr); sys.exit(5)")
    log = tmp_path / "log"
    ended = run_child(["train", "--lr", "1 2"], log, never)
    assert (ended.code, ended.out, ended.error, ended.stopped) == (5, "data ['train', '--lr', '1 2']\n", "talk", False)
    assert log.read_text() == '$ tformer train --lr "1 2"\ntalk\n'


def test_the_peak_is_the_childs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not this process's, which is larger than the small child and smaller than the big one."""
    ballast = bytearray(os.urandom(1 << 20)) * 100
    plays(monkeypatch, "import sys, time; x = bytearray(int(sys.argv[1]) << 20); time.sleep(0.5)")
    peaks = [run_child([size], tmp_path / "log", never).peak_bytes for size in ("1", "700")]
    assert 2**20 < peaks[0] < 90 * 2**20 and 700 * 2**20 < peaks[1] < 800 * 2**20
    assert len(ballast) > peaks[0]


def test_a_child_is_asked_once_to_stop_and_given_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(
        monkeypatch,
        "import signal, sys, time\n"
        "def heard(*_):\n    signal.signal(signal.SIGINT, lambda *_: sys.exit(9)); time.sleep(0.5); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, heard)\nprint('ready', file=sys.stderr, flush=True)\ntime.sleep(60)",
    )
    log = tmp_path / "log"
    ended = run_child([], log, lambda: "ready" in log.read_text())
    assert (ended.code, ended.stopped) == (130, True)


def test_a_killed_child_has_the_signals_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    assert run_child([], tmp_path / "log", never).code == -signal.SIGKILL


@pytest.mark.slow
def test_the_last_error_of_a_real_command_is_told(tmp_path: Path) -> None:
    """Its quick twin is `test_output_and_talk_are_told_apart`."""
    ended = run_child(["config", "show", "gpt/nothing"], tmp_path / "log", never)
    assert (ended.code, ended.out) == (2, "") and f"error: {ended.error}\n" in (tmp_path / "log").read_text()


def test_no_child_outlives_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plays(monkeypatch, "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)")
    log = tmp_path / "log"

    def breaks_down() -> bool:
        if log.read_text().count("\n") > 1:
            raise RuntimeError("at once")
        return False

    with pytest.raises(RuntimeError):
        run_child([], log, breaks_down)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().splitlines()[1]), 0)


@dataclass
class Sweeps:
    """Sweeps of one recipe into one folder, whose children are played."""

    recipe: Path
    out: Path
    children: Children

    def plan(self, seeds: int = 1, **more: Any) -> SweepPlan:
        task = SweepTask(config=str(self.recipe), **{"vary": {"model.*.norm.place": ("pre", "post")}, **more})
        return SweepPlan(seeds=seeds, tasks=(task,))

    def run(self, plan: SweepPlan | None = None, **more: Any) -> tuple[list[Result], list[tuple[str, bool]]]:
        """Sweep, and note only the commands of this sweep; the results, and (status, finished before) as told."""
        told: list[tuple[str, bool]] = []
        plan, work = plan or self.plan(), Work(should_stop=lambda: self.children.stopping)
        self.children.commands.clear()
        grid = resolve_plan(plan, skip_invalid=True)
        more["ended"] = lambda result, line: told.append((result.status, line.endswith("finished before")))
        return run_sweep(plan, grid, self.out, work=work, **more)[1], told

    def table(self) -> str:
        return (self.out / "table.md").read_text()


@pytest.fixture
def sweeps(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    found = Sweeps(tiny_recipe, tmp_path / "deep" / "out", Children())
    monkeypatch.setattr(cells, "run_child", found.children)
    monkeypatch.setattr("tformer.workflows.sweep.run.draw", lambda *_: [])  # a picture takes longer than all else
    return found


def test_a_sweep_trains_each_cell_once_and_writes_its_files(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tformer.workflows.sweep.run.draw", pictures.draw)
    results, told = sweeps.run(sweeps.plan(seeds=2))
    assert sweeps.children.trained == ["pre-seed1337", "post-seed1337", "pre-seed1338", "post-seed1338"]
    assert [result.cell for result in results] == ["pre-seed1337", "pre-seed1338", "post-seed1337", "post-seed1338"]
    assert told == [("done", False)] * 4
    found = {path.name for path in sweeps.out.iterdir()} - {".lock"}
    assert found == {"sweep.json", "table.md", "table.tex", "table.csv", "table.json", "cells.csv", "runs", "cells",
                     "curves.svg", "curves.png"}  # fmt: skip
    assert (results[0].best, results[0].parameters, results[0].peak_memory_bytes) == (1.5, 10, 2**20)


def test_the_same_command_again_does_nothing(sweeps: Sweeps) -> None:
    first, _ = sweeps.run()
    again, told = sweeps.run()
    assert sweeps.children.commands == [] and again == first
    assert all(before for _, before in told)


def test_only_the_first_cell_trains_the_tokenizer(sweeps: Sweeps) -> None:
    sweeps.run(sweeps.plan(seeds=2))
    given = [
        words[words.index("--tokenizer") + 1] if "--tokenizer" in words else None for words in sweeps.children.commands
    ]
    first = str(sweeps.out / "runs" / "pre-seed1337" / "tokenizer.json")
    assert given == [None, first, first, first]


def test_tasks_share_a_tokenizer_where_their_texts_are_the_same(sweeps: Sweeps) -> None:
    same = {"config": str(sweeps.recipe), "train": ("--data", "a.txt")}
    tasks = (
        SweepTask(name="one", **same),
        SweepTask(name="two", **same),
        SweepTask(name="three", config=str(sweeps.recipe)),
    )
    columns = {"data.columns.text": ("a", "b")}
    tasks = (*tasks, SweepTask(name="columns", config=str(sweeps.recipe), vary=columns))
    sweeps.run(SweepPlan(tasks=tasks))
    assert ["--tokenizer" in words for words in sweeps.children.commands] == [False, True, False, False, False]


def test_cells_with_other_vocabularies_train_their_own(sweeps: Sweeps) -> None:
    axis = {"tokenizer.train.min_frequency": (1, 2), "model.*.norm.place": ("pre", "post")}
    sweeps.run(SweepPlan(tasks=(SweepTask(config=str(sweeps.recipe), vary=axis),)))
    assert ["--tokenizer" in words for words in sweeps.children.commands] == [False, True, False, True]


@pytest.mark.parametrize(
    ("code", "word"), [(4, "diverged"), (5, "out of memory"), (1, "failed"), (2, "refused"), (-9, "killed")]
)
def test_a_failure_is_a_row_and_the_sweep_goes_on(sweeps: Sweeps, code: int, word: str) -> None:
    sweeps.children.codes = {"pre-seed1337": code}
    results, _ = sweeps.run(tolerant=True)
    assert [result.status for result in results] == [word, "done"]
    assert results[0].message == ("killed by signal 9 (out of memory?)" if code < 0 else f"it went wrong with {code}")
    assert [result.failed for result in results] == [word != "diverged", False]
    assert f"| pre |  |  |  |  |  | {word} |" in sweeps.table()


def test_what_failed_is_tried_again_but_what_diverged_is_not(sweeps: Sweeps) -> None:
    sweeps.children.codes = {"pre-seed1337": 4, "post-seed1337": 5}
    sweeps.run()
    sweeps.children.codes.clear()
    results, _ = sweeps.run()
    assert sweeps.children.trained == ["post-seed1337"] and "--resume" in sweeps.children.commands[0]
    assert [result.status for result in results] == ["diverged", "done"]


@pytest.mark.parametrize(("code", "error"), [(3, StorageError), (6, RunInUseError)])
def test_a_full_disk_and_a_busy_run_end_the_sweep(sweeps: Sweeps, code: int, error: type[Exception]) -> None:
    sweeps.children.codes = {"post-seed1337": code}
    with pytest.raises(error, match="post-seed1337: it went wrong"):
        sweeps.run()
    assert not (sweeps.out / "cells" / "post-seed1337.json").exists()


def test_data_that_the_first_training_refuses_ends_the_sweep_and_leaves_the_folder_free(sweeps: Sweeps) -> None:
    sweeps.children.codes = {"pre-seed1337": 2}
    with pytest.raises(InputError, match="pre-seed1337: it went wrong"):
        sweeps.run()
    sweeps.children.codes.clear()
    other = sweeps.plan(train=("--data", "another.txt"))
    results, _ = sweeps.run(other)
    assert [result.status for result in results] == ["done", "done"]


def test_an_interrupted_sweep_goes_on_where_it_stopped(sweeps: Sweeps) -> None:
    sweeps.children.stop_at = "post-seed1337"
    with pytest.raises(Interrupted, match="1 of 2 trainings are finished") as caught:
        sweeps.run()
    assert "same command" in (caught.value.hint or "") and caught.value.exit_code == 130
    sweeps.children.stop_at, sweeps.children.stopping = "", False
    results, told = sweeps.run()
    assert sweeps.children.trained == ["post-seed1337"] and "--resume" in sweeps.children.commands[0]
    assert [result.status for result in results] == ["done", "done"] and told[0][1]


def test_evaluations_follow_training_and_alone_are_repeated(sweeps: Sweeps) -> None:
    asked = sweeps.plan(evaluate={"long": ("--stride", "4"), "other": ("--data", "x")})
    sweeps.children.stop_at = ""
    sweeps.children.codes = {"evaluate": 2}
    results, _ = sweeps.run(asked)
    assert results[0].evaluate["long"] == {"failure": "refused", "message": "it went wrong with 2"}
    shutil.rmtree(sweeps.out)
    sweeps.children.codes.clear()
    results, _ = sweeps.run(asked)
    run = str(sweeps.out / "runs" / "pre-seed1337")
    assert sweeps.children.commands[1:3] == [
        ["evaluate", run, "--stride", "4", "--json"],
        ["evaluate", run, "--data", "x", "--json"],
    ]
    assert results[0].evaluate["long"]["value"] == 3.5 and results[0].evaluate["long"]["metric"] == "loss"


def test_training_is_not_repeated_for_an_evaluation_that_was_interrupted(
    sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sweeps.plan(evaluate={"long": ()})

    def stops_before_evaluating(words: list[str], *more: Any) -> Ended:
        sweeps.children.stopping = sweeps.children.stopping or words[0] == "evaluate"
        return sweeps.children(words, *more)

    monkeypatch.setattr(cells, "run_child", stops_before_evaluating)
    with pytest.raises(Interrupted):
        sweeps.run(asked)
    monkeypatch.setattr(cells, "run_child", sweeps.children)
    sweeps.children.stopping = False
    sweeps.run(asked)
    assert [words[0] for words in sweeps.children.commands] == ["evaluate", "train", "evaluate"]


def test_a_folder_keeps_to_its_plan(sweeps: Sweeps) -> None:
    sweeps.run()
    for other, words in (
        (sweeps.plan(seeds=2), "seeds is 1 in the folder, 2 in this command"),
        (
            sweeps.plan(set={"optimizer.lr": 0.5}),
            "tasks.0.set.optimizer.lr is null in the folder, 0.5 in this command",
        ),
        (sweeps.plan().model_copy(update={"max_steps": 3}), "max_steps is null in the folder, 3 in this command"),
    ):
        with pytest.raises(InputError, match=f"holds another sweep: {words}"):
            sweeps.run(other)


@pytest.mark.parametrize("text", ["{}", "[]", '{"cell": ', '{"cell": 3}'])
def test_a_damaged_result_is_named_and_its_cell_comes_back_without_it(sweeps: Sweeps, text: str) -> None:
    sweeps.run()
    damaged = sweeps.out / "cells" / "pre-seed1337.json"
    damaged.write_text(text)
    with pytest.raises(InputError, match=r"pre-seed1337.json is damaged"):
        sweeps.run()
    damaged.unlink()
    results, _ = sweeps.run()
    assert [result.status for result in results] == ["done", "done"]


@pytest.mark.parametrize("name", ["runs", "cells"])
def test_a_folder_that_was_cleared_is_filled_again(sweeps: Sweeps, name: str) -> None:
    sweeps.run()
    shutil.rmtree(sweeps.out / name)
    results, _ = sweeps.run()
    assert [result.status for result in results] == ["done", "done"]


def test_a_folder_with_something_else_is_refused(sweeps: Sweeps) -> None:
    sweeps.out.mkdir(parents=True)
    (sweeps.out / "thesis.tex").write_text("")
    with pytest.raises(InputError, match=r"is not empty .it holds thesis.tex"):
        sweeps.run()


def test_variants_left_out_are_rows_too(sweeps: Sweeps) -> None:
    task = SweepTask(config=str(sweeps.recipe), vary={"model.decoder.num_heads": (3, 2)})
    results, _ = sweeps.run(SweepPlan(tasks=(task,)))
    assert [(result.choices["num_heads"], result.status) for result in results] == [("3", "left out"), ("2", "done")]
    assert "left out" in sweeps.table()
