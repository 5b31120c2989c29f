"""`tformer generate` with encoder-decoders, as a user runs it: files, standard input, order, empty lines, prefixes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.end_to_end.translate_runs import LINES, Cli, Run, documents, refusal


def test_every_line_in_gives_one_line_out_in_order_and_empty_gives_empty(
    cli: Cli, translator: Run, lines: Path
) -> None:
    outcome = cli("generate", translator, "--input", lines)
    assert outcome.code == 0, outcome.err
    answers = outcome.out.split("\n")
    assert answers.pop() == "" and len(answers) == len(LINES)
    assert [bool(answer) for answer in answers] == [bool(line.strip()) for line in LINES]
    for line, answer in zip(LINES, answers, strict=True):
        assert cli("generate", translator, "--prompt", line).out == answer + "\n"


def test_batch_size_and_order_of_lines_change_nothing(cli: Cli, translator: Run, lines: Path, tmp_path: Path) -> None:
    outputs = [cli("generate", translator, "--input", lines, "--batch-size", size).out for size in (1, 2, 32)]
    assert len(set(outputs)) == 1
    turned = tmp_path / "turned.txt"
    turned.write_text("".join(line + "\n" for line in reversed(LINES)))
    assert cli("generate", translator, "--input", turned).out.splitlines() == outputs[0].splitlines()[::-1]


def test_a_file_goes_to_a_file_and_never_over_itself(cli: Cli, translator: Run, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    assert cli("generate", translator, "--input", lines, "--output", out).out == ""
    assert out.read_text() == cli("generate", translator, "--input", lines).out
    assert "would replace" in refusal(cli("generate", translator, "--input", lines, "--output", lines))


def test_an_empty_file_gives_an_empty_output(cli: Cli, translator: Run, tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("")
    outcome = cli("generate", translator, "--input", tmp_path / "none.txt")
    assert (outcome.code, outcome.out) == (0, "")


def test_standard_input_is_answered_line_by_line(cli: Cli, translator: Run) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tformer", "generate", str(translator)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    answers = []
    for line in ("abc", "", "fed cab"):
        process.stdin.write(line + "\n")
        process.stdin.flush()
        answers.append(process.stdout.readline())  # arrives while the pipe stays open
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert answers == [cli("generate", translator, "--prompt", line).out for line in ("abc", "", "fed cab")]
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()


def test_every_output_begins_with_the_target_prefix(cli: Cli, translator: Run, lines: Path, tmp_path: Path) -> None:
    outcome = cli("generate", translator, "--input", lines, "--target-prefix", "ba")
    assert outcome.code == 0, outcome.err
    for line, answer in zip(LINES, outcome.out.split("\n"), strict=False):
        assert answer.startswith("ba") if line.strip() else answer == ""
    prefixes = tmp_path / "prefixes.txt"
    starts = ["c", "x", "", "dd", "", "e", "f"]
    prefixes.write_text("".join(start.replace("x", "a") + "\n" for start in starts))
    found = documents(cli("generate", translator, "--input", lines, "--target-prefix-file", prefixes, "--json"))
    for document in found:
        assert document["text"].startswith(document["target_prefix"]) or not document["prompt"].strip()


# --- interrupts -------------------------------------------------------------------------------------------------------


def test_an_interrupt_keeps_the_lines_that_were_done(translator: Run, tmp_path: Path) -> None:
    path, out = tmp_path / "many.txt", tmp_path / "out.jsonl"
    path.write_text("abc def\n" * 20_000)
    arguments = ["generate", str(translator), "--input", str(path), "--output", str(out), "--batch-size", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tformer", *arguments, "--n-best", "3", "--json"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    pending = tmp_path / f".tmp-{out.name}-{process.pid}"
    while process.poll() is None and not (pending.exists() and pending.stat().st_size):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    done = [json.loads(line) for line in out.read_text().splitlines()]
    assert done and f"interrupted after {len(done):,} lines" in err
    assert [document["index"] for document in done] == list(range(len(done)))
    assert {document["finish_reason"] for document in done} <= {"eos", "length"}
