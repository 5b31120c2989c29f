"""Batch: the frozen value that objectives collate and models read; padding of rows to one width.

Field names are those of Hugging Face's models. A field that a family does not use is None. `attention_mask` is None if
nothing is padded, so that attention can take its fast path. A `PadLayout` fixes where each row starts, so that ids,
labels and document ids of an example are aligned.
"""

# Shapes: B examples, T tokens (or the padded length), U decoder tokens, C channels, Y x X pixels.

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

WIDTH_MULTIPLE = 8  # of the widths of text batches
TARGETS = frozenset({"labels", "next_sentence_label"})  # what is predicted; not an input of models

Side = Literal["right", "left", "random"]
PadTo = Literal["longest", "max"]


@dataclass(frozen=True, slots=True)
class Batch:
    input_ids: Tensor | None = None  # [B, T] long
    labels: Tensor | None = None  # [B, T], [B, U], [B], or [B, L] for many labels; below 0: nothing to predict
    attention_mask: Tensor | None = None  # [B, T] bool, True on real tokens; None: nothing is padded
    position_ids: Tensor | None = None  # [B, T] long
    document_ids: Tensor | None = None  # [B, T] long: tokens of different documents do not see each other
    token_type_ids: Tensor | None = None  # [B, T] long
    decoder_input_ids: Tensor | None = None  # [B, U] long
    decoder_attention_mask: Tensor | None = None  # [B, U] bool
    pixel_values: Tensor | None = None  # [B, C, Y, X] float
    next_sentence_label: Tensor | None = None  # [B] long: 0 the second text follows the first, 1 it was drawn at random
    num_tokens: int = -1  # real (not padded) input and decoder tokens, counted once on the host; images count as 1
    num_labels: int | None = None  # labels that are not ignored, counted before they leave the host; None: not counted

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            object.__setattr__(self, "num_tokens", _count_tokens(self))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch on another device. Both counts are copied, so that nothing is read back from the device."""
        batch = self if torch.device(device).type == "cpu" else self.counted()
        return batch._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, from which copies to a GPU overlap with its work."""
        return self.counted()._map(lambda tensor: tensor.pin_memory())

    def counted(self) -> Batch:
        """The same batch with `num_labels`, if its labels are whole numbers in host memory."""
        labels = self.labels
        if self.num_labels is not None or labels is None or labels.is_floating_point() or labels.device.type != "cpu":
            return self
        return dataclasses.replace(self, num_labels=int((labels >= 0).sum()))

    def model_inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of the model's forward: every tensor that is not None, without the labels."""
        return {name: tensor for name, tensor in self.tensors().items() if name not in TARGETS}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is not None, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed = {name: change(tensor) for name, tensor in self.tensors().items()}
        return Batch(**changed, num_tokens=self.num_tokens, num_labels=self.num_labels)


def _count_tokens(batch: Batch) -> int:
    sides = ((batch.input_ids, batch.attention_mask), (batch.decoder_input_ids, batch.decoder_attention_mask))
    count = 0
    for ids, mask in sides:
        if ids is not None:
            count += ids.numel() if mask is None else int(mask.sum())
    if batch.pixel_values is not None:
        count += batch.pixel_values.shape[0]
    return count


@dataclass(frozen=True)
class PadLayout:
    """Row b occupies columns `starts[b] : starts[b] + lengths[b]` of an array `width` wide."""

    starts: np.ndarray  # [B]
    lengths: np.ndarray  # [B]
    width: int

    def fill(self, rows: Sequence[np.ndarray], value: int) -> np.ndarray:
        """[B, T] int64 with each row in its place and `value` everywhere else."""
        padded = np.full((len(self.starts), self.width), value, dtype=np.int64)
        for index, row in enumerate(rows):
            start = self.starts[index]
            padded[index, start : start + len(row)] = row
        return padded

    def mask(self) -> np.ndarray | None:
        """[B, T] bool, True on real tokens; None if nothing is padded."""
        if (self.lengths == self.width).all():
            return None
        columns = np.arange(self.width)
        starts = self.starts[:, None]
        return (columns >= starts) & (columns < starts + self.lengths[:, None])


def pad_layout(
    lengths: Sequence[int] | np.ndarray,
    *,
    side: Side = "right",
    pad_to: PadTo = "longest",
    max_len: int | None = None,
    rng: np.random.Generator | None = None,
    multiple: int = 1,
) -> PadLayout:
    """The places of rows of these lengths. `pad_to="max"` needs `max_len`; `side="random"` needs `rng`.

    The width is rounded up to a multiple of `multiple` where `max_len` allows, see `padded_lengths`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    longest = int(lengths.max(initial=0))
    assert max_len is None or longest <= max_len, f"a row has {longest} tokens, more than the maximum of {max_len}"
    width = longest
    if (lengths != longest).any():  # rows of equal length need no mask
        width = int(padded_lengths(lengths.max(), multiple=multiple))
    if max_len is not None:
        width = max_len if pad_to == "max" else min(width, max_len)
    spare = width - lengths
    if side == "right":
        starts = np.zeros_like(lengths)
    elif side == "left":
        starts = spare
    else:
        assert rng is not None, 'side="random" needs rng'
        starts = rng.integers(0, spare + 1)
    return PadLayout(starts=starts, lengths=lengths, width=width)


def padded_lengths(lengths: np.ndarray, *, multiple: int = WIDTH_MULTIPLE) -> np.ndarray:
    """Lengths rounded up, so that batches have few different widths.

    A new shape for each batch would cost memory that allocators do not get back, and time for compiling kernels.
    """
    return -(-lengths // multiple) * multiple
