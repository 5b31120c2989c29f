"""`tformer bench attention` with the measuring replaced: what is asked for, what is shown, and every mistake."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
SMALL = ("bench", "attention", "--lengths", "4096,2048", "--kinds", "dense-masked", "--device", "cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is measured, a second for 1,000 positions of dense-masked attention; full attention has no 4,096."""
    from tformer.bench import attention

    requests: list[dict[str, Any]] = []

    def run(measurement: str, arguments: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        requests.append(dict(arguments))
        if (arguments["kind"], arguments["length"]) == ("full", 4096):
            return {"failed": "over 3 s"}
        seconds = arguments["length"] / 1000
        return {"median": seconds, "minimum": seconds, "spread": 0.0, "repeats": 3, "peak_bytes": 2**20}

    monkeypatch.setattr(attention, "run_isolated", run)
    return requests


def test_tables_on_stdout_and_a_line_for_each_cell_on_stderr(cli: Cli, asked: list[dict[str, Any]]) -> None:
    done = cli(*SMALL)
    assert done.code == 0
    assert "| kind | 2,048 | 4,096 |" in done.out
    assert "| full | 2.05 s | over 3 s |" in done.out and "| dense-masked | 2.05 s | 4.10 s |" in done.out
    talk = done.err.splitlines()
    assert talk[0].startswith("note: full attention is measured too")
    assert "batch 1, 4 heads of 64" in talk[1] and "fp32" in talk[1] and "thread" in talk[1]
    assert talk[2:] == [
        "1 of 4  full at 2,048: 2.05 s, 1.00 MiB",
        "2 of 4  dense-masked at 2,048: 2.05 s, 1.00 MiB",
        "3 of 4  full at 4,096: over 3 s",
        "4 of 4  dense-masked at 4,096: 4.10 s, 1.00 MiB",
    ]


def test_every_option_reaches_the_measurement(cli: Cli, asked: list[dict[str, Any]]) -> None:
    words = ("--batch-size", 2, "--heads", 3, "--head-dim", 8, "--causal", "--dtype", "bf16", "--repeats", 4,
             "--max-seconds", 9, "--set", "dense-masked.window=32")  # fmt: skip
    assert cli(*SMALL, *words).code == 0
    assert asked[1] == {
        "kind": "dense-masked", "length": 2048, "options": {"window": 32}, "batch_size": 2, "heads": 3, "head_dim": 8,
        "causal": True, "dtype": "bf16", "device": "cpu", "repeats": 4, "max_seconds": 9.0,
    }  # fmt: skip


def test_json_is_one_document(cli: Cli, asked: list[dict[str, Any]]) -> None:
    done = cli(*SMALL, "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found.keys() == {"environment", "settings", "cells", "summary", "notes"}
    assert [cell["failed"] for cell in found["cells"]] == [None, None, "over 3 s", None]
    assert found["environment"]["line"].startswith("torch ") and found["settings"]["lengths"] == [2048, 4096]


def test_out_holds_the_report(cli: Cli, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = cli(*SMALL, "--out", out)
    assert done.code == 0 and done.err.splitlines()[-1] == f"written to {out}"
    names = {"table.md", "table.csv", "table.json", "time.svg", "memory.svg"}
    assert {path.name for path in out.iterdir()} == names
    assert done.out.strip() in (out / "table.md").read_text()


def test_when_nothing_could_be_measured_the_command_fails(cli: Cli, asked: list[dict[str, Any]]) -> None:
    done = cli("bench", "attention", "--lengths", 4096, "--kinds", "full")
    assert done.code == 1 and "| full | over 3 s |" in done.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kinds", "dense"], "--kinds: unknown kind 'dense'"),
        (["--lengths", "512,many"], "--lengths: found 'many'"),
        (["--lengths", "0"], "--lengths: found '0'"),
        (["--lengths", ","], "--lengths: found none"),
        (["--set", "full"], "expected KIND.OPTION=VALUE"),
        (["--set", "dense-masked.window=wide"], "--set dense-masked.window: found the text 'wide'"),
        (["--dtype", "int8"], "--dtype: found 'int8'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--head-dim", "0"], "--head-dim: found 0"),
        (["--repeats", "-1"], "--repeats: found -1"),
        (["--max-seconds", "nan"], "--max-seconds: found nan"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(
    cli: Cli, asked: list[dict[str, Any]], words: list[str], told: str
) -> None:
    done = cli("bench", "attention", *words)
    assert done.code == 2 and done.out == "" and asked == []
    assert done.err.startswith("error: ") and told in done.err and len(done.err.splitlines()) <= 2


def test_a_file_where_the_folder_should_be_is_refused(cli: Cli, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = cli(*SMALL, "--out", tmp_path / "file")
    assert done.code == 2 and asked == [] and (tmp_path / "file").read_text() == "mine"
