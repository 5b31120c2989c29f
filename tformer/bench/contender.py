"""Who is timed: one library at one work, in one number format, in a process of its own (see `race`)."""

from __future__ import annotations

from typing import Protocol


class Contender(Protocol):
    """What its process asks of it.

    Attributes:
        name: `tformer`, or the library's.
        precision: of its products: fp32, bf16, int8, ...
    """

    name: str
    precision: str

    def prepare(self) -> None:
        """Build the model and whatever is made once. Not timed. Raises ValueError for what it cannot do."""

    def run(self) -> int:
        """One timed round, finished when it returns (a GPU has been waited for): the number of tokens done."""
