"""Everything that a picture, page or table of attention is made from, computed once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tformer.errors import InputError
from tformer.loading import Loaded
from tformer.viz.attention.reading import Asked, Reading, read
from tformer.viz.attention.reshape import Changes, changed, changed_matrix
from tformer.viz.attention.rollout import BASIC, HEURISTIC, needs, rollout
from tformer.viz.attention.weights import NAMES, Attention, Chosen, Kind, check, compute, mean_of_heads, num_cells

CAUTION = "Attention shows where a model looks; it is not by itself an explanation of what the model does."
EFFECTIVE = "linformer's weights are effective ones: they may be negative, and rows need not sum to one"
CELLS_PER_BYTE = 32  # sharp attention packs to a tenth of this: more cells than that never fit
SMALLER = "--layers, --heads, --attention or --max-tokens make it smaller"


@dataclass(frozen=True)
class Scene:
    """What is shown.

    Attributes:
        attentions: by kind, whole: nothing hidden, nothing merged.
        rollouts: fp32 [T, S] of the same kinds, where they were asked for.
        model: how the model is called, its hash and where it came from.
    """

    reading: Reading
    attentions: dict[Kind, Attention]
    rollouts: dict[Kind, np.ndarray]
    model: dict[str, str | int]
    command: str = ""
    changes: Changes = field(default_factory=Changes)

    @property
    def notes(self) -> list[str]:
        """What every output should say."""
        said = list(self.reading.notes)
        if any(layer.signed for attention in self.attentions.values() for layer in attention.layers):
            said.append(EFFECTIVE)
        return said

    def shown(self, kind: Kind) -> Attention:
        """With the changes that were asked for."""
        return changed(self.attentions[kind], self.changes)

    def shown_rollout(self, kind: Kind) -> np.ndarray:
        attention = self.attentions[kind]
        return changed_matrix(
            self.rollouts[kind],
            attention.queries,
            attention.keys,
            self.changes,
            normalised=not self.has_signed_rollout(kind),
        )

    def has_signed_rollout(self, kind: Kind) -> bool:
        """Whether effective weights made shares below zero."""
        return float(self.rollouts[kind].min()) < 0

    def of_means(self) -> Scene:
        """With the mean of each layer's heads in their place."""
        means = {kind: mean_of_heads(attention) for kind, attention in self.attentions.items()}
        return replace(self, attentions=means)

    def rollout_notes(self, kind: Kind) -> list[str]:
        return [BASIC + _of(self.attentions[kind]), *([HEURISTIC] if kind == "cross" else [])]


def make_scene(
    loaded: Loaded,
    asked: Asked,
    chosen: Chosen,
    *,
    rollouts: bool,
    max_bytes: float | None,
    bytes_per_cell: float = 1 / CELLS_PER_BYTE,
    command: str = "",
    changes: Changes = Changes(),
) -> Scene:
    """Reads, runs the model once, and rolls out.

    Args:
        rollouts: whether they are needed.
        max_bytes: of the output; None: no limit. `bytes_per_cell`: what a weight takes at least.

    Raises:
        InputError: what the model cannot take, or does not have; more weights than can fit.
    """
    kinds = check(loaded, chosen)
    reading = read(loaded, asked)
    cells = sum(num_cells(loaded, reading, kind, chosen) for kind in kinds)
    if max_bytes is not None and cells * bytes_per_cell > max_bytes:
        raise too_large(max_bytes, f"{cells:,} weights")
    found = compute(loaded, reading, kinds, chosen)
    rolled = {}
    if rollouts:
        for kind in kinds:
            parts = dict(found)
            for part in needs(kind):
                if part not in parts:
                    of_encoder = Chosen() if part == "encoder" else chosen
                    parts |= compute(loaded, reading, [part], of_encoder)
            rolled[kind] = rollout(kind, parts)
    model: dict[str, str | int] = {"name": str(loaded.path), "step": loaded.step, "sha256": weights_hash(loaded)}
    return Scene(reading, found, rolled, model, command, changes)


def too_large(max_bytes: float, found: str) -> InputError:
    """The refusal of what does not fit, with the flags that make it smaller."""
    return InputError(
        f"{found} do not fit into {max_bytes / 1e6:g} MB",
        hint=f"{SMALLER}; --max-megabytes raises the limit",
    )


def weights_hash(loaded: Loaded) -> str:
    """SHA-256 of the parameters, by name: tells models apart wherever they are kept."""
    digest = hashlib.sha256()
    for name, value in sorted(loaded.model.named_parameters()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().float().contiguous().numpy().data)
    return digest.hexdigest()


def heading(scene: Scene, kind: Kind) -> str:
    """The title of a picture."""
    return f"{NAMES[kind]} of {short_name(scene)}"


def short_name(scene: Scene) -> str:
    """The run that a checkpoint belongs to, else the folder."""
    path = Path(str(scene.model["name"]))
    return path.parent.parent.name if path.parent.name == "checkpoints" else path.name


def _of(attention: Attention) -> str:
    """Of which layers and heads, where these are not known to be all."""
    return f" ({len(attention.layers)} layers shown, {len(attention.layers[0].heads)} heads each)"


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
