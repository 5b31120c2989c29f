"""Samples of different lengths as one batch: ids, mask, segments and documents, before anything is corrupted.

Packed documents that must not see each other (`document_ids`) count their positions from 0 each.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tformer.data.batch import Batch
from tformer.data.padding import WIDTH_MULTIPLE, PadLayout, pad_layout
from tformer.data.windows import Example, restarting_positions
from tformer.objectives.base import ObjectiveContext


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
