"""`tformer generate`: options, prompts and lines, compilation."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.quick import first_is_quick
from tformer.decoding import compilation


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("abc\n\nfed cab\nh\n", encoding="utf-8")
    return path


def test_without_arguments_the_newest_run_continues_an_empty_prompt(cli, random_run, monkeypatch):
    monkeypatch.chdir(random_run.parents[1])
    outcome = cli("generate")
    assert outcome.code == 0, outcome.err
    assert outcome.out.endswith("\n") and 1 < len(outcome.out) <= 13  # the unknown token has no text
    assert str(random_run.name) in outcome.err


def test_a_prompt_is_shown_with_its_continuation(cli, random_run):
    outcome = cli("generate", random_run, "--prompt", "abc", "--max-new-tokens", "5")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("abc") and len(outcome.out) == 9


def test_several_samples_are_separated(cli, random_run):
    outcome = cli("generate", random_run, "--prompt", "abc", "--num-samples", "3")
    assert outcome.out.count("---------------\n") == 2
    assert outcome.out.count("abc") >= 3


def test_json_is_one_document_with_everything(cli, random_run):
    outcome = cli("generate", random_run, "--prompt", "abc", "--json", "--logprobs", "--num-samples", "2")
    document = json.loads(outcome.out)
    assert len(outcome.out.splitlines()) == 1
    assert set(document) == {"index", "prompt", "text", "completions", "logprobs", "finish_reason"}
    assert (document["index"], document["prompt"], len(document["completions"])) == (0, "abc", 2)
    for completion in document["completions"]:
        assert len(completion["logprobs"]) == len(completion["ids"])
        assert all(logprob <= 0 for logprob in completion["logprobs"])


def test_logprobs_of_plain_text_are_told_on_stderr(cli, random_run):
    outcome = cli("generate", random_run, "--logprobs")
    assert "log-probability -" in outcome.err and "log-probability" not in outcome.out


def test_one_input_line_gives_one_output_line_in_order(cli, random_run, prompts):
    outcome = cli("generate", random_run, "--input", prompts, "--max-new-tokens", "60")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.split("\n")
    assert len(lines) == 5 and lines[-1] == ""
    documents = [
        json.loads(line)
        for line in cli("generate", random_run, "--input", prompts, "--max-new-tokens", "60", "--json").out.splitlines()
    ]
    assert [document["prompt"] for document in documents] == ["abc", "", "fed cab", "h"]
    assert [document["index"] for document in documents] == [0, 1, 2, 3]
    assert lines[:-1] == [document["text"].replace("\n", "\\n").replace("\r", "\\r") for document in documents]
    assert any("\n" in document["text"] for document in documents), "the test needs a line end inside an output"


def test_standard_input_gives_prompts(cli, random_run, prompts, monkeypatch):
    from_file = cli("generate", random_run, "--input", prompts)
    with prompts.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert cli("generate", random_run, "--input", "-").out == from_file.out


def test_output_goes_to_a_file(cli, random_run, prompts, tmp_path):
    path = tmp_path / "out.txt"
    outcome = cli("generate", random_run, "--input", prompts, "--output", path)
    assert outcome.out == ""
    assert path.read_text(encoding="utf-8") == cli("generate", random_run, "--input", prompts).out


def test_invalid_utf8_names_file_line_and_byte_and_leaves_the_output_as_it_was(cli, random_run, tmp_path):
    bad, out = tmp_path / "bad.txt", tmp_path / "out.txt"
    bad.write_bytes(b"abc\nab\xffc\n")
    out.write_text("precious")
    outcome = cli("generate", random_run, "--input", bad, "--output", out, "--batch-size", "1")
    assert (outcome.code, outcome.out, out.read_text()) == (2, "", "precious")
    assert "bad.txt:2" in outcome.err and "byte 6" in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.txt", "out.txt"]
    replaced = cli("generate", random_run, "--input", bad, "--invalid-utf8", "replace")
    assert replaced.code == 0 and len(replaced.out.splitlines()) == 2


def test_a_prompt_longer_than_the_context_slides_and_says_so_or_is_an_error(cli, random_run):
    long = ("generate", random_run, "--prompt", "abc" * 10)
    slid = cli(*long)
    assert slid.code == 0
    assert "30 tokens" in slid.err and "16" in slid.err and "last 8" in slid.err
    refused = cli(*long, "--context", "error")
    assert (refused.code, refused.out) == (2, "")
    assert "30 tokens" in refused.err and "16" in refused.err


def test_an_encoder_cannot_generate(cli, make_run):
    recipe = """
