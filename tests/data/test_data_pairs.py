"""Sources of pairs: aligned files and tables."""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.fakes import Columns, Spec, pipe, refusal, write
from tests.data.pair_makers import open_one, read
from tformer.data.sources.pairs import open_pairs, shared_columns
from tformer.data.sources.reading import Reading
from tformer.data.sources.tables import PairRow

PAIRS = [("one cat", "eine Katze"), ("two", "zwei")]


# -- aligned files -----------------------------------------------------------------------------------------------------


def test_aligned_files_are_one_pair_a_line_and_empty_lines_are_rows(tmp_path: Path) -> None:
    source, target = write(tmp_path / "a.en", "one cat\n\ntwo"), write(tmp_path / "a.de", "eine Katze\nnichts\n\n")
    opened = open_one(source, target)
    assert list(opened.rows()) == [
        PairRow("one cat", "eine Katze", f"{source}:1"),
        PairRow("", "nichts", f"{source}:2"),
        PairRow("two", "", f"{source}:3"),
    ]
    assert list(opened.rows()) == list(opened.rows()), "rows can be read again"
    assert (opened.name, opened.notes, opened.columns) == (str(source), (), frozenset())
    assert opened.size_bytes() == source.stat().st_size + target.stat().st_size


def test_files_of_different_length_are_refused_with_both_counts(tmp_path: Path) -> None:
    source, target = write(tmp_path / "a.en", "x\n" * 2900), write(tmp_path / "a.de", "y\n" * 2899)
    assert refusal(lambda: open_one(source, target)).message == f"{source} has 2,900 lines, {target} 2,899"
    one = write(tmp_path / "b.en", "x")
    assert refusal(lambda: open_one(one, target)).message == f"{one} has 1 line, {target} 2,899"


def test_only_newlines_part_sentences(tmp_path: Path) -> None:
    source = write(tmp_path / "a.en", "one\u2028line\x0b\x0c\x85\r\ntwo\n")
    target = write(tmp_path / "a.de", "eins\nzwei\n")
    assert read(source, target) == [("one\u2028line\x0b\x0c\x85", "eins"), ("two", "zwei")]


def test_compressed_aligned_files(tmp_path: Path) -> None:
    source, target = write(tmp_path / "a.en.gz", gzip.compress(b"one\ntwo\n")), write(tmp_path / "a.de", "eins\nzwei\n")
    assert read(source, target) == [("one", "eins"), ("two", "zwei")]
    assert open_one(source, target).size_bytes() is None


def test_aligned_files_are_single_files_of_plain_text(tmp_path: Path) -> None:
    plain, table = write(tmp_path / "a.en", "x\n"), write(tmp_path / "a.tsv", "x\ty\n")
    assert refusal(lambda: open_one(table, plain)).message == f"{table}: holds both sides of pairs"
    assert refusal(lambda: open_one("builtin:dates", plain)).message == "builtin:dates: holds both sides of pairs"
    assert "found a folder" in refusal(lambda: open_one(plain, tmp_path)).message
    assert "expected one file, found 2" in refusal(lambda: open_one(tmp_path / "a.*", plain)).message
    assert "no such file" in refusal(lambda: open_one(plain, tmp_path / "missing")).message
    assert "is empty" in refusal(lambda: open_one(write(tmp_path / "e", ""), plain)).message


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "source\ttarget\none cat\teine Katze\n\ntwo\tzwei\n"),
        ("a.tsv", "one cat\teine Katze\ntwo\tzwei\n"),
        ("a.csv", "one cat,eine Katze\r\ntwo,zwei\r\n"),
        ("a.csv", '\ufeffid, target ,note,src\n1,eine Katze,-,"one cat"\n2,zwei,-,two\n'),
        ("a.tsv", "id\tanswer\tquestion\n1\teine Katze\tone cat\n2\tzwei\ttwo\n"),
        ("a.tsv", "EN\tde\none cat\teine Katze\ntwo\tzwei\n"),
        ("a.jsonl", '{"source": "one cat", "target": "eine Katze"}\n{"target": "zwei", "source": "two", "n": [1]}\n'),
        ("a.jsonl", '{"input": "one cat", "id": 1, "output": "eine Katze"}\n{"input": "two", "output": "zwei"}\n'),
        ("a.jsonl", '{"lemma": "one cat", "form": "eine Katze"}\n{"lemma": "two", "form": "zwei"}\n'),
        ("pairs", "one cat\teine Katze\ntwo\tzwei\n"),
        ("pairs", '{"src": "one cat", "tgt": "eine Katze"}\n{"src": "two", "tgt": "zwei"}\n'),
        ("pairs.txt", "source,target\none cat,eine Katze\ntwo,zwei\n"),
    ],
)
def test_columns_are_guessed_and_noted(tmp_path: Path, name: str, content: str) -> None:
    path = write(tmp_path / name, content)
    source = open_one(path)
    assert [(row.source, row.target) for row in source.rows()] == PAIRS
    assert len(source.notes) == 1 and source.notes[0].startswith(f"{name}: source in column ")
    [found] = source.columns
    columns = dict(zip(("source_column", "target_column"), found, strict=True))
    assert read(path, **columns) == PAIRS, "what was guessed can be asked for"


