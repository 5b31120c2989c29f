"""How the report on a classifier or a regression looks on a page: figures with intervals, classes, confusions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tformer.errors import visible
from tformer.formatting import as_cell

FIGURES = (
    *("accuracy", "f1", "f1_macro", "precision", "recall", "precision_macro", "recall_macro", "mcc", "ece"),
    *("pearson", "spearman", "mae", "loss"),
)
MAX_NAME, MAX_HEADING = 24, 12  # characters of a label before a line and above a column
MAX_CLASSES = 20  # a wider matrix fits no screen: its largest errors are listed instead
MAX_CONFUSIONS = 20


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """One figure a line with its 95 % interval where there is one, then a line per class, then what is confused."""
    intervals = report.get("intervals", {})
    for name in FIGURES:
        if name in report:
            between = " [{:.4f}, {:.4f}]".format(*intervals[name]) if name in intervals else ""
            yield f"{name} {report[name]:.4f}{between}"
    yield f"examples {report['examples']}"
    if "per_class" in report:
        yield ""
        yield from _class_lines(report["per_class"])
    if "confusion" in report:
        yield ""
        yield from _confusion_lines(list(report["per_class"]), report["confusion"])


def _class_lines(per_class: dict[str, dict[str, float]]) -> Iterator[str]:
    rows = [
        [
            _short(name, MAX_NAME),
            *(f"{scores[key]:.4f}" for key in ("precision", "recall", "f1")),
            str(scores["support"]),
        ]
        for name, scores in per_class.items()
    ]
    yield from _aligned([["class", "precision", "recall", "f1", "support"], *rows])


def _confusion_lines(names: Sequence[str], counts: Sequence[Sequence[int]]) -> Iterator[str]:
    if len(names) <= MAX_CLASSES:
        yield "confusion (line: label, column: prediction)"
        heading = ["", *(_short(name, MAX_HEADING) for name in names)]
        rows = [[_short(name, MAX_NAME), *map(str, row)] for name, row in zip(names, counts, strict=True)]
        yield from _aligned([heading, *rows])
        return
    wrong = [
        (count, label, guess)
        for label, row in enumerate(counts)
        for guess, count in enumerate(row)
        if count and label != guess
    ]
    wrong.sort(key=lambda error: (-error[0], error[1:]))
    yield f"most frequent confusions of {len(wrong):,}"
    cells = [[_short(names[label], MAX_NAME), _short(names[guess], MAX_NAME), str(n)] for n, label, guess in wrong]
    yield from _aligned([["label", "prediction", "count"], *cells[:MAX_CONFUSIONS]], text_columns=2)


def _aligned(rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> Iterator[str]:
    """Columns two spaces apart: texts begin, numbers end at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _short(name: str, most: int) -> str:
    name = visible(as_cell(name))
    return name if len(name) <= most else f"{name[: most - 1]}…"
