"""What binds a piece of work: arithmetic, memory, or neither (the roofline model; Williams et al., 2009).

Work that takes F operations and reads B bytes at least takes max(F / peak, B / bandwidth) seconds. What it really took,
compared with either, says which of the two it was near; where it was near none, the time went elsewhere: starting
kernels, Python, copies, activations that are written and read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BINDS = 0.4
"""A share of a ceiling below which it does not bind."""

Bound = Literal["arithmetic", "memory", "overhead"]


@dataclass(frozen=True)
class Roofline:
    """Shares of the two ceilings, and what binds."""

    arithmetic: float
    bandwidth: float

    @property
    def bound(self) -> Bound:
        if max(self.arithmetic, self.bandwidth) < BINDS:
            return "overhead"
        return "arithmetic" if self.arithmetic >= self.bandwidth else "memory"

    @property
    def share(self) -> float:
        """Of the ceiling that is nearer."""
        return max(self.arithmetic, self.bandwidth)


def roofline(
    flops: float, bytes_read: float, seconds: float, *, flops_per_second: float, bytes_per_second: float
) -> Roofline:
    """Shares of peak rates: operations and bytes read in `seconds`, beside what the machine can do."""
    return Roofline(flops / seconds / flops_per_second, bytes_read / seconds / bytes_per_second)


def roofline_line(name: str, found: Roofline) -> str:
    """One line: shares of both ceilings, and what binds."""
    words = {
        "arithmetic": "bound by arithmetic",
        "memory": "bound by memory",
        "overhead": f"bound by overhead (neither ceiling above {BINDS:.0%})",
    }
    return (
        f"{name}: {found.arithmetic:.0%} of the matrix-product rate, {found.bandwidth:.0%} of the memory's read rate: "
        f"{words[found.bound]}"
    )
