"""Attention context of one forward pass: positions, padding, documents, masks; and the taps that return inner tensors.

A mask is bool, broadcastable to [B, H, T, S], True where a query may look. None: no limit beside `is_causal`. A mask
that exists is complete: it already forbids the future.

Shape legend: B batch, T queries, S keys. Queries are the last T of the S slots when a cache holds earlier ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class TapSink:
    """Where tapped tensors go. `scope` gives a view of the same sink whose names start with a prefix."""

    wanted: frozenset[str]
    values: dict[str, Tensor] = field(default_factory=dict)
    prefix: str = ""

    def scope(self, name: str | int) -> TapSink:
        """The sink as a submodule called `name` sees it."""
        return TapSink(self.wanted, self.values, f"{self.prefix}{name}.")

    def wants(self, name: str) -> bool:
        return self.prefix + name in self.wanted

    def put(self, name: str, value: Tensor) -> None:
        """Keep `value` if it is wanted."""
        if self.wants(name):
            self.values[self.prefix + name] = value


def check_taps(wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raise a ValueError that names the nearest taps for the first wanted name that does not exist."""
    names = list(known)
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
            raise ValueError(f"unknown tap '{name}'; nearest: {', '.join(near)}")


# Far below any score and yet finite: a row that may look nowhere is uniform until it is zeroed, never NaN.
MASKED_SCORE = -1.0e30


def causal_mask(num_queries: int, num_keys: int, device: torch.device | None = None) -> Tensor:
    """bool [T, S]: the last query sees every key, the one before all but the last, and so on."""
    query_slots = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    return torch.arange(num_keys, device=device) <= query_slots


def make_mask(
    *,
    causal: bool,
    num_queries: int,
    num_keys: int | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    key_document_ids: Tensor | None = None,
) -> tuple[Tensor | None, bool]:
    """The mask and `is_causal` to hand to every layer.

    num_keys: None when the queries are the keys. key_mask [B, S]: bool or 0/1, true where a key holds a token; needed
    when a causal pass has fewer queries than keys. document_ids [B, T]: integers; a query sees only keys of its own
    document, whose ids [B, S] default to the queries'.
    Returns (mask bool [B, 1, T or 1, S] or None, is_causal); when both are given the mask is already causal and the
    flag only says that later keys need not be read.
    """
    num_keys = num_queries if num_keys is None else num_keys
    mask: Tensor | None = None
    if document_ids is not None:
        keys = document_ids if key_document_ids is None else key_document_ids
        mask = (document_ids.unsqueeze(2) == keys.unsqueeze(1)).unsqueeze(1)
    needs_past = causal and num_queries > 1
    if key_mask is not None and (mask is not None or not _all_true_for_free(key_mask)):
        visible = key_mask.bool()[:, None, None, :]
        mask = visible if mask is None else mask & visible
    if not needs_past:
        return mask, False
    if mask is None and num_queries == num_keys:
        return None, True
    device = mask.device if mask is not None else key_mask.device if key_mask is not None else None
    past = causal_mask(num_queries, num_keys, device)[None, None]
    return past if mask is None else mask & past, num_queries == num_keys


def _all_true_for_free(mask: Tensor) -> bool:
    """Whether nothing is masked, asked only where the answer costs no synchronisation."""
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all())
