"""Assertions of the tests of other projects: their numbers, what tformer gives, and the definition if it differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TOLERANCE = 1e-4  # of the projects' own tests


@dataclass(frozen=True)
class Claim:
    """One assertion of a test of another project.

    Attributes:
        test: the name of their test, and what it asserts.
        found: what tformer gives.
        theirs: what they expect.
        ours: what tformer's definition gives where it differs.
        why: that definition; "": theirs holds.
    """

    test: str
    found: Callable[[], Any]
    theirs: Any
    ours: Any = None
    why: str = ""

    def check(self) -> None:
        """Assert their value, or where a definition differs ours, which is then another one."""
        found = self.found()
        assert close(found, self.ours if self.why else self.theirs), found
        assert not self.why or not close(found, self.theirs)

    def __str__(self) -> str:
        return self.test.replace(" ", "_")


def close(found: Any, expected: Any) -> bool:
    """Whether nested sequences of numbers are equal up to the tolerance."""
    if isinstance(expected, float):
        return found == expected or abs(found - expected) <= TOLERANCE
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return len(found) == len(expected) and all(map(close, found, expected))
    return bool(found == expected)


def tally(claims: Sequence[Claim]) -> tuple[int, int]:
    """How many claims hold, and how many there are."""
    return sum(not claim.why for claim in claims), len(claims)
