"""Performer (FAVOR+, arXiv 2009.14794): softmax attention by positive random features, linear in the length.

    out_t = phi(q_t) . (sum_j phi(k_j) v_j^T) / (phi(q_t) . sum_j phi(k_j)),  phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m)

with x' = sqrt(scale) x, so that the mean over W is softmax's kernel:

    exp(q . k) = E_w[exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2)],  w ~ N(0, I)

Features. Every term is positive, so no weight of the approximated attention is negative. Rows of the table W are
orthogonal within each block of h, which lowers the variance, and as long as independent Gaussian vectors, which keeps
the mean. A key's feature can be any number from 0 to exp(|w|^2 / 2): it is held as a number in [0, 1] and the logarithm
of the factor that all features of this key share, its level. The table is not learned. It is saved with the weights,
and redrawn every `redraw_steps` training steps, from a separate generator: no other draw of the training moves,
and evaluation uses the table as it is.

Sums. Without causality the sums over all keys are taken once, then every query reads them: O(S m v + T m v). Causal
positions are cut into chunks of C. Within a chunk the lower triangle of phi(q) phi(k)^T is formed; what came before the
chunk is read from the sums up to it: O(T m v + T C m). There is no sum for each position. Long inputs go through in
segments of many chunks, and the sums pass from one to the next. Each segment is recomputed in the backward pass, so
that what is kept for it grows with T through the inputs, outputs and one set of sums a segment. Features and sums are
fp32 (fp64 for fp64). The sums are all that decoding has to keep.

Levels. A query's numbers are taken relative to the highest level among the keys up to it, never among later ones.
Padding has level -inf, and with it weight 0. Levels cancel in the quotient, so only the part -|k|^2 / 2 of a key's own
carries a gradient.

Queries read sums over all keys, not single keys: there are no scores to which positions could add a bias and no weights
to drop, and documents that share a row cannot be separated.

Shape legend: * leading dimensions, B batch, K kv heads, G query heads on one kv head, H = K G, T queries, S keys,
h head_dim, v value_dim, m features; L positions of a segment, N chunks in it, C positions of a chunk, R = G C;
M = N + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tformer.nn.attention.context import AttentionInputs, Weighted
from tformer.nn.attention.mechanism import AttentionSizes, Mechanism, ProjectionOptions, StateBytes
from tformer.nn.attention.routes import mix_values
from tformer.nn.cache import LayerState, Spares
from tformer.nn.options import require, require_positive
from tformer.nn.structured_dropout import TrainingStep

Kernel = Literal["softmax", "relu"]

MASK_64 = (1 << 64) - 1
RELU_FLOOR = 1.0e-3  # added to relu features, so that every denominator is positive (the paper's code)


def default_features(head_dim: int) -> int:
    """d ln d: the number in the paper's theorem, for a given error at any length."""
    return max(1, int(head_dim * math.log(head_dim)))


def mixed_seed(*parts: int) -> int:
    """A 63-bit seed from numbers, near ones giving unrelated seeds: SplitMix64's mixing of one after the other."""
    state = 0
    for part in parts:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & MASK_64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK_64
        state ^= state >> 31
    return state >> 1