def test_columns_by_name_by_number_and_several_joined(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "lemma\tform\tfeatures\nsee\tsaw\tV;PST\nbe\twas\t\n")
    assert read(path, source_column="lemma,features", target_column="form") == [("see V;PST", "saw"), ("be", "was")]
    assert read(path, source_column="features, lemma", target_column="form")[0] == ("V;PST see", "saw")
    assert open_one(path, source_column="lemma,features", target_column="form").notes == ()
    bare = write(tmp_path / "b.tsv", "see\tsaw\tV;PST\nbe\twas\tV\n")
    assert read(bare, source_column="0,2", target_column=1) == [("see V;PST", "saw"), ("be V", "was")]
    assert open_one(bare, source_column="0,2", target_column=1).columns == {("0,2", 1)}
    really = write(tmp_path / "c.csv", '"a,b",a,b,t\n1,2,3,x\n')
    assert read(really, source_column="a,b", target_column="t") == [("1", "x")]
    keys = write(tmp_path / "d.jsonl", '{"a": "x", "b": "y", "t": "z"}\n{"a": null, "b": "y", "t": "z"}\n')
    assert read(keys, source_column="a,b", target_column="t") == [("x y", "z"), ("y", "z")]


def test_a_first_row_is_data_unless_it_names_columns(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.tsv", "question\tFrage\nanswer\tAntwort\n"))[0] == ("question", "Frage")
    assert len(read(write(tmp_path / "b.tsv", "question\tanswer\nq\ta\nquestion\tanswer\n"))) == 3


def test_parquet_rows(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"n": [[1]] * 2, "target": ["x", None], "source": ["a", "b"]}), path)
    source = open_one(path)
    assert list(source.rows()) == [PairRow("a", "x", f"{path}:1"), PairRow("b", "", f"{path}:2")]
    parquet.write_table(pa.table({"source": [1], "target": ["x"]}), path)
    assert refusal(lambda: read(path)).message == f"{path}:1: 'source' should be text, found a number"


def test_folders_globs_and_compressed_tables(tmp_path: Path) -> None:
    write(tmp_path / "b.tsv", "two\tzwei\n")
    write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"source": "one cat", "target": "eine Katze"}\n'))
    write(tmp_path / "SOURCE.md", "no data")
    assert read(tmp_path) == PAIRS
    assert read(tmp_path / "*.tsv") == PAIRS[1:]
    assert len(open_one(tmp_path).notes) == 2


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b"one cat\teine Katze\ntwo\tzwei\n")
    source = open_one("-")
    assert [(row.source, row.target) for row in source.rows()] == PAIRS
    assert next(iter(source.rows())).place == "standard input:1"


@given(rows=st.lists(st.tuples(st.text('ab",\n\t x', max_size=8), st.text('cd",\n ', max_size=8)), min_size=1))
def test_csv_round_trip(rows: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([("source", "target"), *rows])
        assert read(path, options={"reading": Reading(quotes="cells")}) == rows


# -- prefixes, tasks, weights, fingerprints ----------------------------------------------------------------------------


def test_a_prefix_stands_before_every_source_but_a_blank_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "one\teins\n \tnull\n")
    source = open_one(path, prefix="translate to German: ", task="de", weight=2.0)
    assert [row.source for row in source.rows()] == ["translate to German: one", " "]
    assert {row.task for row in source.rows()} == {"de"} and (source.task, source.weight) == ("de", 2.0)


