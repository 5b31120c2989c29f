"""`tformer tokenize`: pieces, offsets, template, batch, decoding, comparison, colours; wrong uses are one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.test_loading_encode import TAGGER, TRANSLATOR, written
from tformer.data.encoding import TextReader
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

Cli = Callable[..., Any]
TEXT = "the cat sat on the mat. the dog sat on the log\n"


@cache
def trained(model: str, template: str) -> Tokenizer:
    options = TokenizerOptions(model=model, template=template, vocab_size=350)  # type: ignore[arg-type]
    return train_tokenizer(lambda: iter([TEXT * 30]), options)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("wordpiece", "bert").save(tmp_path_factory.mktemp("tokenizers") / "bert.json")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("byte-bpe", "gpt").save(tmp_path_factory.mktemp("tokenizers") / "gpt.json")


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("translator"), TRANSLATOR, "seq2seq")


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("tagger"), TAGGER, "bert")


def document(cli: Cli, *arguments: object) -> list[dict[str, Any]]:
    outcome = cli("tokenize", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    return list(json.loads(outcome.out)["tokenizers"])


def lines(cli: Cli, *arguments: object) -> list[str]:
    outcome = cli("tokenize", *arguments)
    assert outcome.code == 0, outcome.err
    return list(outcome.out.splitlines())


def test_each_token_has_its_piece_id_and_offsets(cli: Cli, bert: Path) -> None:
    [found] = document(cli, bert, "--text", "the cat")
    [text] = found["texts"]
    assert [token["piece"] for token in text["tokens"] if token["special"]] == ["[CLS]", "[SEP]"]
    for token in text["tokens"]:
        assert trained("wordpiece", "bert").token(token["id"]) == token["piece"]
        if not token["special"]:
            assert "the cat"[token["start"] : token["end"]] == token["piece"].removeprefix("##")
    assert text["decoded"] == "the cat"
    assert found["template"] == "[CLS] A [SEP]" and found["pair_template"] == "[CLS] A [SEP] B [SEP]"
    assert found["special_tokens"]["mask"] == {"token": "[MASK]", "id": 4}


def test_a_batch_is_padded_and_masked(cli: Cli, bert: Path) -> None:
    [found] = document(cli, bert, "--text", "the cat sat", "--text", "dog", "--padding-side", "left")
    ids, mask = found["batch"]["input_ids"], found["batch"]["attention_mask"]
    assert len(ids[0]) == len(ids[1]) and mask[0] == [1] * len(ids[0])
    padded = mask[1].count(0)
    assert padded > 0 and ids[1][:padded] == [0] * padded and mask[1][padded:] == [1] * (len(ids[1]) - padded)


def test_longer_texts_are_cut_and_counted(cli: Cli, bert: Path) -> None:
    for part, kept in (("head", "the cat"), ("tail", "the log")):
        [found] = document(cli, bert, "--text", TEXT, "--max-length", 4, "--truncation", part)
        [text] = found["texts"]
        assert text["decoded"] == kept and len(text["tokens"]) == 4
        assert text["num_cut"] == text["num_tokens"] - 2
    [found] = document(cli, bert, "--text", "cat", "--max-length", 9, "--pad", "max")
    assert len(found["batch"]["input_ids"][0]) == 9


def test_a_pair_has_token_types(cli: Cli, bert: Path) -> None:
    [found] = document(cli, bert, "--text", "the cat", "--text2", "the dog")
    [text] = found["texts"]
    separator = [token["piece"] for token in text["tokens"]].index("[SEP]")
    assert [token["type"] for token in text["tokens"]] == [int(n > separator) for n in range(len(text["tokens"]))]
    assert [token["type"] for token in text["tokens"]] == found["batch"]["token_type_ids"][0]


def test_several_tokenizers_are_compared_by_bytes_per_token(cli: Cli, bert: Path, gpt: Path) -> None:
    found = document(cli, bert, gpt, "--text", "the cat", "--text", "zzz")
    for one, name in zip(found, (("wordpiece", "bert"), ("byte-bpe", "gpt")), strict=True):
        count = sum(len(trained(*name).encode(text)) for text in ("the cat", "zzz"))
        assert one["totals"]["bytes_per_token"] == pytest.approx(10 / count)
    assert (found[0]["totals"]["unknown"], found[1]["totals"]["unknown"]) == (1, 0)
    plain = lines(cli, bert, gpt, "--text", "the cat")
    assert "bytes per token" in plain[-3] and [line.split()[0] for line in plain[-2:]] == [str(bert), str(gpt)]


def test_ids_are_decoded(cli: Cli, gpt: Path) -> None:
    tokenizer = trained("byte-bpe", "gpt")
    ids = tokenizer.encode("the dog")
    [found] = document(cli, gpt, "--ids", str([*ids, 0]))
    assert found["text"] == "the dog" and found["text_with_special"] == "the dog<|endoftext|>"
    assert lines(cli, gpt, "--ids", " ".join(map(str, ids)))[-1] == "the dog"


def test_text_comes_from_a_file_too(cli: Cli, gpt: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("the cat\n\nthe dog\n")
    [found] = document(cli, gpt, "--input", tmp_path / "lines.txt")
    assert [text["text"] for text in found["texts"]] == ["the cat", "", "the dog"]
    assert (
        found["texts"]
        == document(cli, gpt, *(w for t in ("the cat", "", "the dog") for w in ("--text", t)))[0]["texts"]
    )


MUCH = "the cat sat on the mat. " * 10


def test_lines_are_read_one_after_the_other(cli: Cli, gpt: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_bytes(b"the cat\nthe mat\n\xff\n")
    outcome = cli("tokenize", gpt, "--input", tmp_path / "lines.txt")
    assert outcome.code == 2 and f"{tmp_path / 'lines.txt'}:3: invalid UTF-8" in outcome.err


def test_a_text_with_too_many_tokens_is_refused_unless_it_is_cut(
    cli: Cli, gpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tformer.cli.tokenize.MOST_TOKENS", 20)
    path = tmp_path / "lines.txt"
    path.write_text(f"the cat\n{MUCH}\n")
    outcome = cli("tokenize", gpt, "--input", path)
    assert outcome.code == 2 and outcome.out.count("sat") <= 1
    assert f"error: {path}:2: the text of {len(MUCH)} characters has more than 20 tokens" in outcome.err
    assert "--max-length N" in outcome.err
    assert cli("tokenize", gpt, "--input", path, "--max-length", 8).code == 0


@pytest.mark.parametrize("truncation", ["head", "tail", "head_tail"])
def test_a_long_text_that_is_cut_is_shown_and_counted_as_whole(
    cli: Cli, bert: Path, truncation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (bert, "--text", MUCH, "--max-length", 8, "--truncation", truncation)
    whole = document(cli, *options)
    monkeypatch.setattr("tformer.tokenizer.pieces.PIECE_CHARACTERS", 30)
    monkeypatch.setattr("tformer.tokenizer.pieces.PIECE_LIMIT", 60)
    assert document(cli, *options) == whole and whole[0]["texts"][0]["num_cut"] > 50


def test_many_texts_are_counted_without_a_padded_batch(
    cli: Cli, gpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is as wide as its longest text: of a corpus it would not fit in memory."""
    monkeypatch.setattr(TextReader, "batch", None)
    texts = ["the cat"] * 30 + ["the dog " * 300]
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    shown, tokenizer = lines(cli, gpt, "--input", tmp_path / "lines.txt"), trained("byte-bpe", "gpt")
    count = sum(len(tokenizer.encode(text)) for text in texts)
    assert shown[-1].split()[3:6] == ["31", f"{30 * 7 + 2400:,}", f"{count:,}"]
    assert [line.replace("␣", " ").replace("|", "") for line in shown[2:33]] == texts