def draw_directions(features: int, head_dim: int, *, seed: int) -> Tensor:
    """A table [m, h], fp32, on the CPU; equal seeds give equal tables. No stream of torch's is read or moved."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    blocks = []
    for _ in range(-(-features // head_dim)):
        gaussian = torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64, device="cpu")
        q, r = torch.linalg.qr(gaussian)
        # LAPACK's signs are not random: without this no row would point anywhere with equal probability.
        blocks.append((q * r.diagonal().sign()).T)
    gaussian = torch.randn(features, head_dim, generator=generator, dtype=torch.float64, device="cpu")
    norms = torch.linalg.vector_norm(gaussian, dim=1, keepdim=True)
    return (torch.cat(blocks)[:features] * norms).float()


CHUNK = 64
SEGMENT_ELEMENTS = 2**20  # features of a segment, over batch and heads: 4 MiB in fp32
SEGMENT_CHUNKS = 16  # at most, however few features there are

LOWEST = -1.0e30  # below any level, and yet finite
SMALLEST = 1.0e-37  # a smaller denominator is rounding error: the output is 0

Result = TypeVar("Result")


class Features(NamedTuple):
    """Feature map of queries and keys: directions [m, h] times the square root of the scale, scale and kernel."""

    table: Tensor
    scale: float
    kernel: Kernel

    def of_queries(self, q: Tensor) -> Tensor:
        """Features [*, m] of queries [*, h], up to a factor of each query, which normalizing takes out again."""
        products = q @ self.table.T
        if self.kernel == "relu":
            return products.relu_() + RELU_FLOOR
        return products.sub_(products.detach().amax(-1, keepdim=True)).exp_()

    def of_keys(self, keys: Keys) -> tuple[Tensor, Tensor]:
        """Features [B, K, S, m], and levels [B, K, S]: the kernel's features are exp(level) times these.

        The level of padding is -inf.
        """
        products_BKSm = keys.k @ self.table.T
        if self.kernel == "relu":
            k_BKSm, level_BKS = products_BKSm.relu_() + RELU_FLOOR, keys.k.new_zeros(keys.k.shape[:-1])
        else:
            highest = products_BKSm.detach().amax(-1, keepdim=True)
            level_BKS = highest.squeeze(-1) - keys.k.square().sum(-1) * (self.scale / 2)
            k_BKSm = products_BKSm.sub_(highest).exp_()
        if keys.mask is not None:
            level_BKS = level_BKS.masked_fill(~keys.mask.unsqueeze(1), -math.inf)
        return k_BKSm, level_BKS


class Sums(NamedTuple):
    """Sums over the keys so far [B, K, m, v + 1], the last column of ones, relative to exp(level); level [B, K]."""

    sums: Tensor
    level: Tensor


class Keys(NamedTuple):
    """Keys [B, K, S, h], values [B, K, S, v] and a bool mask [B, S], True where a key holds a token."""

    k: Tensor
    v: Tensor
    mask: Tensor | None

    def part(self, rows: slice) -> Keys:
        return Keys(self.k[:, :, rows], self.v[:, :, rows], None if self.mask is None else self.mask[:, rows])


def linear_attention(
    q_BHTh: Tensor, keys: Keys, features: Features, *, causal: bool, before: Sums | None = None
) -> tuple[Tensor, Sums]:
    """Output [B, H, T, v], and the sums over all keys.

    All tensors have the dtype of the sums. before: sums of earlier keys, which every query sees. Causal: T = S.
    """
    kv_heads, num_features = keys.k.shape[1], features.table.shape[0]
    q_BKGTh = q_BHTh.unflatten(1, (kv_heads, -1))
    per_query, per_key = (x.shape[0] * x.shape[1] * num_features for x in (q_BHTh, keys.k))
    outs, sums = [], before
    if causal:
        assert q_BHTh.shape[2] == keys.k.shape[2], "causal linear attention needs as many queries as keys"
        for rows, recompute in _segments(q_BHTh.shape[2], per_query):
            out, sums = _run(
                _attend_segment, q_BKGTh[:, :, :, rows], keys.part(rows), features, sums, recompute=recompute
            )
            outs.append(out)
    else:
        for rows, recompute in _segments(keys.k.shape[2], per_key):
            sums = _run(_absorb_segment, keys.part(rows), features, sums, recompute=recompute)
        for rows, recompute in _segments(q_BHTh.shape[2], per_query):
            outs.append(_run(_read_segment, q_BKGTh[:, :, :, rows], features, sums, recompute=recompute))
    assert sums is not None, "attention without a key"
    return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=3)).flatten(1, 2), sums


def _segments(length: int, elements_per_position: int) -> Iterator[tuple[slice, bool]]:
    """Slices of whole chunks, and whether there are several: then they are recomputed."""
    chunks = SEGMENT_ELEMENTS // (elements_per_position * CHUNK)
    size = max(1, min(chunks, SEGMENT_CHUNKS)) * CHUNK
    for start in range(0, length, size):
        yield slice(start, min(start + size, length)), length > size


def _run(function: Callable[..., Result], *arguments: object, recompute: bool) -> Result:
    if recompute and torch.is_grad_enabled():
        result: Result = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
        return result
    return function(*arguments)


def _absorb_segment(keys: Keys, features: Features, before: Sums | None) -> Sums:
    """The sums with a segment's keys added."""
    k_BKLm, level_BKL = features.of_keys(keys)
    level_BK = level_BKL.detach().amax(-1).clamp_min(LOWEST)
    if before is not None:
        level_BK = torch.maximum(level_BK, before.level)
    shares_BKL = (level_BKL - level_BK.unsqueeze(-1)).exp()
    sums = k_BKLm.transpose(-1, -2) @ (F.pad(keys.v, (0, 1), value=1.0) * shares_BKL.unsqueeze(-1))
    if before is not None:
        sums = sums + (before.level - level_BK).exp()[..., None, None] * before.sums
    return Sums(sums, level_BK)


