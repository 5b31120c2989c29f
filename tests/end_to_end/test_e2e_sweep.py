"""A real sweep: processes, runs, tables and plots; interrupted, it goes on; rerun, it does nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.killing import cpu_seconds_until_end, tree_of, without_times
from tformer.checkpoint.run import RunDirectory

Process = subprocess.Popen[str]
ONE = ("--vary", "optimizer.lr=0.01")


def wait_for(condition: Callable[[], object], process: Process) -> None:
    """Until it holds, after a second or two on an idle machine, or the process ends."""
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)


@pytest.fixture
def words(tiny_recipe: Path, text_file: Path) -> tuple[object, ...]:
    """A sweep of the tiny recipe, without axes."""
    return ("sweep", "--config", tiny_recipe, "--data", text_file)


@pytest.mark.slow
def test_a_sweep_from_a_plan_with_two_tasks(
    tiny_recipe: Path, text_file: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinds of positions and a rate that diverges; evaluated at another window; all in one table."""
    monkeypatch.setenv("TEXT", str(text_file))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        f"""\
name: small
tasks:
  - name: text
    config: {tiny_recipe}
    train: [--data, "${{TEXT}}"]
    vary: {{model.*.positions.kind: [rope, alibi]}}
    evaluate: {{strided: [--stride, "4"]}}
  - name: rates
    config: {tiny_recipe}
    train: [--data, "${{TEXT}}"]
    vary: {{optimizer.lr: [1.0e+9]}}
"""
    )
    out = tmp_path / "out"
    first = cli("sweep", "--plan", plan, "--out", out, "--json")
    assert first.code == 0, first.err
    document = json.loads(first.out)
    states = {cell["cell"]: cell["status"] for cell in document["cells"]}
    assert states == {
        "text-rope-seed1337": "done",
        "text-alibi-seed1337": "done",
        "rates-lr-1000000000.0-seed1337": "diverged",
    }
    for cell in document["cells"][:2]:
        run = RunDirectory.open(out / "runs" / cell["cell"])
        best = min(record["loss"] for record in run.metrics() if record["split"] == "valid")
        assert cell["best"] == best and run.best() is not None
        assert cell["parameters"] > 0 and cell["flops_per_token"] > 6 * cell["parameters"] / 2
        assert cell["peak_memory_bytes"] > 50 * 2**20 and cell["seconds"] > 0 and cell["steps"] == 12
        assert cell["evaluate"]["strided"]["metric"] == "loss"
    tokenizers = {(out / "runs" / name / "tokenizer.json").read_bytes() for name in states}
    assert len(tokenizers) == 1
    written = (out / "table.md").read_text()
    assert (
        "| text | rope |" in written
        and "diverged |" in written
        and "one seed: no variant is marked" in written
        and "**" not in written
    )
    assert (out / "curves-text.svg").stat().st_size > 1000 and (out / "curves-text.png").stat().st_size > 1000

    began = time.time_ns()
    again = cli("sweep", "--plan", plan, "--out", out, "--json")
    assert again.code == 0 and json.loads(again.out) == document and again.err.count("finished before") == 3
    assert all(path.stat().st_mtime_ns < began for path in (out / "cells").iterdir())


@pytest.mark.slow
def test_ctrl_c_keeps_everything_and_the_same_command_goes_on(
    words: tuple[object, ...], tmp_path: Path, cli_process: Callable[..., Process]
) -> None:
    words = (*words, *ONE, "--out", "out", "--max-steps", "400", "--set", "training.save_every=400")
    first = cli_process(*words, cwd=tmp_path)
    metrics = tmp_path / "out" / "runs" / "lr-0.01-seed1337" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, first)
    assert metrics.exists(), first.poll()
    first.send_signal(signal.SIGINT)
    _, talk = first.communicate(timeout=300)
    assert first.returncode == 130 and "0 of 1 trainings are finished" in talk and "same command again" in talk
    saved = [entry.step for entry in RunDirectory.open(metrics.parent).checkpoints()]
    assert saved and 0 < saved[-1] < 400
    second = cli_process(*words, cwd=tmp_path)
    shown, talk = second.communicate(timeout=600)
    assert second.returncode == 0, talk
    assert shown.startswith("| lr | parameters |")
    log = (tmp_path / "out" / "cells" / "lr-0.01-seed1337.log").read_text()
    assert log.count("$ tformer train") == 2 and "--resume" in log


@pytest.mark.slow
def test_where_every_training_fails_so_does_the_sweep(
    words: tuple[object, ...], tmp_path: Path, cli: Callable[..., Any]
) -> None:
    outcome = cli(*words, "--vary", "optimizer.lr=1e9", "--out", tmp_path / "out")
    assert outcome.code == 1 and "every training failed" in outcome.err and "diverged" in outcome.out


