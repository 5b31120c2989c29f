"""Named intermediates: ask `forward(..., taps={"decoder.0.self_attention.weights"})` and find them in the output.

No hooks: every module that owns something worth seeing is handed a sink and puts it there when it is wanted, so that
nothing is computed or kept alive for a name nobody asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class TapSink:
    """Where tapped tensors go. `scope` gives a view of the same sink whose names start with a prefix."""

    wanted: frozenset[str]
    values: dict[str, Tensor] = field(default_factory=dict)
    prefix: str = ""

    def scope(self, name: str | int) -> TapSink:
        """The sink as a submodule called `name` sees it."""
        return TapSink(self.wanted, self.values, f"{self.prefix}{name}.")

    def wants(self, name: str) -> bool:
        return self.prefix + name in self.wanted

    def put(self, name: str, value: Tensor) -> None:
        """Keep `value` if it is wanted."""
        if self.wants(name):
            self.values[self.prefix + name] = value


def check_taps(wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raise a ValueError that names the nearest taps for the first wanted name that does not exist."""
    names = list(known)
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
            raise ValueError(f"unknown tap '{name}'; nearest: {', '.join(near)}")
