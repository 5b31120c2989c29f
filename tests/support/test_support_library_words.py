"""Messages in the program's own words: pydantic's sentences, numpy's counts and Python's type names stay inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field, TypeAdapter, ValidationError

from tformer.support.bounds import EXPECTED, mistake_of
from tformer.support.errors import cannot_write
from tformer.support.formatting import kind_of

WRONG: list[tuple[Any, Any, str]] = [
    (int, "x", "found the text 'x', expected an integer"),
    (int, 2.5, "found 2.5, expected an integer"),
    (float, None, "found null, expected a number"),
    (str, 3, "found 3, expected text"),
    (bool, "maybe", "found the text 'maybe', expected true or false"),
    (list[int], 3, "found 3, expected a list"),
    (dict[str, int], [1], "found a list of 1, expected a mapping"),
    (Path, 3, "found 3, expected a path"),
    (Literal["a", "b"], "c", "found the text 'c', expected 'a' or 'b'"),
    (Annotated[int, Field(ge=1)], 0, "found 0, expected at least 1"),
    (Annotated[float, Field(gt=0, le=1)], 2, "found 2, expected at most 1"),
    (Annotated[list[int], Field(min_length=2)], [1], "found a list of 1, expected at least 2 values"),
    (Annotated[str, Field(max_length=2)], "abc", "found the text 'abc', expected at most 2 characters"),
]


@pytest.mark.parametrize(("kind", "value", "words"), WRONG, ids=str)
def test_an_error_of_pydantic_is_said_in_plain_words(kind: Any, value: Any, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(value)
    assert mistake_of(caught.value.errors()[0]) == words


def test_an_error_of_an_unknown_type_does_not_bring_its_sentence() -> None:
    entry = {"type": "new_in_pydantic_9", "loc": (), "msg": "Input should be anew", "input": 3}
    assert mistake_of(entry) == "found 3, expected another value" and "new_in_pydantic_9" not in EXPECTED


def test_no_message_of_pydantic_is_read_elsewhere() -> None:
    """`mistake_of` and `expected_by` are the only doors: an entry's "msg" is read nowhere."""
    source = Path(__file__).parents[2] / "tformer"
    found = [
        str(file) for file in source.rglob("*.py") if '["msg"]' in file.read_text() or "['msg']" in file.read_text()
    ]
    assert found == []


def test_kinds_of_values_have_names_that_are_not_pythons() -> None:
    values = (None, True, 3, 2.5, "x", [], {})
    names = ("null", "true or false", "a number", "a number", "a text", "a list", "an object")
    assert tuple(map(kind_of, values)) == names and kind_of(np.zeros(2)) == "ndarray"


def test_a_write_that_numpy_cut_short_is_said_without_its_counts() -> None:
    try:
        np.arange(8192.0).tofile("/dev/full")
    except OSError as error:
        message = cannot_write("out.npy", error).message
        assert "requested" not in message and message.startswith("cannot write out.npy: ")
    message = cannot_write("out.npy", OSError("36864 requested and 0 written")).message
    assert message == "cannot write out.npy: only a part was written"
