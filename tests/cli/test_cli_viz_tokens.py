"""`tformer viz-tokens`: formats, two runs, data, refusals."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tformer
from tests.end_to_end.translate_runs import DECODER, SEQ2SEQ, build_run
from tests.random_runs import random_run
from tests.viz.pages import page_data
from tformer.inside.tokens import segments

Cli = Callable[..., Any]
LETTERS = "abcdefgh \t"
TEXT = "abc fed cab"
MASKED = DECODER.replace("decoder:", "encoder:").replace("{kind: lm, bias: true}", "{kind: masked_lm}")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("decoder"), DECODER)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with another tokenizer: whole words."""
    options = {"letters": "abc fed cab abc", "template": "none", "model": "word", "vocab_size": 50}
    return random_run(tmp_path_factory.mktemp("other") / "runs", DECODER, arch="words", **options)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("seq2seq"), SEQ2SEQ + "objectives: [{kind: seq2seq}]\n")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = MASKED + "objectives: [{kind: masked_lm}]\n"
    return random_run(tmp_path_factory.mktemp("masked") / "runs", recipe, letters=LETTERS)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.src").write_text("abc\nfed cab\n")
    Path("a.trg").write_text("cab\nabc\n")
    Path("abc.txt").write_text("abc abc fed\n" * 20)


def document(cli: Cli, *words: object) -> dict[str, Any]:
    outcome = cli("viz-tokens", *words, "--format", "json")
    assert outcome.code == 0, outcome.err
    return dict(json.loads(outcome.out))


def test_a_text_in_every_format(decoder: Path, cli: Cli) -> None:
    for name, start in (("t.html", b"<!doctype"), ("t.png", b"\x89PNG"), ("t.svg", b"<?xml"), ("t.json", b"{"),
                        ("t.csv", b"run,position,id,token"), ("t.txt", b"test-tiny")):  # fmt: skip
        made = cli("viz-tokens", decoder, "--text", TEXT, "-o", name)
        assert made.code == 0 and made.out == "" and f"wrote {name}" in made.err, made.err
        assert Path(name).read_bytes().startswith(start)
        assert "10 tokens, " in made.err and "calibration error" in made.err
    assert "Loss of each token" in Path("t.svg").read_text() and "Calibration" in Path("t.svg").read_text()
    assert cli("viz-tokens", decoder, "--text", TEXT).code == 0
    page = Path("tokens.html").read_text()
    assert len(page) < 200_000 and "://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "Content-Security-Policy" in page and "Command: tformer" in page


def test_numbers_agree_in_json_csv_the_page_and_the_terminal(decoder: Path, cli: Cli) -> None:
    found = document(cli, decoder, "--text", TEXT, "--top-k", 4)
    [run] = found["runs"]
    assert "".join(token["token"] for token in run["tokens"]) == TEXT and found["segments"] is None
    assert run["tokens"][0]["bits"] is None and run["tokens"][0]["top"] == []
    for token in run["tokens"][1:]:
        assert token["probability"] == pytest.approx(2 ** -token["bits"]) and len(token["top"]) == 4
        assert (token["rank"] == 0) == (token["top"][0][0] == token["token"])
        assert TEXT[token["start"] : token["end"]] == token["token"]
    bits = [token["bits"] for token in run["tokens"][1:]]
    summary = run["summary"]
    assert summary["bits_per_token"] == pytest.approx(np.mean(bits))
    assert summary["bits_per_character"] == pytest.approx(sum(bits) / len(TEXT))
    assert summary["perplexity"] == pytest.approx(2 ** np.mean(bits))
    rows = list(csv.DictReader(io.StringIO(cli("viz-tokens", decoder, "--text", TEXT, "--format", "csv").out)))
    assert [row["bits"] for row in rows[1:]] == list(map(str, bits)) and rows[0]["bits"] == rows[0]["rank"] == ""
    assert cli("viz-tokens", decoder, "--text", TEXT, "--top-k", 4, "-o", "t.html").code == 0
    shown = page_data(Path("t.html").read_text())["runs"][0]
    assert shown["tokens"] == run["tokens"] and shown["hardest"] == run["hardest"]
    assert [each["bits"] for each in run["hardest"]] == sorted(bits, reverse=True)
    lines = cli("viz-tokens", decoder, "--text", TEXT, "--hardest", 2, "--format", "terminal").out.splitlines()
    assert TEXT in lines
    table = lines[lines.index("hardest tokens") + 1 :]
    assert table[0].split()[:3] == ["bits", "rank", "before"]
    assert [float(line.split()[0]) for line in table[1:3]] == [round(value, 2) for value in sorted(bits)[:-3:-1]]


