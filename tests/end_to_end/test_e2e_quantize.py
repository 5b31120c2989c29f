"""`--quantize int8` of generate, classify and evaluate, as a user asks for it: close figures, one line of refusal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.end_to_end.labelled_examples import sentences
from tests.end_to_end.translate_runs import LINES, SEQ2SEQ, Cli, Run, documents, refusal
from tformer.decoding.inference import QUANTIZE, can_quantize
from tformer.support.device import device_name
from tformer.support.options import Quantize

Runs = Callable[[str], Path]

in_8_bits = pytest.mark.skipif(not can_quantize("int8", torch.device("cpu")), reason="no 8-bit products here")
pytestmark = in_8_bits


def evaluated(cli: Cli, *arguments: object, kind: str = "int8") -> tuple[dict[str, Any], dict[str, Any]]:
    """The report of the weights as they are, and quantized."""
    plain, small = ([*arguments, "--json", "--quantize", each] for each in ("none", kind))
    [before], [after] = (documents(cli("evaluate", *words)) for words in (plain, small))
    return before, after


def test_the_choices_are_those_that_there_are() -> None:
    assert get_args(get_args(Quantize)[0]) == QUANTIZE


@pytest.mark.parametrize("kind", ["single", "multi", "score", "image", "masked", "sentences", "electra"])
def test_figures_of_encoders_in_8_bits_are_close_to_those_in_fp32(kind: str, cli: Cli, encoder_run: Runs) -> None:
    before, after = evaluated(cli, encoder_run(kind))
    assert after["loss"] == pytest.approx(before["loss"], rel=0.05, abs=0.02)
    assert after["loss"] != before["loss"] and after["examples"] == before["examples"]
    for name in ("accuracy", "f1_macro", "pearson"):
        if name in before:
            assert after[name] == pytest.approx(before[name], abs=0.05), name


def test_pseudo_perplexity_in_8_bits(cli: Cli, encoder_run: Runs) -> None:
    before, after = evaluated(cli, encoder_run("masked"), "--pseudo-perplexity", "--max-tokens", 60)
    assert after["pseudo_loss"] == pytest.approx(before["pseudo_loss"], rel=0.05, abs=0.02)


def test_figures_of_a_decoder_in_8_bits(cli: Cli, decoder: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc fed\tcab gab\n" * 30)
    for options in ([], ["--stride", 5], ["--seq-len", 12]):
        before, after = evaluated(cli, decoder, "--data", text, *options)
        assert after["loss"] == pytest.approx(before["loss"], rel=0.05) and after["tokens"] == before["tokens"]


def test_figures_of_pairs_in_8_bits(cli: Cli, random_run: Callable[..., Run], tmp_path: Path) -> None:
    run = random_run(SEQ2SEQ + "objectives: [{kind: seq2seq}]\n")
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_text("abc\nhgf\nde fa\n")
    target.write_text("cba\nfgh\naf ed\n")
    before, after = evaluated(cli, run, "--source", source, "--target", target)
    assert after["loss"] == pytest.approx(before["loss"], rel=0.05) and "bleu" in after
    before, after = evaluated(cli, run, "--source", source, "--target", target, "--score")
    assert after["logprob"] == pytest.approx(before["logprob"], rel=0.05)


def test_4_bits_evaluate_classify_generate_and_translate(
    cli: Cli, decoder: Run, translator: Run, encoder_run: Runs, lines: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc fed\tcab gab\n" * 30)
    before, after = evaluated(cli, decoder, "--data", text, kind="int4")
    assert after["loss"] == pytest.approx(before["loss"], rel=0.2) and after["loss"] != before["loss"]
    for run in (decoder, translator):
        words = ["generate", run, "--input", lines, "--greedy", "--quantize", "int4"]
        outcome = cli(*words)
        assert outcome.code == 0 and len(outcome.out.splitlines()) == len(LINES), outcome.err
        assert cli(*words, "--batch-size", 2).out == outcome.out
    [answer] = documents(cli("classify", encoder_run("single"), "--text", "the owl", "--json", "--quantize", "int4"))
    assert sum(answer["probabilities"].values()) == pytest.approx(1.0)


def test_without_it_the_figures_are_those_of_the_weights_as_they_are(cli: Cli, decoder: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc fed\n" * 30)
    plain, none = (
        documents(cli("evaluate", decoder, "--data", text, "--json", *more))[0] for more in ([], ["--quantize", "none"])
    )
    assert {**plain, "tokens_per_second": 0} == {**none, "tokens_per_second": 0}


def test_labels_in_8_bits_are_those_in_fp32(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{text}\n" for _, text in sentences(50, 11)))
    run = encoder_run("single")
    before, after = (
        documents(cli("classify", run, "--input", texts, "--json", "--quantize", kind)) for kind in ("none", "int8")
    )
    assert [one["label"] for one in before] == [one["label"] for one in after]
    for one, other in zip(before, after, strict=True):
        assert other["probabilities"] == pytest.approx(one["probabilities"], abs=0.05)
    [alone] = documents(cli("classify", run, "--text", texts.read_text().splitlines()[3], "--json", "--quantize=int8"))
    assert alone["probabilities"] == pytest.approx(after[3]["probabilities"], abs=1e-3)


def test_a_decoder_and_a_translator_write_in_8_bits(cli: Cli, decoder: Run, translator: Run, lines: Path) -> None:
    for run in (decoder, translator):
        words = ["generate", run, "--input", lines, "--greedy", "--quantize", "int8"]
        outcome = cli(*words)
        assert outcome.code == 0, outcome.err
        assert len(outcome.out.splitlines()) == len(LINES)
        assert cli(*words, "--batch-size", 2).out == outcome.out
    outcome = cli("generate", translator, "--input", lines, "--beam-size", 3, "--json", "--quantize", "int8")
    assert len(documents(outcome)) == len(LINES)


def test_an_ensemble_in_8_bits(cli: Cli, random_run: Callable[..., Run], lines: Path) -> None:
    runs = [random_run(seed=seed) for seed in (1, 2)]
    outcome = cli("generate", "--ensemble", *runs, "--input", lines, "--quantize", "int8")
    assert outcome.code == 0 and len(outcome.out.splitlines()) == len(LINES), outcome.err


def test_masks_are_filled_in_8_bits(cli: Cli, encoder_run: Runs) -> None:
    words = ["generate", encoder_run("masked"), "--prompt", "the [MASK] and the owl", "--top-k", 3, "--json"]
    before, after = (documents(cli(*words, "--quantize", kind)) for kind in ("none", "int8"))
    assert json.dumps(after) != json.dumps(before) and len(after) == len(before)


def test_weights_on_disk_stay_as_trained(cli: Cli, decoder: Run) -> None:
    def digests() -> dict[Path, str]:
        files = [path for path in decoder.rglob("*") if path.is_file()]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = digests()
    assert cli("generate", decoder, "--prompt", "a", "--quantize", "int8").code == 0
    assert digests() == before


@pytest.mark.parametrize(
    "words", [("generate", "--prompt", "a"), ("classify", "--text", "a"), ("evaluate", "--data", "none.txt")]
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(cli: Cli, words: tuple[str, ...]) -> None:
    command, *rest = words
    message = refusal(cli(command, "no-such-run", *rest, "--quantize", "int2"))
    assert message == "error: Invalid value for '--quantize': 'int2' is not one of 'none', 'int8', 'int4'."


def test_a_processor_without_8_bit_products_is_told_of(cli: Cli, decoder: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tformer.decoding.inference.can_quantize", lambda *_: False)
    for kind in QUANTIZE[1:]:
        message = refusal(cli("generate", decoder, "--prompt", "a", "--device", "cpu", "--quantize", kind))
        assert message.startswith(f"error: --quantize {kind} needs a CPU")
        assert message.splitlines()[0].endswith(f"found {device_name(torch.device('cpu'))}")
        assert "a C compiler for tformer's kernels" in message


@pytest.mark.parametrize("command", ["generate", "classify", "evaluate"])
def test_the_help_says_what_it_does(cli: Cli, command: str) -> None:
    shown = " ".join(cli(command, "--help-all").out.split())
    assert "--quantize" in shown and "multiply weights in 8 or 4 bits with 8-bit inputs" in shown


def test_commands_say_when_quantizing_does_not_pay(
    cli: Cli, encoder_run: Runs, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tformer.decoding.inference._seconds_of_products", lambda *_: (1.0, 3.0))
    for words in (
        ("classify", encoder_run("single"), "--text", "a saw"),
        ("evaluate", encoder_run("single")),
        ("generate", decoder, "--prompt", "a"),
    ):
        outcome = cli(*words, "--quantize", "int8", "--device", "cpu")
        assert outcome.code == 0, outcome.err
        assert "--quantize int8 does not pay here: products of this model take 3.0 times as long" in outcome.err
