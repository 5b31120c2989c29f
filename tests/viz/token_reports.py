"""Reports of token losses made by hand, and with random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from tformer.inside.tokens import TokenReport


def token_report(
    pieces: Sequence[str], *, name: str = "tiny", seed: int = 0, top: int = 3, **changes: Any
) -> TokenReport:
    """A report on the text that these tokens make up, the first without a prediction, with some attributes changed."""
    draws, count = np.random.default_rng(seed), len(pieces)
    ends = [0, *accumulate(map(len, pieces))]
    bits, rank = draws.uniform(0, 12, count), draws.integers(0, 9, count)
    bits[0], rank[0] = np.nan, -1
    words = dict(enumerate(dict.fromkeys([*pieces, *(f" w{n}" for n in range(9))])))
    id_of = {word: token for token, word in words.items()}
    facts: dict[str, Any] = {
        "model": {"name": f"runs/{name}/checkpoints/step-00000003", "step": 3, "sha256": "0"},
        "read": f"a text of {count} tokens",
        "text": "".join(pieces),
        "source": None,
        "ids": np.array([id_of[piece] for piece in pieces]),
        "example": np.zeros(count, dtype=int),
        "spans": tuple(pairwise(ends)),
        "bits": bits,
        "rank": rank,
        "top_ids": draws.integers(0, len(words), (count, top)),
        "top_probabilities": -np.sort(-draws.dirichlet(np.ones(top), count)),
        "words": words,
        "spaced": False,
    }
    return TokenReport(**facts | changes)
