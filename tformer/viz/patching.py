"""Activation patching and ablation as plots, tables, JSON and CSV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tformer.inside.options import head_name
from tformer.inside.patching import PARTS, Ablation, AblationReport, PatchMap, PatchReport
from tformer.loading import Identity
from tformer.support.formatting import aligned
from tformer.viz.picture import ReportView
from tformer.viz.plots import Heat, Plot

# --- patching --------------------------------------------------------------------------------------------------------


def patch_plots(report: PatchReport) -> list[Plot]:
    """A map of each part and beside it its estimate: tokens and layers, or layers and heads."""
    plots: list[Plot] = []
    for each in report.maps:
        for what, values in (("patched", each.exact), ("estimated by gradients", each.estimate)):
            if values is not None:
                plots.append(_patch_heat(report, each, what, values))
    return plots


def _patch_heat(report: PatchReport, each: PatchMap, what: str, values: np.ndarray) -> Heat:
    names = [f"{number}: {token}" for number, token in enumerate(report.tokens[each.side])]
    most = max(1.0, float(np.nanmax(np.abs(values))))
    place = f" of the {each.side}" if len(report.tokens) > 1 else ""
    agree = "" if each.correlation is None else f"; correlation of both {each.correlation:.2f}"
    caption = f"{metric_words(report)}: 1 as after the clean prompt, 0 as after the corrupted one{agree}"
    layers = range(len(values))
    rows, columns, row_label, column_label = (
        (layers, range(values.shape[1]), "layer", "head") if each.is_of_heads else (names, layers, "token", "layer")
    )
    return Heat(
        values if each.is_of_heads else values.T, rows, columns, row_label, column_label, "RdBu_r", -most, most,
        f"{report.metric}, 1 clean, 0 corrupted", f"{PARTS[each.part]}{place}, {what}", caption,
        numbers=each.is_of_heads,
    )  # fmt: skip


def metric_words(report: PatchReport) -> str:
    """`difference of the logits of ' Paris' and ' Rome'`."""
    if report.wrong is not None:
        return f"difference of the logits of '{report.answer}' and '{report.wrong}'"
    return f"{report.metric} of '{report.answer}'"


def patch_lines(report: PatchReport) -> Iterator[str]:
    """The metric after both prompts; for each part its most important cell and the correlation of its estimate."""
    yield f"{metric_words(report)}: {report.clean:.4g} clean, {report.corrupted:.4g} corrupted"
    for each in report.maps:
        values = each.estimate if each.exact is None else each.exact
        extreme = np.nanargmin if report.noising else np.nanargmax
        layer, place = np.unravel_index(int(extreme(values)), values.shape)
        of_head = head_name(int(layer), int(place), cross=each.part == "cross_heads")
        found = of_head if each.is_of_heads else f"L{layer} '{report.tokens[each.side][place]}'"
        agree = "" if each.correlation is None else f"; estimate: correlation {each.correlation:.2f}"
        yield f"{PARTS[each.part]} ({each.side}): {found} {values[layer, place]:.3f}{agree}"


def patch_view(report: PatchReport, model: Identity, about: str) -> ReportView:
    """The maps. about: the prompts and the metric, below the title of a page."""
    title = ("Noising" if report.noising else "Denoising") + " of {}"
    document, table = (lambda: _patch_document(report, model)), (lambda: _patch_table(report))
    return ReportView(title, document, lambda: patch_plots(report), table, subtitle=about)


def _patch_document(report: PatchReport, model: Identity) -> dict[str, Any]:
    """Prompts' tokens, answers, the metric after both, and the cells [layer][token or head]."""
    maps = [
        {
            "side": each.side,
            "part": each.part,
            "exact": None if each.exact is None else each.exact.tolist(),
            "estimate": each.estimate.tolist(),
            "correlation": each.correlation,
        }
        for each in report.maps
    ]
    facts = {name: getattr(report, name) for name in ("answer", "wrong", "metric", "noising", "clean", "corrupted")}
    return {"model": model, **facts, "tokens": report.tokens, "maps": maps}


