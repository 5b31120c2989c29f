"""Built-in sources with labels and with pairs."""

from __future__ import annotations

import datetime
import hashlib
from collections import Counter
from collections.abc import Callable

import pytest

from tests.data.fakes import Spec, open_one, read_documents
from tests.data.pair_makers import tokenize
from tformer.data.sources.builtin import (
    BUILTINS,
    DATE_FORMS,
    FIRST_DATE,
    LAST_DATE,
    MAX_CHARACTERS,
    MAX_DIGITS,
    MAX_PER_PACKAGE,
    NUM_DATES,
    NUM_DIGIT_ROWS,
    NUM_REPEATS,
    REPEAT_LENGTHS,
    date_rows,
    ordinal,
    package_rows,
    write_date,
)
from tformer.data.sources.labelled import open_labelled
from tformer.data.sources.pairs import open_pairs
from tformer.support.errors import InputError


def test_packages_are_the_default_with_enough_examples_of_every_class() -> None:
    (source,) = open_labelled([])
    rows = list(source.rows())
    assert source.name == "builtin:python-packages" and not source.has_text2
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


def test_packages_as_text_have_the_same_documents() -> None:
    documents = read_documents(open_one("builtin:python-packages"))
    assert documents == [f"{row.text}\n" for row in package_rows()]


DAY = datetime.date(1987, 3, 3)


def test_dates_are_the_default_and_can_be_named() -> None:
    (source,) = open_pairs([])
    assert source.name == "builtin:dates" and list(source.rows()) == list(date_rows())
    (named,) = open_pairs([Spec("builtin:dates", prefix="date: ")])
    assert next(iter(named.rows())).source == f"date: {date_rows()[0].source}"
    assert named.fingerprint() != source.fingerprint() == open_pairs([])[0].fingerprint()


def test_texts_are_distinct_in_any_case_and_mixed() -> None:
    rows = date_rows()
    assert len(rows) == len({row.source.lower() for row in rows}) == NUM_DATES
    targets = [datetime.date.fromisoformat(row.target) for row in rows]
    assert min(targets).year == FIRST_DATE.year and max(targets).year == LAST_DATE.year
    assert {row.source.isupper() for row in rows[:50]} == {True, False}
    assert rows[16].place == "builtin:dates:17"


def test_dates_are_written_in_the_expected_forms() -> None:
    written = {write_date(DAY, form) for form in DATE_FORMS}
    assert len(written) == len(DATE_FORMS)
    assert written >= {"3rd of March 1987", "Mar 3, 1987", "Tuesday, 3 March 1987", "03.03.1987", "3.3.1987"}
    written_out = " ".join(ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 30))
    assert written_out == "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 23rd 30th"


@pytest.mark.parametrize("form", DATE_FORMS)
def test_every_form_means_one_day(form: str) -> None:
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(days=n) for n in range(366)]
    assert len({write_date(day, form) for day in days}) == len(days)


def test_dates_are_the_same_on_every_machine() -> None:
    text = "".join(f"{row.source}\t{row.target}\n" for row in date_rows())
    assert BUILTINS["dates"].fingerprint() == hashlib.sha256(text.encode()).hexdigest()
    assert date_rows()[0].source == "December 18th, 2050"


def test_no_text_is_on_both_sides_of_the_split() -> None:
    pairs = tokenize(open_pairs([]), template="none", seq_len=64, target_seq_len=64)
    kept, held_out = pairs.split(fraction=0.1)
    assert len(held_out) == NUM_DATES // 10
    texts = [{part.texts(n)[0].lower() for n in range(len(part))} for part in (kept, held_out)]
    assert not texts[0] & texts[1]


def test_dates_as_text_have_the_same_rows() -> None:
    documents = read_documents(open_one("builtin:dates"))
    assert documents == [f"{row.source}\t{row.target}\n" for row in date_rows()]
    assert open_one("builtin:dates").fingerprint() == open_one("builtin:dates").fingerprint()


def test_other_builtins_have_no_pairs_and_dates_no_labels() -> None:
    with pytest.raises(InputError, match="builtin:python-docs: is text without pairs") as caught:
        open_pairs([Spec("builtin:python-docs")])
    assert caught.value.hint == "with pairs: builtin:dates, builtin:copy, builtin:reverse, builtin:sort"
    with pytest.raises(InputError, match="no such built-in"):
        open_pairs([Spec("builtin:date")])
    with pytest.raises(InputError, match="is text without labels"):
        open_labelled([Spec("builtin:dates")])


@pytest.mark.parametrize(
    ("task", "expected"), [("copy", lambda row: row), ("reverse", lambda row: row[::-1]), ("sort", sorted)]
)
def test_rows_of_digits_are_right_and_distinct(task: str, expected: Callable[[list[str]], list[str]]) -> None:
    (source,) = open_pairs([Spec(f"builtin:{task}")])
    rows = list(source.rows())
    assert len({row.source for row in rows}) == len(rows) == NUM_DIGIT_ROWS
    assert {len(row.source.split()) for row in rows} == set(range(1, MAX_DIGITS + 1))
    assert all(row.target.split() == list(expected(row.source.split())) for row in rows)
    assert rows[4].place == f"builtin:{task}:5" and BUILTINS[task].fingerprint() != BUILTINS["dates"].fingerprint()


def test_repeats_are_different_characters_four_times() -> None:
    documents = read_documents(open_one("builtin:repeats"))
    assert len(documents) == len(set(documents)) == NUM_REPEATS
    for text in documents:
        once = text[: len(text) // 4]
        assert text == f"{once * 4}\n" and len(once) in REPEAT_LENGTHS and len(set(once)) == len(once)
    assert {len(text) // 4 for text in documents} == set(REPEAT_LENGTHS)
    assert BUILTINS["repeats"].fingerprint() == hashlib.sha256("".join(documents).encode()).hexdigest()
    assert documents[0] == next(BUILTINS["repeats"].texts())
