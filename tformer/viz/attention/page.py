"""Attention as an HTML page: every weight as one byte, decoded by the browser.

A byte is round(255 sqrt(a)): uniform attention over 512 tokens is 0.002 a cell, which a linear byte rounds to 0 and
this one to 11. Its error is at most about sqrt(a) / 255. Fewer steps pack smaller where a page would be too large.
Forbidden cells are in a separate mask, so a byte of 0 is a weight of 0. Negative weights (Linformer) use 128 +- 127
sqrt(|a| / largest).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tformer.support.files import encode_text
from tformer.support.formatting import fitted
from tformer.viz.attention.scene import (
    CAUTION,
    MEASURES,
    Divergences,
    HeadSummary,
    Scene,
    short_name,
    summarize,
    too_large,
)
from tformer.viz.attention.weights import NAMES, AttentionMaps, Kind
from tformer.viz.page import render_page

FINEST, COARSEST = 255, 48  # steps between a weight of 0 and of 1
BITS_OF_A_HALVING = 0.87  # bits saved per weight with half as many steps, measured on noisy attention
ZERO, SIGNED_STEPS = 128, 127


@dataclass(frozen=True)
class Packed:
    """Bytes in the order of the weights. largest: the weight of the top step. signed: ZERO is a weight of 0."""

    data: bytes
    steps: int = FINEST
    largest: float = 1.0
    signed: bool = False


def pack(weights: np.ndarray, *, signed: bool = False, steps: int = FINEST) -> Packed:
    """Weights of any shape, fp32, as bytes; between 0 and 1 unless `signed`."""
    if signed:
        largest = float(np.abs(weights).max(initial=0.0)) or 1.0
        roots = np.sign(weights) * np.sqrt(np.abs(weights) / largest)
        return Packed(np.rint(ZERO + SIGNED_STEPS * roots).astype(np.uint8).tobytes(), SIGNED_STEPS, largest, True)
    return Packed(np.rint(np.sqrt(np.clip(weights, 0, 1)) * np.float32(steps)).astype(np.uint8).tobytes(), steps)


SCRIPTS = ("attention.js", "attention_parts.js", "attention_views.js")
WITHOUT = ("lines.js",)
AIM = 0.98  # share of the limit to aim for when a page must shrink

Summaries = dict[Kind, tuple[list[HeadSummary], Divergences]]


def render(
    scene: Scene,
    *,
    view: str,
    scale: str,
    top_k: int,
    max_bytes: float,
    head: str | None = None,
) -> str:
    """The page as text.

    Args:
        view, scale, top_k, head: what it shows when it is opened. head: "mean"; None: the first.
        max_bytes: a larger page is an InputError.
    """
    start = {
        "attention": "cross" if "cross" in scene.attentions else next(iter(scene.attentions)),
        "view": view,
        "scale": scale,
        "top": top_k,
        "head": head,
        "colours": "viridis",
        "merge": scene.changes.merge_subwords,
        "hide": scene.changes.hide_special,
    }
    summaries = {kind: summarize(attention) for kind, attention in scene.attentions.items()}
    cells = sum(attention.cells for attention in scene.attentions.values())
    steps, size = FINEST, 0
    while steps >= COARSEST:
        page = _with_steps(scene, start, summaries, steps)
        size = len(encode_text(page))
        if size <= max_bytes:
            return page
        # In base64, 6 bits a byte: what is too much, as a number of halvings of the steps of all cells.
        halvings = (size - AIM * max_bytes) * 6 / cells / BITS_OF_A_HALVING
        steps = int(steps * 2.0**-halvings)
    raise too_large(max_bytes, f"{cells:,} weights in a page of {size / 1e6:.1f} MB")


def _with_steps(scene: Scene, start: dict[str, Any], summaries: Summaries, steps: int) -> str:
    """The page with weights rounded to `steps` steps."""
    blobs: dict[str, bytes] = {}
    reading, model = scene.reading, scene.model
    data: dict[str, Any] = {
        "kinds": [
            _kind(scene, attention, summaries[kind], blobs, steps) for kind, attention in scene.attentions.items()
        ],
        "sides": {
            name: {
                "tokens": list(side.tokens),
                "special": [int(mark) for mark in side.special],
                "words": [list(word) for word in side.words()],
                "textOf": list(side.text_of),
                "writtenFrom": side.written_from,
            }
            for name, side in reading.sides.items()
        },
        "start": start,
        "notes": scene.notes,
    }
    if reading.pixels is not None:
        blobs["image"] = reading.pixels.tobytes()
        (rows, columns), (height, width, _) = reading.grid, reading.pixels.shape
        offset = len(reading.sides["encoder"]) - rows * columns
        data["image"] = {"height": height, "width": width, "rows": rows, "columns": columns, "offset": offset}
    notes = [
        CAUTION,
        f"Weights on this page are rounded to {steps} steps of their square roots; --format json has them whole.",
        f"Model: {model['name']}, step {model['step']}, sha256 {str(model['sha256'])[:16]}.",
        *(f"{name.capitalize()}: {text}" for name, text in reading.texts.items()),
        *([f"Command: {scene.command}"] if scene.command else []),
    ]
    return render_page(
        title="Attention",
        subtitle=f"{short_name(scene)}: {' → '.join(fitted(text, 160) for text in reading.texts.values())}",
        style="attention.css",
        body=BODY,
        scripts=SCRIPTS,
        data=data,
        blobs=blobs,
        notes=notes,
        without=WITHOUT,
    )


BODY = """\
<div id="controls" class="controls" role="group" aria-label="What is shown"></div>
<div id="notes"></div>
<section id="stage" aria-label="Attention"></section>
"""


def _kind(
    scene: Scene,
    attention: AttentionMaps,
    summary: tuple[list[HeadSummary], Divergences],
    blobs: dict[str, bytes],
    steps: int,
) -> dict[str, Any]:
    kind = attention.kind
    rows, divergences = summary
    blobs[f"{kind}-divergence"] = divergences.between_NN.astype("<f4").tobytes()
    masks: dict[bytes, str] = {}

    def mask_of(visible_TS: np.ndarray) -> str | None:
        """None if all is visible, "causal", or the name of a blob (a byte a cell) that equal patterns share."""
        if visible_TS.all():
            return None
        if attention.causal and np.array_equal(visible_TS, np.tril(np.ones_like(visible_TS))):
            return "causal"
        content = visible_TS.astype(np.uint8).tobytes()
        if content not in masks:
            masks[content] = f"{kind}-mask-{len(masks)}"
            blobs[masks[content]] = content
        return masks[content]

    layers: list[dict[str, Any]] = []
    for layer in attention.layers:
        name, packed = f"{kind}-{layer.number}", pack(layer.weights_HTS, signed=layer.signed, steps=steps)
        blobs[name] = packed.data
        layers.append(
            {
                "number": layer.number,
                "heads": list(layer.heads),
                "pattern": layer.pattern,
                "blob": name,
                "mask": mask_of(layer.visible_TS),
                "steps": packed.steps,
                "largest": packed.largest,
                "signed": packed.signed,
            }
        )
    found: dict[str, Any] = {
        "kind": kind,
        "name": NAMES[kind],
        "queries": attention.queries.name,
        "keys": attention.keys.name,
        "layers": layers,
        "largest": max(float(np.abs(layer.weights_HTS).max(initial=0.0)) for layer in attention.layers) or 1.0,
        "summary": {
            "columns": [[name, label] for name, label in MEASURES.items()],
            "rows": [
                [round(value, 5) if isinstance(value, float) else value for value in asdict(row).values()]
                for row in rows
            ],
            "divergenceQueries": [divergences.rows, divergences.of],
        },
    }
    if kind in scene.rollouts:
        rollout = scene.rollouts[kind]
        packed = pack(rollout, signed=scene.has_signed_rollout(kind), steps=steps)
        blobs[f"{kind}-rollout"] = packed.data
        found["rollout"] = {"blob": f"{kind}-rollout", "notes": scene.rollout_notes(kind), "steps": packed.steps,
                            "mask": "causal" if attention.causal else None, "signed": packed.signed,
                            "unit": packed.largest, "largest": float(np.abs(rollout).max())}  # fmt: skip
    return found
