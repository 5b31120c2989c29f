"""Attention as an HTML page: every weight as one byte, decoded by the browser.

A byte is round(255 sqrt(a)): uniform attention over 512 tokens is 0.002 a cell, which a linear byte rounds to 0 and
this one to 11. Its error is at most about sqrt(a) / 255. Fewer steps pack smaller where a page would be too large.
Forbidden cells are in a separate mask, so a byte of 0 is a weight of 0. Negative weights (Linformer) use 128 +- 127
sqrt(|a| / largest).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from tformer.support.files import encode_text
from tformer.support.formatting import fitted
from tformer.viz.attention.reading import Side
from tformer.viz.attention.scene import (
    CAUTION,
    MEASURES,
    Divergences,
    HeadSummary,
    Scene,
    short_name,
    summarise,
    too_large,
)
from tformer.viz.attention.weights import NAMES, Attention, Kind, Layer
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


def unpack(packed: Packed, shape: tuple[int, ...]) -> np.ndarray:
    """The weights that the page shows, fp32 of that shape."""
    places = np.frombuffer(packed.data, dtype=np.uint8).astype(np.float32).reshape(shape)
    roots = (places - ZERO * packed.signed) / packed.steps
    return np.sign(roots) * roots**2 * packed.largest


def fewer_steps(steps: int, *, too_many_bytes: float, cells: int) -> int:
    """The number of steps with which `cells` weights take `too_many_bytes` less, in base64 (6 bits a byte)."""
    halvings = too_many_bytes * 6 / cells / BITS_OF_A_HALVING
    return int(steps * 2.0**-halvings)


def pack_mask(visible_TS: np.ndarray) -> bytes:
    """One byte for each cell, 1 if it is visible."""
    return visible_TS.astype(np.uint8).tobytes()


STYLE = "attention.css"
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
    summaries = {kind: summarise(attention) for kind, attention in scene.attentions.items()}
    cells = sum(attention.cells for attention in scene.attentions.values())
    steps = FINEST
    while True:
        page = _with_steps(scene, start, summaries, steps)
        size = len(encode_text(page))
        if size <= max_bytes:
            return page
        steps = fewer_steps(steps, too_many_bytes=size - AIM * max_bytes, cells=cells)
        if steps < COARSEST:
            break
    raise too_large(max_bytes, f"{cells:,} weights in a page of {size / 1e6:.1f} MB")


def _with_steps(scene: Scene, start: dict[str, Any], summaries: Summaries, steps: int) -> str:
    """The page with weights rounded to `steps` steps."""
    blobs: dict[str, bytes] = {}
    kinds = [_kind(scene, attention, summaries[kind], blobs, steps) for kind, attention in scene.attentions.items()]
    sides = {name: _side(side) for name, side in scene.reading.sides.items()}
    data: dict[str, Any] = {"kinds": kinds, "sides": sides, "start": start, "notes": scene.notes}
    image = scene.reading.pixels
    if image is not None:
        blobs["image"] = image.tobytes()
        rows, columns = scene.reading.grid
        offset = len(scene.reading.sides["encoder"]) - rows * columns
        data["image"] = {"height": image.shape[0], "width": image.shape[1], "rows": rows, "columns": columns,
                         "offset": offset}  # fmt: skip
    style = files("tformer.viz").joinpath("assets", STYLE).read_text(encoding="utf-8")
    return render_page(
        title="Attention",
        subtitle=_subtitle(scene),
        body=f"<style>\n{style}</style>\n{BODY}",
        scripts=SCRIPTS,
        data=data,
        blobs=blobs,
        notes=_footer(scene, steps),
        without=WITHOUT,
    )


BODY = """\
<div id="controls" class="controls" role="group" aria-label="What is shown"></div>
<div id="notes"></div>
<section id="stage" aria-label="Attention"></section>
"""


def _subtitle(scene: Scene) -> str:
    texts = scene.reading.texts
    quoted = [fitted(text, 160) for text in texts.values()]
    return f"{short_name(scene)}: {' → '.join(quoted)}"


def _footer(scene: Scene, steps: int) -> list[str]:
    model = scene.model
    packed = f"Weights on this page are rounded to {steps} steps of their square roots; --format json has them whole."
    lines = [CAUTION, packed, f"Model: {model['name']}, step {model['step']}, sha256 {str(model['sha256'])[:16]}."]
    lines += [f"{name.capitalize()}: {text}" for name, text in scene.reading.texts.items()]
    return [*lines, *([f"Command: {scene.command}"] if scene.command else [])]


def _kind(
    scene: Scene,
    attention: Attention,
    summary: tuple[list[HeadSummary], Divergences],
    blobs: dict[str, bytes],
    steps: int,
) -> dict[str, Any]:
    kind = attention.kind
    rows, divergences = summary
    blobs[f"{kind}-divergence"] = divergences.between_NN.astype("<f4").tobytes()
    masks: dict[bytes, str] = {}
    layers = [_layer(kind, layer, attention, blobs, masks, steps) for layer in attention.layers]
    found: dict[str, Any] = {
        "kind": kind,
        "name": NAMES[kind],
        "queries": attention.queries.name,
        "keys": attention.keys.name,
        "layers": layers,
        "largest": max(float(np.abs(layer.weights_HTS).max(initial=0.0)) for layer in attention.layers) or 1.0,
        "summary": {
            "columns": [[name, label] for name, label in MEASURES.items()],
            "rows": [[_rounded(value) for value in asdict(row).values()] for row in rows],
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


def _layer(
    kind: Kind, layer: Layer, attention: Attention, blobs: dict[str, bytes], masks: dict[bytes, str], steps: int
) -> dict[str, Any]:
    name = f"{kind}-{layer.number}"
    packed = pack(layer.weights_HTS, signed=layer.signed, steps=steps)
    blobs[name] = packed.data
    return {
        "number": layer.number,
        "heads": list(layer.heads),
        "pattern": layer.pattern,
        "blob": name,
        "mask": _mask(kind, layer.visible_TS, attention, blobs, masks),
        "steps": packed.steps,
        "largest": packed.largest,
        "signed": packed.signed,
    }


def _mask(
    kind: Kind, visible_TS: np.ndarray, attention: Attention, blobs: dict[str, bytes], masks: dict[bytes, str]
) -> str | None:
    """The mask of a layer: None if all is visible, "causal", or the name of a blob, shared by equal patterns."""
    if visible_TS.all():
        return None
    if attention.causal and np.array_equal(visible_TS, np.tril(np.ones_like(visible_TS))):
        return "causal"
    content = pack_mask(visible_TS)
    if content not in masks:
        masks[content] = f"{kind}-mask-{len(masks)}"
        blobs[masks[content]] = content
    return masks[content]


def _side(side: Side) -> dict[str, Any]:
    return {
        "tokens": list(side.tokens),
        "special": [int(mark) for mark in side.special],
        "words": [list(word) for word in side.words()],
        "textOf": list(side.text_of),
        "writtenFrom": side.written_from,
    }


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value
