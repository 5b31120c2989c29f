"""Which pairs are kept, and what a person is told of the others.

A pair is left out when a side is empty (no text, or no tokens), when a side is longer than its limit, or when one side
has more than `max_length_ratio` times the tokens of the other. Each is counted for the first reason that applies.
"""

# Shapes: n pairs of one batch.

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

from tformer.data.pair_tables import PairRow
from tformer.errors import InputError

Overlong = Literal["drop", "truncate", "refuse"]


class PairFilter:
    """Chooses batch by batch, and counts.

    Args:
        limits: the most ids of a source and of a target, special tokens included, as messages name them.
        rooms: the same without special tokens.
        overlong: "drop"; "truncate": longer ones stay, and are cut by the caller; "refuse": they are an error.
        max_length_ratio: None: any.
        keep_all: nothing is left out, for evaluation: "drop" is then as "truncate".
    """

    def __init__(
        self,
        limits: tuple[int, int],
        *,
        rooms: tuple[int, int],
        overlong: Overlong,
        max_length_ratio: float | None,
        keep_all: bool,
    ) -> None:
        self._limits, self._rooms, self._ratio = limits, rooms, max_length_ratio
        self._overlong, self._keep_all = overlong, keep_all
        self._read = self._cut = 0
        self._out: Counter[str] = Counter()

    def keep(self, rows: Sequence[PairRow], sources: list[list[int]], targets: list[list[int]]) -> list[int]:
        """The numbers of the rows that stay; ids without special tokens. Raises InputError for what is refused."""
        self._read += len(rows)
        source_n, target_n = (np.array([len(ids) for ids in side], dtype=np.int64) for side in (sources, targets))
        blank = [not row.source.strip() or not row.target.strip() for row in rows]
        empty = np.array(blank, dtype=bool) | (source_n == 0) | (target_n == 0)
        overlong = (source_n > self._rooms[0]) | (target_n > self._rooms[1])
        uneven = np.zeros_like(empty)
        if self._ratio is not None:
            uneven = np.maximum(source_n, target_n) > self._ratio * np.minimum(source_n, target_n)
        left = np.ones_like(empty)
        reasons = {"empty": empty, "long": overlong & (self._overlong == "drop"), "ratio": uneven}
        for reason, out in () if self._keep_all else reasons.items():
            self._out[reason] += int((out & left).sum())
            left &= ~out
        if self._overlong == "refuse" and (overlong & left).any():
            first = int(np.flatnonzero(overlong & left)[0])
            raise self._too_long(rows[first], (len(sources[first]), len(targets[first])))
        self._cut += int((overlong & left).sum())
        return np.flatnonzero(left).tolist()

    def notes(self, name: str) -> tuple[str, ...]:
        """How many pairs were left out and why, and how many were cut."""
        notes = []
        if dropped := self._out.total():
            notes.append(f"{name}: {dropped:,} of {self._read:,} pairs left out: {self._reasons()}")
        if self._cut:
            notes.append(f"{name}: {self._cut:,} of {self._read:,} pairs are {self._longer()} and were cut")
        return tuple(notes)

    def nothing_left(self, name: str) -> InputError:
        """What is wrong when no pair stays."""
        if not self._read:
            return InputError(f"{name}: no rows")
        return InputError(
            f"{name}: none of {self._read:,} pairs is left: {self._reasons()}",
            hint="see data.seq_len, data.target_seq_len, data.overlong and data.max_length_ratio",
        )

    def _too_long(self, row: PairRow, lengths: tuple[int, int]) -> InputError:
        side = int(lengths[0] <= self._rooms[0])
        special = self._limits[side] - self._rooms[side]
        return InputError(
            f"{row.place}: the {('source', 'target')[side]} has {lengths[side] + special:,} tokens, "
            f"expected at most {self._limits[side]:,}",
            hint="that is what the model reads; leave the pair out",
        )

    def _reasons(self) -> str:
        words = {
            "empty": "with an empty side",
            "long": self._longer(),
            "ratio": f"with a length ratio above {self._ratio or 0:g}",
        }
        return ", ".join(f"{self._out[reason]:,} {text}" for reason, text in words.items() if self._out[reason])

    def _longer(self) -> str:
        source, target = self._limits
        return f"longer than {source:,} tokens" + ("" if source == target else f" (targets: {target:,})")