@pytest.mark.slow
def test_a_killed_training_is_named_and_tells_in_the_exit_code(
    words: tuple[object, ...], tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tformer.support.processes import Child
    from tformer.workflows.sweep import cells

    class KilledChild(Child):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__(command, **options)
            if "optimizer.lr=0.1" in command:
                self.process.kill()

    monkeypatch.setattr(cells, "Child", KilledChild)
    outcome = cli(*words, "--vary", "optimizer.lr=0.01,0.1", "--out", tmp_path / "out")
    assert outcome.code == 1 and "1 of 2 trainings failed: lr-0.1-seed" in outcome.err, outcome.err
    assert "killed by signal 9 (out of memory?)" in outcome.err and "killed" in outcome.out


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_a_sweep_killed_while_its_training_imports_leaves_no_process(
    words: tuple[object, ...], tmp_path: Path, cli_process: Callable[..., Process]
) -> None:
    sweep = cli_process(*words, *ONE, "--out", "out", cwd=tmp_path)
    wait_for(lambda: len(list(tree_of(sweep.pid))) >= 2, sweep)
    processes = list(tree_of(sweep.pid))
    assert len(processes) == 2
    sweep.kill()
    sweep.communicate()
    assert cpu_seconds_until_end(processes) < 0.5  # the imports take longer


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_the_trainings_of_a_killed_sweep_end_with_it_and_the_same_command_goes_on_at_once(
    words: tuple[object, ...], tmp_path: Path, cli_process: Callable[..., Process]
) -> None:
    words = (*words, *ONE, "--max-steps", "300", "--out")
    metrics = tmp_path / "out" / "runs" / "lr-0.01-seed1337" / "metrics.jsonl"
    first = cli_process(*words, "out", cwd=tmp_path)
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, first)
    processes = list(tree_of(first.pid))
    assert len(processes) == 2  # the sweep and the training
    first.kill()
    first.communicate()
    assert cpu_seconds_until_end(processes) < 0.5
    again = cli_process(*words, "out", cwd=tmp_path)
    _, talk = again.communicate(timeout=600)
    assert again.returncode == 0, talk
    assert cli_process(*words, "undisturbed", cwd=tmp_path).wait(timeout=600) == 0
    tables = [json.loads((tmp_path / name / "table.json").read_text()) for name in ("out", "undisturbed")]
    assert without_times(tables[0]) == without_times(tables[1])


KINDS = ("sinusoidal", "learned", "rope", "alibi", "t5_bias")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gpt", "bert", "transformer", "t5"])
def test_the_kinds_of_positions_are_compared_in_every_family(
    arch: str, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    """The line of the README as it stands: a table of five trainings, and no surprise."""
    data = tmp_path / ("rows.tsv" if arch in ("bert", "transformer") else "text.txt")
    if arch == "bert":
        rows = [
            f"number {number} is {('even', 'odd')[number % 2]}\t{('even', 'odd')[number % 2]}" for number in range(200)
        ]
        data.write_text("\n".join(["text\tlabel", *rows]))
    elif arch == "transformer":
        data.write_text("\n".join(["source\ttarget", *(f"{number} plus one\t{number + 1}" for number in range(200))]))
    else:
        data.write_text("".join(f"{number} plus one is {number + 1}.\n" for number in range(3000)))
    axis = f"model.*.positions.kind={','.join(KINDS)}"
    small = [] if arch == "bert" else ["--set", "training.batch_size=8"]
    words = ("--arch", arch, "--data", data, "--vary", axis, "--max-steps", "4", *small)
    outcome = cli("sweep", *words, "--out", tmp_path / "out", "--json")
    assert outcome.code == 0, outcome.err
    cells = json.loads(outcome.out)["cells"]
    assert {cell["choices"]["positions.kind"]: cell["status"] for cell in cells} == dict.fromkeys(KINDS, "done")


@pytest.mark.slow
def test_sinusoids_learn_as_well_as_learned_positions(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """They did not learn more than the frequency of letters where the model hardly saw the tokens."""
    data, losses = tmp_path / "text.txt", {}
    data.write_text("".join(f"{number} plus one is {number + 1}.\n" for number in range(3000)))
    steps = [word for key in ("training.eval_every", "schedule.decay_steps") for word in ("--set", f"{key}=100")]
    both = "model.*.positions.kind,model.embedding.scale=[learned,false],[sinusoidal,true],[sinusoidal,false]"
    words = ("--arch", "gpt", "--preset", "char-cpu", "--data", data, "--max-steps", "100", *steps, "--vary")
    for out, axis in {"as it stands": "model.*.positions.kind=learned,sinusoidal", "unscaled": both}.items():
        outcome = cli("sweep", *words, axis, "--out", tmp_path / out, "--json")
        assert outcome.code == 0, outcome.err
        losses[out] = [cell["best"] for cell in json.loads(outcome.out)["cells"]]
        assert ("model.embedding.scale is true" in outcome.err) == (out == "as it stands")
    assert losses["as it stands"] == losses["unscaled"][:2]
    learned, scaled, hidden = losses["unscaled"]
    assert scaled < learned + 0.2 and hidden > scaled + 0.5, losses
