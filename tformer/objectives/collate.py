"""Padding samples of different lengths into one batch, and word dropout on its inputs.

Packed documents that must not see each other (`document_ids`) count their positions from 0 each.

Word dropout: x_t becomes r with probability p, each token by itself; special tokens and labels stay (Iyyer et al.,
2015; arXiv 1512.05287, 1910.05895, 1511.06349). r is the first token that the vocabulary has of an objective's list
of roles, such as mask, unknown, padding; without any of them, random tokens where an objective allows that
(1703.02573).

Shapes: B samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tformer.data.batching.batch import (
    WIDTH_MULTIPLE,
    Batch,
    PadLayout,
    pad_layout,
)
from tformer.data.batching.windows import restarting_positions
from tformer.data.shards.corpus import Example
from tformer.errors import InputError
from tformer.objectives.base import ObjectiveContext
from tformer.tokenizer.special import SpecialIds


def pad_samples(
    samples: Sequence[Example | np.ndarray] | np.ndarray, context: ObjectiveContext, *, rng: np.random.Generator
) -> Batch:
    """Samples, or one array [B, T] of them, as a batch without labels; `rng`: random padding.

    A label of every sample is read as next-sentence label. Raises ValueError for a sample longer than `seq_len`.
    """
    if isinstance(samples, np.ndarray):
        width = samples.shape[1]
        if width == context.seq_len or (width < context.seq_len and context.pad_to == "longest"):
            return Batch(input_ids=torch.from_numpy(samples.astype(np.int64)))
    examples = [sample if isinstance(sample, Example) else Example(sample) for sample in samples]
    layout = pad_layout(
        [len(example) for example in examples],
        side=context.padding,
        pad_to=context.pad_to,
        max_len=context.seq_len,
        rng=rng,
        multiple=WIDTH_MULTIPLE,
    )
    # Padding is masked and has no label, so without a token of its own any id will do.
    pad_id = 0 if context.special_ids.pad is None else context.special_ids.pad
    mask = layout.mask()
    documents, positions = document_tensors([documents_of(example) for example in examples], layout)
    return Batch(
        input_ids=torch.from_numpy(layout.fill([example.ids for example in examples], pad_id)),
        attention_mask=None if mask is None else torch.from_numpy(mask),
        token_type_ids=_token_types(examples, layout),
        document_ids=documents,
        position_ids=positions,
        next_sentence_label=_pair_labels(examples),
    )


def document_tensors(rows: Sequence[np.ndarray], layout: PadLayout) -> tuple[Tensor | None, Tensor | None]:
    """(document ids, positions) [B, T] from each row's document ids; (None, None) where each is one document."""
    if not any((row != row[0]).any() for row in rows):
        return None, None
    documents = torch.from_numpy(layout.fill(rows, -1))
    return documents, torch.from_numpy(layout.fill([restarting_positions(row) for row in rows], 0))


def documents_of(example: Example) -> np.ndarray:
    """[t]: the document of each id; one for all where the example does not say."""
    return np.zeros(len(example), dtype=np.int64) if example.document_ids is None else example.document_ids


def _token_types(examples: Sequence[Example], layout: PadLayout) -> Tensor | None:
    rows = [example.token_type_ids for example in examples]
    if all(row is None for row in rows):
        return None
    return torch.from_numpy(layout.fill([np.zeros(0, dtype=np.int64) if row is None else row for row in rows], 0))


def _pair_labels(examples: Sequence[Example]) -> Tensor | None:
    labels = [example.label for example in examples]
    if any(label is None for label in labels):
        return None
    return torch.tensor(np.array(labels), dtype=torch.long)


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
