"""A model's own attention, as `bench attention` measures it: heads, their size, the kind and its options, its lengths.

It is that of the first layer: of the decoder where there is no encoder, causal, else of the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tformer.bench.attention_kinds import DENSE_MASKED
from tformer.bench.attention_options import NOT_MEASURED
from tformer.build import layer_sizes
from tformer.recipe.layers import layer_sections
from tformer.recipe.recipe import Recipe


@dataclass(frozen=True)
class ModelAttention:
    """options: of the kind, those that are not as usual. notes: what of the model is left out."""

    kind: str
    options: Mapping[str, Any]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    max_length: int
    notes: tuple[str, ...]

    def lengths(self, usual: Sequence[int]) -> tuple[int, ...]:
        """The usual lengths that are less than the longest that the model reads, and that one."""
        return (*(length for length in usual if length < self.max_length), self.max_length)

    def options_beside(self, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Options by kind as --set gives them, with the model's own where they say nothing."""
        found = {kind: dict(options) for kind, options in settings.items()}
        if self.kind in found:
            found[self.kind] = {**self.options, **found[self.kind]}
        if DENSE_MASKED in found and "window" in self.options:
            found[DENSE_MASKED].setdefault("window", self.options["window"])
        return found


def attention_of(recipe: Recipe) -> ModelAttention:
    """Of a model. InputError when its sizes do not fit together."""
    side = "decoder" if recipe.model.encoder is None else "encoder"
    layers = layer_sections(getattr(recipe.model, side), path=f"model.{side}")
    sizes, first = layer_sizes(recipe.model, side), layers[0].attention
    notes = [f"the attention of the {side}"] if recipe.model.encoder and recipe.model.decoder else []
    if any(layer.attention != first for layer in layers) or len(set(sizes)) > 1:
        notes.append("its layers differ: measured is the attention of the first")
    if sizes[0].value_dim != sizes[0].head_dim:
        notes.append(f"values have {sizes[0].value_dim} numbers a head: measured as {sizes[0].head_dim}")
    usual = type(first)()
    given = {field.name: getattr(first, field.name) for field in fields(first) if field.name not in NOT_MEASURED}
    return ModelAttention(
        kind=first.kind,
        options={name: value for name, value in given.items() if value != getattr(usual, name)},
        heads=sizes[0].num_heads,
        kv_heads=sizes[0].num_kv_heads,
        head_dim=sizes[0].head_dim,
        causal=side == "decoder",
        max_length=recipe.seq_len,
        notes=tuple(notes),
    )