def _read_segment(q_BKGLh: Tensor, features: Features, sums: Sums) -> Tensor:
    """Output [B, K, G, L, v] of queries that see all keys."""
    q_BKxm = features.of_queries(q_BKGLh.flatten(2, 3))
    return _quotient(q_BKxm @ sums.sums).unflatten(2, q_BKGLh.shape[2:4])


def _attend_segment(q_BKGLh: Tensor, keys: Keys, features: Features, before: Sums | None) -> tuple[Tensor, Sums]:
    """Output [B, K, G, L, v] of a segment, each query seeing the sums before and the keys up to itself."""
    length = q_BKGLh.shape[3]
    size = min(CHUNK, length)
    k_BKLm, level_BKL = features.of_keys(keys)
    v_BKLv = F.pad(keys.v, (0, 1), value=1.0)
    if missing := -length % size:
        q_BKGLh, k_BKLm, v_BKLv = (F.pad(x, (0, 0, 0, missing)) for x in (q_BKGLh, k_BKLm, v_BKLv))
        level_BKL = F.pad(level_BKL, (0, missing), value=-math.inf)
    k_BKNCm, v_BKNCv, level_BKNC = (x.unflatten(2, (-1, size)) for x in (k_BKLm, v_BKLv, level_BKL))
    q_BKNRh = q_BKGLh.unflatten(3, (-1, size)).transpose(2, 3).flatten(3, 4)
    q_BKNRm = features.of_queries(q_BKNRh)

    own_BKN = level_BKNC.detach().amax(-1).clamp_min(LOWEST)
    shares_BKNC = (level_BKNC - own_BKN.unsqueeze(-1)).exp()
    added_BKNmv = k_BKNCm.transpose(-1, -2) @ (v_BKNCv * shares_BKNC.unsqueeze(-1))
    past_BKNmv, past_BKN, after = _prefix_sums(added_BKNmv, own_BKN, before)

    seen_BKNC = torch.maximum(past_BKN.unsqueeze(-1), level_BKNC.detach().cummax(-1).values)
    future_CC = torch.ones(size, size, dtype=torch.bool, device=q_BKGLh.device).triu_(1)
    share_BKNCC = (level_BKNC.unsqueeze(-2) - seen_BKNC.unsqueeze(-1)).masked_fill(future_CC, -math.inf).exp()
    products_BKNGCC = (q_BKNRm @ k_BKNCm.transpose(-1, -2)).unflatten(3, (-1, size))
    within = (products_BKNGCC * share_BKNCC.unsqueeze(3)).flatten(3, 4) @ v_BKNCv
    past_share_BKNC = (past_BKN.unsqueeze(-1) - seen_BKNC).exp()
    past = (q_BKNRm @ past_BKNmv).unflatten(3, (-1, size)) * past_share_BKNC[..., None, :, None]
    out_BKNGCv = _quotient(within.view_as(past) + past)
    return out_BKNGCv.transpose(2, 3).flatten(3, 4)[:, :, :, :length], after


def _prefix_sums(added_BKNmv: Tensor, own_BKN: Tensor, before: Sums | None) -> tuple[Tensor, Tensor, Sums]:
    """The sums before each chunk [B, K, N, m, v + 1] with their levels [B, K, N], and the sums after the last chunk."""
    start_BK1 = torch.full_like(own_BKN[..., :1], LOWEST) if before is None else before.level.unsqueeze(-1)
    level_BKM = torch.cat([start_BK1, own_BKN], dim=-1).cummax(-1).values  # before each chunk, and after the last
    share_BKMN = (own_BKN.unsqueeze(-2) - level_BKM.unsqueeze(-1)).exp().tril(-1)
    added_BKNx = added_BKNmv.flatten(3)
    # Two products: the backward pass of one that is cut in two would fill and copy all of it again.
    past_BKNx, last_BK1x = share_BKMN[:, :, :-1] @ added_BKNx, share_BKMN[:, :, -1:] @ added_BKNx
    if before is not None:
        fade_BKM1 = (start_BK1 - level_BKM).exp().unsqueeze(-1)
        before_BK1x = before.sums.flatten(2).unsqueeze(2)
        past_BKNx = past_BKNx + fade_BKM1[:, :, :-1] * before_BK1x
        last_BK1x = last_BK1x + fade_BKM1[:, :, -1:] * before_BK1x
    after = Sums(last_BK1x.squeeze(2).unflatten(2, added_BKNmv.shape[3:]), level_BKM[..., -1])
    return past_BKNx.view_as(added_BKNmv), level_BKM[..., :-1], after