def test_a_terminal_has_each_token_on_the_colour_of_its_loss() -> None:
    from tests.viz.token_reports import token_report
    from tformer.viz.tokens import as_text

    report = token_report(["ab", " c\n", "d"], bits=np.array([np.nan, 0.0, 8.0]))
    drawn = as_text([report], hardest=1, width=80, colour="truecolor")
    assert "ab\x1b[48;2;68;1;84;38;2;255;255;255m c↵\x1b[0m\n\x1b[48;2;253;231;37;38;2;0;0;0md\x1b[0m\n" in drawn
    plain = as_text([token_report(["ab", "\n\n  c", "d"])], hardest=1, width=80, colour="none")
    assert "\nab↵\n↵\n  cd\n" in plain


def test_two_runs_with_different_tokenizers_are_aligned_by_characters(decoder: Path, other: Path, cli: Cli) -> None:
    found = document(cli, decoder, other, "--text", TEXT)
    one, two = found["runs"]
    assert one["name"] != two["name"] and len(one["tokens"]) != len(two["tokens"])
    assert [each["text"] for each in found["segments"]] == ["abc", " fed", " cab"]
    for number, run in enumerate((one, two)):
        for place, segment in enumerate(found["segments"][1:], start=1):
            own = [token["bits"] for token in run["tokens"] if token["segment"] == place]
            assert segment["bits"][number] == pytest.approx(sum(own)) and own
    for name in ("two.html", "two.svg", "two.txt", "two.csv"):
        assert cli("viz-tokens", decoder, other, "--text", TEXT, "-o", name).code == 0
        assert other.name in Path(name).read_text() and decoder.name in Path(name).read_text()


def test_data_has_the_loss_of_evaluate_and_lists_the_hardest_tokens_in_context(decoder: Path, cli: Cli) -> None:
    [run] = document(cli, decoder, "--data", "abc.txt", "--max-examples", 999, "--hardest", 3)["runs"]
    assert run["text"] is None and run["tokens"] is None and len(run["hardest"]) == 3
    evaluated = json.loads(cli("evaluate", decoder, "--data", "abc.txt", "--json").out)
    assert run["summary"]["tokens"] == evaluated["tokens"]
    assert run["summary"]["bits_per_token"] * math.log(2) == pytest.approx(evaluated["loss"], abs=1e-4)
    assert run["summary"]["accuracy"] == pytest.approx(evaluated["accuracy"])
    for each in run["hardest"]:
        shown = each["before"] + each["token"] + each["after"]
        assert shown.replace("<unk>", "\n") in "abc abc fed\n" * 20  # which the vocabulary lacks
    rows = list(csv.reader(io.StringIO(cli("viz-tokens", decoder, "--data", "abc.txt", "--format", "csv").out)))
    assert rows[0][:4] == ["run", "position", "id", "token"] and rows[0][9:11] == ["before", "after"]
    assert len(rows) == 21
    for name in ("d.html", "d.svg", "d.txt"):
        assert cli("viz-tokens", decoder, "--data", "abc.txt", "-o", name).code == 0


def test_pairs_and_masked_texts_are_read_from_files(translator: Path, masked: Path, cli: Cli) -> None:
    [run] = document(cli, translator, "--source", "a.src", "--target", "a.trg")["runs"]
    assert run["summary"]["tokens"] == 8  # six letters and two ends
    [run] = document(cli, masked, "--data", "abc.txt", "--max-examples", 2)["runs"]
    assert run["read"].startswith("2 of ") and run["summary"]["tokens"] > 10


