"""`tformer classify`: blocks of input and the form of answers."""

from __future__ import annotations

import gzip
import json
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.sources import files
from tformer.data.sources.reading import Reading
from tformer.data.sources.tables import table_format
from tformer.decoding import lines as line_reader
from tformer.decoding.lines import blocks, line_blocks, open_texts_or_pairs, row_blocks, text_blocks
from tformer.evaluation.answers import AnswerFormat
from tformer.recipe.sections import Columns
from tformer.support.errors import InputError


def texts_of(path, **options):
    options = {"pairs": False, "reading": Reading()} | options
    if table_format(path) is not None:
        source = open_texts_or_pairs(str(path), **{"columns": Columns()} | options)
        return list(row_blocks(source.rows()))
    return list(text_blocks(str(path), **options))


def test_every_line_is_a_text_the_empty_ones_too(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes(b"one\n\r\ntwo\twords\n\nlast without an end")
    [block] = texts_of(path)
    assert [text for text, _ in block] == ["one", "", "two\twords", "", "last without an end"]
    assert {second for _, second in block} == {None}


@given(
    lines=st.lists(
        st.text(st.sampled_from("ab \r\x85\u2028\u2029\x0b\x0c\x1c\0é"), max_size=5).map(lambda x: x.rstrip("\r"))
    ),
    ends=st.lists(st.sampled_from(["\n", "\r\n"]), min_size=1),
)
def test_a_line_ends_with_newline_alone_or_after_one_carriage_return(tmp_path_factory, lines, ends):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes("".join(line + ends[n % len(ends)] for n, line in enumerate(lines)).encode())
    assert [text for block in texts_of(path) for text, _ in block] == lines


def test_a_final_newline_ends_the_last_line_and_an_empty_file_has_none(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("a\n\n")
    assert [len(block) for block in texts_of(path)] == [2]
    path.write_text("")
    assert texts_of(path) == []


def test_blocks_are_full_and_in_order(tmp_path):
    path = tmp_path / "texts.txt.gz"
    path.write_bytes(gzip.compress("".join(f"{number}\n" for number in range(1000)).encode()))
    found = list(line_blocks(str(path), errors="strict", size=64))
    assert [len(block) for block in found] == [64] * 15 + [40]
    assert [line for block in found for line in block] == [str(number) for number in range(1000)]
    assert [len(block) for block in blocks(iter(range(5)), 2)] == [2, 2, 1]


def test_a_block_ends_where_its_lines_are_long(tmp_path, monkeypatch):
    """Memory is that of the longest line, not of as many lines as a block may have."""
    monkeypatch.setattr(line_reader, "BLOCK_CHARACTERS", 1000)
    monkeypatch.setattr(files, "PIECE_BYTES", 100)
    sizes = [10, 900, 3000, 5, 5, 400, 400, 400]
    (tmp_path / "texts.txt").write_text("".join("x" * size + "\n" for size in sizes))
    lines = texts_of(tmp_path / "texts.txt")  # a piece of the file ends behind the first 5 and 5
    assert [[len(text) for text, _ in block] for block in lines] == [[10, 900, 3000, 5, 5], [400, 400, 400]]
    (tmp_path / "texts.csv").write_text("text,n\n" + "".join("x" * size + ",1\n" for size in sizes))
    rows = texts_of(tmp_path / "texts.csv", columns=Columns(text="text"))
    assert [[len(text) for text, _ in block] for block in rows] == [[10, 900, 3000], [5, 5, 400, 400, 400]]


def test_a_line_above_the_limit_is_refused_with_its_place_and_the_limit(tmp_path, monkeypatch):
    """No more than the limit, and one piece of the file, is read of it."""
    monkeypatch.setattr(line_reader, "MAX_ROW_CHARACTERS", 1000)
    monkeypatch.setattr(files, "PIECE_BYTES", 100)
    read = []
    decode = line_reader.decode_text
    monkeypatch.setattr(line_reader, "decode_text", lambda *a, **k: (read.append(len(t)) or t for t in decode(*a, **k)))
    path = tmp_path / "texts.txt"
    path.write_text("short\n" + "x" * 5000 + "\nshort\n")
    with pytest.raises(InputError, match=r"texts.txt:2: a line has more than 1,000 characters"):
        texts_of(path)
    assert sum(read) <= 1200
    path.write_text("x" * 1000 + "\nshort\n")
    assert [len(text) for block in texts_of(path) for text, _ in block] == [1000, 5]


def test_pairs_are_parted_by_one_tab(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("a\tb\n\n")
    assert texts_of(path, pairs=True) == [[("a", "b"), ("", "")]]
    path.write_text("a\tb\nalone\n")
    with pytest.raises(InputError, match=r"pairs.txt:2: .*found 1"):
        texts_of(path, pairs=True)
    path.write_text("a\tb\tc\n")
    with pytest.raises(InputError, match=r"pairs.txt:1: .*found 3"):
        texts_of(path, pairs=True)


def test_invalid_utf8_names_the_line(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes(b"good\nb\xffd\n")
    with pytest.raises(InputError, match=r"texts.txt:2"):
        texts_of(path)
    assert texts_of(path, reading=Reading("replace")) == [[("good", None), ("b\ufffdd", None)]]


def test_standard_input_is_answered_when_it_pauses(monkeypatch):
    """A writer that waits for an answer gets it: the block ends although the input does not."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as file:
        monkeypatch.setattr("sys.stdin", file)
        found = line_blocks("-", errors="strict", size=100)
        os.write(writer, b"first\nsec")
        assert next(found) == ["first"]
        os.write(writer, b"ond\nthird")
        assert next(found) == ["second"]
        os.close(writer)
        assert list(found) == [["third"]]


def test_much_standard_input_comes_in_full_blocks(monkeypatch):
    reader, writer = os.pipe()
    lines = [f"line {number}" for number in range(30_000)]

    def write():
        with os.fdopen(writer, "wb") as file:
            file.write("".join(f"{line}\n" for line in lines).encode())

    thread = threading.Thread(target=write)
    with os.fdopen(reader) as file:
        monkeypatch.setattr("sys.stdin", file)
        thread.start()
        found = list(line_blocks("-", errors="strict", size=500))
        thread.join()
    assert [line for block in found for line in block] == lines
    assert max(map(len, found)) == 500


P = np.array([0.1, 0.6, 0.3])


def test_a_class_is_its_label_and_probability():
    assert AnswerFormat("classes", ("a", "b", "c")).line(P) == "b\t0.6000"


def test_top_gives_pair_after_pair_and_never_more_than_there_are():
    assert AnswerFormat("classes", ("a", "b", "c"), top=2).line(P) == "b\t0.6000\tc\t0.3000"
    assert AnswerFormat("classes", ("a", "b", "c"), top=9).line(P).split("\t")[::2] == ["b", "c", "a"]


def test_json_has_the_label_and_all_probabilities_the_highest_first():
    document = AnswerFormat("classes", ("a", "b", "c")).document(P)
    assert document["label"] == "b"
    assert list(document["probabilities"]) == ["b", "c", "a"]
    assert json.loads(json.dumps(document))["probabilities"]["a"] == pytest.approx(0.1)
    assert list(AnswerFormat("classes", ("a", "b", "c"), top=1).document(P)["probabilities"]) == ["b"]


def test_several_labels_are_those_above_the_threshold():
    values = np.array([0.9, 0.2, 0.6])
    assert AnswerFormat("labels", ("x", "y", "z")).line(values) == "x,z\t0.9000,0.6000"
    assert AnswerFormat("labels", ("x", "y", "z"), threshold=0.95).line(values) == "\t"
    assert AnswerFormat("labels", ("x", "y", "z"), threshold=0.6).line(values) == "x\t0.9000"
    assert AnswerFormat("labels", ("x", "y", "z"), top=1).line(values) == "x\t0.9000"
    assert AnswerFormat("labels", ("x", "y", "z"), threshold=0.1).document(values)["labels"] == ["x", "z", "y"]


def test_a_score_is_a_number():
    assert AnswerFormat("score", ()).line(np.array([3.14159])) == "3.1416"
    assert AnswerFormat("score", ()).document(np.array([3.5])) == {"score": 3.5}


def test_a_label_with_a_tab_or_a_newline_stays_one_cell():
    assert AnswerFormat("classes", ("a\tb\nc", "d")).line(np.array([1.0, 0.0])) == "a\\tb\\nc\t1.0000"
