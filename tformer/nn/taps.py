"""Taps: the inner tensors of a forward pass by name, each declared once, which a caller may read or replace.

A module declares its tensors in `taps()`, in the order of computation, each with the letters of its shape and its
meaning, and passes each through `tap` where it is made. What follows is computed from what `tap` returns: the tensor
itself, or its replacement. Without taps the sink is None, and nothing is done.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

LETTERS = {
    "B": "examples",
    "T": "positions",
    "S": "source positions",
    "D": "d_model",
    "E": "embedding size",
    "H": "heads",
    "K": "key/value heads",
    "h": "head size",
    "v": "value size",
    "F": "feed-forward size",
    "V": "vocabulary",
    "L": "labels",
    "r": "projected keys",
    "G": "global tokens",
    "C": "channels",
    "Y": "image height",
    "X": "image width",
    "P": "patch size",
    "N": "patches",
}
"""Meanings of the letters of shapes. Letters side by side are a product, `+` a sum: `Hh+Kh+Kv`."""


class Tap(NamedTuple):
    """Declaration of an inner tensor.

    Attributes:
        letters: of its shape, one symbol for each dimension: "B T Hh+Kh+Kv". T: positions of the stack; S: keys.
        inputs: names of the tensors it is made of, as far as they exist; None: the tensor before it.
        parameters: modules and parameters in it, relative to the declaring module; `positions` is that of the layer.
        beside: the next tensor reads this tensor and the one before it.
        replaces: name of the tensor in whose place later ones read this one.
        dropout, dropout_before: the rates at which training drops numbers of it, and of the tensor before it.
        title: the name in documents; default: the name itself.
    """

    name: str
    letters: str
    meaning: str
    inputs: tuple[str, ...] | None = None
    parameters: tuple[str, ...] = ()
    beside: bool = False
    replaces: str | None = None
    dropout: float = 0.0
    dropout_before: float = 0.0
    title: str = ""


Replacement = Tensor | Callable[[Tensor], Tensor]
"""What takes the place of a tapped tensor: a tensor of its shape and dtype, or a function that makes one from it."""


class TapSink:
    """Collects tapped tensors by name and replaces some. `scope` gives a view of it for names with a prefix.

    wanted: names to collect. replacements: by name. values: what was collected. used: names that were replaced.
    Not a dataclass: FSDP2 copies dataclasses that hold tensors, so that taps would be collected in a copy that is lost.
    """

    def __init__(self, wanted: Collection[str], replacements: Mapping[str, Replacement] | None = None) -> None:
        self.wanted, self.replacements, self.prefix = frozenset(wanted), replacements or {}, ""
        self.values: dict[str, Tensor] = {}
        self.used: set[str] = set()

    def scope(self, name: str | int) -> TapSink:
        """The sink as a submodule called `name` sees it."""
        sink = TapSink(self.wanted, self.replacements)
        sink.prefix, sink.values, sink.used = f"{self.prefix}{name}.", self.values, self.used
        return sink

    def wants(self, name: str) -> bool:
        """Whether the tensor has to be formed: to be collected or to be replaced."""
        return self.prefix + name in self.wanted or self.replaces(name)

    def replaces(self, name: str) -> bool:
        return self.prefix + name in self.replacements

    def replaced(self, name: str, value: Tensor) -> Tensor:
        """`value`, or what replaces it. ValueError for a replacement of another shape or dtype."""
        name = self.prefix + name
        if name not in self.replacements:
            return value
        self.used.add(name)
        found = self.replacements[name]
        new = found if isinstance(found, Tensor) else found(value)
        if new.shape != value.shape or new.dtype != value.dtype:
            raise ValueError(
                f"replace '{name}': found {new.dtype} {list(new.shape)}, expected {value.dtype} {list(value.shape)}"
            )
        return new

    def keep(self, name: str, value: Tensor) -> Tensor:
        """`value`, collected if it is wanted."""
        if self.prefix + name in self.wanted:
            self.values[self.prefix + name] = value
        return value


def tap(taps: TapSink | None, name: str, value: Tensor) -> Tensor:
    """`value` or what replaces it, collected under this name if it is wanted."""
    return value if taps is None else taps.keep(name, taps.replaced(name, value))


def scoped(taps: TapSink | None, name: str | int) -> TapSink | None:
    """The sink for a submodule called `name`; None without taps."""
    return None if taps is None else taps.scope(name)


def check_taps(wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raise a ValueError that names the nearest taps for the first wanted name that does not exist."""
    names = list(known)
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
            raise ValueError(f"unknown tap '{name}'; nearest: {', '.join(near)}")