def _quotient(sums: Tensor) -> Tensor:
    """Weighted values over weights; 0 where there are none."""
    total = sums[..., -1:]
    return sums[..., :-1] / total.where(total > SMALLEST, 1.0)


def dense_weights(q_BHTh: Tensor, keys: Keys, features: Features, *, causal: bool) -> Tensor:
    """The weights [B, H, T, S] that are equivalent to the sums: phi(q) phi(k)^T, each row divided by its sum."""
    num_queries, num_keys = q_BHTh.shape[2], keys.k.shape[2]
    k_BKSm, level_BKS = features.of_keys(keys)
    group = q_BHTh.shape[1] // keys.k.shape[1]
    k_BHSm, level_BHS = k_BKSm.repeat_interleave(group, dim=1), level_BKS.repeat_interleave(group, dim=1)
    level_BHTS = level_BHS.unsqueeze(2).expand(-1, -1, num_queries, -1)
    if causal:
        future = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BHTh.device).triu_(1)
        level_BHTS = level_BHTS.masked_fill(future, -math.inf)
    highest = level_BHTS.amax(-1, keepdim=True).clamp_min(LOWEST)
    shares = (features.of_queries(q_BHTh) @ k_BHSm.transpose(-1, -2)) * (level_BHTS - highest).exp()
    total = shares.sum(-1, keepdim=True)
    return shares / total.where(total > SMALLEST, 1.0)


class PerformerState:
    """Sums over the keys so far, [B, K, m, v + 1]: the same size after ten tokens and after ten thousand."""

    def __init__(self) -> None:
        self.sums: Sums | None = None
        self.length = 0

    def select_rows(self, index: Tensor, *, capacity: int | None = None, spares: Spares | None = None) -> None:
        """Row i becomes what row index[i] was; the capacity is ignored."""
        if self.sums is not None:
            self.sums = Sums(*(tensor.index_select(0, index) for tensor in self.sums))

    def truncate(self, length: int) -> None:
        """To 0 or to the current length. ValueError in between: keys cannot be subtracted from sums."""
        if length == 0:
            self.sums, self.length = None, 0
        elif length != self.length:
            raise ValueError(f"performer attention keeps sums of {self.length} positions, not of the first {length}")


