"""Rows of token ids of different lengths as one tensor, and what is checked of them first.

Prefixes and prompts are padded on the left, so that the newest token of every row stands in the last column; sources
on the right. A mask exists only where something is padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tformer.errors import InputError
from tformer.model import Transformer

FILLER = 0  # any id will do: the mask hides it


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Ids long [B, T] that end in the last column, and a bool mask [B, T] of the real ones; None: all are."""
    longest = max(map(len, rows))
    ids_BT = torch.tensor([[FILLER] * (longest - len(row)) + list(row) for row in rows], device=device)
    if min(map(len, rows)) == longest:
        return ids_BT, None
    lengths_B1 = torch.tensor([[len(row)] for row in rows], device=device)
    return ids_BT, torch.arange(longest, device=device) >= longest - lengths_B1


def right_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The same, with every row starting in the first column."""
    longest = max(map(len, rows))
    ids_BT = torch.tensor([list(row) + [FILLER] * (longest - len(row)) for row in rows], device=device)
    if min(map(len, rows)) == longest:
        return ids_BT, None
    lengths_B1 = torch.tensor([[len(row)] for row in rows], device=device)
    return ids_BT, torch.arange(longest, device=device) < lengths_B1


def check_sources(
    model: Transformer, sources: Sequence[Sequence[int]], prefixes: Sequence[Sequence[int]], *, first_row: int = 0
) -> None:
    """Raise for what an encoder-decoder cannot read; messages count sources from 1.

    InputError for a source without tokens; ValueError for a model without an encoder or a decoder, or when there is
    not one decoder prefix for each source.
    """
    if model.encoder is None or model.decoder is None:
        raise ValueError("sources need a model with an encoder and a decoder")
    if len(sources) != len(prefixes):
        raise ValueError(f"{len(sources)} sources and {len(prefixes)} decoder prefixes: expected one prefix for each")
    for number, source in enumerate(sources, start=first_row + 1):
        if not source:
            raise InputError(f"source {number} has no tokens, expected at least 1")
