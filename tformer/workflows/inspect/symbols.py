"""Sizes by letter: what `[B, H, T, h]` stands for, and that a tensor really has that shape.

    B examples   T positions (of the decoder beside an encoder: of the target)   S positions of the source
    D d_model    H heads    K key/value heads    h head size    v value size    F feed-forward size
    V vocabulary    E embedding size    L labels    r projected keys (Linformer)    G global tokens (Longformer)
    C channels   Y image height   X image width   P patch size   N patches

Letters side by side are a product, `+` a sum: `Hh+Kh+Kv`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

NAMES = {
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


def value_of(symbol: str, sizes: Mapping[str, int]) -> int:
    """The number that a symbol stands for."""
    return sum(math.prod(sizes[c] if c in sizes else int(c) for c in term) for term in symbol.split("+"))


def check_shape(shape: Sequence[int], symbols: Sequence[str], sizes: Mapping[str, int], *, what: str) -> None:
    """Fail where a tensor has not the shape that its symbols say: the description would be wrong."""
    expected = [value_of(symbol, sizes) for symbol in symbols]
    assert list(shape) == expected, f"{what}: found {list(shape)}, expected {list(symbols)} = {expected}"


def shown(symbol: str) -> str:
    """A product with its dots: `CPP` is C·P·P."""
    return "+".join("·".join(term) for term in symbol.split("+"))
