"""`tformer bench train|generate|translate` with the measuring replaced: what is asked, what is shown, every mistake."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
SMALL = ("--arch", "gpt", "--preset", "char", "--precision", "fp32", "--device", "cpu", "--length", 8)
CEILINGS = {"flops_per_second": {"fp32": 1e9}, "product": [1, 2, 3], "bytes_per_second": 1e9, "data_sheet": None}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every contender who would have had a process; int8 is twice as fast as fp32, and bf16 does not work."""
    from tformer.bench import speed

    requests: list[dict[str, Any]] = []

    def limits(measurement: str, arguments: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        cost = {"flops": 5e8, "bytes_read": 1e8, "steps": 1, "examples": 2, "memory": {}}
        return {"ceilings": CEILINGS, "costs": [cost] * len(arguments["bench"]["entries"])}

    def row(contender: Mapping[str, Any]) -> dict[str, Any]:
        requests.append(dict(contender))
        precision = contender["entry"][1]
        if precision == "bf16":
            return {"failed": "no bf16"}
        seconds = 1.0 if precision == "fp32" else 2.0
        timing = {"seconds": seconds, "minimum": seconds, "spread": 0.0, "repeats": 3}
        return {**timing, "tokens": 100, "memory": {"peak_rss_bytes": 2**20}}

    monkeypatch.setattr(speed, "run_isolated", limits)
    monkeypatch.setattr(speed, "race", lambda _, contenders, **__: [row(one) for one in contenders])
    return requests


def test_a_table_ceilings_and_what_binds(
    cli: Cli, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tformer.decoding.inference.can_quantize", lambda *_: True)
    words = ("--arch", "gpt", "--preset", "char", "--precision", "fp32", "--device", "cpu", "--batch-size", 2)
    done = cli("bench", "generate", *words, "--quantize", "none,int8")
    assert done.code == 0
    assert "| tformer fp32 | 2 | 100 |" in done.out and "| tformer int8 | 2 | 50 |" in done.out
    assert "2.00 x" in done.out
    assert "ceilings, batch 2: fp32 1 GFLOP/s" in done.out
    assert "tformer fp32, batch 2: 50% of the matrix-product rate" in done.out and "bound by arithmetic" in done.out
    assert "tformer fp32, batch 2: 100 tokens/s" in done.err


def test_json_is_one_document(cli: Cli, asked: list[dict[str, Any]]) -> None:
    done = cli("bench", "train", *SMALL, "--batch-size", "2,4", "--json")
    found = json.loads(done.out)
    assert done.code == 0
    assert found.keys() == {"command", "environment", "settings", "ceilings", "rows", "best"}
    needed = {"tokens_per_second", "step_ms", "peak_rss_bytes", "share_of_peak", "name", "precision", "batch_size"}
    assert len(found["rows"]) == 2 and all(needed <= row.keys() for row in found["rows"])
    assert found["settings"]["batch_sizes"] == [2, 4]


def test_every_option_reaches_the_measurement(cli: Cli, asked: list[dict[str, Any]]) -> None:
    words = ("--compile", "--repeats", 4, "--max-seconds", 9, "--threads", 1, "--set", "model.decoder.num_layers=1")
    assert cli("bench", "train", *SMALL, "--batch-size", 3, *words).code == 0
    bench = asked[0]["bench"]
    assert (bench["compile"], bench["repeats"], bench["max_seconds"], bench["threads"]) == (True, 4, 9.0, 1)
    assert bench["length"] == 8 and asked[0]["batch_size"] == 3 and "num_layers: 1" in bench["recipe_yaml"]


def test_generate_and_translate_have_their_own_options(
    cli: Cli, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tformer.decoding.inference.can_quantize", lambda *_: True)
    common = ("--precision", "fp32", "--device", "cpu")
    words = ("--arch", "gpt", "--preset", "char", "--prompt-length", 4, "--new-tokens", 6, "--quantize", "none,int8")
    assert cli("bench", "generate", *common, *words).code == 0
    assert asked[0]["bench"]["options"] == {"new_tokens": 6} and asked[0]["bench"]["length"] == 4
    assert asked[1]["entry"][:2] == ("tformer", "int8")
    asked.clear()
    assert cli("bench", "translate", *common, "--preset", "tiny", "--sentences", 12, "--batch-size", "8,16").code == 0
    options = {"sentences": 12, "new_tokens": 30, "beam_size": 4}
    assert asked[0]["bench"]["options"] == options and asked[0]["bench"]["model"] == "transformer/tiny"


@pytest.mark.parametrize("command", ["generate", "translate"])
def test_8_bits_are_refused_in_a_line_where_there_are_none(
    cli: Cli, asked: list[dict[str, Any]], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tformer.decoding.inference.can_quantize", lambda *_: False)
    done = cli("bench", command, "--device", "cpu", "--precision", "fp32", "--quantize", "none,int8")
    assert done.code == 2 and done.out == "" and asked == []
    assert done.err.startswith("error: --quantize int8 needs a CPU") and len(done.err.splitlines()) <= 2


def test_out_holds_the_report(cli: Cli, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    done = cli("bench", "train", *SMALL, "--out", out)
    assert done.code == 0 and done.err.splitlines()[-1] == f"wrote {out}"
    text = out.read_text()
    assert "tformer" in text.splitlines()[0] and "| tformer fp32 |" in text


def test_a_run_gives_its_sizes(cli: Cli, asked: list[dict[str, Any]], random_run: Path) -> None:
    common = ("--precision", "fp32", "--device", "cpu", "--run", random_run)
    assert cli("bench", "train", *common).code == 0
    assert "d_model: 8\n" in asked[0]["bench"]["recipe_yaml"] and asked[0]["bench"]["model"] == str(random_run)


def test_when_nothing_could_be_measured_the_command_fails(cli: Cli, asked: list[dict[str, Any]]) -> None:
    done = cli("bench", "train", "--arch", "gpt", "--preset", "char", "--precision", "bf16", "--device", "cpu")
    assert done.code == 1 and "no bf16" in done.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "--batch-size", "2,many"], "--batch-size: found 'many'"),
        (["train", "--batch-size", ","], "--batch-size: found none"),
        (["train", "--batch-size", "65537"], "--batch-size: found '65537', expected whole numbers from 1 to 65,536"),
        (["train", "--batch-size", ",".join(map(str, range(1, 34)))], "--batch-size: found 33 sizes, expected 32"),
        (["generate", "--quantize", ""], "--quantize: found '', expected a word"),
        (["train", "--repeats", "0"], "--repeats must be 1 to 1,000,000,000, found 0"),
        (["train", "--threads", "99999999999999"], "--threads must be 1 to 4,096, found 99999999999999"),
        (["train", "--max-seconds", "inf"], "--max-seconds must be above 0 and at most 1,000,000,000, found inf"),
        (["train", "--length", "-1"], "--length must be 1 to 1,000,000,000, found -1"),
        (["train", "--preset", "char", "--length", "999"], "--length: found 999"),
        (["train", "--precision", "int4"], "'--precision': 'int4' is not one of"),
        (["train", "--device", "tpu"], "unknown device 'tpu'"),
        (["generate", "--quantize", "int3"], "--quantize: found 'int3'"),
        (["generate", "--new-tokens", "0"], "--new-tokens must be 1 to 1,000,000,000, found 0"),
        (["generate", "--preset", "char", "--new-tokens", "400"], "the model reads 256"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(
    cli: Cli, asked: list[dict[str, Any]], words: list[str], told: str
) -> None:
    done = cli("bench", *words)
    assert done.code == 2 and done.out == "" and asked == []
    assert done.err.startswith("error: ") and told in done.err and len(done.err.splitlines()) <= 2


def test_a_flag_with_a_value_points_to_the_help_of_its_command(cli: Cli) -> None:
    done = cli("bench", "train", "--compile=2")
    assert done.code == 2 and "'--compile' does not take a value" in done.err
    assert done.err.splitlines()[-1] == "hint: see 'tformer bench train --help'"
    assert cli("train", "--json=1").err.splitlines()[-1] == "hint: see 'tformer train --help'"


def test_a_folder_where_the_file_should_be_is_refused(cli: Cli, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    done = cli("bench", "train", *SMALL, "--out", tmp_path)
    assert done.code == 2 and asked == [] and "is a folder" in done.err
