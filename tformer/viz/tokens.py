"""The loss of each token as a page, a picture, terminal text, JSON and CSV: of one run, or of two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tformer.inside.tokens import BINS, TokenReport, segments
from tformer.support.errors import visible
from tformer.support.formatting import aligned, fitted
from tformer.viz.attention.scene import run_name
from tformer.viz.evaluation import calibration
from tformer.viz.lens.text import signs
from tformer.viz.page import MAX_BYTES, render_page, within
from tformer.viz.picture import ReportView, for_page
from tformer.viz.plots import Heat, LinePlot, Plot, colour_at
from tformer.viz.terminal import RESET, Colours, colour_code, draw_plot

MOST_BITS = 16.0  # at the end of the colour scale, where a token has as many
ROWS, COLUMNS = 20, 8  # of tokens in a picture, as many as have room for words
WORD, CONTEXT = 12, 32  # characters of a word in a picture, and of a context in the terminal
CAUTION = (
    f"Equal losses have equal colours, and all above {MOST_BITS:g} bits the same. A loss says how surprising a token "
    "is to the model, not how right it is."
)
BODY = """\
<div id="controls" class="controls" role="group" aria-label="What is shown"></div>
<section id="texts" class="panels" aria-label="The text, each token coloured"></section>
<section id="cell" aria-label="The token at the cursor" aria-live="polite"></section>
<section id="hardest" aria-label="The hardest tokens"></section>
<section id="plots" aria-label="Calibration"></section>
"""


def view_of(reports: Sequence[TokenReport], *, hardest: int, command: str = "") -> ReportView:
    """The reports of one run, or of two side by side. hardest: number of the hardest tokens."""
    return ReportView(
        f"Tokens of {', '.join(names_of(reports))}",
        lambda: {"command": command} | as_document(reports, hardest=hardest),
        lambda: plots_of(reports),
        lambda: _table(reports, hardest=hardest),
        partial(as_text, reports, hardest=hardest),
        lambda **_: as_page(reports, hardest=hardest, command=command),
    )


def names_of(reports: Sequence[TokenReport]) -> list[str]:
    """A name for each run: of two checkpoints of one run with their steps."""
    names = [run_name(Path(str(report.model["name"]))) for report in reports]
    unique = len(set(names)) == len(names)
    return names if unique else [f"{name}, step {r.model['step']:,}" for name, r in zip(names, reports, strict=True)]


def summary_line(report: TokenReport) -> str:
    """`12 tokens, 3.214 bits per token, 1.1 per character, perplexity 9.28, 41.7% right, calibration error 0.031`."""
    found = report.summary
    characters = f"{found['bits_per_character']:.4g} per character, " if "bits_per_character" in found else ""
    return (
        f"{found['tokens']:,} tokens, {found['bits_per_token']:.4g} bits per token, {characters}"
        f"perplexity {found['perplexity']:.4g}, {found['accuracy']:.1%} right, calibration error {found['ece']:.3f}"
    )


def most_bits(reports: Sequence[TokenReport]) -> float:
    """The loss at the end of the colour scale, the same for all runs."""
    return min(MOST_BITS, max(float(np.nanmax(report.bits)) for report in reports)) or 1.0


# --- numbers ----------------------------------------------------------------------------------------------------------


def as_document(reports: Sequence[TokenReport], *, hardest: int) -> dict[str, Any]:
    """One document: for each run summary, calibration, hardest tokens and a text's tokens; segments of two runs."""
    runs: list[dict[str, Any]] = []
    for name, report in zip(names_of(reports), reports, strict=True):
        runs.append(
            {
                "name": name, "model": report.model, "read": report.read, "text": report.text,
                "source": report.source, "summary": report.summary, "calibration": report.calibration,
                "tokens": None if report.text is None else [_token(report, n) for n in range(len(report.ids))],
                "hardest": [{"before": report.context(n)[0], "after": report.context(n)[1], **_token(report, n)}
                            for n in report.hardest(hardest)],
            }
        )  # fmt: skip
    common: list[dict[str, Any]] | None = None
    if len(reports) == 2 and reports[0].text is not None and reports[0].text == reports[1].text:
        common, of_tokens = segments(*reports)
        for run, numbers in zip(runs, of_tokens, strict=True):
            for token, number in zip(run["tokens"], numbers, strict=True):
                token["segment"] = None if number < 0 else number
                token["difference"] = None if number < 0 else common[number]["difference"]
    return {"runs": runs, "segments": common}


def _token(report: TokenReport, place: int) -> dict[str, Any]:
    start, end = report.spans[place] or (None, None)
    bits, known = float(report.bits[place]), report.rank[place] >= 0
    return {
        "position": place, "id": int(report.ids[place]), "token": report.tokens[place], "piece": report.pieces[place],
        "start": start, "end": end, "bits": bits if known else None, "probability": 2.0**-bits if known else None,
        "rank": int(report.rank[place]) if known else None, "top": report.top(place) if known else [],
    }  # fmt: skip


