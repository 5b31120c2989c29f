"""Attention of one forward pass with all that outputs need: weights, rollouts, notes and summary measures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tformer.inside.options import head_name
from tformer.inside.reading import Inputs, ModelInputs, read
from tformer.loading import Loaded
from tformer.support.errors import InputError, visible
from tformer.viz.attention.weights import (
    BASIC,
    HEURISTIC,
    KINDS,
    NAMES,
    AttentionMaps,
    Changes,
    Chosen,
    Kind,
    Layer,
    changed,
    changed_matrix,
    check,
    compute,
    num_cells,
    rollout,
)

# Shapes: H heads, T queries, S keys, N heads of all layers.


DIVERGENCE_CELLS = 1.5e8  # largest number of logarithms; with more, evenly spaced queries represent all


@dataclass(frozen=True)
class HeadSummary:
    """Measures of one head; None where undefined: positions of two sequences cannot be compared."""

    layer: int
    head: int
    entropy: float | None
    distance: float | None
    previous: float | None
    itself: float | None
    first: float
    special: float
    max: float
    nearest: str | None = None
    nearest_divergence: float | None = None


@dataclass(frozen=True)
class Divergences:
    """Divergence between every two heads, in bits, in the order of the summaries; from `rows` of `of` queries."""

    between_NN: np.ndarray
    rows: int
    of: int


def summarize(attention: AttentionMaps) -> tuple[list[HeadSummary], Divergences]:
    """Measures of each shown head, and the divergence between every two."""
    cross = attention.kind == "cross"
    names = [head_name(layer.number, head, cross=cross) for layer in attention.layers for head in layer.heads]
    found = [row for layer in attention.layers for row in _of_layer(attention, layer)]
    divergences = divergence(attention)
    rows = []
    for place, row in enumerate(found):
        others = divergences.between_NN[place].copy()
        others[place] = math.inf
        if len(others) > 1:
            near = int(others.argmin())
            row = replace(row, nearest=names[near], nearest_divergence=float(others[near]))
        rows.append(row)
    return rows, divergences


def _of_layer(attention: AttentionMaps, layer: Layer) -> list[HeadSummary]:
    weights_HTS = _shares(layer)
    seen_T = layer.visible_TS.sum(axis=1)
    several_T = seen_T > 1
    entropy_HT = torch.special.entr(torch.from_numpy(weights_HTS)).sum(-1).numpy()
    special_S = np.array(attention.keys.special, dtype=np.float32)
    own = attention.kind != "cross"
    distance = None
    if own:
        places = np.arange(weights_HTS.shape[1], dtype=np.float32)
        distance = (weights_HTS * np.abs(places[:, None] - places)).sum(-1).mean(-1)
    rows = []
    for place, head in enumerate(layer.heads):
        matrix_TS = weights_HTS[place]
        entropy = entropy_HT[place, several_T] / np.log(seen_T[several_T]) if several_T.any() else None
        rows.append(
            HeadSummary(
                layer=layer.number,
                head=head,
                entropy=None if entropy is None else float(entropy.mean()),
                distance=None if distance is None else float(distance[place]),
                previous=float(np.diagonal(matrix_TS, -1).mean()) if own and len(matrix_TS) > 1 else None,
                itself=float(np.diagonal(matrix_TS).mean()) if own else None,
                first=float(matrix_TS[:, 0].mean()),
                special=float((matrix_TS @ special_S).mean()),
                max=float(matrix_TS.max(axis=-1).mean()),
            )
        )
    return rows


def _shares(layer: Layer) -> np.ndarray:
    """The weights; signed ones as shares of their absolute values."""
    if not layer.signed:
        return layer.weights_HTS
    sizes = np.abs(layer.weights_HTS)
    total = sizes.sum(axis=-1, keepdims=True)
    return sizes / np.where(total > 0, total, 1)


def divergence(attention: AttentionMaps) -> Divergences:
    """Jensen-Shannon divergence between every two heads, the mean over queries: H((p + q) / 2) - (H(p) + H(q)) / 2."""
    queries, keys = len(attention.queries), len(attention.keys)
    count = sum(len(layer.heads) for layer in attention.layers)
    pairs = max(1, count * (count - 1) // 2)
    rows = int(min(queries, max(1, DIVERGENCE_CELLS // (pairs * keys))))
    picked = np.unique(np.linspace(0, queries - 1, rows).round().astype(int))
    heads = torch.cat([torch.from_numpy(_shares(layer)[:, picked]) for layer in attention.layers])
    entropy_NT = torch.special.entr(heads).sum(-1)
    between = torch.zeros(count, count)
    for one in range(count - 1):
        mixed = torch.special.entr((heads[one] + heads[one + 1 :]).mul_(0.5)).sum(-1)
        value = (mixed - 0.5 * (entropy_NT[one] + entropy_NT[one + 1 :])).mean(-1)
        between[one, one + 1 :] = value
    between = (between + between.T).clamp_(min=0.0) / math.log(2.0)
    return Divergences(between.numpy(), len(picked), queries)


CAUTION = "Attention shows where a model looks; it is not by itself an explanation of what the model does."
EFFECTIVE = "linformer's weights are effective ones: they may be negative, and rows need not sum to one"
CELLS_PER_BYTE = 32  # the best compression: more cells than that never fit
SMALLER = "--layers, --heads, --attention or --max-tokens make it smaller"


class Matrix(NamedTuple):
    """One matrix of a view, with the numbers of its layer and head, or "rollout" and ""."""

    layer: int | str
    head: int | str
    title: str
    weights_TS: np.ndarray
    seen_TS: np.ndarray


@dataclass(frozen=True)
class Scene:
    """Everything that a picture, page or table of attention is made from, computed once.

    Attributes:
        attentions: by kind, before `changes`: nothing hidden, nothing merged.
        rollouts: fp32 [T, S] of the same kinds; empty if not needed.
        model: name, step and hash of the model.
    """

    reading: ModelInputs
    attentions: dict[Kind, AttentionMaps]
    rollouts: dict[Kind, np.ndarray]
    model: dict[str, str | int]
    command: str = ""
    changes: Changes = field(default_factory=Changes)

    @property
    def notes(self) -> list[str]:
        """Messages for every output."""
        said = list(self.reading.notes)
        if any(layer.signed for attention in self.attentions.values() for layer in attention.layers):
            said.append(EFFECTIVE)
        return said

    def shown(self, kind: Kind) -> AttentionMaps:
        """The attention of a kind after `changes`."""
        return changed(self.attentions[kind], self.changes)

    def shown_rollout(self, kind: Kind) -> np.ndarray:
        attention = self.attentions[kind]
        return changed_matrix(
            self.rollouts[kind],
            attention.queries,
            attention.keys,
            self.changes,
            normalized=not self.has_signed_rollout(kind),
        )

    def matrices(self, attention: AttentionMaps, view: str) -> list[Matrix]:
        """Matrices of a view after `changes`: one for each head, or the rollout."""
        if view != "rollout":
            return [
                Matrix(
                    layer.number,
                    head,
                    f"layer {layer.number}, {'mean of heads' if head < 0 else f'head {head}'}",
                    matrix_TS,
                    layer.visible_TS,
                )
                for layer in attention.layers
                for head, matrix_TS in zip(layer.heads, layer.weights_HTS, strict=True)
            ]
        matrix_TS = self.shown_rollout(attention.kind)
        seen_TS = np.ones(matrix_TS.shape, dtype=bool)
        # Only causal order hides cells of a rollout, since sparse layers combine to a wider pattern.
        return [Matrix("rollout", "", "rollout", matrix_TS, np.tril(seen_TS) if attention.causal else seen_TS)]

    def has_signed_rollout(self, kind: Kind) -> bool:
        """Whether the rollout has negative values, from effective weights."""
        return float(self.rollouts[kind].min()) < 0

    def of_means(self) -> Scene:
        """The scene with the mean of each layer's heads as the only head."""

        def mean(layer: Layer) -> Layer:
            return replace(layer, heads=(-1,), weights_HTS=layer.weights_HTS.mean(axis=0, keepdims=True))

        means = {
            kind: replace(attention, layers=tuple(map(mean, attention.layers)))
            for kind, attention in self.attentions.items()
        }
        return replace(self, attentions=means)

    def rollout_notes(self, kind: Kind) -> list[str]:
        layers = self.attentions[kind].layers
        shown = f" ({len(layers)} layers shown, {len(layers[0].heads)} heads each)"
        return [BASIC + shown, *([HEURISTIC] if kind == "cross" else [])]


