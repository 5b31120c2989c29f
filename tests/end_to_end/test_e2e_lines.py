r"""A line is what ends in \n or \r\n. Every command reads as many lines as a file has, each with its text unchanged.

A carriage return alone, U+0085, U+2028, U+2029, vertical tab, form feed, U+001C to U+001E and NUL are text; so is a
byte order mark that does not stand at the start of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.fakes import Columns, Spec
from tests.end_to_end.translate_runs import SEQ2SEQ
from tformer.data.sources.labelled import open_labelled
from tformer.data.sources.pairs import open_pairs
from tformer.data.sources.text import open_sources
from tformer.decoding.lines import line_blocks
from tformer.tokenizer import Tokenizer

Cli = Callable[..., Any]
NO_ENDS = "\r\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e\0\ufeff"
LINE = st.text(st.sampled_from("ab c" + NO_ENDS), max_size=6).map(lambda text: text.rstrip("\r"))
few = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
FIXED = "".join(f"a{sign}b\n" for sign in NO_ENDS)


@st.composite
def files(draw: st.DrawFn, line: st.SearchStrategy[str] = LINE) -> tuple[bytes, list[str]]:
    """Content of a file, and its lines."""
    lines = [*draw(st.lists(line, max_size=6)), "a"]
    ends = [draw(st.sampled_from(("\n", "\r\n"))) for _ in lines]
    if draw(st.booleans()):
        ends[-1] = ""  # no final newline
    mark = "\ufeff" if draw(st.booleans()) or lines[0].startswith("\ufeff") else ""
    return (mark + "".join(map(str.__add__, lines, ends))).encode(), lines


@given(file=files(), size=st.integers(1, 4))
@few
def test_every_reader_of_lines_gives_the_lines_of_the_file(
    file: tuple[bytes, list[str]], size: int, tmp_path: Path
) -> None:
    content, lines = file
    path = tmp_path / "lines.txt"
    path.write_bytes(content)
    (tmp_path / "other.txt").write_bytes(b"x\n" * len(lines))
    assert [line for block in line_blocks(str(path), errors="strict", size=size) for line in block] == lines
    [labelled] = open_labelled([Spec(str(path))], columns=Columns(), needs_label=False)  # type: ignore[list-item]
    assert [row.text for row in labelled.rows()] == lines
    for source, target, side in ((path, tmp_path / "other.txt", "source"), (tmp_path / "other.txt", path, "target")):
        [pairs] = open_pairs([Spec(str(source), str(target))], columns=Columns())
        assert [getattr(row, side) for row in pairs.rows()] == lines
    [text] = open_sources([Spec(str(path))], columns=Columns())
    read = "".join(piece.text for piece in text.documents())
    assert read.removesuffix("\n").split("\n") == lines


@given(rows=st.lists(st.tuples(LINE, LINE), min_size=1, max_size=4))
@few
def test_cells_of_tables_keep_their_text(rows: list[tuple[str, str]], tmp_path: Path) -> None:
    """The first row and column hold names and words, so that no row is blank or begins with a byte order mark."""
    table = [["text", "label"], *([f"a{text}", f"b{label}b"] for text, label in rows)]
    tsv, jsonl = tmp_path / "table.tsv", tmp_path / "table.jsonl"
    tsv.write_bytes("".join(f"{text}\t{label}\r\n" for text, label in table).encode())
    jsonl.write_bytes(
        "".join(
            json.dumps({"text": text, "label": label}, ensure_ascii=False) + "\n" for text, label in table[1:]
        ).encode()
    )
    for path in (tsv, jsonl):
        [source] = open_labelled([Spec(str(path))], columns=Columns())  # type: ignore[list-item]
        assert [[row.text, row.label] for row in source.rows()] == table[1:]


def shown(cli: Cli, *words: object) -> list[Any]:
    """The documents of a command's `--json`."""
    outcome = cli(*words, "--json")
    assert outcome.code == 0, outcome.err
    return [json.loads(line) for line in outcome.out.split("\n") if line]