def test_a_run_shows_what_its_model_reads(cli: Cli, tagger: Path, translator: Path, random_run: Path) -> None:
    import tformer

    for path, text in ((tagger, "a bad cab"), (translator, "a cab."), (random_run, "abc")):
        [found] = document(cli, path, "--text", text)
        assert found["batch"]["input_ids"] == [tformer.load(path).encode(text)]
    [found] = document(cli, translator, "--text", "bad", "--side", "target")
    read, predicted = tformer.load(translator).encode_target("bad")
    assert found["batch"]["input_ids"] == [[*read, predicted[-1]]]
    assert found["max_length"] == 32


def test_a_hugging_face_folder_needs_no_model(cli: Cli, tmp_path: Path) -> None:
    trained("bpe", "roberta").save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"model_max_length": 7, "padding_side": "left", "pad_token": "<pad>"}'
    )
    [found] = document(cli, tmp_path, "--text", "the cat")
    assert (found["max_length"], found["padding_side"]) == (7, "left")
    assert found["texts"][0]["tokens"][0]["piece"] == "<s>"


def test_the_template_can_be_left_out_and_special_tokens_read(cli: Cli, bert: Path) -> None:
    [bare] = document(cli, bert, "--text", "[MASK] cat", "--no-template")
    assert "[MASK]" not in [token["piece"] for token in bare["texts"][0]["tokens"]]
    [read] = document(cli, bert, "--text", "[MASK] cat", "--special-tokens")
    assert [token["piece"] for token in read["texts"][0]["tokens"]][:2] == ["[CLS]", "[MASK]"]


