"""`tformer data`: a messy table in text, JSON and pictures, and every way to get it wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data import messy
from tests.data.workbooks import excel

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "messy.csv"
    path.write_bytes(messy.messy_csv(messy.messy_rows()))
    return path


def test_a_messy_table_is_described_in_at_most_six_lines(cli: Cli, table: Path) -> None:
    outcome = cli("data", table)
    lines = outcome.out.splitlines()
    assert outcome.code == 0 and len(lines) == 6
    assert lines[0] == (
        "messy.csv: encoding cp1252, separator semicolon, text in column 'review', label in column 'sentiment'; "
        "not used: id, date"
    )
    left_out = "37 more that --bad-rows drop leaves out: the text is blank (24 rows, first lines "
    assert lines[1].startswith(f"rows: 2,963; {left_out}")
    assert "the label is empty (13 rows, first lines " in lines[1]
    assert lines[2].startswith("labels (2): ") and lines[3].startswith("lengths: median ")
    assert "exact duplicates, 30 near duplicates" in lines[4] and "1 text with several labels (lines " in lines[5]


def test_the_excel_copy_is_described_alike(cli: Cli, table: Path, tmp_path: Path) -> None:
    pytest.importorskip("python_calamine")
    rows = [[cell if cell != "" else None for cell in row] for row in messy.messy_rows()]
    (tmp_path / "messy.xlsx").write_bytes(excel({"Sheet1": [messy.NAMES, *rows]}))
    first, second = (json.loads(cli("data", path, "--json").out) for path in (table, tmp_path / "messy.xlsx"))
    for key in ("rows", "labels", "blank", "exact", "near", "conflicting", "bad_rows", "columns", "unused_columns"):
        assert first[key] == second[key]


def test_json_has_all_figures_and_dropped_rows_are_written(cli: Cli, table: Path, tmp_path: Path) -> None:
    outcome = cli("data", table, "--valid", table, "--json", "--dropped", tmp_path / "dropped.jsonl")
    document = json.loads(outcome.out)
    assert (document["rows"], document["bad_rows"], document["in_both"]) == (2963, 37, 2963)
    assert document["columns"] == {"text": "review", "text2": None, "label": "sentiment"}
    dropped = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert len(dropped) == 37 and {row["reason"] for row in dropped} == {"the label is empty", "the text is blank"}
    assert dropped[0]["row"][0] == "7" and dropped[0]["place"].startswith(f"{table}:")


@pytest.mark.parametrize(("suffix", "start"), [(".html", b"<!doctype html>"), (".svg", b"<?xml"), (".csv", b"")])
def test_pictures_are_written(cli: Cli, table: Path, tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"look{suffix}"
    assert cli("data", table, "-o", path).code == 0
    assert path.read_bytes().startswith(start) and path.stat().st_size > 100


def test_lengths_are_counted_in_tokens_of_a_tokenizer(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nabc,x\nabcdef,y\n")
    assert cli("train-tokenizer", tmp_path / "a.csv", "--model", "char", "--out", tmp_path / "t.json").code == 0
    outcome = cli("data", tmp_path / "a.csv", "--tokenizer", tmp_path / "t.json", "--max-length", "4")
    assert "tokens" in outcome.out and "1 text longer than 4 tokens would be cut" in outcome.out


def test_a_table_without_labels_is_described_too(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,one two\n2,three\n")
    outcome = cli("data", tmp_path / "a.csv")
    assert outcome.code == 0 and "labels" not in outcome.out and "rows: 2" in outcome.out


TAGGED = "Ada B-PER\nsings O\n\nin O\nOslo B-LOC\n\nAda O\nsings O\n"
CONTEXT = "Ada was born in Oslo ."


def squad(start: int = 16) -> dict[str, Any]:
    asked = [
        {"id": "1", "question": "Where ?", "answers": [{"text": "Oslo", "answer_start": start}]},
        {"id": "2", "question": "When ?", "answers": [], "is_impossible": True},
    ]
    return {"version": "2.0", "data": [{"title": "Ada", "paragraphs": [{"context": CONTEXT, "qas": asked}]}]}


TAGS = {"words": ["Ada", "sings"], "tags": ["B-PER", "O"]}
MARKED = {
    "a.conll": (TAGGED, ["a.conll: words with tags", "rows: 3", "labels (3): O, B-PER, B-LOC (66.7%, 16.7%, 16.7%)"]),
    "a.txt": (TAGGED, ["a.txt: words with tags", "caution: 1 text with several labels (lines 1 and 7)"]),
    "a.jsonl": (json.dumps(TAGS) + "\n", ["a.jsonl: words with tags", "labels (2): B-PER, O (50.0%, 50.0%)"]),
    "b.jsonl": (
        json.dumps({"question": "Where ?", "context": CONTEXT, "answers": {"text": ["Oslo"], "answer_start": [16]}}),
        ["b.jsonl: questions about contexts", "labels (1): answer (100.0%)"],
    ),
    "a.json": (
        json.dumps(squad()),
        ["a.json: questions about contexts", "labels (2): answer, no answer (50.0%, 50.0%)"],
    ),
    "b.json": (json.dumps(squad(), indent=1), ["b.json: questions about contexts", "rows: 2"]),
}


@pytest.mark.parametrize("name", MARKED)
def test_tags_and_questions_are_described(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(MARKED[name][0])
    words = ("--objective", "token_classification") if name == "a.txt" else ()
    outcome = cli("data", tmp_path / name, "--valid", tmp_path / name, *words)
    assert outcome.code == 0, outcome.err
    assert all(line in outcome.out for line in MARKED[name][1]) and "whose text is in the training data" in outcome.out
    assert len(outcome.out.splitlines()) <= 6 and cli("data", tmp_path / name, "-o", tmp_path / "a.html").code == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.conll",
            "Ada B-PER\nsings\n",
            "a.conll:2: expected a word in column 0 and its tag in another, found 1 column",
        ),
        (
            "a.jsonl",
            json.dumps(TAGS | {"tags": ["O"]}),
            "a.jsonl:1: expected one tag for each word, found 2 words, 1 tag",
        ),
        ("a.json", json.dumps(squad(3)), "a.json: question 1: the answer 'Oslo' does not stand at character 3"),
        ("a.json", "{\n", "a.json: not JSON"),
    ],
)
def test_data_says_what_train_would_say_of_wrong_tags_and_questions(
    cli: Cli, tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    outcome = cli("data", tmp_path / name)
    assert outcome.code == 2 and message in outcome.err and len(outcome.err.splitlines()) <= 2
    kind = "question_answering" if name == "a.json" else "token_classification"
    said = cli("train", "--arch", "bert", "--objective", kind, "--data", tmp_path / name, "--out", tmp_path / "run").err
    assert outcome.err.splitlines()[0] in said


def test_sentences_and_contexts_are_read_in_windows(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text(TAGGED)
    (tmp_path / "a.txt").write_text(TAGGED)
    assert cli("train-tokenizer", tmp_path / "a.txt", "--model", "char", "--out", tmp_path / "t.json").code == 0
    outcome = cli("data", tmp_path / "a.conll", "--tokenizer", tmp_path / "t.json", "--max-length", "4")
    assert "3 texts longer than 4 tokens would be read in windows" in outcome.out, outcome.err


PAIRS = "".join(f"{chr(97 + n % 26)}{n} b\t{n} c\n" for n in range(30)) + "a0 b\t0 c\nsame\tsame\nx\t\n"


@pytest.mark.parametrize("names", ["source\ttarget\n", "en\tde\n", ""])
def test_pairs_are_described_without_being_named(cli: Cli, tmp_path: Path, names: str) -> None:
    (tmp_path / "a.tsv").write_text(names + PAIRS)
    outcome = cli("data", tmp_path / "a.tsv", "--valid", tmp_path / "a.tsv")
    lines = outcome.out.splitlines()
    assert outcome.code == 0 and len(lines) == 5 and "source in column" in lines[0] and lines[1] == "rows: 33"
    assert lines[2] == (
        "lengths: source median 2 words, 95 % at most 2, longest 2; target median 2 words, 95 % at most 2, longest 2"
    )
    assert lines[3] == "texts: 1 pair with a blank side, 1 exact duplicate, 1 pair of a text and itself"
    assert lines[4] == "caution: 32 validation pairs whose source is in the training data"
    named = json.loads(cli("data", tmp_path / "a.tsv", "--objective", "seq2seq", "--json").out)
    assert named["equal"] == 1 and set(named["columns"]) == {"source", "target"} and named["bad_rows"] == 0


def test_aligned_files_are_described_and_drawn_with_tokens(cli: Cli, tmp_path: Path) -> None:
    for name, text in (("a.en", "one two\nthree\n"), ("a.de", "eins zwei\ndrei vier fünf\n")):
        (tmp_path / name).write_text(text)
    words = ("data", tmp_path / "a.en", "--target", tmp_path / "a.de")
    files = (tmp_path / "a.en", tmp_path / "a.de")
    assert cli("train-tokenizer", *files, "--model", "char", "--out", tmp_path / "t.json").code == 0
    outcome = cli(*words, "--tokenizer", tmp_path / "t.json", "--max-length", "9")
    assert outcome.out.startswith(f"{tmp_path / 'a.en'}: aligned lines\nrows: 2\n")
    assert "target median 11 tokens, 95 % at most 13, longest 14" in outcome.out
    assert "1 pair longer than 9 tokens would be left out" in outcome.out
    assert cli(*words, "-o", tmp_path / "look.html").code == 0
    assert "target" in (tmp_path / "look.html").read_text()


def test_train_says_the_same_of_pairs_and_of_text(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(f"source\ttarget\n{PAIRS}")
    words = ("train", "--dry-run", "--arch", "transformer", "--preset", "tiny", "--data", tmp_path / "a.tsv")
    lines = cli(*words, "--valid", tmp_path / "a.tsv").err.splitlines()
    assert any(line.startswith("lengths: source median ") and "; target median " in line for line in lines)
    assert "texts: 1 exact duplicate, 1 pair of a text and itself" in lines, "a pair with a blank side is left out"
    assert "caution: 32 validation pairs whose source is in the training data" in lines
    (tmp_path / "a.txt").write_text("One line here.\n\nAnother line.\nThe last\n" * 40)
    lines = cli("train", "--dry-run", "--arch", "gpt", "--preset", "char-cpu", "--data", tmp_path / "a.txt").err
    assert "text: 1,560 characters in 160 lines\n" in lines and "lines: 25.0% are blank, 73.1% occur before" in lines


def test_running_text_is_described_and_drawn(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One line here.\n\nOne line here.\nThe last")
    lines = cli("data", tmp_path / "a.txt").out.splitlines()
    assert lines == [
        f"{tmp_path / 'a.txt'}: running text",
        "text: 39 characters in 4 lines, 8 words",
        "lengths: median 11 characters, 95 % at most 14, longest 14",
        "lines: 25.0% are blank, 25.0% occur before",
    ]
    document = json.loads(cli("data", tmp_path / "a.txt", "--json").out)
    assert (document["lines"], document["words"], document["columns"]) == (4, 8, {})
    assert cli("data", tmp_path / "a.txt", "-o", tmp_path / "look.svg").code == 0
    table = tmp_path / "a.csv"
    table.write_text("text,label\na b,x\nc,y\n")
    outcome = cli("data", table, "--objective", "causal_lm")
    assert "text: 4 characters in 2 lines, 3 words" in outcome.out, "each row is a document"


def test_images_are_looked_at_as_images(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(60):
        folder = Path("digits") / "0129"[number % 4]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 9), number, dtype=np.uint8)).save(folder / f"{number}.png")
    found = json.loads(cli("data", "digits", "--json").out)
    assert (found["examples"], found["side"], found["channels"]) == (60, 8, 1)
    assert found["labels"] == dict.fromkeys("0129", 15) and min(found["held_out"].values()) > 0
    first, labels, held_out = cli("data", "digits").out.splitlines()
    assert first == "digits: 60 grey images of 8 pixels"
    assert labels.startswith("labels (4): 0, 1, 2, 9 (25.0%")
    trained = cli("train", "--arch", "vit", "--data", "digits", "--dry-run").err
    assert held_out.startswith(
        f"held out by train --arch vit without --valid: {sum(found['held_out'].values())} images"
    )
    assert f"{sum(found['held_out'].values())} validation images" in trained
    assert cli("data", "digits", "-o", "look.svg").code == 0
    for more in (["digits"], ["--objective", "causal_lm"], ["--dropped", "bad.jsonl"]):
        assert "leave out other files and options for texts" in cli("data", "digits", *more).err


def test_pictures_beside_texts_leave_a_folder_one_of_texts(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("one line\n")
    Image.fromarray(np.zeros((8, 9), dtype=np.uint8)).save(tmp_path / "a.png")
    assert "text: 9 characters" in cli("data", tmp_path, "--objective", "causal_lm").out


@pytest.mark.parametrize(
    ("name", "content"), [("a.png", b"\x89PNG"), ("a.zip", b"PK"), ("train-idx3-ubyte", b"\0\0\x08\x03" + bytes(12))]
)
def test_images_without_labels_are_no_text(cli: Cli, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    outcome = cli("data", tmp_path / name)
    assert outcome.code == 2 and "no text" not in outcome.err and name in outcome.err


def test_a_carriage_return_outside_quotes_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\rgood,pos\r")
    outcome = cli("data", tmp_path / "a.csv")
    assert outcome.code == 2 and "a.csv:1: a carriage return outside quotes" in outcome.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no table to look at"),
        (["TABLE", "--target", "a.de", "--target", "b.de"], "--target: found 2 files, expected 1"),
        (["TABLE", "--objective", "causal_lm", "--text-column", "review", "--valid", "TABLE"], "--valid: lines"),
        (["TABLE", "--source-column", "stars"], "no column 'stars'"),
        (["no.csv"], "no.csv: no such file"),
        (["TABLE", "--label-column", "stars"], "no column 'stars'"),
        (["TABLE", "--encoding", "latin-99"], "unknown encoding 'latin-99'"),
        (["TABLE", "--delimiter", "::"], "--delimiter: expected one character"),
        (["TABLE", "-o", "a.doc"], "has the suffix .doc"),
        (["TABLE", "--dropped", "TABLE"], "--dropped"),
    ],
)
def test_a_wrong_call_is_one_line(cli: Cli, table: Path, words: list[str], message: str) -> None:
    outcome = cli("data", *(str(table) if word == "TABLE" else word for word in words))
    assert outcome.code == 2 and message in outcome.err and (outcome.out == "" or "--json" in words)
