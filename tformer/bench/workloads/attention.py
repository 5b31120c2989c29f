"""`bench attention`: forward and backward of one attention kind at one length, without projections.

softmax(q k^T) v or what a kind has in its place, then the gradients of q, k, v and of the kind's own parameters.
Queries, keys and values lie in memory as projections leave them, [B, T, H, h].

Shape legend: B batch, T positions, H heads, K heads of keys and values, h head_dim, D = H h.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.bench.machine import PeakMemory
from tformer.bench.peers import PEERS
from tformer.bench.workloads import SEED, Contender, synchronize
from tformer.nn.attention import (
    ATTENTION,
    AttentionContext,
    AttentionSizes,
    FullAttentionOptions,
    Mechanism,
    ProjectionOptions,
)
from tformer.nn.attention.context import AttentionInputs
from tformer.support.device import DTYPES

FULL, DENSE_MASKED = "full", "dense-masked"
"""The references: full attention as the model computes it, and with a T x T mask."""

SHORT_LENGTH = 128  # positions of a first call that loads code
SLOW_SECONDS = 1.0  # a first call that takes longer is enough warm-up
ROUND_SECONDS = 0.01  # quick calls are repeated within a round, so that waking the process does not count


@dataclass(frozen=True)
class DenseMaskedOptions(FullAttentionOptions):
    """Full attention under the band of a sliding window, as a T x T mask: the baseline for memory."""

    window: int = 256  # visible keys in all, without the query's own


KINDS: dict[str, type[ProjectionOptions]] = {
    FULL: ATTENTION[FULL],
    DENSE_MASKED: DenseMaskedOptions,
    **{kind: options for kind, options in ATTENTION.items() if kind != FULL},
}
"""Every kind that can be measured, and its options."""


ATTENTION_PEERS: dict[str, tuple[str, str]] = {
    f"{library}-{implementation}": (library, implementation)
    for (work, library), peer in PEERS.items()
    if work == "attention"
    for implementation in peer.precisions or ()
}
"""Other libraries' attention functions by name: library and implementation."""


@dataclass(frozen=True)
class AttentionBench:
    """What to measure; it travels to the measuring process as JSON.

    Attributes:
        kinds: of `KINDS`, then of `ATTENTION_PEERS`. options: of each kind, by name.
        kv_heads: None: as many as heads.
        max_seconds: of one kind at one length, starting Python included.
        model: name of the model that gave the sizes, if any.
        compile: our kinds go through torch.compile.
    """

    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    options: Mapping[str, Mapping[str, Any]]
    batch_size: int = 1
    heads: int = 4
    head_dim: int = 64
    causal: bool = False
    dtype: str = "fp32"
    device: str = "cpu"
    repeats: int = 10
    max_seconds: float = 120.0
    kv_heads: int | None = None
    model: str | None = None
    compile: bool = False

    def sizes(self, length: int) -> AttentionSizes:
        """Self-attention of the first layer of a model of this length."""
        return AttentionSizes(
            d_model=self.heads * self.head_dim,
            num_heads=self.heads,
            num_kv_heads=self.heads if self.kv_heads is None else self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            max_seq_len=length,
            causal=self.causal,
        )

    def mechanism(self, kind: str, length: int) -> Mechanism:
        """One of `kinds` with random parameters. ValueError when its options and the sizes do not fit together."""
        sizes = self.sizes(length)
        if kind in ATTENTION_PEERS:
            library, implementation = ATTENTION_PEERS[kind]
            peer: Mechanism = PEERS["attention", library].make(sizes, implementation)
            return peer.train()
        options = KINDS[kind](**self.options[kind])
        mechanism = options.mechanism(options, sizes)
        mechanism.reset_parameters(0.02)
        return mechanism.train()


