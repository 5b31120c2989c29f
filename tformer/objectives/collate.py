"""Padding samples of different lengths into one batch, and word dropout on its inputs.

Packed documents that must not see each other (`document_ids`) count their positions from 0 each.

Word dropout: x_t becomes r with probability p, each token by itself; special tokens and labels stay. No single word
decides then (Iyyer et al., 2015; arXiv 1512.05287, 1910.05895), and a decoder depends less on the last words
(1511.06349). r is the first of an objective's list of roles that the vocabulary has, such as mask, unknown,
padding. For a vocabulary without any of them (bytes), some objectives draw random tokens: the noising of 1703.02573.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.data.batching.padding import WIDTH_MULTIPLE, PadLayout, pad_layout
from tformer.data.batching.windows import restarting_positions
from tformer.data.shards.corpus import Example
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import ObjectiveContext
from tformer.support.errors import InputError
from tformer.tokenizer.special import SpecialIds

NO_TYPES = np.zeros(0, dtype=np.int64)

MASK_FIRST = ("mask", "unk", "pad")  # classified texts: a pre-trained encoder has seen [MASK]
UNK_FIRST = ("unk", "mask", "pad")  # generated texts
NO_MASK = ("unk", "pad")  # masked LM, where a mask requires a prediction


def pad_samples(
    samples: Sequence[Example | np.ndarray] | np.ndarray, context: ObjectiveContext, *, rng: np.random.Generator
) -> Batch:
    """Samples, or one array [B, T] of them, as a batch without labels; `rng`: random padding.

    A label of every sample is its next-sentence label. Raises ValueError for a sample longer than `seq_len`.
    """
    if isinstance(samples, np.ndarray):
        width = samples.shape[1]
        if width == context.seq_len or (width < context.seq_len and context.pad_to == "longest"):
            return Batch(input_ids=torch.from_numpy(samples.astype(np.int64)))
    examples = [sample if isinstance(sample, Example) else Example(sample) for sample in samples]
    batch = pad_examples(examples, context, rng=rng)
    labels = [example.label for example in examples]
    if any(label is None for label in labels):
        return batch
    return replace(batch, next_sentence_label=torch.tensor(np.array(labels), dtype=torch.long))


def pad_shifted(
    examples: Sequence[Example], labels: Sequence[np.ndarray], context: ObjectiveContext, *, rng: np.random.Generator
) -> Batch:
    """Samples of t ids as rows of t - 1 inputs with `labels`, each [t - 1]; `rng`: random padding.

    Raises ValueError for a sample with fewer than 2 or more than seq_len + 1 ids.
    """
    for example in examples:
        require_shifted_length(len(example), context)
    lengths = [len(example) - 1 for example in examples]
    layout = pad_layout(lengths, side=context.padding, pad_to=context.pad_to, max_len=context.seq_len, rng=rng)
    mask = layout.mask()
    documents, positions = document_tensors([documents_of(example)[:-1] for example in examples], layout)
    inputs = layout.fill([example.ids[:-1] for example in examples], pad_id(context.special_ids))
    return Batch(
        input_ids=torch.from_numpy(inputs),
        labels=torch.from_numpy(layout.fill(labels, IGNORED_LABEL)),
        attention_mask=None if mask is None else torch.from_numpy(mask),
        document_ids=documents,
        position_ids=positions,
    )


def require_shifted_length(num_ids: int, context: ObjectiveContext) -> None:
    """Raise ValueError for a sample with fewer than 2 or more than seq_len + 1 ids."""
    if not 2 <= num_ids <= context.seq_len + 1:
        raise ValueError(f"a sample must have 2 to {context.seq_len + 1} ids, found {num_ids}")


def pad_examples(
    examples: Sequence[Example] | np.ndarray, context: ObjectiveContext, *, rng: np.random.Generator | None = None
) -> Batch:
    """Ids, mask (None when nothing is padded), token types and documents where any example has them; no labels."""
    lengths = np.array([len(example) for example in examples], dtype=np.int64)
    layout = pad_layout(
        lengths,
        side=context.padding,
        pad_to=context.pad_to,
        max_len=context.seq_len,
        rng=rng,
        multiple=WIDTH_MULTIPLE,
    )
    if layout.width == 0:  # empty texts and a template without special tokens: a column of padding
        layout = PadLayout(layout.starts, lengths, 1)
    mask = layout.mask()
    types = [example.token_type_ids for example in examples]
    has_types = any(row is not None for row in types)
    documents, positions = None, None
    if any(example.document_ids is not None for example in examples):
        documents, positions = document_tensors([documents_of(example) for example in examples], layout)
    return Batch(
        input_ids=torch.from_numpy(layout.fill([example.ids for example in examples], pad_id(context.special_ids))),
        attention_mask=None if mask is None else torch.from_numpy(mask),
        token_type_ids=torch.from_numpy(layout.fill([NO_TYPES if row is None else row for row in types], 0))
        if has_types
        else None,
        document_ids=documents,
        position_ids=positions,
    )


def pad_id(special_ids: SpecialIds) -> int:
    """The id of padding: it is masked and has no label, so without a padding token any id will do."""
    return 0 if special_ids.pad is None else special_ids.pad


def document_tensors(rows: Sequence[np.ndarray], layout: PadLayout) -> tuple[Tensor | None, Tensor | None]:
    """(document ids, positions) [B, T] from each row's document ids; (None, None) where each row is one document."""
    if not any((row != row[0]).any() for row in rows):
        return None, None
    documents = torch.from_numpy(layout.fill(rows, -1))
    return documents, torch.from_numpy(layout.fill([restarting_positions(row) for row in rows], 0))


