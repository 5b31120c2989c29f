"""The main road, as a user walks it: train, generate, evaluate, resume, fine-tune."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.pair_makers import records, weights_of
from tformer.training import session

Cli = Callable[..., Any]
Start = Callable[..., "subprocess.Popen[str]"]


def test_train_then_generate_then_evaluate(
    cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = cli("train", "--config", tiny_recipe, "--data", text_file)
    assert trained.code == 0, trained.err
    run = Path(trained.out.strip())
    assert run.parts[0] == "runs"
    for name in ("recipe.yaml", "tokenizer.json", "metrics.jsonl", "environment.json", "samples.txt"):
        assert (run / name).is_file(), name
    assert "step 12" in trained.err and "valid loss" in trained.err

    generated = cli("generate", "--prompt", "the ", "--max-new-tokens", "5", "--seed", "1")
    assert generated.code == 0, generated.err
    assert generated.out.startswith("the ")

    evaluated = cli("evaluate", run, "--data", text_file, "--json")
    figures = json.loads(evaluated.out)
    assert {"loss", "perplexity", "bits_per_byte"} <= figures.keys()


def test_training_prints_one_json_document(cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    outcome = cli("train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / "run", "--json")
    assert json.loads(outcome.out)["step"] == 12
    assert len(outcome.out.splitlines()) == 1


def test_validation_during_training_equals_evaluate(
    cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path
) -> None:
    """The same whole validation set, the same figure, from the checkpoint alone."""
    valid = tmp_path / "valid.txt"
    valid.write_text(text_file.read_text()[:700])
    run = tmp_path / "run"
    assert cli("train", "--config", tiny_recipe, "--data", text_file, "--valid", valid, "--out", run).code == 0
    trained = records(run)[-1]
    assert trained["split"] == "valid"
    checkpoint = run / "checkpoints" / "step-00000012"
    figures = json.loads(cli("evaluate", checkpoint, "--data", valid, "--precision", "fp32", "--json").out)
    assert figures["loss"] == pytest.approx(trained["loss"], abs=1e-5)
    assert figures["bits_per_byte"] == pytest.approx(trained["bits_per_byte"], abs=1e-5)


def test_dry_run_writes_nothing(cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    outcome = cli(
        "train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / "run", "--dry-run", "--json"
    )
    assert outcome.code == 0, outcome.err
    summary = json.loads(outcome.out)
    assert summary["parameters"] > 0 and summary["memory"]["total_bytes"] > 0
    assert summary["batch"]["input_ids"] == [4, 16]
    assert sorted(tmp_path.rglob("*")) == before


def test_init_from_takes_model_and_tokenizer(cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    first = tmp_path / "first"
    assert cli("train", "--config", tiny_recipe, "--data", text_file, "--out", first).code == 0
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text()[200:])
    second = tmp_path / "second"
    outcome = cli("train", "--init-from", first, "--data", other, "--out", second, "--max-steps", "3", "--lr", "1e-9")
    assert outcome.code == 0, outcome.err
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    losses = [line["loss"] for line in records(second) if line["split"] == "valid"]
    start = [line["loss"] for line in records(first) if line["split"] == "valid"][-1]
    assert losses[0] == pytest.approx(start, abs=0.3)


def test_init_from_with_a_config_reads_the_data_of_the_config(
    cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path
) -> None:
    first = tmp_path / "first"
    assert cli("train", "--config", tiny_recipe, "--data", text_file, "--out", first).code == 0
    tuning = tmp_path / "tuning.yaml"
    tuning.write_text(f"data: {{train: [{{path: '{text_file}'}}], valid_fraction: 0.2}}\ntraining: {{max_steps: 2}}\n")
    second = tmp_path / "second"
    outcome = cli("train", "--init-from", first, "--config", tuning, "--out", second)
    assert outcome.code == 0, outcome.err
    assert records(second)[-1]["step"] == 2
    assert str(text_file) in (second / "recipe.yaml").read_text()


def test_a_run_that_stopped_early_stays_stopped(cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    run = tmp_path / "run"
    flags = ("--set", "training.early_stopping={patience: 1}", "--set", "training.eval_every=2", "--lr", "1e-30")
    assert cli("train", "--config", tiny_recipe, "--data", text_file, "--out", run, *flags).code == 0
    before = records(run)
    again = cli("train", "--resume", "--out", run)
    assert again.code == 0 and records(run) == before


def test_resume_finds_the_newest_run_of_the_name(
    cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path(cli("train", "--config", tiny_recipe, "--data", text_file).out.strip())
    outcome = cli("train", "--resume", "--arch", "gpt", "--max-steps", "14")
    assert outcome.code == 0 and outcome.out.strip() == str(run), outcome.err
    assert records(run)[-1]["step"] == 14


def test_resume_refuses_another_global_batch(cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    run = tmp_path / "run"
    assert cli("train", "--config", tiny_recipe, "--data", text_file, "--out", run).code == 0
    refused = cli("train", "--resume", "--out", run, "--batch-size", "7", "--max-steps", "20")
    assert refused.code == 2 and "7 sequences" in refused.err
    same = cli("train", "--resume", "--out", run, "--batch-size", "2", "--grad-accum", "2", "--max-steps", "20")
    assert same.code == 0, same.err


def test_resume_with_more_steps_continues(cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    run = tmp_path / "run"
    assert cli("train", "--config", tiny_recipe, "--data", text_file, "--out", run, "--max-steps", "6").code == 0
    outcome = cli("train", "--resume", "--out", run, "--max-steps", "9")
    assert outcome.code == 0, outcome.err
    assert records(run)[-1]["step"] == 9
    again = cli("train", "--resume", "--out", run)
    assert again.code == 0 and "nothing to do" in again.err


def test_max_minutes_saves_and_keeps_the_horizon(cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    common = ("train", "--config", tiny_recipe, "--data", text_file)
    assert cli(*common, "--out", whole).code == 0
    ended = cli(*common, "--out", run, "--max-minutes", "1e-9")
    assert ended.code == 0 and "at step 0 of 12: before the first step; no checkpoint was saved" in ended.err
    assert cli("train", "--resume", "--out", run, "--set", "training.max_minutes=null").code == 0
    assert records(run) == records(whole)
    assert weights_of(run, 12) == weights_of(whole, 12)


def test_a_run_stopped_at_a_step_is_validated_there_and_goes_on_with_its_own_schedule(
    cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    common = ("train", "--config", tiny_recipe, "--data", text_file, "--set", "schedule.warmup_ratio=0.25")
    assert cli(*common, "--out", whole).code == 0
    stopped = cli(*common, "--out", run, "--stop-at-step", "5")
    assert stopped.code == 0 and "stopped as asked at step 5 of 12: saved" in stopped.err
    found = records(run)
    assert [record["step"] for record in found if record["split"] == "valid"][-1] == found[-1]["step"] == 5
    again = cli("train", "--resume", "--out", run, "--stop-at-step", "5")
    assert again.code == 0 and "stopped as asked at step 5" in again.err and records(run) == found
    assert cli("train", "--resume", "--out", run, "--stop-at-step", "500").code == 0
    assert weights_of(run, 12) == weights_of(whole, 12)


def test_standard_input_is_data(
    cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with text_file.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        done = cli("train", "--config", tiny_recipe, "--data", "-", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert done.out.strip() == str(tmp_path / "run")


@pytest.mark.slow  # quick: test_e2e_streams.py
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_exits(
    number: signal.Signals, code: int, cli_process: Start, cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path
) -> None:
    run = tmp_path / "run"
    long = ("--max-steps", "1000000", "--set", "training.log_every=1")
    process = cli_process("train", "--config", tiny_recipe, "--data", text_file, "--out", run, *long, cwd=tmp_path)
    _wait_for_steps(process, run, 3)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "interrupted: saved at step" in err and "Traceback" not in err
    latest = (run / "checkpoints" / "latest").read_text().strip()
    assert (run / "checkpoints" / latest / "manifest.json").is_file()


def test_a_signal_before_training_starts_no_run(
    cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = session.prepare

    def interrupted(*arguments: Any) -> Any:
        prepared = prepare(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return prepared

    monkeypatch.setattr(session, "prepare", interrupted)
    outcome = cli("train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / "run")
    assert outcome.code == 130 and "interrupted before training began; no run was started" in outcome.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_signal_while_data_is_prepared_starts_no_run(cli_process: Start, tmp_path: Path, tiny_recipe: Path) -> None:
    """Tokenizing a large file is interrupted at once, and leaves no run behind."""
    words = [f"word{number}" for number in range(20000)]
    draw = random.Random(1)
    big = tmp_path / "big.txt"
    with big.open("w") as file:
        for _ in range(120):
            file.write(" ".join(draw.choices(words, k=20000)) + "\n")
    process = cli_process(
        "train",
        "--config",
        tiny_recipe,
        "--data",
        big,
        "--out",
        tmp_path / "run",
        "--set",
        "tokenizer.train.model=byte-bpe",
        "--set",
        "tokenizer.train.template=gpt",
        cwd=tmp_path,
    )
    time.sleep(3.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err and not (tmp_path / "run" / "recipe.yaml").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("writes", [True, False], ids=["a writer that writes nothing", "no writer"])
@pytest.mark.slow
def test_a_signal_is_heard_while_waiting_for_the_writer_of_a_pipe(
    cli_process: Start, tmp_path: Path, tiny_recipe: Path, writes: bool
) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    writer = os.open(pipe if writes else tmp_path, os.O_RDWR if writes else os.O_RDONLY)
    process = cli_process("train", "--config", tiny_recipe, "--data", pipe, "--out", tmp_path / "run", cwd=tmp_path)
    time.sleep(4.0)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    os.close(writer)
    assert process.returncode == 143, err
    assert "interrupted" in err and not (tmp_path / "run").exists()


@pytest.mark.slow  # quick: a run in use, test_e2e_bad_input.py
def test_a_second_run_in_a_directory_is_refused_also_while_the_first_is_suspended_which_then_goes_on(
    cli_process: Start, cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path
) -> None:
    run = tmp_path / "run"
    process = cli_process(
        "train", "--config", tiny_recipe, "--data", text_file, "--out", run, "--max-steps", "1000000", cwd=tmp_path
    )
    try:
        _wait_for_steps(process, run, 1)
        second = cli("train", "--resume", "--out", run)
        assert second.code == 6 and str(process.pid) in second.err
        process.send_signal(signal.SIGSTOP)
        second = cli("train", "--resume", "--out", run)
        assert second.code == 6 and str(process.pid) in second.err
        steps = len((run / "metrics.jsonl").read_text().splitlines())
        process.send_signal(signal.SIGCONT)
        _wait_for_steps(process, run, steps + 2)
    finally:
        process.kill()
        process.communicate()


def _wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    deadline = time.monotonic() + 90
    metrics = run / "metrics.jsonl"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()[1]}")
        if metrics.is_file() and len(metrics.read_text().splitlines()) >= steps:
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError("no step within 90 s")