def test_plain_output_has_pieces_table_batch_and_decoded_text(cli: Cli, gpt: Path) -> None:
    found = lines(cli, gpt, "--text", "the cat\n")
    assert found[2].replace("|", "") == "the␣cat↵"
    assert any(line.startswith("decoded: the cat\\n") for line in found)
    assert any(line.startswith("attention_mask") for line in found)


@pytest.mark.parametrize(("colour", "expected"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_pieces_are_coloured_on_a_terminal_only(bert: Path, colour: dict[str, str], expected: bool) -> None:
    code = "import pty, sys; pty.spawn([sys.executable, '-m', 'tformer', *sys.argv[1:]])"
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    outcome = subprocess.run(
        [sys.executable, "-c", code, "tokenize", bert, "--text", "the cat"],
        env={**environment, "TERM": "xterm-256color", **colour}, capture_output=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (b"\x1b[" in outcome.stdout) == expected
    assert b"the" in outcome.stdout
    assert (b"|" in outcome.stdout) != expected


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "pair of a batch": (("{bert}", "--text", "a", "--text", "b", "--text2", "c"), "found 2"),
    "pair without template": (("{gpt}", "--text", "a", "--text2", "b"), "no template for two texts"),
    "length 0": (("{bert}", "--text", "a", "--max-length", "0"), "--max-length must be at least 1, found 0"),
    "no room": (("{bert}", "--text", "the cat", "--max-length", "2"), "leave no room for text"),
    "no maximum": (("{bert}", "--text", "a", "--pad", "max"), "--pad max"),
    "words as ids": (("{bert}", "--ids", "1 two"), "--ids: found 'two', expected whole numbers"),
    "no ids": (("{bert}", "--ids", " "), "--ids: found nothing"),
    "side of a file": (("{bert}", "--text", "a", "--side", "target"), "--side target"),
    "side of a classifier": (("{tagger}", "--text", "a", "--side", "target"), "only an encoder-decoder"),
    "missing input": (("{bert}", "--input", "missing.txt"), "missing.txt"),
    "empty input": (("{bert}", "--input", "{nothing}"), "there is no text: the input is empty"),
    "bad bytes": (("{bert}", "--input", "{bytes}"), "UTF-8"),
    "wrong choice": (("{bert}", "--text", "a", "--pad", "wide"), "--pad"),
    "unknown option": (("{bert}", "--text", "a", "--colour"), "--colour"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_use_is_one_clear_line(
    cli: Cli, case: str, bert: Path, gpt: Path, tagger: Path, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("nothing", "bytes")}
    places["nothing"].write_text("")
    places["bytes"].write_bytes(b"\xff\xfe\n")
    words, expected = WRONG[case]
    filled = [word.format(bert=bert, gpt=gpt, tagger=tagger, **places) for word in words]
    outcome = cli("tokenize", *filled)
    assert (outcome.code, outcome.out) == (2, ""), outcome.err
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and expected in outcome.err and "Traceback" not in outcome.err
