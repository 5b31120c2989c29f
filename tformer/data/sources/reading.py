"""How files of text and tables are read: encoding, delimiter, and what happens to bytes that are no character.

What is not named is found: the encoding of csv and tsv in their first bytes, the delimiter of csv in its first rows.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tformer.support.errors import InputError
from tformer.support.options import BadRowsAre, Errors, QuotesAre

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
"""Separators of cells that are found in csv, and their names."""
SHOWN_ROWS = 10  # of those that cannot be used
MAX_REASONS = 1000  # that are counted apart
ENCODING_BYTES = 1 << 24  # at the beginning of a table, in which its encoding is found
NUL_BYTES = 8192  # at the beginning, in which UTF-16 shows
UTF8_CHARACTERS = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
UNDEFINED_IN_CP1252 = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")


@dataclass(frozen=True)
class Reading:
    """Settings for reading files. Raises InputError for an unknown encoding or a delimiter of several characters.

    Attributes:
        errors: at bytes that are not of the encoding.
        encoding: of text, by a name that Python knows; None: found in tables, else UTF-8.
        delimiter: between the cells of csv: a character, or a name of `DELIMITERS`; None: found.
        bad_rows: what happens to rows of tables that cannot be used.
        quotes: in csv they stand around cells, or are text; None: around cells, and a doubtful one is an error.
    """

    errors: Errors = "strict"
    encoding: str | None = None
    delimiter: str | None = None
    bad_rows: BadRowsAre = "error"
    quotes: QuotesAre | None = None

    def __post_init__(self) -> None:
        try:
            "".encode(self.encoding or "utf-8")
        except LookupError:
            raise InputError(
                f"--encoding: unknown encoding '{self.encoding}'",
                hint="known are utf-8, utf-16, latin-1, cp1252, cp1251, gbk, shift_jis and others",
            ) from None
        if self.delimiter is not None and (len(self.separator or "") != 1 or self.separator in ('"', "\n", "\r")):
            names = ", ".join(DELIMITERS.values())
            raise InputError(f"--delimiter: expected one character, {names}, found {self.delimiter!r}")

    @property
    def separator(self) -> str | None:
        """The delimiter as a character."""
        named = {name: character for character, name in DELIMITERS.items()} | {"\\t": "\t"}
        return self.delimiter and named.get(self.delimiter, self.delimiter)

    @property
    def drops(self) -> bool:
        """Whether rows that cannot be used are left out."""
        return self.bad_rows == "drop"


class ReadsTexts:
    """Base class of options of commands that read texts: lines, or a table."""

    input_path: str | None
    text_column: str | None
    invalid_utf8: Errors
    encoding: str | None
    delimiter: str | None
    quotes: QuotesAre | None

    @property
    def reading(self) -> Reading:
        """These options as `Reading`. Raises InputError for an unknown encoding or delimiter."""
        return Reading(self.invalid_utf8, self.encoding, self.delimiter, quotes=self.quotes)


class BadRows:
    """Rows that cannot be used: their number, also by reason, and the lines of the first ones."""

    def __init__(self, rows: Iterable[tuple[str, Any, InputError]] = ()) -> None:
        """rows: (place, what was read, error) of each."""
        self.total = 0
        self.first: InputError | None = None
        self.reasons = Counter[str]()
        self.lines: dict[str, list[str]] = {}  # of the first `SHOWN_ROWS`, by reason
        for place, _, error in rows:
            self.add(place, error)

    def add(self, place: str, error: InputError) -> None:
        """Count a row."""
        reason = error.message.removeprefix(f"{place}: ")
        if self.total < SHOWN_ROWS:
            self.lines.setdefault(reason, []).append(place.rpartition(":")[2])
        if reason in self.reasons or len(self.reasons) < MAX_REASONS:
            self.reasons[reason] += 1
        self.first = self.first or error
        self.total += 1

    def error(self, name: str) -> InputError:
        """The error of the only bad row, or one error for all bad rows of the file of this name."""
        assert self.first is not None
        hint = self.first.hint or "--bad-rows drop leaves such rows out"
        message = self.first.message if self.total == 1 else f"{name}: {self.total:,} rows cannot be used: {self}"
        return InputError(message, hint=hint)

    def __str__(self) -> str:
        """The reasons of the first ones, each with its number and lines."""
        shown = []
        for reason, lines in self.lines.items():
            count, named = self.reasons[reason], f"line{'s' * (len(lines) > 1)} {', '.join(lines)}"
            shown.append(f"{reason} ({f'{count:,} rows, first ' if count > len(lines) else ''}{named})")
        rest = self.total - sum(self.reasons[reason] for reason in self.lines)
        return "; ".join([*shown, *([f"and {rest:,} more"] if rest else [])])


def whole_characters(text: str, *, place: str, errors: Errors) -> str:
    """Refuses or replaces half of a UTF-16 pair: JSON can hold it, but it is no character and has no UTF-8."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if errors == "replace":
            return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
        found = f"\\u{ord(text[error.start]):04x}"
        raise InputError(f"{place}: {found} is half a character", hint="--invalid-utf8 replace accepts it") from None
    return text


def find_encoding(chunks: Iterator[bytes]) -> str:
    """The encoding of a table, by its first `ENCODING_BYTES`: UTF-8 (also where no other fits), UTF-16 or cp1252.

    Text in a Western language has single letters beyond ASCII, which are rarely UTF-8 by chance. In other scripts they
    stand in rows: such text, and UTF-8 with damaged bytes, is not taken for cp1252. Latin-1 has the same letters;
    it is chosen for bytes that cp1252 leaves undefined.
    """
    data = b""
    while len(data) < ENCODING_BYTES and (chunk := next(chunks, b"")):
        data += chunk
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for encoding, first in (("utf-16-le", 1), ("utf-16-be", 0)):
        high = data[first:NUL_BYTES:2]
        if high.count(0) > len(high) // 2:
            return encoding
    with contextlib.suppress(UnicodeDecodeError):
        codecs.utf_8_decode(data, "strict", False)
        return "utf-8"
    rows = re.findall(rb"[\x80-\xff]+", data)
    if sum(map(len, rows)) > 2 * len(rows) or 10 * len(UTF8_CHARACTERS.findall(data)) > len(rows):
        return "utf-8"
    return "latin-1" if UNDEFINED_IN_CP1252.search(data) else "cp1252"


def find_delimiter(lines: Sequence[str]) -> str:
    """The separator of these first lines of csv: one that the first row has, and that cuts most rows like it.

    The last row may be incomplete. A comma where several fit, or none.
    """
    best = (0.0, ",")
    for delimiter in DELIMITERS:
        widths: list[int] = []
        with contextlib.suppress(csv.Error):
            for row in csv.reader(lines, delimiter=delimiter):
                widths += [len(row)] if row else []
        if widths and widths[0] > 1:
            share = widths.count(widths[0]) / len(widths)
            best = max(best, (share, delimiter), key=lambda found: found[0])
    return best[1]