def test_fingerprint_follows_what_changes_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "one\teins\n")
    other = write(tmp_path / "b.tsv", "two\teins\n")
    source, target = write(tmp_path / "a.en", "one\n"), write(tmp_path / "a.de", "eins\n")
    opened = [
        open_one(path),
        open_one(other),
        open_one(path, prefix="x"),
        open_one(path, task="x"),
        open_one(path, source_column=1, target_column=0),
        open_one(source, target),
        open_one(target, source),
    ]
    assert len({each.fingerprint() for each in opened}) == len(opened)
    assert open_one(path).fingerprint() == open_one(path, source_column=0, target_column=1).fingerprint()


def test_several_sources_keep_their_order(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.tsv", f"{name}\tx\n") for name in "ba"]
    sources = open_pairs([Spec(str(path)) for path in paths])
    assert [row.source for source in sources for row in source.rows()] == ["b", "a"]


def test_preferred_columns_hold_in_tables_that_have_them(tmp_path: Path) -> None:
    def found(name: str, content: str, preferred: Columns, asked: Columns | None = None) -> list[tuple[str, str]]:
        specs = [Spec(str(write(tmp_path / name, content)), None)]
        [source] = open_pairs(specs, columns=asked, preferred=preferred)
        return [(row.source, row.target) for row in source.rows()]

    forms, numbers = Columns(source="lemma,tag", target="form"), Columns(source=2, target=0)
    assert found("a.tsv", "form\ttag\tlemma\nsaw\tV\tsee\n", forms) == [("see V", "saw")]
    assert found("b.tsv", "source\ttarget\nsee\tsaw\n", forms) == [("see", "saw")]
    assert found("c.tsv", "see\tsaw\nbe\twas\n", forms) == [("see", "saw"), ("be", "was")]
    assert found("d.jsonl", '{"q": "x", "form": "saw"}\n', forms) == [("x", "saw")]
    assert found("e.tsv", "saw\tV\tsee\nwas\tV\tbe\n", numbers) == [("see", "saw"), ("be", "was")]
    assert found("f.tsv", "target\tn\tsource\nsaw\tV\tsee\n", Columns(source=0, target=2)) == [("see", "saw")]
    assert found("g.jsonl", '{"source": "see", "target": "saw"}\n', numbers) == [("see", "saw")]
    assert found(
        "h.tsv", "lemma\tform\nsee\tsaw\n", Columns(source="lemma", target="form"), Columns(source="form")
    ) == [("saw", "see")]


def test_columns_are_shared_when_every_table_has_the_same(tmp_path: Path) -> None:
    one, same = write(tmp_path / "a.tsv", "source\ttarget\na\tb\n"), write(tmp_path / "b.csv", "target,source\na,b\n")
    bare, aligned = write(tmp_path / "c.tsv", "a\tb\nc\td\n"), write(tmp_path / "d.txt", "a\n")
    opened = [open_one(path) for path in (one, same, bare)] + [open_one(aligned, aligned)]
    assert shared_columns([opened[0], opened[1], opened[3]]) == ("source", "target")
    assert shared_columns(opened) is None and shared_columns(opened[3:]) is None
    assert shared_columns(opened[2:]) == (0, 1)


# -- texts in an object ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_objects_of_translations_are_pairs_in_the_order_of_their_keys(format: str, tmp_path: Path) -> None:
    rows = [{"id": n, "translation": {"de": f"Satz {n}", "en": f"text {n}"}} for n in range(3)]
    path = tmp_path / f"rows.{format}"
    if format == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(rows), path)
    opened = open_one(path)
    assert [(row.source, row.target, row.id) for row in opened.rows()][1] == ("Satz 1", "text 1", "1")
    chosen = "source in column 'de', target in column 'en', by their order"
    assert opened.notes == (f"rows.{format}: {chosen}; --source-column en --target-column de swaps them",)
    [turned] = open_pairs([Spec(str(path))], columns=Columns(source="en", target="de"))
    assert next(turned.rows()).source == "text 0" and turned.notes == ()


def test_columns_of_languages_say_how_they_are_turned(tmp_path: Path) -> None:
    named, known = write(tmp_path / "a.tsv", "en\tde\na b\tc\nd\te\n"), write(tmp_path / "b.tsv", "src\ttgt\na\tb\n")
    assert "--source-column de --target-column en swaps them" in open_one(named).notes[0]
    assert "turns" not in open_one(known).notes[0]
