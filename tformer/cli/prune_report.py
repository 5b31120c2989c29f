"""How `tformer prune` tells what it did: a small table of before and after for people, one document for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tformer.workflows.prune import Pruned

COST = ("parameters", "flops_per_token")
LEFT_OUT = ("examples", "tokens", "bytes")  # the same before and after


def report_lines(pruned: Pruned, data: str | None) -> Iterator[str]:
    """What went, then one figure a line, before and after."""
    for side, choice in pruned.layers.items():
        found = "" if choice.method is None else f", {choice.method}, {choice.evaluations} evaluations"
        kept = f"{len(choice.kept)} of {choice.num_layers} layers stay: {', '.join(map(str, choice.kept))}"
        yield f"{side}: {kept} ({choice.strategy}{found})"
    if pruned.heads is not None:
        yield f"heads: {pruned.heads.after} of {pruned.heads.before} stay ({pruned.heads.per_layer})"
        for side, layers in pruned.heads.layers.items():
            yield f"{side} heads by layer: {', '.join(str(len(layer.self_attention)) for layer in layers)}"
    for note in pruned.notes:
        yield f"note: {note}"
    if data is not None:
        yield f"measured on {data}"
    rows = [
        (name, _cell(name, value), _cell(name, pruned.after[name]), _change(name, value, pruned.after[name]))
        for name, value in pruned.before.items()
        if name not in LEFT_OUT and name in pruned.after and isinstance(value, int | float)
    ]
    table = [("", "before", "after", ""), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    for name, before, after, change in table:
        line = f"{name:<{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}  {change:>{widths[3]}}"
        yield line.rstrip()


def document(pruned: Pruned, data: str | None) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {
        "path": str(pruned.path),
        "step": pruned.step,
        "layers": {
            side: {
                "before": choice.num_layers,
                "after": len(choice.kept),
                "kept": list(choice.kept),
                "dropped": list(choice.dropped),
                "strategy": choice.strategy,
                "method": choice.method,
                "evaluations": choice.evaluations,
            }
            for side, choice in pruned.layers.items()
        },
        "heads": _heads(pruned),
        "data": data,
        "metric": pruned.metric,
        "before": pruned.before,
        "after": pruned.after,
        "notes": pruned.notes,
    }


def _heads(pruned: Pruned) -> dict[str, Any] | None:
    """Counts, and of every layer that stays the importance of its heads and those that stay."""
    heads = pruned.heads
    if heads is None:
        return None
    stacks = {
        side: [
            {
                attention: {"importance": importance.tolist(), "kept": list(kept.of(attention))}
                for attention, importance in scores.items()
            }
            for kept, scores in zip(layers, pruned.importance[side], strict=True)
        ]
        for side, layers in heads.layers.items()
    }
    return {"before": heads.before, "after": heads.after, "per_layer": heads.per_layer, **stacks}


def _cell(name: str, value: float) -> str:
    return f"{value:,.0f}" if name in COST else f"{value:,.4f}"


def _change(name: str, before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if name in COST else f"{after - before:+.4f}"
