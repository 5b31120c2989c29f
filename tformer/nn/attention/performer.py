"""Performer (FAVOR+, arXiv 2009.14794): softmax attention by positive random features, linear in the length.

    out_t = phi(q_t) . (sum_j phi(k_j) v_j^T) / (phi(q_t) . sum_j phi(k_j)),  phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(m)

with x' = sqrt(scale) x, so that the mean over W is exp(q . k scale): softmax's kernel (`performer_features`). The sums
run over all keys, or over those up to the query (`performer_sums`), and are all that decoding has to remember. Features
and sums are fp32 (fp64 for fp64).

The table W is not learned. It is saved with the weights, and drawn anew every `redraw_steps` training steps, from a
generator of its own: no other draw of the training moves, and evaluation uses the table as it stands.

Queries see keys through m numbers only, never one by one: there are no scores for a position kind to bias and no
weights to drop, and documents that share a row cannot be kept apart.

Shape legend: B batch, T queries, S keys, H query heads, K kv heads, h head_dim, v value_dim, m features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tformer.nn.attention.mechanism import AttentionSizes, Call, Mechanism, ProjectionOptions
from tformer.nn.attention.performer_features import Kernel, default_features, draw_directions, mixed_seed
from tformer.nn.attention.performer_sums import Features, Keys, Sums, dense_weights, linear_attention
from tformer.nn.layer_cache import LayerState, Spares
from tformer.nn.options import require, require_positive
from tformer.nn.step import Step

TABLE = "directions"
"""The name of the table among a mechanism's buffers: it has no mean, so averages of checkpoints take the last one's."""

USUAL_HEAD_DIM = 64  # of what `features: null` is said to cost where the size of the heads is not known


@dataclass(frozen=True)
class PerformerOptions(ProjectionOptions):
    """Options of FAVOR+ attention."""

    kind: Literal["performer"] = "performer"
    features: int | None = None  # random features per head; null: head_dim ln head_dim
    kernel: Kernel = "softmax"  # relu: features max(0, W x') + 0.001, no approximation of softmax
    redraw_steps: int = 1000  # training steps between new draws of the features; 0: never

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(features=self.features)
        require(self.redraw_steps >= 0, f"redraw_steps must be at least 0, found {self.redraw_steps}")

    def keys_per_query(self, length: float) -> float:
        """2 m: W x of query and key (2 m h each), adding a key to the sums and reading them (2 m v each)."""
        return 2.0 * (default_features(USUAL_HEAD_DIM) if self.features is None else self.features)


class PerformerState:
    """Sums over the keys so far, [B, K, m, v + 1]: the same size after ten tokens and after ten thousand."""

    def __init__(self) -> None:
        self.sums: Sums | None = None
        self.length = 0

    def select_rows(self, index: Tensor, *, capacity: int | None = None, spares: Spares | None = None) -> None:
        """Row i becomes what row index[i] was; capacity means nothing here."""
        if self.sums is not None:
            self.sums = Sums(*(tensor.index_select(0, index) for tensor in self.sums))

    def truncate(self, length: int) -> None:
        """To nothing, or to what is there. ValueError between: sums cannot forget."""
        if length == 0:
            self.sums, self.length = None, 0
        elif length != self.length:
            raise ValueError(f"performer attention remembers sums of {self.length} positions, not the first {length}")


class PerformerAttention(Mechanism):
    """Linear attention with the features of a table [m, h] that all heads of the layer share."""

    takes_position_scores: ClassVar[bool] = False
    drops_weights: ClassVar[bool] = False
    directions: Tensor

    def __init__(self, options: PerformerOptions, sizes: AttentionSizes) -> None:
        super().__init__()
        self.kernel, self.redraw_steps = options.kernel, options.redraw_steps
        # Layers of one number in encoder and decoder draw different tables.
        self._place = (sizes.layer, int(sizes.causal))
        features = default_features(sizes.head_dim) if options.features is None else options.features
        self.register_buffer(TABLE, torch.empty(features, sizes.head_dim))
        self.reset_parameters(0.0)

    def reset_parameters(self, std: float) -> None:
        """Draw the first table. It follows from torch's seed without moving its stream; `std` is not used."""
        self._draw(torch.initial_seed())

    def begin_step(self, step: Step) -> None:
        """Draw the table anew when its time has come: the same one on every process, and after a resume."""
        if self.redraw_steps and step.number > 1 and (step.number - 1) % self.redraw_steps == 0:
            self._draw(step.seed)

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        if not self.directions.is_meta:
            self.directions.copy_(draw_directions(*self.directions.shape, seed=mixed_seed(seed, *self._place)))

    def new_state(
        self, sizes: AttentionSizes, *, batch_size: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> LayerState:
        return PerformerState()

    def forward(self, q_BHTh: Tensor, k_BKSh: Tensor, v_BKSv: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        """See `Mechanism`. The weights are those that the features stand for; ValueError where their keys are gone."""
        reach, state = call.reach, call.state
        if reach.document_ids is not None:
            raise ValueError("document_ids: performer attention cannot keep documents of one row apart")
        assert state is None or isinstance(state, PerformerState), "performer attention takes its own state"
        wide = torch.float64 if q_BHTh.dtype == torch.float64 else torch.float32
        # Of all slots remembered, the last ones are new.
        mask = None if reach.key_mask is None else reach.key_mask[:, -k_BKSh.shape[2] :].bool()
        keys = Keys(k_BKSh.to(wide), v_BKSv.to(wide), mask)
        features = Features(self.directions.to(wide) * call.scale**0.5, call.scale, self.kernel)
        q = q_BHTh.to(wide)
        before = None if state is None else state.sums
        if call.need_weights and before is not None:
            raise ValueError("performer attention keeps sums, not keys: no weights after the first cached step")
        out_BHTv, sums = linear_attention(q, keys, features, causal=reach.causal, before=before)
        if state is not None:
            state.sums, state.length = sums, state.length + k_BKSh.shape[2]
        weights = dense_weights(q, keys, features, causal=reach.causal).float() if call.need_weights else None
        return out_BHTv.to(q_BHTh.dtype), weights
