"""Three tasks that show whether a model of pairs learns at all: copy, reverse and sort a row of digits.

`builtin:copy`, `builtin:reverse`, `builtin:sort`: `NUM_ROWS` different rows of 1 to `MAX_DIGITS` digits with spaces
between them, drawn by a hash of their numbers. (JoeyNMT's toy data, arXiv 1907.12484, is of this kind.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tformer.data.builtin import PREFIX
from tformer.data.pair_tables import PairRow
from tformer.data.permutation import derive_key

NUM_ROWS = 10_000
MAX_DIGITS = 9
TASKS: dict[str, Callable[[str], str]] = {
    "copy": str,
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
}


@cache
def toy_rows(task: str) -> tuple[PairRow, ...]:
    """All pairs of a task, short and long ones mixed; always the same."""
    rows: dict[str, PairRow] = {}
    draw = 0
    while len(rows) < NUM_ROWS:
        number, length = divmod(derive_key("toys", draw), MAX_DIGITS)
        digits = f"{number % 10 ** (length + 1):0{length + 1}}"
        place = f"{PREFIX}{task}:{len(rows) + 1}"
        rows.setdefault(digits, PairRow(" ".join(digits), " ".join(TASKS[task](digits)), place))
        draw += 1
    return tuple(rows.values())
