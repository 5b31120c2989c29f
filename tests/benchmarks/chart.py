"""The README's chart: bars of tokens per second, from the JSON documents of `tests.benchmarks.race`:

python -m tests.benchmarks.chart report-2.json report-3.json report-5.json --out tformer/guide/pictures/speed.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

TITLE = "Speed of tformer beside transformers, llama.cpp and CTranslate2 on two CPU cores"
WIDTH, LABELS, LONGEST_BAR, BAR, PANEL = 820, 150, 560, 20, 36
OURS, THEIRS = "#2f81c4", "#9aa0a8"
NAMES = {"ctranslate2": "CTranslate2"}


@dataclass(frozen=True)
class Panel:
    """Bars of one case: of each contender's row of that batch size, in this order; others are left out."""

    title: str
    note: str
    work: str
    batch_size: int
    bars: tuple[str, ...]


PANELS = (
    Panel(
        "Training GPT-2 124M, tokens/s",
        "bf16, batch 2 x 512",
        "train",
        2,
        ("tformer bf16", "transformers bf16", "transformers fp32"),
    ),
    Panel(
        "Generating with GPT-2 124M, one text, tokens/s",
        "16 tokens read, 128 written",
        "generate",
        1,
        (
            *("tformer int4", "tformer int8", "tformer bf16"),
            *("llama.cpp q4_0", "llama.cpp q8_0", "llama.cpp bf16", "transformers bf16", "transformers fp32"),
        ),
    ),
    Panel(
        "Translating, beam 4, batch 64, tokens/s",
        "6 + 6 layers of 512",
        "translate",
        64,
        ("tformer int8", "tformer bf16", "CTranslate2 int8", "CTranslate2 fp32"),
    ),
)


def speeds_of(document: Mapping[str, Any], batch_size: int) -> dict[str, float]:
    """Tokens per second of each contender at a batch size."""
    return {
        f"{NAMES.get(row['name'], row['name'])} {row['precision']}": row["tokens_per_second"]
        for row in document["rows"]
        if row["batch_size"] == batch_size and row["failed"] is None
    }


def draw(documents: Sequence[Mapping[str, Any]]) -> str:
    """The SVG of the panels whose work has a document."""
    parts, y = [], 22
    for panel in PANELS:
        speeds: dict[str, float] = {}
        for document in documents:
            if document["settings"]["work"] == panel.work:
                speeds |= speeds_of(document, panel.batch_size)
        bars = [(label, speeds[label]) for label in panel.bars if label in speeds]
        if not bars:
            continue
        parts.append(
            f'<text x="8" y="{y}" font-weight="600">{escape(panel.title)}</text>'
            f'<text x="{WIDTH - 8}" y="{y}" text-anchor="end" font-size="12">{escape(panel.note)}</text>'
        )
        y += 24
        most = max(speed for _, speed in bars)
        for label, speed in bars:
            width = LONGEST_BAR * speed / most
            colour = OURS if label.startswith("tformer") else THEIRS
            parts.append(
                f'<text x="{LABELS}" y="{y}" text-anchor="end">{escape(label)}</text>'
                f'<rect x="{LABELS + 8}" y="{y - 11}" width="{width:.1f}" height="14" rx="2" fill="{colour}"/>'
                f'<text x="{LABELS + 14 + width:.1f}" y="{y}">{speed:,.0f}</text>'
            )
            y += BAR
        y += PANEL - 24
    height = y - 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" '
        f'fill="#797b80">\n<title>{TITLE}</title>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path, nargs="+", help="written by --json, or by tests.benchmarks.all_cases")
    parser.add_argument("--out", type=Path, default=Path("speed.svg"))
    asked = parser.parse_args()
    asked.out.write_text(draw([json.loads(path.read_text()) for path in asked.documents]))
    print(asked.out)


if __name__ == "__main__":
    main()
