"""What attention is compared with: what the machine multiplies and reads at most, and what a cell needs of both.

The ceiling of products is measured at the shape of the block that attention stands in, [B T, D] x [D, 4 D], in the
number format of the bench, at the start of the same run and in a process of its own.

Operations are those of forward and backward by the convention of training (three times forward; what a fused backward
computes again is not counted): 4 h a head for each key that a query costs, by the kind's own `keys_per_query`. Causal
full attention needs half of the keys. Bytes are those that cannot be spared: queries, keys, values, outputs and their
gradients, each read once where it is needed, and the mask of dense-masked attention.

Shape legend: B batch, T positions, H heads, K heads of keys and values, h head_dim, D = H h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from tformer.bench.attention import AttentionBench, Cell
from tformer.bench.attention_kinds import DENSE_MASKED, FULL, make_options
from tformer.bench.attention_peers import ATTENTION_PEERS
from tformer.bench.ceiling import Ceilings, measure_ceilings
from tformer.bench.isolate import run_isolated
from tformer.bench.roofline import Roofline, roofline
from tformer.metrics import BACKWARD_AND_FORWARD, attention_flops
from tformer.nn.hardware import DTYPES

MOST_ROWS = 8192
HALVED = frozenset({FULL, *ATTENTION_PEERS})
"""What leaves out the later half of the keys where attention is causal, or could."""


def ceilings(*, dtype: str, device: str, rows: int, width: int) -> dict[str, Any]:
    """In the measuring process: a `Ceilings` as a mapping."""
    return asdict(measure_ceilings([dtype], torch.device(device), product=(rows, width, 4 * width)))


def measure_attention_ceilings(bench: AttentionBench, *, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
    """A `Ceilings` as a mapping, or {"failed": why}; None when stopped."""
    arguments = {
        "dtype": bench.dtype,
        "device": bench.device,
        "rows": min(MOST_ROWS, bench.batch_size * bench.lengths[-1]),
        "width": bench.heads * bench.head_dim,
    }
    return run_isolated("attention_ceilings", arguments, max_seconds=bench.max_seconds, should_stop=should_stop)


def flops(bench: AttentionBench, kind: str, length: int) -> float:
    """Of forward and backward of all positions of all sequences."""
    keys = float(length)
    if kind not in ATTENTION_PEERS and kind != DENSE_MASKED:
        keys = make_options(kind, bench.options[kind]).keys_per_query(length)
    if bench.causal and kind in HALVED:
        keys = (length + 1) / 2
    forward = attention_flops([(bench.heads * bench.head_dim, keys)])
    return BACKWARD_AND_FORWARD * forward * bench.batch_size * length


def bytes_read(bench: AttentionBench, kind: str, length: int) -> float:
    """Forward reads q, k and v; backward these, the outputs and their gradient."""
    kv_heads = bench.heads if bench.kv_heads is None else bench.kv_heads
    numbers = bench.batch_size * length * bench.head_dim * (4 * bench.heads + 4 * kv_heads)
    mask = 2.0 * length**2 if kind == DENSE_MASKED else 0.0
    return numbers * DTYPES[bench.dtype].itemsize + mask


def line_of(bench: AttentionBench, cell: Cell, found: Mapping[str, Any] | None) -> Roofline | None:
    """Shares of the ceilings; None for a cell that holds no number, or without ceilings."""
    if cell.median is None or found is None or "failed" in found:
        return None
    measured = Ceilings(**found)
    return roofline(
        flops(bench, cell.kind, cell.length),
        bytes_read(bench, cell.kind, cell.length),
        cell.median,
        flops_per_second=measured.arithmetic(bench.dtype),
        bytes_per_second=measured.bytes_per_second,
    )
