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

    def race(measurement: str, contenders: list[Mapping[str, Any]], **rules: Any) -> list[dict[str, Any]]:
        [arguments] = contenders
        kind, length, bench = arguments["kind"], arguments["length"], arguments["bench"]
        limits = {"repeats": rules["repeats"], "max_seconds": rules["max_seconds"]}
        requests.append({**bench, "kind": kind, "length": length, "options": bench["options"][kind], **limits})
        if (kind, length) == ("full", 4096):
            return [{"failed": "over 3 s"}]
        timing = {"seconds": length / 1000, "minimum": length / 1000, "spread": 0.0, "repeats": 3}
        memory = {"peak_bytes": 2**20, "peak_rss_bytes": 2**28}
        return [{**timing, "tokens": length * bench["batch_size"], "memory": memory}]

    def ceilings(measurement: str, arguments: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        assert measurement == "attention ceilings"
        bench = arguments["bench"]
        rows, width = bench["batch_size"] * bench["lengths"][-1], bench["heads"] * bench["head_dim"]
        rates = {bench["dtype"]: 1e12}
        size = [rows, width, 4 * width]
        return {"flops_per_second": rates, "product": size, "bytes_per_second": 1e12, "data_sheet": None}

    monkeypatch.setattr(attention, "race", race)
    monkeypatch.setattr(attention, "run_isolated", ceilings)
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
    words = ("--batch-size", 2, "--num-heads", 3, "--head-dim", 8, "--causal", "--precision", "bf16", "--compile",
             "--repeats", 4, "--max-seconds", 9, "--set", "dense-masked.window=32")  # fmt: skip
    assert cli(*SMALL, *words).code == 0
    expected = {
        "kind": "dense-masked", "length": 2048, "options": {"window": 32}, "batch_size": 2, "heads": 3, "head_dim": 8,
        "causal": True, "dtype": "bf16", "device": "cpu", "repeats": 4, "max_seconds": 9.0, "compile": True,
    }  # fmt: skip
    assert expected.items() <= asked[1].items()


def test_json_is_one_document(cli: Cli, asked: list[dict[str, Any]]) -> None:
    done = cli(*SMALL, "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found.keys() == {"environment", "settings", "cells", "summary", "notes"}
    assert [cell["failed"] for cell in found["cells"]] == [None, None, "over 3 s", None]
    assert found["environment"]["line"].startswith("torch ") and found["settings"]["lengths"] == [2048, 4096]


def test_every_cell_has_the_keys_of_every_bench(cli: Cli, asked: list[dict[str, Any]]) -> None:
    found = json.loads(cli(*SMALL, "--batch-size", 2, "--json").out)
    keys = {"tokens_per_second", "step_ms", "peak_rss_bytes", "share_of_peak", "bound"}
    assert all(keys <= cell.keys() for cell in found["cells"])
    masked, failed = found["cells"][1], found["cells"][2]
    assert masked["tokens_per_second"] == 2000.0 and masked["step_ms"] == 2048.0
    flops = 3 * 4 * 4 * 64 * 2048 * (2 * 2048)  # forward and backward, 4 heads of 64, all keys of all queries
    assert masked["flops"] == flops and masked["share_of_peak"] == pytest.approx(flops / 2.048 / 1e12)
    assert failed["tokens_per_second"] is failed["share_of_peak"] is None
    assert found["environment"]["ceilings"]["product"] == [8192, 256, 1024]


def test_a_roofline_line_for_each_kind(cli: Cli, asked: list[dict[str, Any]]) -> None:
    out = cli(*SMALL).out
    assert "- ceilings: fp32 1,000 GFLOP/s (product 4096 x 256 x 1024)" in out
    assert "- dense-masked at 4,096: 1% of the matrix-product rate" in out and "bound by overhead" in out


def test_a_model_gives_heads_kind_options_and_lengths(cli: Cli, asked: list[dict[str, Any]]) -> None:
    words = ("bench", "attention", "--device", "cpu")
    done = cli(*words, "--arch", "longformer", "--preset", "base")
    assert {one["kind"] for one in asked} == {"full", "sliding_window"} and not any(one["causal"] for one in asked)
    assert asked[0]["heads"] == 12 and asked[0]["head_dim"] == 64 and "longformer/base" in done.err
    windows = [one["options"]["window"] for one in asked if one["kind"] == "sliding_window"]
    assert set(windows) == {512} and max(one["length"] for one in asked) == 4096
    asked.clear()
    set_ = ("--set", "model.decoder.num_heads=6", "--set", "model.decoder.num_kv_heads=2")
    assert cli(*words, "--arch", "llama", "--preset", "tiny", *set_, "--set", "model.d_model=96").code == 0
    assert all(one["causal"] and (one["heads"], one["kv_heads"], one["head_dim"]) == (6, 2, 16) for one in asked)
    asked.clear()
    assert cli(*words, "--arch", "gpt", "--preset", "char", "--num-heads", 3, "--lengths", "64").code == 0
    assert asked[0]["heads"] == 3 and asked[0]["length"] == 64


def test_a_run_gives_its_attention(cli: Cli, asked: list[dict[str, Any]], random_run: Path) -> None:
    done = cli("bench", "attention", "--run", random_run, "--device", "cpu")
    assert done.code == 0 and [(one["kind"], one["length"], one["heads"], one["head_dim"]) for one in asked] == [
        ("full", 16, 2, 4)
    ]


def test_peers_are_rows_beside_the_kinds(cli: Cli, asked: list[dict[str, Any]]) -> None:
    pytest.importorskip("transformers")
    done = cli(*SMALL, "--peer", "transformers", "--json")
    kinds = [cell["kind"] for cell in json.loads(done.out)["cells"]]
    assert kinds[:4] == ["full", "dense-masked", "transformers-eager", "transformers-sdpa"]


def test_out_holds_the_report(cli: Cli, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = cli(*SMALL, "--out", out)
    assert done.code == 0 and done.err.splitlines()[-1] == f"wrote {out}"
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
        (["--precision", "int8"], "--precision: found 'int8'"),
        (["--peer", "ctranslate2"], "--peer ctranslate2: not available for attention; available: transformers"),
        (["--run", "x", "--arch", "gpt"], "--run and other model options exclude each other"),
        (["--set", "model.d_model=8"], "unknown kind 'model'"),
        (["--arch", "gpt", "--set", "model.no_such=8"], "no_such"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--head-dim", "0"], "--head-dim: found 0"),
        (["--repeats", "-1"], "--repeats: found -1"),
        (["--max-seconds", "nan"], "--max-seconds must be a finite number, found nan"),
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