def documents_of(example: Example) -> np.ndarray:
    """[t]: the document of each id; zeros for an example of one document."""
    return np.zeros(len(example), dtype=np.int64) if example.document_ids is None else example.document_ids


class WordDropout:
    """Replaces tokens at random; with `share` 0 it replaces none and draws no numbers.

    Args:
        share: p.
        special_ids: of the vocabulary.
        excluded: ids [n] that are never replaced.
        roles: the first that the vocabulary has is the token that is written.
        ordinary: ids [m] to draw from where the vocabulary has none of the roles; None: that is an error.

    Raises InputError when there is no replacement.
    """

    def __init__(
        self,
        share: float,
        special_ids: SpecialIds,
        *,
        excluded: np.ndarray,
        roles: Sequence[str] = UNK_FIRST,
        ordinary: np.ndarray | None = None,
    ) -> None:
        self.share, self.excluded = share, excluded
        found = [token for role in roles if (token := getattr(special_ids, role)) is not None]
        self.replacements = np.array(found[:1], dtype=np.int64) if found else ordinary
        if share and self.replacements is None:
            raise InputError(
                "objectives: word_dropout needs a tokenizer with a mask, unknown or padding token, this one has none",
                hint="train one with --template bert, or --set objectives.0.word_dropout=0",
            )

    def __call__(
        self, ids: np.ndarray, rng: np.random.Generator, *, also_excluded: np.ndarray | None = None
    ) -> np.ndarray:
        """New ids of the same shape; `also_excluded` is True where a token stays, whatever its id."""
        if not self.share:
            return ids
        excluded = np.isin(ids, self.excluded)
        excluded = excluded if also_excluded is None else excluded | also_excluded
        assert self.replacements is not None
        if len(self.replacements) == 1:
            return drop_words(ids, excluded, self.share, int(self.replacements[0]), rng)
        drawn = self.replacements[rng.integers(len(self.replacements), size=ids.shape)]
        return drop_words(ids, excluded, self.share, drawn, rng)

    def rows(self, rows: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
        """The same for rows of unequal lengths."""
        if not self.share:
            return list(rows)
        return np.split(self(np.concatenate(rows), rng), np.cumsum([len(row) for row in rows])[:-1])


def drop_words(
    ids: np.ndarray, excluded: np.ndarray, share: float, replacement: int | np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """New ids of the same shape: each is replaced with probability `share`, except where `excluded` is True."""
    return np.where((rng.random(ids.shape) < share) & ~excluded, replacement, ids)
