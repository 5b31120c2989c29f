"""Word dropout on the inputs: while training, single tokens give way to one that says nothing. Labels stay.

    x_t becomes r with probability p, each token by itself; special tokens are never replaced

So no single word decides (Iyyer et al., 2015; 1512.05287; "Transformers without Tears", 1910.05895), and a decoder
cannot lean on the last words alone (1511.06349). r is the first that the vocabulary has of an objective's list of
roles, such as mask, unknown, padding. A vocabulary without any of them (bytes) takes random tokens where an objective
allows that: the noising of 1703.02573.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tformer.errors import InputError
from tformer.tokenizer.special import SpecialIds

MASK_FIRST = ("mask", "unk", "pad")  # texts that are classified: the encoder may know [MASK] from its training
UNK_FIRST = ("unk", "mask", "pad")  # texts that are written
NO_MASK = ("unk", "pad")  # masked LM, where a mask asks for a prediction


class WordDropout:
    """Replaces tokens; `share` 0 replaces none and draws nothing.

    Args:
        share: p.
        special_ids: of the vocabulary.
        kept: ids [n] that are never replaced.
        roles: see `replacement_id`.
        ordinary: ids [m] to draw from where the vocabulary has none of the roles; None: that is an error.

    Raises InputError when there is nothing to write.
    """

    def __init__(
        self,
        share: float,
        special_ids: SpecialIds,
        *,
        kept: np.ndarray,
        roles: Sequence[str] = UNK_FIRST,
        ordinary: np.ndarray | None = None,
    ) -> None:
        self.share, self.kept = share, kept
        self.written = ordinary
        if share and (ordinary is None or _has_any(special_ids, roles)):
            self.written = np.array([replacement_id(special_ids, roles)], dtype=np.int64)

    def __call__(self, ids: np.ndarray, rng: np.random.Generator, *, also_kept: np.ndarray | None = None) -> np.ndarray:
        """New ids of the same shape; `also_kept` is True where a token stays whatever it is."""
        if not self.share:
            return ids
        kept = np.isin(ids, self.kept)
        kept = kept if also_kept is None else kept | also_kept
        assert self.written is not None
        if len(self.written) == 1:
            return drop_words(ids, kept, self.share, int(self.written[0]), rng)
        return drop_words(ids, kept, self.share, self.written[rng.integers(len(self.written), size=ids.shape)], rng)

    def rows(self, rows: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
        """The same for rows of unequal lengths."""
        if not self.share:
            return list(rows)
        return np.split(self(np.concatenate(rows), rng), np.cumsum([len(row) for row in rows])[:-1])


def replacement_id(special_ids: SpecialIds, roles: Sequence[str] = MASK_FIRST) -> int:
    """What word dropout writes: the first of these roles that there is; InputError when there is none of them."""
    for role in roles:
        token: int | None = getattr(special_ids, role)
        if token is not None:
            return token
    raise InputError(
        "objectives: word_dropout needs a tokenizer with a mask, unknown or padding token, this one has none",
        hint="train one with --template bert, or set word_dropout to 0",
    )


def _has_any(special_ids: SpecialIds, roles: Sequence[str]) -> bool:
    return any(getattr(special_ids, role) is not None for role in roles)


def drop_words(
    ids: np.ndarray, kept: np.ndarray, share: float, replacement: int | np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """New ids of the same shape: each becomes `replacement` with probability `share`, but not where `kept` is True."""
    return np.where((rng.random(ids.shape) < share) & ~kept, replacement, ids)
