"""What the tests of attention kinds share: every kind with options, its definition as a plain formula, comparisons."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tformer.nn.attention import AttentionContext, AttentionSizes, FullAttentionOptions, Mechanism, ProjectionOptions
from tformer.nn.attention.additive import AdditiveAttention, AdditiveOptions
from tformer.nn.attention.bigbird import BigBirdAttention, BigBirdOptions
from tformer.nn.attention.bigbird_blocks import Blocks
from tformer.nn.attention.disentangled import DisentangledAttention, DisentangledOptions, log_bucket
from tformer.nn.attention.linformer import LinformerAttention, LinformerOptions
from tformer.nn.attention.performer import PerformerAttention, PerformerOptions
from tformer.nn.attention.sliding_window import SlidingWindowAttention, SlidingWindowOptions
from tformer.nn.positions import PositionSizes

WIDTH, HEADS, HEAD, SCALE = 24, 4, 6, 0.4
REACHES = [(causal, side) for causal in (False, True) for side in ("none", "right", "left")]
WINDOWS: list[dict[str, Any]] = [
    {"window": 8},
    {"window": 8, "block": 2},
    {"window": 10, "global_tokens": 3},
    {"window": 4, "block": 2, "dilation": 3, "global_tokens": 1},
    {"window": 6, "dilation": 2},
]
BIGBIRDS: list[dict[str, Any]] = [
    {"random_blocks": 2},
    {"random_blocks": 1, "global_blocks": 2},
    {"random_blocks": 2, "global_blocks": 0, "window_blocks": 5},
    {"random_blocks": 0},
    {"random_blocks": 3, "window_blocks": 1, "seed": 7},
]
KINDS: dict[str, ProjectionOptions] = {
    "full": FullAttentionOptions(),
    "additive": AdditiveOptions(),
    "disentangled": DisentangledOptions(buckets=8, max_distance=20, share_projections=False),
    **{f"window-{n}": SlidingWindowOptions(implementation="blocks", **x) for n, x in enumerate(WINDOWS)},
    **{f"bigbird-{n}": BigBirdOptions(block=4, implementation="blocks", **x) for n, x in enumerate(BIGBIRDS)},
    **{f"linformer-{x}": LinformerOptions(rank=5, sharing=x) for x in ("none", "headwise", "key_value", "layerwise")},
    **{f"performer-{x}": PerformerOptions(features=13, kernel=x) for x in ("softmax", "relu")},
}
SPARSE = [name for name in KINDS if name.startswith(("window", "bigbird"))]


def mechanism_of(
    options: ProjectionOptions, *, causal: bool = False, kv_heads: int = HEADS, value_dim: int = HEAD, layer: int = 0
) -> Mechanism:
    torch.manual_seed(1)
    sizes = AttentionSizes(WIDTH, HEADS, kv_heads, HEAD, value_dim, max_seq_len=64, layer=layer, causal=causal)
    mechanism = options.mechanism(options, sizes)
    mechanism.scale = SCALE
    for parameter in mechanism.parameters():
        nn.init.normal_(parameter, std=0.4)
    return mechanism


def tensors(
    length: int, *, batch: int = 2, kv_heads: int = HEADS, value_dim: int = HEAD, keys: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    """Queries, keys and values that ask for gradients."""
    torch.manual_seed(0)
    keys = length if keys is None else keys
    shapes = ((batch, HEADS, length, HEAD), (batch, kv_heads, keys, HEAD), (batch, kv_heads, keys, value_dim))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def call_of(context: AttentionContext, *, batch: int = 2, **values: Any) -> dict[str, Any]:
    """Named arguments of a mechanism."""
    return {"context": context, "x_BTD": torch.randn(batch, context.q_pos.shape[1], WIDTH), **values}


def padding(length: int, side: str) -> Tensor | None:
    """The second example is shorter, the first complete."""
    if side == "none":
        return None
    mask = torch.ones(2, length, dtype=torch.long)
    short = length // 3
    mask[1, :short] = 0 if side == "left" else 1
    mask[1, length - short :] = 1 if side == "left" else 0
    return mask


def hooks_of(kind: Any, *, causal: bool) -> Any:
    hooks = kind.build(
        PositionSizes(
            d_model=WIDTH, num_heads=HEADS, head_dim=HEAD, value_dim=HEAD, max_seq_len=64, bidirectional=not causal
        )
    )
    for parameter in hooks.parameters():
        nn.init.normal_(parameter)
    return hooks


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T scale) v with repeated heads; rows that may look nowhere are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(~mask, -1e30)
    return (scores.softmax(-1) * mask.any(-1, keepdim=True)) @ v


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float = 1e-5) -> None:
    """Outputs, and gradients relative to the largest number of each."""
    up = torch.randn_like(expected)
    ours = torch.autograd.grad(found, inputs, up, retain_graph=True, allow_unused=True)
    theirs = torch.autograd.grad(expected, inputs, up, allow_unused=True)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    for a, b in zip(ours, theirs, strict=True):
        a = torch.zeros_like(b) if a is None else a
        largest = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a, b, atol=tolerance * largest, rtol=0)


# --- definitions ------------------------------------------------------------------------------------------------------


def definition(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
    """What a kind computes, by its formula: no blocks, no chunks, no sums that are kept."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mask = plain_mask(mechanism, context, len(q))
    if isinstance(mechanism, LinformerAttention):
        return _linformer(mechanism, q, k, v, mask)
    if isinstance(mechanism, PerformerAttention):
        return _performer(mechanism, q, k, v, mask)
    if isinstance(mechanism, AdditiveAttention):
        activations = (q.unsqueeze(3) + k.unsqueeze(2)).tanh()
        scores = torch.einsum("bhtsd,hd->bhts", activations, mechanism.weight.to(q.dtype)) * mechanism.scale
        return (scores.masked_fill(~mask, -1e30).softmax(-1) * mask.any(-1, keepdim=True)) @ v
    if isinstance(mechanism, DisentangledAttention):
        scores = _disentangled(mechanism, q, k, context) * mechanism.scale
        return (scores.masked_fill(~mask, -1e30).softmax(-1) * mask.any(-1, keepdim=True)) @ v
    return naive(q, k, v, mask)