schema: 1
model:
  d_model: 8
  max_seq_len: 16
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
"""
    outcome = cli("generate", make_run(recipe))
    assert outcome.code == 2 and "decoder" in outcome.err


def test_an_output_that_the_disk_refuses_is_exit_3(cli, random_run, tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(28, "No space left on device", str(tmp_path / "out.txt"))

    monkeypatch.setattr("tformer.support.files.create", refuse)
    outcome = cli("generate", random_run, "--output", tmp_path / "out.txt")
    assert outcome.code == 3 and "No space left" in outcome.err


def on_a_terminal(*arguments):
    """Start the command with a terminal as its standard output; (process, the terminal's other end)."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tformer", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(theirs)
    return process, ours


def read_all(terminal):
    data = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # how Linux says that the other end is closed
            chunk = b""
        if not chunk:
            os.close(terminal)
            return data
        data += chunk


def test_a_terminal_sees_a_stream_without_control_characters_until_an_interrupt(random_run):
    process, terminal = on_a_terminal(
        "generate", random_run, "--prompt", "abc", "--max-new-tokens", "10000000", "--temperature", "5", "--seed", "4"
    )
    begin = os.read(terminal, 3)  # arrives while generation goes on
    process.send_signal(signal.SIGINT)
    text = begin + read_all(terminal)
    _, err = process.communicate(timeout=60)
    assert text.startswith(b"abc")
    assert b"\x1b" not in text
    assert process.returncode == 130, err
    assert b"interrupted" in err and b"Traceback" not in err


@pytest.mark.slow
def test_escapes_are_spelled_out_on_a_terminal_and_kept_in_a_pipe(cli, random_run):
    arguments = ("generate", random_run, "--prompt", "a\x1b[2Jb", "--max-new-tokens", "1", "--top-k", "1")
    process, terminal = on_a_terminal(*arguments)
    shown = read_all(terminal)
    process.communicate(timeout=60)
    assert shown.startswith(b"a\\x1b[2Jb") and b"\x1b" not in shown
    assert cli(*arguments).out.startswith("a\x1b[2Jb")


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_command_quietly(random_run, tmp_path):
    """Its quick twin is `end_to_end/test_e2e_streams.py::test_a_closed_pipe_ends_a_command_like_sigpipe`."""
    prompts = tmp_path / "many.txt"
    prompts.write_text("abc\n" * 2000)
    process = subprocess.Popen(
        [sys.executable, "-m", "tformer", "generate", str(random_run), "--input", str(prompts), "--batch-size", "1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) in (1, 141)  # 128 + SIGPIPE, or what the command-line library says of it
    assert "Traceback" not in err and "BrokenPipe" not in err and "error" not in err


@first_is_quick("how", [["--greedy"], ["--seed", "3", "--num-samples", "2"], ["--beam-size", "2"]], ids=str)
def test_the_text_is_the_same(cli: Any, random_run: Path, how: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("generate", random_run, "--prompt", "abc", "--max-new-tokens", "8", *how)
    expected = cli(*command)
    monkeypatch.setattr(compilation, "missing_compiler", lambda device: None)
    monkeypatch.setattr(compilation, "compile_decoding", partial(compilation.compile_decoding, backend="eager"))
    found = cli(*command, "--compile", "on")
    assert found.code == 0, found.err
    assert found.out == expected.out
    assert found.err.count("decoding is compiled") == 1 and "compiled" not in expected.err