def test_a_translation_is_coloured_given_its_source(translator: Path, cli: Cli) -> None:
    [run] = document(cli, translator, "--text", "abc", "--target", "cab")["runs"]
    assert run["source"] == "abc" and run["text"] == "cab" and len(run["tokens"]) == 5
    found = document(cli, translator, translator, "--text", "abc")
    assert found["runs"][0]["text"] == found["runs"][1]["text"] and found["segments"] is not None


def test_python_returns_what_the_command_prints(decoder: Path, other: Path, cli: Cli) -> None:
    run = tformer.load(decoder)
    report = run.tokens(TEXT, top_k=4)
    [printed] = document(cli, decoder, "--text", TEXT, "--top-k", 4)["runs"]
    assert report.summary == printed["summary"]
    assert report.hardest(20) == [each["position"] for each in printed["hardest"]]
    assert report.bits[1:].tolist() == [token["bits"] for token in printed["tokens"][1:]]
    found, _ = segments(report, tformer.load(other).tokens(TEXT))
    assert len(found) == 3
    assert run.tokens(data="abc.txt", max_examples=1).text is None
    with pytest.raises(tformer.InputError, match="top_k must be 1 to 100, found 0"):
        run.tokens(TEXT, top_k=0)
    with pytest.raises(tformer.InputError, match="tokens takes no hardest"):
        run.tokens(TEXT, hardest=3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("RUN", "--text", "abc", "--top-k", "0"), "--top-k must be 1 to 100, found 0"),
        (("RUN", "--text", "abc", "--top-k", "101"), "--top-k must be 1 to 100, found 101"),
        (("RUN", "--text", "abc", "--hardest", "0"), "--hardest must be at least 1, found 0"),
        (("RUN", "--max-examples", "0"), "--max-examples must be at least 1"),
        (("RUN", "--data", "missing.txt"), "missing.txt"),
        (("RUN", "--data", "abc.txt", "--label-column", "x"), "--label-column has no meaning here"),
        (("RUN", "--source", "a.src", "--target", "a.trg"), "--source has no meaning here"),
        (("RUN", "--text", "a"), "there is nothing to predict"),
        (("RUN", "--text", "abc", "--target", "abc"), "is no encoder-decoder"),
        (("RUN", "--text", "abc", "--prefix", "x: "), "is no encoder-decoder"),
        (("TRANSLATOR", "--text", "abc" * 9), "the source has 29 tokens, but the model reads at most 16"),
        (("TRANSLATOR", "--text", "abc", "--target", "abc" * 9), "the target has 29 tokens"),
        (("MASKED", "--text", "abc" * 9), "the text has 29 tokens, but the model reads at most 16"),
        (("TRANSLATOR", "--source", "a.src", "--target", "abc.txt"), "lines"),
        (("RUN", "TRANSLATOR", "--data", "abc.txt"), "abc.txt: plain text is one side of pairs"),
        (("RUN", "missing", "--text", "abc"), "missing does not exist"),
        (("RUN", "--text", "abc", "--checkpoint", "step-7"), "step-7"),
        (("RUN", "--text", "abc", "--format", "pdf"), "--format pdf: unknown"),
        (("RUN", "--text", "abc", "-o", "tokens.pdf"), "tokens.pdf has the suffix .pdf"),
        (("RUN", "--data", "abc.txt", "-o", "abc.txt"), "would replace"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    words: tuple[str, ...], message: str, decoder: Path, translator: Path, masked: Path, cli: Cli
) -> None:
    places = {"RUN": decoder, "TRANSLATOR": translator, "MASKED": masked}
    before = set(Path().iterdir())
    outcome = cli("viz-tokens", *(places.get(word, word) for word in words))
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.code == 2 and outcome.out == "" and len(errors) == 1 and message in errors[0], outcome.err
    assert set(Path().iterdir()) == before
