"""`--json` with an error: one object on standard output, of every command, with the message and the code of stderr."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.cli.app import COMMANDS

Cli = Callable[..., Any]

FAILS = {
    "train-tokenizer": ("missing.txt", "--vocab-size", "300", "--out", "tokenizer.json"),
    "train": ("--arch", "gpt", "--data", "missing.txt"),
    "config show": ("--preset", "none/such"),
    "config explain": ("model.none",),
    "config list": ("--none",),
    "config schema": ("--none",),
    "average": ("missing", "--out", "new"),
    "merge": ("missing", "--out", "new"),
    "search": ("missing", "words"),
    "prune": ("missing", "--rate", "0.5", "--out", "new"),
    "generate": ("missing", "--prompt", "a"),
    "classify": ("missing", "--text", "a"),
    "sweep": ("--arch", "gpt", "--vary", "none=1,2"),
    "runs list": ("missing",),
    "runs show": ("missing",),
    "runs compare": ("missing", "missing"),
    "plot": ("missing", "-o", "a.html"),
    "inspect": ("missing",),
    "data": ("missing",),
    "tokenize": ("missing", "--text", "a"),
    "viz-pe": ("--encoding", "none"),
    "viz-attention": ("missing", "--text", "a"),
    "import": ("missing", "--out", "new"),
    "export": ("missing", "--out", "new"),
    "evaluate": ("missing",),
    "doctor": ("--none",),
    "bench train": ("--preset", "none/such"),
    "guide": ("--none",),
}


def commands_with_json() -> set[str]:
    """The commands, and those of groups, that have `--json`."""
    found = set()
    for name, command in COMMANDS.items():
        for inner in command.subcommands() or (None,):
            page = command.page(name, inner)
            if any("--json" in entry.name for entry in page.entries):
                found.add(f"{name} {inner}" if inner else name)
    return found


def test_every_command_with_json_is_tried() -> None:
    assert len(commands_with_json()) > 20
    assert {name for name in commands_with_json() if not name.startswith("bench ")} - {
        "config validate"
    } <= FAILS.keys()


def only_object(outcome: Any) -> dict[str, Any]:
    """The error that stdout holds, which stderr has in one line, with its hint."""
    [line] = outcome.out.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found.keys() == {"error", "hint", "code"} and found["code"] == outcome.code == 2
    [message] = [each for each in outcome.err.splitlines() if each.startswith("error: ")]
    assert message == f"error: {found['error']}" and "Traceback" not in outcome.err
    assert found["hint"] is None or f"hint: {found['hint']}" in outcome.err.splitlines()
    return found


@pytest.mark.parametrize("name", FAILS)
def test_an_error_is_one_object_with_message_hint_and_code(
    name: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    only_object(cli(*name.split(), *FAILS[name], "--json"))
    assert not list(tmp_path.iterdir())


# (command line, its message; parts of it with " ... " between). LM is a run with random weights.
WRONG = [
    ("data", "there is no table to look at"),
    ("data rows.csv --label-column stars", "no column 'stars'"),
    ("data rows.csv --tokenizer nowhere", "nowhere ... does not exist"),
    ("data rows.csv --delimiter ::", "--delimiter: expected one character, comma, semicolon, tab, bar, found '::'"),
    ("data rows.csv --encoding latin-99", "--encoding: unknown encoding 'latin-99'"),
    ("data latin.csv --encoding utf-8", "latin.csv:2: invalid UTF-8"),
    ("data damaged.xlsx", "damaged.xlsx: damaged or no spreadsheet"),
    ("data damaged.ods", "damaged.ods: damaged or no spreadsheet"),
    ("train --arch bert --data damaged.xlsx", "damaged.xlsx: damaged or no spreadsheet"),
    ("train --arch bert --data gaps.csv", "gaps.csv: 2 rows cannot be used"),
    ("train --arch bert --data rows.csv --bad-rows keep", "'--bad-rows' ... 'keep' is not one of"),
    ("train --arch bert --data rows.csv --labels good,bad", "rows.csv:2 ... unknown label 'pos'"),
    ("train --arch bert --data rows.csv --best-metric f1", "best_metric ... 'f1'"),
    ("train --arch bert --data rows.csv --group-column author", "no column 'author'"),
    ("train --arch bert --data rows.csv --folds 1", "--folds: found 1, expected at least 2"),
    ("train --arch bert --data - --folds 2", "--folds reads the data several times"),
    ("train --arch gpt --data text.txt --folds 2", "only labelled examples are cut into folds"),
    ("train --arch bert --data rows.csv --set data.folds=2 --set data.fold=3", "data.fold ... expected at most"),
    ("train --arch bert --data same.csv --set data.folds=5", "found 3 different texts, expected at least 5"),
    ("evaluate LM --data text.txt --threshold best", "--threshold: found 'best'"),
    ("evaluate LM --data text.txt --threshold 0.5", "--threshold has no meaning here"),
    ("classify missing --text a --threshold 2", "--threshold must be 0 to 1, found 2"),
    ("evaluate LM --data text.txt --by size", "'--by' ... 'size' is not one of"),
    ("evaluate LM --data text.txt --plot curves.doc", "curves.doc has the suffix .doc"),
    ("evaluate LM --data text.txt --plot -", "--plot: expected a file"),
    ("evaluate LM --data text.txt --plot curves.png", "--plot draws the decisions of a classifier"),
    ("sweep --arch gpt --out new --vary optimizer.lr", "--vary: found 'optimizer.lr'"),
    ("sweep --arch gpt --out new --vary optimizer.lr=1,2 --vary optimizer.lr=3", "optimizer.lr is given twice"),
    ("sweep --arch gpt --out new --vary optimizer.lr=fast", "optimizer.lr: found the text 'fast'"),
    ("sweep --arch gpt --out new --vary optimizer.lr=0.1 --evaluate test", "--evaluate: found 'test'"),
    ("generate LM --input rows.csv --text-column body", "no column 'body'"),
    ("generate LM --input rows.csv --output rows.csv", "--output rows.csv would replace what is read"),
    ("generate LM --input rows.csv --encoding latin-99", "--encoding: unknown encoding 'latin-99'"),
    ("generate LM --input rows.csv --delimiter ''", "--delimiter: expected one character"),
    ("generate LM --input damaged.xlsx", "damaged.xlsx: damaged or no spreadsheet"),
    ("generate LM --input latin.txt --encoding ascii", "latin.txt:2: invalid ascii"),
    ("generate LM --input utf16.txt", "utf16.txt ... it looks like UTF-16"),
    *(
        (f"{command} job.xlf", "job.xlf: found XLIFF, expected text ... columns source and target")
        for command in (
            *("data", "train-tokenizer", "train --dry-run --arch gpt --data", "train --dry-run --arch bert --data"),
            *("train --dry-run --arch transformer --data", "train --dry-run --arch gpt --valid job.xlf --data"),
            *("train --dry-run --arch transformer --source text.txt --target", "train --dry-run --arch t5 --data"),
            *(
                "tokenize LM --input",
                "generate LM --input",
                "evaluate LM --data",
                "data --valid job.xlf",
            ),
            "train --dry-run --init-from LM --data",
        )
    ),
    ("classify missing --input rows.csv --output rows.csv", "--output rows.csv would replace what is read"),
    ("import . --out new", "config.json"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of a user."""
    texts = {
        "rows.csv": "text,label\ngood food,pos\nbad food,neg\nfine,pos\npoor,neg\n",
        "gaps.csv": "text,label\ngood food,pos\nbad food,\nfine,pos\npoor,neg\nno,\n",
        "same.csv": "text,label\n" + "good,pos\nbad,neg\nfine!,pos\n" * 2 + "Good,pos\n",
        "latin.csv": "text,label\nna\xefve,pos\nbad,neg\n",
        "latin.txt": "good\nna\xefve\n",
        "text.txt": "fed cab\n" * 20,
        "job.xlf": '<?xml version="1.0"?>\n<xliff version="1.2"><file/></xliff>\n',
        "damaged.xlsx": "PK\x03\x04 and no more",
        "damaged.ods": "PK\x03\x04 and no more",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    (tmp_path / "utf16.txt").write_text("good\n", encoding="utf-16")
    return tmp_path


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_input_is_one_line_and_one_object(
    words: str, message: str, cli: Cli, folder: Path, random_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    outcome = cli(*(random_run if word == "LM" else word for word in shlex.split(words)), "--json")
    found = only_object(outcome)
    assert all(part in f"{found['error']} {found['hint']}" for part in message.split(" ... ")), found
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_recipes_that_fail_are_listed_with_their_errors(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("arch: gpt\nnone: 1\n")
    outcome = cli("config", "validate", tmp_path / "bad.yaml", "--json")
    [found] = json.loads(outcome.out)
    assert outcome.code == 2 and found["ok"] is False and "none" in found["error"]


@pytest.mark.slow
def test_an_error_of_several_processes_is_one_object(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes answer together and fail together.

    The quick twin is `test_an_error_is_one_object_with_message_hint_and_code`.
    """
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a\n")
    outcome = cli("classify", "missing", "--input", "a.txt", "--devices", "2", "--device", "cpu", "--json")
    [line] = outcome.out.splitlines()
    assert json.loads(line)["code"] == outcome.code == 2 and "missing" in json.loads(line)["error"]
