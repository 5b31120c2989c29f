"""Pairs that are on every machine: dates as people write them, and the same dates as ISO 8601 has them.

`builtin:dates`: "Tuesday, 3rd of March 1987" is 1987-03-03. `NUM_DATES` days between 1900 and 2099, each in a form
drawn from `FORMS` and in one of three cases, by a hash of its number. Every form can mean one day only, so 03/04/1987
is none of them. No text occurs twice, not even in another case. Rows of digits: `builtin_toys`.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from tformer.data.builtin import BUILTINS, PREFIX, find_builtin
from tformer.data.builtin_toys import TASKS, toy_rows
from tformer.data.pair_tables import PairRow
from tformer.data.permutation import derive_key
from tformer.errors import InputError

NUM_DATES = 20_000
FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
# Spelled out: strftime follows the machine's language.
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
FORMS = (
    "{d} {month} {y}",
    "{d} {mon} {y}",
    "{d}-{mon}-{y}",
    "{d}. {month} {y}",
    "{nth} {month} {y}",
    "{nth} of {month} {y}",
    "the {nth} of {month}, {y}",
    "{month} {d}, {y}",
    "{mon} {d}, {y}",
    "{month} {nth}, {y}",
    "{mon} {nth} {y}",
    "{y} {month} {d}",
    "{weekday}, {d} {month} {y}",
    "{weekday}, {month} {d}, {y}",
    "{weekday} the {nth} of {month} {y}",
    "{day} {d} {mon} {y}",
    "{day}, {mon} {nth}, {y}",
    "{dd}.{mm}.{y}",
    "{d}.{m}.{y}",
    "{y}/{mm}/{dd}",
    "{y}.{mm}.{dd}",
)
CASES: tuple[Callable[[str], str], ...] = (str, str, str.lower, str.upper)  # half of them as a book has them


@cache
def date_rows() -> tuple[PairRow, ...]:
    """All pairs, mixed; always the same."""
    rows: dict[str, PairRow] = {}
    draw = 0
    while len(rows) < NUM_DATES:
        number, form = divmod(derive_key("dates", draw), len(FORMS))
        number, case = divmod(number, len(CASES))
        day = FIRST + datetime.timedelta(days=number % ((LAST - FIRST).days + 1))
        text = CASES[case](write_date(day, FORMS[form]))
        rows.setdefault(text.lower(), PairRow(text, day.isoformat(), f"{PREFIX}dates:{len(rows) + 1}"))
        draw += 1
    return tuple(rows.values())


def write_date(day: datetime.date, form: str) -> str:
    """A date in one of the `FORMS`."""
    month, weekday = MONTHS[day.month - 1], WEEKDAYS[day.weekday()]
    return form.format(
        d=day.day,
        dd=f"{day.day:02}",
        nth=ordinal(day.day),
        m=day.month,
        mm=f"{day.month:02}",
        mon=month[:3],
        month=month,
        y=day.year,
        day=weekday[:3],
        weekday=weekday,
    )


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 21st."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


PAIRS: dict[str, Callable[[], tuple[PairRow, ...]]] = {
    "dates": date_rows,
    **{task: functools.partial(toy_rows, task) for task in TASKS},
}


@dataclass(frozen=True)
class PairBuiltin:
    """A built-in source of pairs. It is also known as text (`find_builtin`), a document a pair."""

    name: str = "dates"

    def rows(self) -> Iterator[PairRow]:
        yield from PAIRS[self.name]()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for row in self.rows():
            digest.update(f"{row.source}\t{row.target}\n".encode())
        return digest.hexdigest()

    def size_bytes(self) -> int | None:
        return None


def find_pair_builtin(path: str) -> PairBuiltin:
    """The source of `builtin:NAME`; InputError for an unknown one, and for one without pairs."""
    found = find_builtin(path)
    if not found.paired:
        paired = ", ".join(f"{PREFIX}{name}" for name, builtin in BUILTINS.items() if builtin.paired)
        raise InputError(f"{path}: is text without pairs", hint=f"with pairs: {paired}")
    return PairBuiltin(found.name)