def _table(reports: Sequence[TokenReport], *, hardest: int) -> list[tuple[Any, ...]]:
    """A row for each token of a text, or for each of the hardest tokens of data."""
    columns = ["position", "id", "token", "start", "end", "bits", "probability", "rank"]
    columns += ["before", "after"] if reports[0].text is None else []
    most = max(report.top_ids.shape[1] for report in reports)
    best = [f"{name}_{number + 1}" for number in range(most) for name in ("top", "top_probability")]
    rows: list[tuple[Any, ...]] = [("run", *columns, *best)]
    for run in as_document(reports, hardest=hardest)["runs"]:
        for token in run["tokens"] or run["hardest"]:
            best_cells = (cell for pair in token["top"] for cell in pair)
            rows.append((run["model"]["name"], *map(token.get, columns), *best_cells))
    return rows


# --- page, plots, terminal --------------------------------------------------------------------------------------------


def as_page(reports: Sequence[TokenReport], *, hardest: int, command: str = "", max_bytes: float = MAX_BYTES) -> str:
    """The page. Raises InputError for one of more than `max_bytes`."""
    first, high, document = reports[0], most_bits(reports), as_document(reports, hardest=hardest)
    measures: dict[str, Any] = {"bits": ("loss, bits (dark: expected, yellow: surprising)", "viridis", 0.0, high)}
    if document["segments"] is not None:
        most = np.nanmax([0.0, *(abs(each["difference"]) for each in document["segments"])]) or 1.0
        one, other = names_of(reports)
        measures["difference"] = (f"bits of {other} minus those of {one}", "RdBu_r", -most, most)
    page = render_page(
        title="Tokens",
        subtitle=f"{', '.join(names_of(reports))}: {fitted(first.read if first.text is None else first.text, 160)}",
        style="tokens.css",
        body=BODY,
        scripts=("tokens.js", "plots.js"),
        data=document
        | {
            "measures": measures,
            "captions": [f"{report.read}: {summary_line(report)}" for report in reports],
            "plots": [for_page(calibration_plot(reports))],
        },
        notes=[
            CAUTION,
            *dict.fromkeys(note for report in reports for note in report.notes),
            *("Model: {name}, step {step}.".format(**report.model) for report in reports),
            *([] if first.source is None else [f"Source: {first.source}"]),
            *([f"Command: {command}"] if command else []),
        ],
    )
    return within(page, max_bytes, "a shorter text or a smaller --top-k makes it smaller; --format csv has no limit")


def plots_of(reports: Sequence[TokenReport]) -> list[Plot]:
    """The tokens of a text in rows, as maps of their losses; then the calibration."""
    high, plots = most_bits(reports), list[Plot]()
    for name, report in zip(names_of(reports), reports, strict=True):
        words = [fitted(signs(token), WORD) for token in report.tokens]
        for start in range(0, 0 if report.text is None else len(words), ROWS * COLUMNS):
            rows = range(start, min(start + ROWS * COLUMNS, len(words)), COLUMNS)
            bits_RC = np.full((len(rows), COLUMNS), np.nan)
            bits_RC.flat[: len(words) - start] = report.bits[start : start + bits_RC.size]
            shown = [[*words[row : row + COLUMNS], *[""] * COLUMNS][:COLUMNS] for row in rows]
            plots.append(Heat(bits_RC, list(map(str, rows)), [""] * COLUMNS, "position", "", "viridis", 0.0, high,
                              "bits", f"Loss of each token, {name}", summary_line(report), numbers=True,
                              words=shown))  # fmt: skip
    return [*plots, calibration_plot(reports)]


def calibration_plot(reports: Sequence[TokenReport]) -> LinePlot:
    """The calibration of all runs."""
    named = zip(names_of(reports), reports, strict=True)
    return calibration({f"{name}, ECE {each.summary['ece']:.3f}": each.calibration for name, each in named}, bins=BINS)


def as_text(reports: Sequence[TokenReport], *, hardest: int, width: int, colour: Colours) -> str:
    """For each run the coloured text and the hardest tokens; the calibration."""
    lines, high = list[str](), most_bits(reports)
    for name, report in zip(names_of(reports), reports, strict=True):
        lines += [f"{name}, {report.read}", summary_line(report), ""]
        lines += [] if report.text is None else [_coloured(report, high, colour), ""]
        rows = [("bits", "rank", "before", "token", "after", "most probable")]
        for place in report.hardest(hardest):
            (before, after), (answer, share) = map(signs, report.context(place)), report.top(place)[0]
            cells = (before[-CONTEXT:], signs(report.tokens[place]), after[:CONTEXT], f"{signs(answer)} {share:.3f}")
            rows.append((f"{report.bits[place]:.2f}", f"{report.rank[place]:,}", *cells))
        lines += ["hardest tokens", *aligned(rows, right=rows[0][:3]), ""]
    return "\n".join([*lines, draw_plot(calibration_plot(reports), width=min(width, 72), colour=colour)])


def _coloured(report: TokenReport, high: float, colour: Colours) -> str:
    """The text, every token on the colour of its loss; the terminal breaks its lines."""
    pieces = list[str]()
    for piece, bits in zip(report.pieces, report.bits.tolist(), strict=True):
        parts = [visible(part) for part in piece.replace("\n", "↵\n").split("\n")]
        if colour != "none" and np.isfinite(bits):
            ground = colour_at("viridis", bits / high)
            ink = (0, 0, 0) if np.dot(ground, (0.3, 0.6, 0.1)) > 127 else (255, 255, 255)
            codes = f"{colour_code(ground, colour, ground=True)};{colour_code(ink, colour, ground=False)}"
            parts = [f"\x1b[{codes}m{part}{RESET}" if part else "" for part in parts]
        pieces.append("\n".join(parts))
    return "".join(pieces)
