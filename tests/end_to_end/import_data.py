"""What tests of imported models learn from and are measured on, in the words of the tiny folders' tokenizers."""

from __future__ import annotations

from pathlib import Path

from tests.interop.tiny_folders import SENTENCES, WORDS

LABELS = {0: "zeta", 1: "alpha", 2: "mid"}  # an order that is not the alphabet's


def write_data(kind: str, folder: Path) -> Path:
    """`text`: lines; `labelled`: the first word decides; `pairs`: each text with itself."""
    if kind == "text":
        path, rows = folder / "text.txt", SENTENCES * 3
    elif kind == "labelled":
        path = folder / "labelled.tsv"
        rows = ["label\ttext", *(f"{LABELS[WORDS.index(line.split()[0]) % 3]}\t{line}" for line in SENTENCES * 2)]
    else:
        path, rows = folder / "pairs.tsv", ["source\ttarget", *(f"{line}\t{line}" for line in SENTENCES * 2)]
    path.write_text("".join(f"{row}\n" for row in rows))
    return path