def make_scene(
    loaded: Loaded,
    inputs: Inputs,
    chosen: Chosen,
    *,
    rollouts: bool,
    max_bytes: float | None,
    bytes_per_cell: float = 1 / CELLS_PER_BYTE,
    command: str = "",
    changes: Changes = Changes(),
) -> Scene:
    """Read the inputs, run the model once, and compute the rollouts.

    Args:
        rollouts: whether to compute them.
        max_bytes: size limit of the output; None: no limit. bytes_per_cell: lower bound for one weight.

    Raises:
        InputError: inputs that do not suit the model; kinds, layers or heads that it lacks; too many weights.
    """
    kinds = check(loaded, chosen)
    reading = read(loaded, inputs)
    cells = sum(num_cells(loaded, reading, kind, chosen) for kind in kinds)
    if max_bytes is not None and cells * bytes_per_cell > max_bytes:
        raise too_large(max_bytes, f"{cells:,} weights")
    found = compute(loaded, reading, kinds, chosen)
    rolled = {}
    if rollouts:
        for kind in kinds:
            parts = dict(found)
            for part in KINDS if kind == "cross" else ():
                if part not in parts:
                    of_encoder = Chosen() if part == "encoder" else chosen
                    parts |= compute(loaded, reading, [part], of_encoder)
            rolled[kind] = rollout(kind, parts)
    return Scene(reading, found, rolled, loaded.identity, command, changes)


def too_large(max_bytes: float, found: str) -> InputError:
    """The error for an output above the size limit, with the options that make it smaller."""
    return InputError(
        f"{found} do not fit into {max_bytes / 1e6:g} MB",
        hint=f"{SMALLER}; --max-megabytes raises the limit",
    )


def heading(scene: Scene, kind: Kind) -> str:
    """The title of a picture."""
    return f"{NAMES[kind]} of {short_name(scene)}"


def short_name(scene: Scene) -> str:
    """The name of a checkpoint's run, or of the folder."""
    return run_name(Path(str(scene.model["name"])))


def run_name(path: Path) -> str:
    """The name of the run of a checkpoint, or of the folder."""
    return visible(path.parent.parent.name if path.parent.name == "checkpoints" else path.name)


MEASURES: Mapping[str, str] = {
    "layer": "layer",
    "head": "head",
    "entropy": "entropy / ln(visible)",
    "distance": "mean distance",
    "previous": "previous token",
    "itself": "itself",
    "first": "first token",
    "special": "special tokens",
    "max": "largest weight",
    "nearest": "most alike head",
    "nearest_divergence": "divergence from it (bits)",
}
"""The columns of the summary in words."""
