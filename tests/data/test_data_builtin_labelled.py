"""The built-in labelled text: enough classes and examples, mixed, each text once, and readable as plain text too."""

from __future__ import annotations

from collections import Counter

from tests.data.fakes import open_one, read_documents
from tformer.data.builtin_labelled import MAX_CHARACTERS, MAX_PER_PACKAGE, package_rows
from tformer.data.labelled import open_labelled


def test_it_is_the_default_and_has_enough_of_every_class() -> None:
    (source,) = open_labelled([])
    rows = list(source.rows())
    assert source.name == "builtin:python-packages" and source.has_label and not source.has_text2
    counts = Counter(row.label for row in rows)
    assert 12 <= len(counts) <= 20
    assert min(counts.values()) >= 80 and max(counts.values()) <= MAX_PER_PACKAGE
    assert source.fingerprint() == open_labelled([])[0].fingerprint()


def test_texts_are_short_different_and_mixed() -> None:
    rows = package_rows()
    assert len({" ".join(row.text.split()) for row in rows}) == len(rows)
    assert max(len(row.text) for row in rows) <= MAX_CHARACTERS
    assert min(len(row.text) for row in rows) > 0
    last = Counter(row.label for row in rows[-len(rows) // 10 :])
    assert len(last) == len({row.label for row in rows}), "the last tenth has every class"
    assert not any(row.text.startswith("Module ") for row in rows)


def test_places_name_file_and_line() -> None:
    row = next(row for row in package_rows() if row.label == "tarfile")
    assert row.place.startswith("tarfile.py:") and row.place.rpartition(":")[2].isdigit()


def test_as_text_it_has_the_same_documents() -> None:
    documents = read_documents(open_one("builtin:python-packages"))
    assert documents == [f"{row.text}\n" for row in package_rows()]
