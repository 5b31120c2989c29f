"""Labelled texts, pairs of texts and images as batches, and what training changes about them.

- word dropout (`word_dropout.py`): a share of the text's tokens becomes [MASK], so that no single word decides.
- swapped pairs: half of the pairs are read the other way round, [CLS] b [SEP] a [SEP] for [CLS] a [SEP] b [SEP].
- augmentation of images: `tformer.data.augment`.

Beside an encoder, a decoder reads the same text again: `read_again`.

Shapes: B examples, T tokens, L labels, C channels, Y x X pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tformer.data.batch import Batch
from tformer.data.padding import WIDTH_MULTIPLE, PadLayout, pad_layout
from tformer.data.windows import Example
from tformer.errors import InputError
from tformer.objectives.base import ImageContext, ObjectiveContext
from tformer.objectives.masked_lm import never_masked
from tformer.objectives.word_dropout import MASK_FIRST, WordDropout
from tformer.tokenizer.special import SpecialIds

if TYPE_CHECKING:
    from tformer.data.images import ImageExample

SWAPPED_SHARE = 0.5
NO_TYPES = np.zeros(0, dtype=np.int64)


class ExampleCollator:
    """Makes the batches of the objectives that have one label per example.

    `label_dtype`: of the batch's labels, torch.long for a class, torch.float32 for a score or for several labels.
    Raises InputError for what the examples cannot have: word dropout of images, or of a tokenizer that has neither a
    mask, an unknown nor a padding token.
    """

    def __init__(
        self,
        context: ObjectiveContext,
        label_dtype: torch.dtype,
        *,
        word_dropout: float = 0.0,
        swap_pairs: bool = False,
    ) -> None:
        self.context, self.label_dtype = context, label_dtype
        self.word_dropout, self.swap_pairs = word_dropout, swap_pairs
        if context.images is not None and (word_dropout or swap_pairs):
            raise InputError("objectives: word_dropout and swap_pairs are for texts, this model reads images")
        if word_dropout:
            kept = np.flatnonzero(never_masked(context))
            self.drop = WordDropout(word_dropout, context.special_ids, kept=kept, roles=MASK_FIRST)

    def __call__(
        self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """One batch of `Example` or `ImageExample`; `labels` is None when the first sample has none.

        `rng`: random padding, and what training varies. Raises ValueError for a text of more than `seq_len` ids.
        """
        if self.context.images is not None:
            batch = collate_images(samples, self.context.images, rng=rng, training=training)
        else:
            batch = self._texts(samples, rng=rng, training=training)
        return replace(batch, labels=self._labels(samples))

    def _texts(self, examples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool) -> Batch:
        if training and self.swap_pairs:
            chosen = rng.random(len(examples)) < SWAPPED_SHARE
            special_ids = self.context.special_ids
            examples = [
                swap_pair(example, special_ids) if swap else example
                for example, swap in zip(examples, chosen.tolist(), strict=True)
            ]
        batch = collate_texts(examples, self.context, rng=rng)
        if training and self.word_dropout:
            assert batch.input_ids is not None
            batch = replace(batch, input_ids=torch.from_numpy(self.drop(batch.input_ids.numpy(), rng)))
        return batch if self.context.target is None else read_again(batch, self.context.target.start)

    def _labels(self, samples: Sequence[Any] | np.ndarray) -> Tensor | None:
        if samples[0].label is None:
            return None
        return torch.from_numpy(np.array([sample.label for sample in samples])).to(self.label_dtype)


def collate_texts(
    examples: Sequence[Example] | np.ndarray, context: ObjectiveContext, *, rng: np.random.Generator
) -> Batch:
    """Ids, mask (None when nothing is padded) and, when any example has them, token types; no labels."""
    lengths = np.array([len(example) for example in examples], dtype=np.int64)
    layout = pad_layout(
        lengths,
        side=context.padding,
        pad_to=context.pad_to,
        max_len=context.seq_len,
        rng=rng,
        multiple=WIDTH_MULTIPLE,
    )
    if layout.width == 0:  # empty texts and a template without special tokens: a column of padding stands for them
        layout = PadLayout(layout.starts, lengths, 1)
    mask = layout.mask()
    types = [example.token_type_ids for example in examples]
    typed = any(row is not None for row in types)
    # Padding is masked, so without a token of its own any id will do.
    pad_id = 0 if context.special_ids.pad is None else context.special_ids.pad
    return Batch(
        input_ids=torch.from_numpy(layout.fill([example.ids for example in examples], pad_id)),
        attention_mask=None if mask is None else torch.from_numpy(mask),
        token_type_ids=torch.from_numpy(layout.fill([NO_TYPES if row is None else row for row in types], 0))
        if typed
        else None,
    )


def read_again(batch: Batch, start: int) -> Batch:
    """The decoder reads the encoder's text, shifted right behind `start`, and sees all of it at its last token (BART).

    On whichever side the padding stands, the first real token gives its place to `start`.
    """
    assert batch.input_ids is not None
    ids, mask = batch.input_ids.roll(1, dims=1), batch.attention_mask
    first_B = torch.zeros(len(ids), dtype=torch.long) if mask is None else mask.long().argmax(dim=1)
    ids[torch.arange(len(ids)), first_B] = start
    return replace(batch, decoder_input_ids=ids, decoder_attention_mask=mask, num_tokens=-1)


def collate_images(
    examples: Sequence[ImageExample] | np.ndarray, images: ImageContext, *, rng: np.random.Generator, training: bool
) -> Batch:
    """Normalised pixels, in training varied as `images.augment` says; no labels."""
    from tformer.data.augment import augment
    from tformer.data.images import to_pixels

    pixels_BCYX = np.stack([example.pixels for example in examples])
    if training and images.augment:
        pixels_BCYX = augment(pixels_BCYX, images.augment, rng)
    return Batch(pixel_values=to_pixels(pixels_BCYX, images.mean, images.std))


def swap_pair(example: Example, special_ids: SpecialIds) -> Example:
    """[CLS] a [SEP] b [SEP] -> [CLS] b [SEP] a [SEP]: the texts change places, the special tokens stay.

    The texts are told apart by their token types; an example without types, or of one text, is returned as it is.
    """
    types = example.token_type_ids
    if types is None or not types.any():
        return example
    before, first, between = _frame(example.ids[types == 0], special_ids)
    start, second, end = _frame(example.ids[types == 1], special_ids)
    left, right = np.concatenate([before, second, between]), np.concatenate([start, first, end])
    new_types = np.repeat(np.array([0, 1], dtype=types.dtype), [len(left), len(right)])
    return replace(example, ids=np.concatenate([left, right]), token_type_ids=new_types)


def _frame(ids: np.ndarray, special_ids: SpecialIds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A segment as (special tokens that open it, its text, special tokens that close it)."""
    closes = np.isin(ids, [token for token in (special_ids.sep, special_ids.eos) if token is not None])
    end = len(ids) - _run(closes[::-1])
    opens = np.isin(ids[:end], [token for token in (special_ids.cls, special_ids.bos) if token is not None])
    start = _run(opens)
    return ids[:start], ids[start:end], ids[end:]


def _run(flags: np.ndarray) -> int:
    """How many of the first flags are True."""
    return len(flags) if flags.all() else int(flags.argmin())
