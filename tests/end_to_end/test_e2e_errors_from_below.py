"""Errors of the libraries below end in one line with the right exit code; `--json` prints each as an object."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tformer
from tests.quick import first_is_quick
from tformer.cli.report import emit_json
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer

Cli = Callable[..., Any]
CATASTROPHIC = {"Regex": r"(a+)+(?!a)b\1"}
EXPLODES = "a" * 60 + "!"
PARTS = {
    "split": {"pre_tokenizer": {"type": "Split", "pattern": CATASTROPHIC, "behavior": "Isolated", "invert": False}},
    "replace": {"normalizer": {"type": "Replace", "pattern": CATASTROPHIC, "content": "x"}},
}


@pytest.fixture(params=PARTS)
def tokenizer(request: pytest.FixtureRequest, decoder: Path, tmp_path: Path) -> Path:
    """The tokenizer of a run with a pattern that takes exponential time on a text of a."""
    document = json.loads(next(decoder.glob("**/tokenizer.json")).read_text())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document | PARTS[request.param]))
    return path


def refused(outcome: Any, *words: str, code: int = 2) -> dict[str, Any]:
    """The object of `--json` on stdout; stderr has the same message as one line."""
    [line] = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    found: dict[str, Any] = json.loads(outcome.out.splitlines()[-1]) if outcome.out else {}
    assert outcome.code == code and all(word in line for word in words) and "Traceback" not in outcome.err
    assert not found or (line == f"error: {found['error']}" and found.keys() == {"error", "hint", "code"})
    assert not found or found["code"] == code
    return found


def test_tokenize_and_train_refuse_a_pattern_that_explodes(
    tokenizer: Path, cli: Cli, tiny_recipe: Path, tmp_path: Path
) -> None:
    text = tmp_path / "data.txt"
    text.write_text(f"{EXPLODES}\n" * 50)
    assert refused(cli("tokenize", tokenizer, "--text", EXPLODES, "--json"), "tokenizer.json", "retry-limit-in-match")
    options = ("--data", text, "--tokenizer", tokenizer, "--out", tmp_path / "run")
    refused(cli("train", "--config", tiny_recipe, *options), str(tokenizer), "retry-limit-in-match")


def test_a_pattern_that_explodes_is_one_line_on_standard_error(tokenizer: Path, tmp_path: Path) -> None:
    """The library would print its panic, with RUST_BACKTRACE a hundred lines of it."""
    program = [sys.executable, "-m", "tformer", "tokenize", str(tokenizer), "--text", EXPLODES]
    done = subprocess.run(program, env=os.environ | {"RUST_BACKTRACE": "1"}, capture_output=True, text=True)
    error, hint = done.stderr.splitlines()
    assert done.returncode == 2 and error.startswith("error: ") and hint.startswith("hint: ")


def test_generate_and_viz_attention_refuse_a_pattern_that_explodes(
    tokenizer: Path, trained: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    assert cli("export", trained("gpt"), "--out", folder).code == 0
    document = json.loads((folder / "tokenizer.json").read_text())
    document |= {name: part for name, part in json.loads(tokenizer.read_text()).items() if name in ("normalizer",)}
    document["pre_tokenizer"] = json.loads(tokenizer.read_text())["pre_tokenizer"] or document["pre_tokenizer"]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    named = str(folder / "tokenizer.json")
    assert refused(cli("generate", folder, "--prompt", EXPLODES, "--json"), named, "retry-limit")
    refused(cli("viz-attention", folder, "--text", EXPLODES, "--format", "json"), named, "retry-limit")
    with pytest.raises(InputError, match="retry-limit"):  # a panic of the library does not derive from Exception
        tformer.load(folder).generate(EXPLODES)


def test_a_template_with_an_id_that_no_token_has_is_refused(tokenizer: Path, cli: Cli) -> None:
    document = json.loads(tokenizer.read_text()) | {"normalizer": None, "pre_tokenizer": None}
    document["post_processor"] = {"type": "BertProcessing", "sep": ["[SEP]", 99999], "cls": ["[CLS]", 88888]}
    tokenizer.write_text(json.dumps(document))
    refused(cli("tokenize", tokenizer, "--text", "a", "--json"), str(tokenizer), "gives the id 88888")


@first_is_quick("call", ["encode", "encode_spans", "count", "normalize_pair"], quick=2)
def test_every_call_of_the_tokenizer_raises_an_exception(tokenizer: Path, call: str) -> None:
    read = Tokenizer.load(tokenizer)
    calls: dict[str, Callable[[], Any]] = {
        "encode": lambda: read.encode(EXPLODES),
        "encode_spans": lambda: read.encode_spans(EXPLODES),
        "count": lambda: read.count(EXPLODES),
        "normalize_pair": lambda: read.encode_pair(EXPLODES, "b"),
    }
    with pytest.raises(InputError, match="retry-limit"):
        calls[call]()


def program(*words: str, before: str = "", cwd: Path) -> Any:
    """A command in a process of its own, after a line of shell."""
    source = str(Path(tformer.__file__).parents[1])
    found = subprocess.run(
        ["bash", "-c", f'{before}\nexec "$@"', "bash", sys.executable, "-m", "tformer", *words],
        cwd=cwd, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}, check=False,
    )  # fmt: skip
    return type("Outcome", (), {"code": found.returncode, "out": found.stdout, "err": found.stderr})


@first_is_quick("words", [("generate", "x"), ("train", "--arch", "gpt"), ("doctor", "--no-speed")])
def test_a_removed_working_folder_is_one_line_before_torch_is_loaded(words: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    found = refused(program(*words, "--json", before=f"rmdir {folder}", cwd=folder), "current folder has been removed")
    assert found["hint"] == "change to another one (cd)"


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
def test_too_little_address_space_for_torch_is_exit_5(tmp_path: Path) -> None:
    found = program("doctor", "--no-speed", "--json", before="ulimit -v 500000", cwd=tmp_path)
    assert refused(found, "out of memory: PyTorch needs", "512.0 MB", code=5)
    assert program("config", "list", before="ulimit -v 500000", cwd=tmp_path).code == 0  # it needs no torch


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
@pytest.mark.skipif(torch.version.cuda is not None, reason="its libraries need several times as much")
def test_enough_address_space_for_torch_is_not_refused(tmp_path: Path) -> None:
    """Its quick twin is `test_too_little_address_space_for_torch_is_exit_5`."""
    assert program("doctor", "--no-speed", before="ulimit -v 2000000", cwd=tmp_path).code == 0


USAGE = {
    "an unknown flag": ("generate", "--foo"),
    "a former flag": ("evaluate", "--errors", "x"),
    "a bad value": ("train", "--max-steps", "many"),
    "a bad choice": ("generate", "x", "--quantize", "int3"),
    "a missing value": ("classify", "--text"),
    "a surplus argument": ("doctor", "x"),
    "a missing subcommand's flag": ("runs", "list", "--foo"),
    "an unknown command": ("generat",),
    "a run that does not exist": ("evaluate", "no-such-run"),
    "a bound": ("generate", "x", "--temperature", "-1"),
}


@pytest.mark.parametrize("case", USAGE)
def test_json_prints_every_error_as_one_object(case: str, cli: Cli) -> None:
    command, *rest = USAGE[case]
    outcome = cli(command, "--json", *rest) if case == "a missing value" else cli(command, *rest, "--json")
    assert refused(outcome) and len(outcome.out.splitlines()) == 1


def test_without_json_nothing_goes_to_stdout(cli: Cli) -> None:
    assert cli("generate", "--foo").out == ""


def test_json_lines_end_with_the_error(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_and_fail(*_: object, **__: object) -> None:
        emit_json({"text": "an answer"})
        raise InputError("line 2 cannot be read")

    monkeypatch.setattr("tformer.cli.workers.run_in_workers", answer_and_fail)
    outcome = cli("generate", "x", "--prompt", "a", "--json")
    last = {"error": "line 2 cannot be read", "hint": None, "code": 2}
    assert [json.loads(line) for line in outcome.out.splitlines()] == [{"text": "an answer"}, last]


def test_an_interrupt_with_json_is_an_object_with_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tformer.cli.app.make_program", interrupt)
    found = refused(cli("doctor", "--json"), "interrupted", code=128 + signal.SIGINT)
    assert found == {"error": "interrupted", "hint": None, "code": 130}


def test_newlines_and_controls_in_names_do_not_split_the_line(cli: Cli, decoder: Path, tmp_path: Path) -> None:
    shutil.copytree(decoder, tmp_path / "a\nb\x1b[31m\tc")
    for name in ("no\nsuch\x07run", "a\nb\x1b[31m\tc"):
        outcome = cli("classify", tmp_path / name, "--text", "x", "--json")
        found = refused(outcome, "\\n")
        assert len(outcome.err.splitlines()) == 1 + (found["hint"] is not None)
        assert not any(ord(sign) < 32 for sign in found["error"] + (found["hint"] or ""))