def _patch_table(report: PatchReport) -> list[tuple[Any, ...]]:
    """A row for each cell."""
    rows: list[tuple[Any, ...]] = [("side", "part", "layer", "place", "token", "exact", "estimate")]
    for each in report.maps:
        for (layer, place), estimate in np.ndenumerate(each.estimate):
            if np.isfinite(estimate):
                token = "" if each.is_of_heads else report.tokens[each.side][place]
                exact = "" if each.exact is None else float(each.exact[layer, place])
                rows.append((each.side, each.part, layer, place, token, exact, float(estimate)))
    return rows


# --- ablation --------------------------------------------------------------------------------------------------------


def ablation_plots(report: AblationReport) -> list[Plot]:
    """The loss that is added without each head, and without each attention and feed-forward network."""
    plots: list[Plot] = []
    for side in dict.fromkeys(each.side for each in report.parts):
        own = [each for each in report.parts if each.side == side]
        of_layers = list(dict.fromkeys(each.part for each in own if each.head is None))
        groups = [(part, [each for each in own if each.part == part]) for part in PARTS if part.endswith("heads")]
        groups.append(("layers", [each for each in own if each.head is None]))
        for part, found in groups:
            if not found:
                continue
            columns = of_layers if part == "layers" else range(1 + max(each.head or 0 for each in found))
            values = np.full((1 + max(each.layer for each in found), len(columns)), np.nan)
            for each in found:
                values[each.layer, of_layers.index(each.part) if each.head is None else each.head] = change(
                    report, each
                )
            most = max(float(np.nanmax(np.abs(values))), 1e-9)
            title = f"loss without each {'layer' if part == 'layers' else 'head'}, {side}"
            title += ", cross-attention" if part == "cross_heads" else ""
            caption = f"Loss minus that of the whole model ({report.whole['loss']:.4f}) on {report.data}; {report.mode}"
            plots.append(
                Heat(values, range(len(values)), columns, "layer", "part" if part == "layers" else "head", "RdBu_r",
                     -most, most, "added loss", title, caption, numbers=True)
            )  # fmt: skip
    return plots


def change(report: AblationReport, part: Ablation) -> float:
    """The loss without a part minus the whole model's loss."""
    return part.metrics["loss"] - report.whole["loss"]


def ablation_table(report: AblationReport) -> list[tuple[str, ...]]:
    """A row for each part, sorted by the loss that its absence adds, the largest first."""
    accurate = "accuracy" in report.whole
    rows = [("part", "stack", "loss", "added", *(("accuracy",) if accurate else ()))]

    def row(name: str, side: str, metrics: Any, added: str) -> tuple[str, ...]:
        return (name, side, f"{metrics['loss']:.4f}", added, *((f"{metrics['accuracy']:.4f}",) if accurate else ()))

    rows.append(row("(whole)", "", report.whole, ""))
    ordered = sorted(report.parts, key=lambda each: -change(report, each))
    return rows + [row(each.name, each.side, each.metrics, f"{change(report, each):+.4f}") for each in ordered]


def ablation_view(report: AblationReport, model: Identity) -> ReportView:
    """The view of an ablation: the loss without each part."""

    def text(**_: Any) -> str:
        table = ablation_table(report)
        return "\n".join([*aligned(table, right=table[0][2:]), ""])

    document, rows = (lambda: _ablation_document(report, model)), (lambda: _ablation_rows(report))
    return ReportView("What each part of {} is worth", document, lambda: ablation_plots(report), rows, text)


def _ablation_document(report: AblationReport, model: Identity) -> dict[str, Any]:
    """The data, the metrics of the whole model, and those without each part."""
    parts = [
        {"side": each.side, "part": each.part, "layer": each.layer, "head": each.head, "name": each.name,
         "metrics": dict(each.metrics),
         "added_loss": change(report, each)}
        for each in report.parts
    ]  # fmt: skip
    return {"model": model, "data": report.data, "ablate": report.mode, "whole": report.whole, "parts": parts}


def _ablation_rows(report: AblationReport) -> list[tuple[Any, ...]]:
    """A row for each part."""
    rows: list[tuple[Any, ...]] = [("side", "part", "layer", "head", "loss", "added_loss")]
    rows += [(each.side, each.part, each.layer, "" if each.head is None else each.head, each.metrics["loss"],
              change(report, each)) for each in report.parts]  # fmt: skip
    return rows
