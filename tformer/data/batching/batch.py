"""Batch: the frozen value that objectives collate and models read.

Fields have the names of Hugging Face's models. A field that a family does not use is None. `attention_mask` is None if
nothing is padded, so that attention can take its fast path.
"""

# Shapes: B examples, T tokens (or the padded length), U decoder tokens, C channels, Y x X pixels.

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TARGETS = frozenset({"labels", "next_sentence_label"})  # what is predicted; not an input of models


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a micro-batch that one of several processes trains on: every `world_size`-th row.

    Attributes:
        rows: the places of its rows.
        num_rows: rows of the whole micro-batch.
        counted: False in a process that gets no row. It computes the first row with a loss of 0, because all
            processes take part in every exchange of gradients.
        labels_per_row: labels of each row of the whole micro-batch; empty where the process has not seen all rows.
    """

    rows: slice
    num_rows: int
    counted: bool = True
    labels_per_row: tuple[int, ...] = ()

    @classmethod
    def of(cls, num_rows: int, *, rank: int, world_size: int) -> Share:
        """The share of process `rank`."""
        if rank < num_rows:
            return cls(slice(rank, num_rows, world_size), num_rows)
        return cls(slice(0, 1), num_rows, counted=False)


@dataclass(frozen=True, slots=True)
class Batch:
    input_ids: Tensor | None = None  # [B, T] long
    labels: Tensor | None = None  # [B, T], [B, U], [B], or [B, L] for many labels; below 0: nothing to predict
    attention_mask: Tensor | None = None  # [B, T] bool, True on real tokens; None if nothing is padded
    position_ids: Tensor | None = None  # [B, T] long
    document_ids: Tensor | None = None  # [B, T] long: tokens of different documents do not see each other
    token_type_ids: Tensor | None = None  # [B, T] long
    decoder_input_ids: Tensor | None = None  # [B, U] long
    decoder_attention_mask: Tensor | None = None  # [B, U] bool
    pixel_values: Tensor | None = None  # [B, C, Y, X] float
    next_sentence_label: Tensor | None = None  # [B] long: 0 the second text follows the first, 1 it was drawn at random
    num_tokens: int = -1  # real (not padded) input and decoder tokens, counted once on the host; images count as 1
    num_labels: int | None = None  # labels that are not ignored, counted before they leave the host, if at all
    share: Share | None = None  # the rows of one of several processes; None: all rows

    def __post_init__(self) -> None:
        if self.num_tokens >= 0:
            return
        count = 0 if self.pixel_values is None else self.pixel_values.shape[0]
        sides = ((self.input_ids, self.attention_mask), (self.decoder_input_ids, self.decoder_attention_mask))
        for ids, mask in sides:
            if ids is not None:
                count += ids.numel() if mask is None else int(mask.sum())
        object.__setattr__(self, "num_tokens", count)

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

    def shared(self, share: Share) -> Batch:
        """The rows of one process from the batch of all."""
        labels = self.labels
        if labels is not None and labels.ndim == 2 and not labels.is_floating_point():
            share = dataclasses.replace(share, labels_per_row=tuple((labels >= 0).sum(dim=1).tolist()))
        rows = {name: tensor[share.rows] for name, tensor in self.tensors().items()}
        return Batch(**rows, num_tokens=-1, num_labels=None, share=share)

    @property
    def is_counted(self) -> bool:
        """Whether loss and counts of this process include the batch, see `Share`."""
        return self.share is None or self.share.counted

    def model_inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of the model's forward: every tensor that is not None, without the labels."""
        return {name: tensor for name, tensor in self.tensors().items() if name not in TARGETS}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is not None, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed = {name: change(tensor) for name, tensor in self.tensors().items()}
        return Batch(**changed, num_tokens=self.num_tokens, num_labels=self.num_labels, share=self.share)
