"""What `bench attention` can measure: every attention kind of the table, and full attention under a dense mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from tformer.nn.attention import ATTENTION, AttentionOptions, FullAttentionOptions, ProjectionOptions

FULL, DENSE_MASKED = "full", "dense-masked"
"""The references: full attention as the model computes it, and with a T x T mask."""


@dataclass(frozen=True)
class DenseMaskedOptions(FullAttentionOptions):
    """Full attention under the band of a sliding window, as a T x T mask: what a pattern must beat, most in memory."""

    window: int = 256  # keys in sight in all, the query's own not counted


CLASSES: dict[str, type[ProjectionOptions]] = {cls.kind: cls for cls in get_args(AttentionOptions)}
KINDS: dict[str, type[ProjectionOptions]] = {
    FULL: CLASSES[FULL],
    DENSE_MASKED: DenseMaskedOptions,
    **{kind: CLASSES[kind] for kind in ATTENTION if kind != FULL},
}
"""Every kind that can be measured, and its options."""


def make_options(kind: str, options: Mapping[str, Any]) -> ProjectionOptions:
    """The options of a kind. ValueError when a value is not allowed; types are not looked at."""
    return KINDS[kind](**options)