def _disentangled(mechanism: DisentangledAttention, q: Tensor, k: Tensor, context: AttentionContext) -> Tensor:
    """q_i . k_j + q_i . K_r + k_j . Q_r, with the projected row of every pair."""
    assert mechanism.position_q is not None and mechanism.position_k is not None and mechanism.norm is not None
    table, heads = mechanism.norm(mechanism.table).to(q.dtype), q.shape[1]
    queries, keys = (
        each(table).unflatten(-1, (-1, HEAD)).transpose(0, 1) for each in (mechanism.position_q, mechanism.position_k)
    )
    keys = keys.repeat_interleave(heads // len(keys), dim=0)
    distance = context.q_pos.unsqueeze(2) - context.k_pos.unsqueeze(1)
    index = (log_bucket(distance, buckets=8, max_distance=20) + 8).clamp(0, 15)
    of_keys = torch.einsum("bhtd,hbtsd->bhts", q, keys[:, index].expand(-1, len(q), -1, -1, -1))
    of_queries = torch.einsum("bhsd,hbtsd->bhts", k, queries[:, index].expand(-1, len(q), -1, -1, -1))
    return q @ k.transpose(-1, -2) + of_keys + of_queries


def _linformer(mechanism: LinformerAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q (E k)^T scale) (F v); padding is not projected."""
    group, real = q.shape[1] // mechanism.sizes.num_kv_heads, mask[:, :, :1].transpose(2, 3)
    e, f = (x[..., : k.shape[2]].to(q.dtype) for x in (mechanism.keys, mechanism.values))
    e, f = (x.repeat_interleave(group, dim=0) if x.ndim == 3 else x for x in (e, f))
    return (q @ (e @ (k * real)).transpose(2, 3) * mechanism.scale).softmax(-1) @ (f @ (v * real))


def _performer(mechanism: PerformerAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The formula with its T x S matrix of feature products, and no stabilizer at all."""
    table = mechanism.directions.to(q.dtype)

    def features(x: Tensor) -> Tensor:
        x = x * mechanism.scale**0.5
        if mechanism.kernel == "relu":
            return (x @ table.T).relu() + 1e-3
        return (x @ table.T - x.square().sum(-1, keepdim=True) / 2).exp()

    weights = features(q) @ features(k).transpose(-1, -2) * mask
    total = weights.sum(-1, keepdim=True)
    return weights @ v / total.where(total > 0, 1.0)


def plain_mask(mechanism: Mechanism, context: AttentionContext, batch: int = 2) -> Tensor:
    """Which keys each query sees, bool [B, 1, T, S]: element by element, as the papers say it."""
    queries, keys, documents = context.q_pos.shape[1], context.k_pos.shape[1], context.document_ids
    mask = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    for row in range(batch):
        real = [j for j in range(keys) if context.key_mask is None or context.key_mask[row, j]]
        sees: Callable[[int, int], bool] = lambda i, j: True  # noqa: E731
        if isinstance(mechanism, SlidingWindowAttention):
            sees = _window(mechanism, context, row, real)
        elif isinstance(mechanism, BigBirdAttention):
            sees = _bigbird(mechanism, context.causal, real)
        for t in range(queries):
            i = keys - queries + t
            for j in real:
                there = sees(i, j) and not (context.causal and j > i)
                mask[row, 0, t, j] = there and (documents is None or bool(documents[row, i] == documents[row, j]))
    return mask


def _window(
    mechanism: SlidingWindowAttention, context: AttentionContext, row: int, real: list[int]
) -> Callable[[int, int], bool]:
    options, marks = mechanism.options, context.global_mask
    chosen = set(real[: options.global_tokens] if marks is None else [j for j in real if marks[row, j]])

    def sees(i: int, j: int) -> bool:
        steps, rest = divmod(abs(i - j), options.dilation)
        return (rest == 0 and steps <= options.reach(causal=context.causal)) or i in chosen or j in chosen

    return sees


def _bigbird(mechanism: BigBirdAttention, causal: bool, real: list[int]) -> Callable[[int, int], bool]:
    """Block by block; blocks are counted from the first real token."""
    options, offset = mechanism.options, real[0]
    blocks = -(-(real[-1] + 1 - offset) // options.block)
    chosen = set(range(options.global_blocks))
    if not causal:
        chosen |= set(range(blocks - options.global_blocks, blocks))

    @cache
    def seen(own: int) -> set[int]:
        side = options.window_blocks // 2
        return {own + step for step in range(-side, side + 1)} | drawn(
            options, own, blocks, causal, mechanism.sizes.layer
        )

    def sees(i: int, j: int) -> bool:
        own, block = (i - offset) // options.block, (j - offset) // options.block
        return i >= offset and (block in chosen or block in seen(own) or (own in chosen and not causal))

    return sees


def drawn(options: BigBirdOptions, block: int, num_blocks: int, causal: bool, layer: int) -> set[int]:
    """The random blocks of a block of queries."""
    blocks = Blocks(
        size=options.block,
        side=options.window_blocks // 2,
        num_global=options.global_blocks,
        num_random=options.random_blocks,
        seed=options.seed,
        layer=layer,
        causal=causal,
        offset=torch.tensor([[0]]),
        count=torch.tensor([[num_blocks]]),
    )
    index, exists = blocks.random(torch.tensor([[block]]))
    return set(index[exists].tolist())