class PerformerAttention(Mechanism):
    """Linear attention with the features of a table [m, h] that all heads of the layer share."""

    one_document: ClassVar[bool] = True
    traces_lengths: ClassVar[bool] = False
    random_buffers: ClassVar[tuple[str, ...]] = ("directions",)
    takes_position_scores: ClassVar[bool] = False
    drops_weights: ClassVar[bool] = False
    weights_meaning: ClassVar[str] = "weights that the random features approximate; computed only for this view"
    directions: Tensor

    def __init__(self, options: PerformerOptions, sizes: AttentionSizes) -> None:
        super().__init__(options, sizes)
        self.kernel, self.redraw_steps = options.kernel, options.redraw_steps
        # Layers of one number in encoder and decoder draw different tables.
        self._place = (sizes.layer, int(sizes.causal))
        features = default_features(sizes.head_dim) if options.features is None else options.features
        self.register_buffer("directions", torch.empty(features, sizes.head_dim))
        self.reset_parameters(0.0)

    def reset_parameters(self, std: float) -> None:
        """Draw the first table. It follows from torch's seed without moving its stream; `std` is not used."""
        self._draw(torch.initial_seed())

    def begin_step(self, step: TrainingStep) -> None:
        """Redraw the table every `redraw_steps` steps: the same one on every process, and after a resume."""
        if self.redraw_steps and step.number > 1 and (step.number - 1) % self.redraw_steps == 0:
            self._draw(step.seed)

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        if not self.directions.is_meta:
            self.directions.copy_(draw_directions(*self.directions.shape, seed=mixed_seed(seed, *self._place)))

    def flops(self, queries: float, keys: float, *, training: bool = False) -> float:
        """Features, sums over keys and reading them, with the triangles of causal chunks; segments of one example."""
        (features, head_dim), heads, kv_heads = self.directions.shape, self.sizes.num_heads, self.sizes.num_kv_heads
        columns, total = self.sizes.value_dim + 1, 0.0
        sides = ((queries, heads),) if self.sizes.causal else ((keys, kv_heads), (queries, heads))
        for length, rows in sides:
            for segment, again in _segments(round(length), rows * features):
                positions = segment.stop - segment.start
                fixed, products = features * head_dim * rows * positions, features * columns * rows * positions
                if self.sizes.causal:
                    size = min(CHUNK, positions)
                    chunks = -(-positions // size)
                    padded = chunks * size
                    fixed = features * (head_dim * (kv_heads * positions + heads * padded))
                    fixed += features * columns * kv_heads * chunks * (chunks + 1)
                    products = padded * (features * columns * (kv_heads + heads) + size * heads * (features + columns))
                # The table of directions and the shares of chunks have no gradient.
                total += fixed * (2 + again) + products * (3 + again) if training else fixed + products
        return 2.0 * total

    def new_state(
        self, *, batch_size: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> LayerState:
        return PerformerState()

    def state_bytes(self, dtype: torch.dtype) -> StateBytes:
        """Sums [m, v + 1] and a level for each key head, never narrower than fp32."""
        numbers = self.sizes.num_kv_heads * (self.directions.shape[0] * (self.sizes.value_dim + 1) + 1)
        return StateBytes(0, numbers * max(torch.float32.itemsize, dtype.itemsize))

    def forward(self, inputs: AttentionInputs) -> Weighted:
        """See `Mechanism`. The weights come from the features; ValueError if earlier keys are in the sums only."""
        q_BHTh, k_BKSh, v_BKSv, context = inputs[:4]
        state = inputs.state
        if context.document_ids is not None:
            raise ValueError("document_ids: performer attention cannot keep documents of one row apart")
        assert state is None or isinstance(state, PerformerState), "performer attention takes its own state"
        wide = torch.float64 if q_BHTh.dtype == torch.float64 else torch.float32
        # Of all slots in the state, the last ones are new.
        mask = None if context.key_mask is None else context.key_mask[:, -k_BKSh.shape[2] :].bool()
        keys = Keys(k_BKSh.to(wide), v_BKSv.to(wide), mask)
        features = Features(self.directions.to(wide) * self.scale**0.5, self.scale, self.kernel)
        q = q_BHTh.to(wide)
        before = None if state is None else state.sums
        if inputs.need_weights and before is not None:
            raise ValueError("performer attention keeps sums, not keys: no weights after the first cached step")
        out_BHTv, sums = linear_attention(q, keys, features, causal=context.causal, before=before)
        if state is not None:
            state.sums, state.length = sums, state.length + k_BKSh.shape[2]
        if not inputs.need_weights or inputs.taps is None:
            return out_BHTv.to(q_BHTh.dtype), None
        weights = dense_weights(q, keys, features, causal=context.causal).float()
        weights = inputs.taps.replaced("weights", weights)
        return mix_values(inputs, weights) if inputs.replaces_weights else out_BHTv.to(q_BHTh.dtype), weights


@dataclass(frozen=True)
class PerformerOptions(ProjectionOptions):
    """Options of FAVOR+ attention (Performer, arXiv 2009.14794)."""

    mechanism: ClassVar[type[Mechanism]] = PerformerAttention

    kind: Literal["performer"] = "performer"
    features: int | None = None  # random features per head; null: head_dim ln head_dim
    kernel: Kernel = "softmax"  # relu: features max(0, W x') + 0.001, no approximation of softmax
    redraw_steps: int = 1000  # training steps between new draws of the features; 0: never

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(features=self.features)
        require(self.redraw_steps >= 0, f"redraw_steps must be at least 0, found {self.redraw_steps}")

    def saved_values(self, *, queries: int, keys: int, values: int, itemsize: int, max_seq_len: int) -> float:
        """Numbers for fp32 copies of Q, K and V, which a narrower dtype needs."""
        fp32_bytes = torch.float32.itemsize
        return (queries + keys + values) * fp32_bytes / itemsize if itemsize < fp32_bytes else 0.0
