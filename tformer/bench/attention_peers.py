"""Other libraries' attention, as `bench attention` measures ours: queries, keys and values in, outputs out.

- `transformers-eager`, `transformers-sdpa`: the two functions that the library's models choose from.
- `x-transformers`: its `Attend` with `flash=True`, which its layers go through.

Each is full attention. A library is imported when its mechanism is made, in the process that measures it.

Shape legend: B batch, T positions, H heads, K heads of keys and values, h head_dim.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tformer.errors import InputError
from tformer.nn.attention import AttentionContext, AttentionSizes, FullAttentionOptions, Mechanism

IMPLEMENTATIONS = {
    "eager": ("transformers.models.llama.modeling_llama", "eager_attention_forward"),
    "sdpa": ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
}
"""Of `transformers`: module and function."""


class _Transformers(Mechanism):
    """One of `IMPLEMENTATIONS`."""

    def __init__(self, sizes: AttentionSizes, implementation: str) -> None:
        super().__init__(FullAttentionOptions(), sizes)
        self.num_key_value_groups = sizes.num_heads // sizes.num_kv_heads  # the library reads these two
        self.is_causal = sizes.causal
        module, name = IMPLEMENTATIONS[implementation]
        self._attend = getattr(importlib.import_module(module), name)
        self._needs_mask = sizes.causal and implementation == "eager"
        self._mask: Tensor | None = None

    def forward(  # type: ignore[override]
        self, q_BHTh: Tensor, k_BKTh: Tensor, v_BKTh: Tensor, context: AttentionContext, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        if self._needs_mask and (self._mask is None or self._mask.shape[-1] != q_BHTh.shape[2]):
            length, least = q_BHTh.shape[2], torch.finfo(q_BHTh.dtype).min
            full = torch.full((length, length), least, dtype=q_BHTh.dtype, device=q_BHTh.device)
            self._mask = full.triu_(1)[None, None]
        out_BTHh, _ = self._attend(self, q_BHTh, k_BKTh, v_BKTh, self._mask, scaling=self.scale, dropout=0.0)
        return out_BTHh.transpose(1, 2), None


class _XTransformers(Mechanism):
    """`Attend`, whose fused path is PyTorch's."""

    def __init__(self, sizes: AttentionSizes) -> None:
        super().__init__(FullAttentionOptions(), sizes)
        from x_transformers.attend import Attend

        self._attend = Attend(causal=sizes.causal, heads=sizes.num_heads, flash=True)

    def forward(  # type: ignore[override]
        self, q_BHTh: Tensor, k_BKTh: Tensor, v_BKTh: Tensor, context: AttentionContext, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        out_BHTh, _ = self._attend(q_BHTh, k_BKTh, v_BKTh)
        return out_BHTh, None


ATTENTION_PEERS: dict[str, Callable[[AttentionSizes], Mechanism]] = {
    "transformers-eager": lambda sizes: _Transformers(sizes, "eager"),
    "transformers-sdpa": lambda sizes: _Transformers(sizes, "sdpa"),
    "x-transformers": _XTransformers,
}
"""Rows beside the kinds of ours."""

LIBRARIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "transformers": ("transformers", ("transformers-eager", "transformers-sdpa")),
    "x-transformers": ("x_transformers", ("x-transformers",)),
}
"""What --peer takes: the module that must be importable, and the rows that it stands for."""


def make_peer(name: str, sizes: AttentionSizes) -> Mechanism:
    """A row of `ATTENTION_PEERS`. ImportError when its library is not there."""
    return ATTENTION_PEERS[name](sizes).train()


def choose_attention_peers(libraries: Sequence[str]) -> list[str]:
    """The rows of the named libraries. InputError for one that is not known here, or not installed."""
    chosen: list[str] = []
    for library in dict.fromkeys(libraries):
        if library not in LIBRARIES:
            there = ", ".join(LIBRARIES)
            raise InputError(f"--peer {library}: it does no attention here; available: {there}")
        module, rows = LIBRARIES[library]
        if importlib.util.find_spec(module) is None:
            raise InputError(f"--peer {library}: {module} is not installed", hint="pip install 'tformer[bench]'")
        chosen += rows
    return chosen
