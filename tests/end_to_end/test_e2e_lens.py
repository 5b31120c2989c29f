"""`lens` as a user runs it, of every kind of model; and `Run.lens`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tformer
from tests.quick import first_is_quick
from tests.viz.pages import page_data
from tformer.support.errors import InputError

Cli = Callable[..., Any]


def show(cli: Cli, run: Path, *arguments: object) -> Any:
    outcome = cli("lens", run, *arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def document(cli: Cli, run: Path, *arguments: object) -> dict[str, Any]:
    return json.loads(show(cli, run, *arguments, "--format", "json").out)


@first_is_quick(
    ("suffix", "start"),
    [
        ("html", b"<!doctype"),
        ("png", b"\x89PNG"),
        ("svg", b"<?xml"),
        ("csv", b"row,position"),
        ("txt", b"Logit lens of"),
        ("json", b'{"model"'),
    ],
    quick=2,
)
def test_every_format(suffix: str, start: bytes, decoder: Path, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / f"lens.{suffix}"
    outcome = show(cli, decoder, "--text", "fed cab", "-o", path)
    assert outcome.out == "" and f"wrote {path}" in outcome.err and path.read_bytes().startswith(start)


@pytest.mark.parametrize("suffix", ["png", "svg", "csv", "txt"])
def test_parts_in_every_format(suffix: str, decoder: Path, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / f"parts.{suffix}"
    show(cli, decoder, "--text", "fed cab", "--view", "parts", "--target-token", "a", "--against", "b", "-o", path)
    assert path.stat().st_size > 200
    if suffix == "txt":
        assert "logit of a minus that of b" in path.read_text(encoding="utf-8")


def test_the_numbers_of_a_decoder_are_those_of_its_logits(decoder: Path, cli: Cli) -> None:
    found, run = document(cli, decoder, "--text", "fed cab"), tformer.load(decoder)
    ids = torch.tensor([run.encode("fed cab")])
    with torch.no_grad():
        logits = run.model(input_ids=ids).logits[0]
    assert found["tokens"] == list("fed cab") and found["targets"][:-1] == list("ed cab")
    probabilities = logits.softmax(-1)[range(6), ids[0, 1:]]
    np.testing.assert_allclose(found["probability"][-1][:-1], probabilities, atol=1e-6)
    np.testing.assert_allclose(found["parts"]["logits"][:-1], logits[range(6), ids[0, 1:]], atol=1e-4)
    np.testing.assert_allclose(np.sum(found["parts"]["values"], 1), found["parts"]["logits"], atol=1e-4)


def test_a_target_token_is_followed_at_chosen_positions(decoder: Path, cli: Cli) -> None:
    found = document(cli, decoder, "--text", "fed cab", "--target-token", "h", "--positions", "0,2-3", "--top-k", 2)
    assert found["targets"] == ["h"] * 3 and found["positions"] == [0, 2, 3]
    assert np.array(found["top"]).shape[1:] == (3, 2)
    shown = show(cli, decoder, "--text", "fed cab", "--positions", "0,2", "--format", "terminal").out
    assert "position 0" in shown and "position 2" in shown and "position 6" not in shown


def test_a_decoder_continues_its_text_first(decoder: Path, cli: Cli) -> None:
    outcome = show(cli, decoder, "--text", "abc", "--max-new-tokens", 3, "--format", "json")
    assert len(json.loads(outcome.out)["tokens"]) > 3 and "generated greedily" in outcome.err


def test_both_stacks_of_a_translator(translator: Path, cli: Cli) -> None:
    found = document(cli, translator, "--text", "fed", "--target", "abc")
    assert found["tokens"] == ["[START]", *"abc"] and found["targets"][:-1] == list("abc")
    assert any(name.startswith("L0C") for name in found["parts"]["names"])
    encoder = document(cli, translator, "--text", "fed", "--target", "abc", "--stack", "encoder")
    assert encoder["parts"].keys() == {"reason"} and encoder["stack"] == "encoder"
    assert encoder["probability"][-1] == pytest.approx(found["probability"][-1], abs=1e-5)
    assert "own translation" in show(cli, translator, "--text", "fed cab", "--format", "csv").err


def test_a_masked_language_model_at_each_mask(encoder_run: Callable[[str], Path], cli: Cli) -> None:
    run = encoder_run("masked")
    found = document(cli, run, "--text", "the [MASK] and the <mask>")
    assert found["positions"] == [2, 5] and set(found["tokens"]) == {"[MASK]"}
    filled = tformer.load(run).fill_masks("the [MASK] and the [MASK]")
    for mask, candidates in enumerate(filled):
        place = found["top"][-1][mask].index(candidates[0].token)
        assert found["top_probabilities"][-1][mask][place] == pytest.approx(candidates[0].probability, abs=1e-5)


@pytest.mark.parametrize("kind", ["single", "multi", "image"])
def test_a_classifier_answers_once_after_each_layer(kind: str, encoder_run: Callable[[str], Path], cli: Cli) -> None:
    run = encoder_run(kind)
    image = next((run.parent / "data").rglob("*.png"), None) if kind == "image" else None
    given = ("--image", image) if image is not None else ("--text", "the saw")
    found = document(cli, run, *given)
    answer = tformer.load(run).classify(image if image is not None else "the saw")
    [top], [shares] = found["top"][-1], found["top_probabilities"][-1]
    for label, share in zip(top, shares, strict=True):
        assert share == pytest.approx(answer.probabilities[label], abs=1e-5)
    assert found["rows"] == ["input", "0"] and found["tokens"] == ["answer"]
    assert document(cli, run, *given, "--target-token", top[1])["targets"] == [top[1]]
    show(cli, run, *given, "--format", "terminal")
    assert show(cli, run, *given, "--format", "svg", "-o", "-").out.startswith("<?xml")


FOLDERS = [("gpt2", "ab"), ("bert", "[MASK]"), ("classifier", "a"), ("t5", "a"), ("bart", "a")]


@first_is_quick(("name", "text"), FOLDERS)
def test_folders_of_hugging_face(name: str, text: str, folders: Path, cli: Cli) -> None:
    found = document(cli, folders / name, "--text", text)
    assert max(found["kl"][-1]) == 0
    np.testing.assert_allclose(np.sum(found["parts"]["values"], 1), found["parts"]["logits"], atol=1e-4)


def test_a_tuned_lens_is_trained_saved_in_the_run_and_read_again(
    random_run: Callable[..., Path], text_file: Path, cli: Cli, tmp_path: Path
) -> None:
    from tests.end_to_end.translate_runs import DECODER

    run = random_run(DECODER, letters="abcdefghijklmnopqrstuvwxyz \n")
    page = tmp_path / "tuned.html"
    outcome = show(cli, run, "--text", "the cat", "--tuned", text_file, "--steps", 40, "-o", page)
    saved = run / "tuned-lens-step-00000003.safetensors"
    assert saved.is_file() and f"saved the tuned lens to {saved}" in outcome.err and "KL" in outcome.err
    data = page_data(page.read_text(encoding="utf-8"))
    assert data["lenses"] == ["tuned", "logit"] and np.mean(data["heldOut"][1]) < np.mean(data["heldOut"][0])
    again = document(cli, run, "--text", "the cat", "--lens", "tuned")
    assert again["kl"] != again["logit_lens"]["kl"]
    assert again["held_out_kl"]["tuned"][0] < again["held_out_kl"]["logit"][0]
    assert "on held-out text" in show(cli, run, "--text", "the cat", "--lens", "tuned", "--format", "terminal").out
    assert cli("inspect", run, "--verify").code == 0
    plain = document(cli, run, "--text", "the cat")
    assert "held_out_kl" not in plain and plain["kl"] == again["logit_lens"]["kl"]


def test_python_returns_the_numbers_of_the_command_as_arrays(decoder: Path, cli: Cli) -> None:
    run, found = tformer.load(decoder), document(cli, decoder, "--text", "fed cab", "--against", "b")
    report = run.lens("fed cab", against="b")
    np.testing.assert_allclose(report.lens.probability, found["probability"], atol=1e-8)
    assert report.top.tolist() == found["top"] and report.targets == found["targets"]
    assert report.parts is not None and [part.name for part in report.parts.parts] == found["parts"]["names"]
    np.testing.assert_allclose(report.parts.values, found["parts"]["values"], atol=1e-8)
    with pytest.raises(InputError, match=r"target_token 'zz'( is not|: 2 tokens)"):
        run.lens("fed", target_token="zz")
    with pytest.raises(InputError, match="lens takes no output"):
        run.lens("fed", output="x.html")


def test_a_row_of_csv_is_a_layer_at_a_position(decoder: Path, cli: Cli) -> None:
    rows = list(csv.DictReader(io.StringIO(show(cli, decoder, "--text", "ab", "--format", "csv").out)))
    assert [(row["row"], row["position"]) for row in rows] == [("input", "0"), ("input", "1"), ("0", "0"), ("0", "1")]
