"""The lens as text and numbers: JSON, CSV, a terminal; and as plots, which become pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tformer.inside.lens import MEASURES, Lens, LensReport
from tformer.support.errors import visible
from tformer.support.formatting import TOKEN_SIGNS, aligned, fitted
from tformer.viz.attention.scene import run_name
from tformer.viz.attention.text import rounded
from tformer.viz.plots import Heat, Plot

SHOWN_WORDS, SHOWN_PARTS, SHOWN_LABELS = 5, 14, 12
WORD_LENGTH = 12
DIVERGENCE = "KL(model's answer ‖ answer after the layer)"
CAPTION = "Each row is the answer if the model ended there; the last is the model's."


def document_of(report: LensReport) -> dict[str, Any]:
    """The JSON of a report; arrays as in `LensReport`."""
    parts: Any = {"reason": report.without_parts}
    if report.parts is not None:
        names = [part.name for part in report.parts.parts]
        values, logits = rounded(report.parts.values), rounded(report.parts.logits)
        parts = {"against": report.against, "names": names, "values": values, "logits": logits}
    document: dict[str, Any] = {
        "model": report.model,
        "command": report.command,
        **report.texts,
        "notes": report.notes,
        "stack": report.stack,
        "rows": report.lens.rows,
        "positions": report.positions,
        "tokens": report.tokens,
        "targets": report.targets,
        **_measures(report.lens),
        "top": report.top.tolist(),
        "top_probabilities": rounded(report.lens.top_probabilities),
        "parts": parts,
    }
    if report.tuned_kl is not None:
        document["logit_lens"] = _measures(report.logit_lens)
        document["held_out_kl"] = dict(zip(("logit", "tuned"), rounded(report.tuned_kl), strict=True))
    return document


def _measures(lens: Lens) -> dict[str, Any]:
    return {name: rounded(getattr(lens, name)) for name in MEASURES}


def table_of(report: LensReport, view: str) -> list[tuple[Any, ...]]:
    """A row for each layer and position, or (`parts`) for each position and part."""
    lens, top, rows = report.lens, report.top, list[tuple[Any, ...]]()
    places = list(zip(report.positions, report.tokens, report.targets, strict=True))
    if view == "parts":
        assert report.parts is not None
        rows.append(("position", "token", "target", "part", "layer", "head", "value"))
        for place, values_C in zip(places, report.parts.values.tolist(), strict=True):
            for part, value in zip(report.parts.parts, values_C, strict=True):
                rows.append((*place, part.kind, part.layer, part.head, f"{value:.9g}"))
        return rows
    best = [f"{name}_{number + 1}" for number in range(top.shape[2]) for name in ("top", "top_probability")]
    rows.append(("row", "position", "token", "target", *MEASURES, *best))
    for row, n in np.ndindex(lens.rank.shape):
        numbers = [f"{getattr(lens, name)[row, n].item():.9g}" for name in MEASURES]
        pairs = zip(top[row, n], lens.top_probabilities[row, n].tolist(), strict=True)
        rows.append((lens.rows[row], *places[n], *numbers, *(c for word, p in pairs for c in (word, f"{p:.9g}"))))
    return rows


# --- terminal ---------------------------------------------------------------------------------------------------------


def heading(report: LensReport, view: str) -> str:
    """The title of a picture or a text."""
    kind = "Parts of logits" if view == "parts" else "Logit lens" if report.tuned_kl is None else "Tuned lens"
    return f"{kind} of {run_name(Path(str(report.model['name'])))}"


def as_text(report: LensReport, view: str) -> str:
    """A table for each shown position, of all positions the last."""
    lines = [heading(report, view), ""]
    for n in range(0 if report.every else len(report.positions) - 1, len(report.positions)):
        where = "" if report.pools else f"{signs(report.tokens[n])} (position {report.positions[n]}): "
        what = f"parts of the {_logit(report, n)}" if view == "parts" else f"probability of {signs(report.targets[n])}"
        lines += [where + what, *(_parts if view == "parts" else _layers)(report, n), ""]
    if report.tuned_kl is not None and view != "parts":
        columns = zip(report.lens.rows, *report.tuned_kl.tolist(), strict=False)
        rows = [(name, f"{old:.3f}", f"{new:.3f}") for name, old, new in columns]
        names = ("layer", "logit lens", "tuned lens")
        lines += [f"{DIVERGENCE} on held-out text, in nats", *aligned([names, *rows], right=names[1:]), ""]
    return "\n".join(lines)


def _logit(report: LensReport, n: int) -> str:
    minus = "" if report.against is None else f" minus that of {signs(report.against)}"
    return f"logit of {signs(report.targets[n])}{minus}"


def _layers(report: LensReport, n: int) -> list[str]:
    lens, top = report.lens, report.top
    rows = [("layer", "probability", "rank", "entropy", "KL", "most probable")]
    for row, name in enumerate(lens.rows):
        pairs = zip(top[row, n, :SHOWN_WORDS], lens.top_probabilities[row, n].tolist(), strict=False)
        best = "  ".join(f"{fitted(signs(word), WORD_LENGTH)} {probability:.3f}" for word, probability in pairs)
        found = (lens.probability[row, n], lens.entropy[row, n], lens.kl[row, n])
        probability, entropy, kl = (f"{value:.3f}" for value in found)
        rows.append((name, probability, f"{lens.rank[row, n]:,}", entropy, kl, best))
    return aligned(rows, right=rows[0][1:5])


def _parts(report: LensReport, n: int) -> list[str]:
    assert report.parts is not None
    values = report.parts.values[n]
    order = np.argsort(-np.abs(values), kind="stable")
    shown, rest = order[:SHOWN_PARTS], order[SHOWN_PARTS:]
    rows = [(report.parts.parts[place].name, values[place]) for place in shown]
    rows += [(f"{len(rest)} other parts", values[rest].sum())] if len(rest) else []
    rows += [("sum", values.sum()), ("logit", report.parts.logits[n])]
    cells = [(name, f"{value:+.3f}") for name, value in rows]
    return aligned(cells, right=cells[0][1:])


def signs(text: str) -> str:
    """A token with visible white space."""
    return visible(text.translate(TOKEN_SIGNS))


# --- plots ------------------------------------------------------------------------------------------------------------


def plots_of(report: LensReport, view: str) -> list[Plot]:
    """Plots of a picture: measures of each layer and position, or the parts of the last shown position."""
    if view == "parts":
        return [_plot_of_parts(report)]
    lens, rows = report.lens, report.lens.rows
    if report.pools:
        labels = lens.top_ids[-1, 0, :SHOWN_LABELS]
        # Of each row the shares by label.
        shares = np.take_along_axis(lens.top_probabilities[:, 0], np.argsort(lens.top_ids[:, 0]), axis=1)[:, labels]
        names, title = [signs(report.words[label]) for label in labels.tolist()], "Probability of each label"
        return [Heat(shares.astype(float), rows, names, "after layer", "label", "viridis", 0.0, 1.0, "probability",
                     title, CAPTION, numbers=True)]  # fmt: skip
    names = [signs(token) for token in report.tokens]
    words = [[fitted(signs(word), WORD_LENGTH) for word in row] for row in report.top[:, :, 0]]
    figures: list[tuple[str, np.ndarray, str]] = [
        ("Probability of the target, and the most probable token", lens.probability, "probability"),
        ("Rank of the target", np.log10(lens.rank + 1.0), "log10(1 + rank)"),
        ("Entropy of the answer", lens.entropy, "nats"),
        (DIVERGENCE, lens.kl, "nats"),
    ]
    return [
        Heat(values.astype(float), rows, names, "after layer", "token read", "viridis", 0.0, None if number else 1.0,
             unit, title, CAPTION, numbers=number == 0, words=words)
        for number, (title, values, unit) in enumerate(figures)
    ]  # fmt: skip


def _plot_of_parts(report: LensReport) -> Plot:
    assert report.parts is not None
    found = dict(zip(report.parts.parts, report.parts.values[-1].tolist(), strict=True))
    cells = {(part.layer, part.column): value for part, value in found.items() if part.layer is not None}
    layers, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    values = np.array([[cells.get((layer, column), np.nan) for column in columns] for layer in layers])
    alone = ", ".join(f"{part.kind} {value:+.3g}" for part, value in found.items() if part.layer is None)
    most = max(map(abs, found.values())) or 1.0
    where = "" if report.pools else f" at {signs(report.tokens[-1])}"
    title = f"Parts of the {_logit(report, -1)}{where}"
    caption = f"Beside these: {alone}. All parts add up to {sum(found.values()):.4g}."
    return Heat(values, layers, columns, "layer", "part", "RdBu_r", -most, most, "added to the logit", title, caption)
