"""Reports of `tformer attribute` with random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tformer.inside.attribution import AttributionReport
from tformer.inside.options import METHODS

HOSTILE = "</script>"


def random_report(tokens: dict[str, tuple[str, ...]], *, answers: int = 1, **facts: Any) -> AttributionReport:
    """The last `answers` positions of the decoder, or of a classifier its label; later tokens are NaN."""
    draw, length = np.random.default_rng(0), len(tokens.get("decoder", ()))
    positions = tuple(range(length - answers, length)) if length else (None,)
    scores = {
        method: {side: draw.normal(size=(answers, len(each))) for side, each in tokens.items()} for method in METHODS
    }
    for by_side in scores.values():
        for row, at in zip(by_side.get("decoder", ()), positions, strict=bool(length)):
            row[(at or 0) + 1 :] = np.nan
    total = sum(np.nansum(each, axis=1) for each in scores["integrated"].values())
    values = draw.normal(size=answers)
    return AttributionReport(
        tokens=tokens,
        positions=positions,
        targets=tuple(f"answer{n}" for n in range(answers)),
        against=None,
        metric="logit",
        baseline="pad",
        steps=50,
        values=values,
        baseline_values=values - total,
        scores=scores,
        texts={"text": "".join(tokens[next(iter(tokens))])},
        **facts,
    )