class AttentionContender(Contender):
    """One attention kind at one length; the contender of the measuring process.

    Order: a short call loads code; inputs are made; memory is measured from here over the first call at full length, so
    that masks and tables that a kind makes in its first call count too; then rounds are timed.
    """

    def __init__(self, *, bench: Mapping[str, Any], kind: str, length: int) -> None:
        self.bench, self.kind, self.length = AttentionBench(**bench), kind, length
        self.device = torch.device(self.bench.device)

    def prepare(self) -> None:
        torch.manual_seed(SEED)
        self._make_call(min(self.length, SHORT_LENGTH))()
        self._call = self._make_call(self.length)
        memory = PeakMemory(self.device)
        start = time.perf_counter()
        self._call()
        self._peak_bytes = memory.bytes()  # on a GPU this waits for the call
        self._first_seconds = time.perf_counter() - start
        self._calls = 1

    def warm_up(self) -> None:
        if self._first_seconds > SLOW_SECONDS:
            return
        self.run()
        start = time.perf_counter()
        self.run()
        self._calls = math.ceil(ROUND_SECONDS / (time.perf_counter() - start))

    def run(self) -> int:
        for _ in range(self._calls):
            self._call()
            synchronize(self.device)
        return self._calls * self.bench.batch_size * self.length

    def peak_memory(self) -> dict[str, int]:
        return {**super().peak_memory(), "peak_bytes": self._peak_bytes}

    def _make_call(self, length: int) -> Callable[[], None]:
        bench = self.bench
        mechanism = bench.mechanism(self.kind, self.length).to(self.device)
        if bench.compile and self.kind not in ATTENTION_PEERS:
            mechanism.compile(dynamic=False)
        kv_heads = bench.sizes(length).num_kv_heads
        inputs = [
            torch.randn(bench.batch_size, length, heads, bench.head_dim, device=self.device, dtype=DTYPES[bench.dtype])
            for heads in (bench.heads, kv_heads, kv_heads, bench.heads)  # queries, keys, values, gradient
        ]
        window = DenseMaskedOptions(**bench.options[self.kind]).window if self.kind == DENSE_MASKED else None
        return forward_and_backward(mechanism, inputs, window, causal=bench.causal)


def forward_and_backward(
    mechanism: Mechanism, inputs_BTHh: list[Tensor], window: int | None, *, causal: bool
) -> Callable[[], None]:
    """A call that goes forward and back; with a `window` under a dense mask of that band, made by the first call."""
    *qkv_BTHh, grad_BTHh = inputs_BTHh
    batch, length, heads, head_dim = grad_BTHh.shape
    trained = [*(x.requires_grad_() for x in qkv_BTHh), *mechanism.parameters()]
    positions = torch.arange(length, device=grad_BTHh.device).unsqueeze(0)
    stream_BTD = torch.zeros(1, dtype=grad_BTHh.dtype, device=grad_BTHh.device).expand(batch, length, heads * head_dim)
    widths = sum(x.shape[2] for x in qkv_BTHh) * head_dim
    weight = torch.zeros(widths, stream_BTD.shape[-1], dtype=grad_BTHh.dtype, device=grad_BTHh.device)
    project = partial(F.linear, weight=weight)  # of tables of positions
    mask: Tensor | None = None

    def call_once() -> None:
        nonlocal mask
        if window is not None and mask is None:
            mask = band_mask(length, window, causal=causal, device=grad_BTHh.device)
        context = AttentionContext(positions, positions, causal=causal, mask=mask, is_causal=causal and mask is None)
        q, k, v = (x.transpose(1, 2) for x in qkv_BTHh)
        out_BHTh, _ = mechanism(AttentionInputs(q, k, v, context, mechanism.scale, x_BTD=stream_BTD, project=project))
        torch.autograd.grad(out_BHTh, trained, grad_BTHh.transpose(1, 2), allow_unused=True)

    return call_once


def band_mask(length: int, window: int, *, causal: bool, device: torch.device) -> Tensor:
    """bool [1, 1, T, T]: a query sees `window` keys beside its own, half on each side (causal: all before)."""
    before, after = (window, 0) if causal else (window // 2, window // 2)
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril_(after).triu_(-before)[None, None]
