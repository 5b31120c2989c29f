"""A messy table as people have it: 3,000 rows with ; and Latin-1, quoted newlines, missing labels, duplicates."""

from __future__ import annotations

import csv
import datetime
import io
import random
from typing import Any

NAMES = ["id", "date", "review", "sentiment"]
WORDS = {"neg": ("bad", "awful", "poor"), "pos": ("good", "great", "fine")}
BLANK, UNLABELLED, REPEATED, CONFLICTING = range(7, 3000, 125), range(11, 3000, 230), range(9, 3000, 50), (500, 501)


def messy_rows(count: int = 3000) -> list[list[Any]]:
    """Rows of id, date, text and label: 24 blank texts, 13 missing labels, 60 duplicates, half of them near ones."""
    draw = random.Random(1)
    rows: list[list[Any]] = []
    for n in range(count):
        label = draw.choice(sorted(WORDS))
        first, second = draw.choices(WORDS[label], k=2)
        thing, space = draw.choice(["café", "film", "naïve play"]), "\n" if n % 100 == 3 else " "
        text = f"the {thing} {n} was {first},{space}{second}; yes"
        if n in BLANK:
            text = "  "
        elif n in REPEATED:
            text, label = rows[0][2], rows[0][3]
            if n % 100 != 9:  # a near duplicate
                text = f"  {text.upper()}{'!' * n}"
        elif n in CONFLICTING:
            text, label = "one text of two labels", sorted(WORDS)[n - CONFLICTING[0]]
        if n in UNLABELLED:
            label = ""
        rows.append([n, (datetime.date(2024, 1, 1) + datetime.timedelta(n % 300)).isoformat(), text, label])
    return rows


def messy_csv(rows: list[list[Any]], *, encoding: str = "latin-1") -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=";").writerows([NAMES, *rows])
    return text.getvalue().encode(encoding)