@pytest.mark.slow
@given(file=files())
@few
def test_one_line_in_is_one_line_out(
    file: tuple[bytes, list[str]],
    cli: Cli,
    decoder: Path,
    translator: Path,
    encoder_run: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    content, lines = file
    path = tmp_path / "lines.txt"
    path.write_bytes(content)
    cut = ("--max-new-tokens", 1, "--too-long", "cut")
    assert [each["prompt"] for each in shown(cli, "generate", decoder, "--input", path, *cut[:2])] == lines
    assert [each["prompt"] for each in shown(cli, "generate", translator, "--input", path, *cut)] == lines
    assert len(shown(cli, "classify", encoder_run("single"), "--input", path)) == len(lines)
    for words in (["generate", decoder, *cut[:2]], ["generate", translator, *cut], ["classify", encoder_run("single")]):
        outcome = cli(*words, "--input", path)
        assert outcome.code == 0 and outcome.out.count("\n") == len(lines), outcome.err


def test_one_line_in_is_one_line_out_with_every_sign(cli: Cli, decoder: Path, translator: Path, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(FIXED.encode())
    for run, more in ((decoder, ()), (translator, ("--too-long", "cut"))):
        found = shown(cli, "generate", run, "--input", path, "--max-new-tokens", 1, *more)
        assert [each["prompt"] for each in found] == FIXED.split("\n")[:-1]


@given(file=files())
@few
def test_tokenize_shows_every_line(file: tuple[bytes, list[str]], cli: Cli, decoder: Path, tmp_path: Path) -> None:
    content, lines = file
    path = tmp_path / "lines.txt"
    path.write_bytes(content)
    [document] = shown(cli, "tokenize", decoder, "--input", path)
    assert document["tokenizers"][0]["totals"]["texts"] == len(lines)


def test_evaluate_counts_the_lines_of_both_files(cli: Cli, random_run: Callable[..., Path], tmp_path: Path) -> None:
    translator = random_run(SEQ2SEQ + "objectives: [{kind: seq2seq}]\n")
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_bytes(FIXED.encode())
    target.write_bytes(FIXED.replace("\n", "\r\n").encode())
    [report] = shown(cli, "evaluate", translator, "--source", source, "--target", target, "--no-decode")
    assert report["examples"] == len(NO_ENDS)
    target.write_bytes(FIXED.encode() + b"a\n")
    outcome = cli("evaluate", translator, "--source", source, "--target", target)
    assert outcome.code == 2 and str(len(NO_ENDS)) in outcome.err and str(len(NO_ENDS) + 1) in outcome.err


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_train_tokenizer_sees_every_character(end: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(("\ufeff" + FIXED.replace("\n", end) * 4).encode())
    out = tmp_path / "tokenizer.json"
    outcome = cli("train-tokenizer", tmp_path / "text.txt", "--model", "char", "--template", "none", "--out", out)
    assert outcome.code == 0, outcome.err
    tokenizer = Tokenizer.load(out)
    assert tokenizer.decode(tokenizer.encode(FIXED)) == FIXED
    assert tokenizer.vocab_size == len(set(FIXED)) + 1  # and the unknown token


def test_generated_lines_are_those_of_each_prompt_alone_in_order(cli: Cli, decoder: Path, tmp_path: Path) -> None:
    """Prompts of unequal lengths, of which each joins when another text ends."""
    prompts = ["ab " * (7 * row % 5) + "abc"[row % 3] for row in range(9)]
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(prompts) + "\n")
    words = ("--greedy", "--max-new-tokens", 7, "--stop", "a", "--batch-size", 2)
    found = shown(cli, "generate", decoder, "--input", path, *words)
    assert [each["index"] for each in found] == list(range(9))
    for prompt, each in zip(prompts, found, strict=True):
        [alone] = shown(cli, "generate", decoder, "--prompt", prompt, *words[:-2])
        assert each["completions"][0]["ids"] == alone["completions"][0]["ids"]
