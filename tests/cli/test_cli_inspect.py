"""`tformer inspect`: what it prints, at any width, what it refuses, and where it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.translate_runs import SEQ2SEQ, build_run
from tformer.support.formatting import amount
from tformer.workflows.inspect.text import report_lines, trace_lines

Cli = Callable[..., Any]


def test_a_recipe_needs_no_tokenizer(cli: Cli) -> None:
    outcome = cli("inspect", "--arch", "gpt", "--preset", "small", "--depth", 1)
    assert outcome.code == 0 and "124,439,808" in outcome.out and outcome.err == ""
    assert "tied, counted once: heads.lm.weight is embedding.weight" in outcome.out
    assert not any("qkv" in line for line in outcome.out.splitlines())


def test_the_tree_names_its_layers_and_says_what_is_tied(cli: Cli) -> None:
    lines = cli("inspect", "--arch", "gpt", "--preset", "small").out.splitlines()
    parts = [line.strip("│├└ ").split() for line in lines]
    assert ["layers"] in [part[:1] for part in parts] and ["blocks"] not in [part[:1] for part in parts]
    (head,) = [part for part in parts if part[:1] == ["lm"]]
    (table,) = [part for part in parts if part[:1] == ["embedding"]]
    assert "tied" in head and "tied" not in table


def test_json_is_one_document(cli: Cli) -> None:
    found = json.loads(cli("inspect", "--arch", "gpt", "--preset", "small", "--json").out)
    assert found["parameters"] == 124_439_808 and found["tree"][0]["name"] == "model"
    assert found["cache"]["bytes_per_token"] * 1024 == found["cache"]["bytes_at_length"]
    shapes = json.loads(cli("inspect", "--arch", "gpt", "--preset", "small", "--shapes", "--json").out)
    logits = [step for part in shapes["sections"] for step in part["steps"] if step["name"] == "logits"]
    assert [(step["shape"], step["symbols"]) for step in logits] == [([1, 8, 50257], ["B", "T", "V"])]


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("preset", ["gpt/small", "transformer/tiny", "vit/mnist", "electra/tiny", "gpt/gpt3-175b"])
def test_everything_fits_into_a_terminal(preset: str, width: int) -> None:
    from tformer.workflows.inspect.report import report_on
    from tformer.workflows.inspect.subject import InspectRequest, read_subject
    from tformer.workflows.inspect.trace import empty_inputs, trace_shapes

    arch, name = preset.split("/")
    depth = 2 if "175b" in name else None
    sets = ["model.decoder.num_layers=2"] if "175b" in name else []
    subject = read_subject(InspectRequest(arch=arch, preset=name, sets=sets))
    length = subject.source_length if arch == "vit" else 8
    lines = list(report_lines(report_on(subject), width=width, depth=depth))
    inputs = empty_inputs(subject.model, source_length=length, target_length=6)
    lines += trace_lines(trace_shapes(subject.model, inputs), width=width)
    assert max(map(len, lines)) <= width, max(lines, key=len)


def test_amounts_have_three_digits() -> None:
    assert [amount(value) for value in (0, 7, 999, 999.6, 1234, 5.6e9)] == ["0", "7", "999", "1 k", "1.23 k", "5.6 G"]
    assert amount(1_430_000_000, "B") == "1.43 GB" and amount(12, "B") == "12 B"


def test_files_by_suffix(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("inspect", "--arch", "gpt", "--preset", "tiny", "-o", tmp_path / "x.txt")
    assert outcome.code == 0 and outcome.out == "" and (tmp_path / "x.txt").read_text().startswith("gpt/tiny: ")
    assert cli("inspect", "--arch", "gpt", "--preset", "tiny", "-o", tmp_path / "x.json").code == 0
    assert json.loads((tmp_path / "x.json").read_text())["arch"] == "gpt"


def test_an_unwritable_file_is_exit_3(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = cli("inspect", "--arch", "gpt", "--preset", "tiny", "-o", tmp_path / "file" / "x.txt")
    assert outcome.code in (2, 3) and "Traceback" not in outcome.err
    outcome = cli("inspect", "--arch", "gpt", "--preset", "tiny", "-o", "/proc/x.txt")
    assert outcome.code == 3 and outcome.err.startswith("error: "), outcome.err


def test_sizes_that_follow_another_width_are_noted(cli: Cli, random_run: Path) -> None:
    for model in (("--arch", "gpt", "--preset", "tiny"), (random_run,)):
        found = json.loads(cli("inspect", *model, "--set", "model.d_model=64", "--json").out)
        assert any("follows d_model" in note and "feedforward.d_ff" in note for note in found["notes"]), found["notes"]


def test_a_run_is_read_with_its_own_vocabulary(cli: Cli, random_run: Path) -> None:
    outcome = cli("inspect", random_run, "--json")
    found = json.loads(outcome.out)
    assert found["sizes"]["vocab_size"] == 16 and not found["notes"], found["sizes"]
    longer = json.loads(cli("inspect", random_run, "--set", "model.decoder.num_layers=3", "--json").out)
    assert longer["parameters"] > found["parameters"]


def test_shapes_of_a_text(cli: Cli, random_run: Path) -> None:
    outcome = cli("inspect", random_run, "--shapes", "--text", "abc fed")
    assert outcome.code == 0 and "1×2×6×6" in outcome.out, outcome.out + outcome.err
    assert "input   a b c ␣ f e\nlabels  b c ␣ f e d\n" in outcome.out, "six inputs, each with its label"


def test_shapes_of_a_translator_show_its_own_translation(cli: Cli, tmp_path: Path) -> None:
    run = build_run(tmp_path, SEQ2SEQ + "objectives: [{kind: seq2seq}]\n")
    done = cli("inspect", run, "--shapes", "--text", "abc", "--json")
    written = json.loads(cli("generate", run, "--prompt", "abc", "--json").out)["text"]
    found = json.loads(done.out)["example"]["original"]["target"]
    assert found["tokens"][:-1] == list(written) != list("abc"), found
    assert "the target is the model's own translation" in done.err
    given = json.loads(cli("inspect", run, "--shapes", "--text", "abc", "--target", "ba", "--json").out)
    assert given["example"]["original"]["target"]["tokens"][:-1] == ["b", "a"]


def test_a_batch_of_an_example_takes_no_memory(cli: Cli, random_run: Path) -> None:
    done = cli("inspect", random_run, "--shapes", "--text", "fed", "--batch-size", 10**9, "--json")
    steps = {step["id"]: step for part in json.loads(done.out)["sections"] for step in part["steps"]}
    assert done.code == 0 and steps["decoder.embedding.tokens"]["shape"] == [10**9, 2, 8]


def test_a_page_of_shapes_holds_the_example_and_the_trace(cli: Cli, random_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "shapes.html"
    outcome = cli("inspect", random_run, "--shapes", "--text", "abc", "-o", page)
    assert outcome.code == 0 and outcome.out == "" and f"wrote {page}" in outcome.err, outcome.err
    content = page.read_text()
    assert content.startswith("<!doctype html>") and '"id":"decoder.0.self_attention.scores"' in content
    assert '"predicts"' not in content and "the next token at every position" in content
    assert "http" not in content.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_shapes_as_json_say_what_goes_into_each_tensor(cli: Cli, random_run: Path) -> None:
    document = json.loads(cli("inspect", random_run, "--shapes", "--text", "abc", "--json").out)
    steps = {step["id"]: step for part in document["sections"] for step in part["steps"]}
    assert steps["decoder.0.self_attention.weights"]["inputs"] == ["decoder.0.self_attention.scores"]
    [table] = steps["decoder.embedding.tokens"]["parameters"]
    assert table["name"] == "embedding.weight" and table["tied"] == ["heads.lm.weight"]
    assert document["example"]["labels"]["tokens"] == ["b", "c"]


def test_shapes_follow_both_models_of_electra(cli: Cli) -> None:
    words = ["inspect", "--arch", "electra", "--preset", "tiny", "--shapes"]
    told = cli(*words).out
    assert told.index("GENERATOR") < told.index("head masked_lm") < told.index("DISCRIMINATOR") < told.index("replaced")
    document = json.loads(cli(*words, "--json").out)
    logits = [
        [step["shape"] for part in trace["sections"] for step in part["steps"] if step["name"] == "logits"]
        for trace in (document, document["generator"])
    ]
    assert logits == [[[1, 8]], [[1, 8, 8000]]]
    tables = [trace["sections"][0]["steps"][1]["parameters"][0]["tied"] for trace in (document, document["generator"])]
    assert "generator.embedding.weight" in tables[0] and "discriminator.embedding.weight" in tables[1]


def test_the_legend_has_the_sizes(cli: Cli) -> None:
    told = cli("inspect", "--arch", "llama", "--preset", "tiny", "--shapes").out
    for entry in ("B = 1 examples", "T = 8 positions", "D = 192 d_model", "H = 6 heads", "K = 2 key/value heads"):
        assert entry in told, told[:300]


def test_verify_says_ok_or_what_is_wrong(cli: Cli, make_run: Callable[..., Path]) -> None:
    run = make_run()
    outcome = cli("inspect", run, "--verify")
    assert outcome.code == 0 and outcome.out.count(": ok (") == 1 and outcome.err == ""
    [weights] = run.glob("checkpoints/*/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    outcome = cli("inspect", run, "--verify")
    assert outcome.code == 2 and "model.safetensors is damaged" in outcome.out
    assert outcome.err == f"error: {weights.parent}: found 1 problem, expected none\n"
    [verdict] = json.loads(cli("inspect", run, "--verify", "--json").out)
    assert not verdict["ok"] and len(verdict["problems"]) == 1


def test_the_memory_report_speaks_of_what_is_kept_not_of_a_library(cli: Callable[..., Any]) -> None:
    shown = cli("inspect", "--arch", "gpt", "--preset", "gpt3-175b", "--device", "cpu").out
    assert "freed, kept for reuse" in shown and "C library" not in shown
