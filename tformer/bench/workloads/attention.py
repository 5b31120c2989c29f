"""`bench attention`: forward and backward of one attention kind at one length, without projections."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tformer.bench.attention_peers import ATTENTION_PEERS, make_peer
from tformer.bench.machine import PeakMemory
from tformer.bench.processes import measure
from tformer.device import DTYPES
from tformer.nn.attention import (
    ATTENTION,
    AttentionContext,
    AttentionSizes,
    FullAttentionOptions,
    Mechanism,
    ProjectionOptions,
)

FULL, DENSE_MASKED = "full", "dense-masked"
"""The references: full attention as the model computes it, and with a T x T mask."""


@dataclass(frozen=True)
class DenseMaskedOptions(FullAttentionOptions):
    """Full attention under the band of a sliding window, as a T x T mask: what a pattern must beat, most in memory."""

    window: int = 256  # keys in sight in all, the query's own not counted


KINDS: dict[str, type[ProjectionOptions]] = {
    FULL: ATTENTION[FULL],
    DENSE_MASKED: DenseMaskedOptions,
    **{kind: options for kind, options in ATTENTION.items() if kind != FULL},
}
"""Every kind that can be measured, and its options."""


def make_options(kind: str, options: Mapping[str, Any]) -> ProjectionOptions:
    """The options of a kind. ValueError when a value is not allowed; types are not looked at."""
    return KINDS[kind](**options)


SHORT = 128  # positions of the call that loads code
SLOW_SECONDS = 1.0  # a first call that takes longer has warmed up enough
SHARE_FOR_REPEATS = 0.5  # of the time limit: what is left covers loading


def measure_attention(
    *,
    kind: str,
    length: int,
    options: Mapping[str, Any],
    batch_size: int,
    heads: int,
    head_dim: int,
    causal: bool,
    dtype: str,
    device: str,
    repeats: int,
    max_seconds: float,
    kv_heads: int | None = None,
    compile: bool = False,
) -> dict[str, Any]:
    """Seconds (median, minimum, spread as a share, repeats) and peak bytes above the inputs.

    kind, options: as in `attention_kinds.KINDS`; or one of `ATTENTION_PEERS`.
    compile: a kind of ours goes through torch.compile, once for each length; peers are taken as they are.
    dtype: fp32, bf16 or fp16. ValueError when options and sizes do not suit each other.
    """
    began = time.perf_counter()
    torch.manual_seed(0)
    where, number_format = torch.device(device), DTYPES[dtype]
    window = _window(options) if kind == DENSE_MASKED else None
    sizes = sizes_of(heads=heads, head_dim=head_dim, length=length, causal=causal, kv_heads=kv_heads)

    def prepare(positions: int) -> Callable[[], object]:
        mechanism = make_mechanism(kind, options, sizes).to(where)
        if compile and kind not in ATTENTION_PEERS:
            mechanism.compile(dynamic=False)
        widths = (heads, sizes.num_kv_heads, sizes.num_kv_heads, heads)  # of queries, keys, values, gradient
        inputs = [
            torch.randn(batch_size, positions, count, head_dim, device=where, dtype=number_format) for count in widths
        ]
        return _work(mechanism, inputs, window, causal=causal)

    prepare(min(length, SHORT))()
    work = prepare(length)
    memory = PeakMemory(where)
    start = time.perf_counter()
    work()
    peak = memory.bytes()  # on a GPU this waits for the work to be done
    first = time.perf_counter() - start
    timing = measure(
        work,
        repeats=repeats,
        most_seconds=SHARE_FOR_REPEATS * max_seconds - (time.perf_counter() - began),
        warm_ups=0 if first > SLOW_SECONDS else 2,
        synchronise=(lambda: torch.cuda.synchronize(where)) if where.type == "cuda" else lambda: None,
    )
    return {**asdict(timing), "peak_bytes": peak}


def _window(options: Mapping[str, Any]) -> int:
    parsed = make_options(DENSE_MASKED, options)
    assert isinstance(parsed, DenseMaskedOptions)
    return parsed.window


def sizes_of(*, heads: int, head_dim: int, length: int, causal: bool, kv_heads: int | None = None) -> AttentionSizes:
    """Self-attention of the first layer of a model that reads so many positions."""
    return AttentionSizes(
        d_model=heads * head_dim,
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        max_seq_len=length,
        causal=causal,
    )


def make_mechanism(kind: str, options: Mapping[str, Any], sizes: AttentionSizes) -> Mechanism:
    """A kind with its parameters drawn, or a peer's. ValueError when options and sizes do not suit each other."""
    if kind in ATTENTION_PEERS:
        return make_peer(kind, sizes)
    parsed = make_options(kind, options)
    mechanism = parsed.mechanism(parsed, sizes)
    mechanism.reset_parameters(0.02)
    return mechanism.train()


def _work(mechanism: Mechanism, inputs_BTHh: list[Tensor], window: int | None, *, causal: bool) -> Callable[[], object]:
    """A call that goes forward and back. With a `window`, under a mask of that band, which the first call makes."""
    *qkv_BTHh, grad_BTHh = inputs_BTHh
    batch, length, heads, head_dim = grad_BTHh.shape
    trained = [*(x.requires_grad_() for x in qkv_BTHh), *mechanism.parameters()]
    positions = torch.arange(length, device=grad_BTHh.device).unsqueeze(0)
    stream_BTD = torch.zeros(1, dtype=grad_BTHh.dtype, device=grad_BTHh.device).expand(batch, length, heads * head_dim)
    mask: Tensor | None = None

    def work() -> None:
        nonlocal mask
        if window is not None and mask is None:
            mask = band_mask(length, window, causal=causal, device=grad_BTHh.device)
        context = AttentionContext(positions, positions, causal=causal, mask=mask, is_causal=causal and mask is None)
        q, k, v = (x.transpose(1, 2) for x in qkv_BTHh)
        out_BHTh, _ = mechanism(q, k, v, context, x_BTD=stream_BTD)
        torch.autograd.grad(out_BHTh, trained, grad_BTHh.transpose(1, 2), allow_unused=True)

    return work


def band_mask(length: int, window: int, *, causal: bool, device: torch.device) -> Tensor:
    """bool [1, 1, T, T]: a query sees `window` keys beside its own, half on each side (causal: all before)."""
    if causal:
        band = torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(-window)
    else:
        band = torch.ones(length, length, dtype=torch.bool, device=device).tril_(window // 2).triu_(-(window // 2))
    return band[None, None]
