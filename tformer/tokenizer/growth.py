"""A bound on how much longer a text may become in the steps of a tokenizer.json, computed from the file alone.

A file of a few hundred bytes can hold forty replacements that each double a text. Such files are refused before any
text is given to them.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any

MAX_GROWTH = 256  # times; Unicode's own normal forms reach 18
MAX_TEMPLATE = 4096  # pieces of a template


def growth_problem(document: dict[str, Any]) -> str | None:
    """Why encoding or decoding could give far more text than it is given; None if it cannot."""
    for section in ("normalizer", "pre_tokenizer", "decoder"):
        factor = 1.0
        for step in _steps(document.get(section)):
            factor *= _factor(step)
        if factor > MAX_GROWTH:
            return (
                f"its {section} can make a text {min(factor, 1e12):,.0f} times as long, expected at most {MAX_GROWTH}"
            )
    for step in _steps(document.get("post_processor")):
        for name in ("single", "pair"):
            pieces = step.get(name)
            texts = [piece for piece in pieces or () if isinstance(piece, dict) and "Sequence" in piece]
            if isinstance(pieces, list) and (len(pieces) > MAX_TEMPLATE or len(texts) > 2):
                return f"its template repeats a text: {name} has {len(pieces)} pieces, {len(texts)} of them texts"
    return None


def _steps(section: Any) -> Iterator[dict[str, Any]]:
    """The steps of a section. Sequences give their steps one by one."""
    if not isinstance(section, dict):
        return
    yield section
    for name in ("normalizers", "pretokenizers", "decoders", "processors"):
        for inner in section.get(name) or ():
            yield from _steps(inner)


def _factor(step: dict[str, Any]) -> float:
    """The largest factor by which the step can lengthen a text."""
    if step.get("type") == "Precompiled":
        charsmap = step.get("precompiled_charsmap")
        if not isinstance(charsmap, str):
            return 1.0
        # SentencePiece's map of characters: the size of a trie, the trie, then the replacements, which end in NUL.
        data = base64.b64decode(charsmap)
        (size,) = struct.unpack("<I", data[:4])
        return float(max(map(len, data[4 + size :].split(b"\0")), default=1))
    added, pattern = step.get("content"), step.get("pattern")
    if step.get("type") != "Replace" or not isinstance(added, str):
        return 1.0
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(literal, str) and literal:
        return max(1.0, len(added) / len(literal))
    return len(added) + 1.0 if len(added) > 1 else 1.0  # a regular expression may match between any two characters
