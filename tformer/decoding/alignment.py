"""Which source tokens a translation came from, read off the decoder's cross-attention by force-decoding."""

# Shapes: u target tokens, t source tokens.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tformer.decoding.score import score_targets
from tformer.model import Transformer

Links = tuple[tuple[int, int], ...]
"""(target position, source position) of tokens, counted from 0 in the bare texts."""


def mean_attention(
    models: Sequence[Transformer],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    start_ids: Sequence[int],
) -> list[np.ndarray]:
    """fp32 [u, t] for each pair, the mean over the models; see `score.TargetScore.alignment`."""
    each = []
    for model in models:
        scores = score_targets(model, sources, targets, start_ids=start_ids, alignments=True)
        each.append([score.alignment for score in scores if score.alignment is not None])
    return [np.stack(parts).mean(axis=0) for parts in zip(*each, strict=True)]


def links_of(attention: np.ndarray, ids: Sequence[int], ends: Sequence[int]) -> Links:
    """The source token that each target token but the `ends` looked at most.

    attention: [u, t] over the bare source text.
    """
    places = [place for place, token in enumerate(ids) if token not in ends]
    return tuple((number, int(attention[place].argmax())) for number, place in enumerate(places))
