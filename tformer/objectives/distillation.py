"""Knowledge distillation: a student learns from labels and from its teacher's predictions on the same batch.

    loss = alpha * hard + (1 - alpha) * T² * KL(teacher_T || student_T) + hidden * L_hidden + attention * L_attention

hard is the loss of the inner objective; soft targets are Hinton et al.'s (arXiv 1503.02531), p_T = softmax(z / T).
Each objective defines its own soft loss: for a yes-or-no decision (multi-label) it is the KL of the two outcomes, for a
score (student - teacher)² in place of T² KL.

    L_hidden      mean over layers, positions and d of (h_student - h_teacher)²                    (arXiv 1909.10351)
    L_attention   mean over layers, heads and queries of KL(a_teacher || a_student) over the keys  (arXiv 2002.10957)

Student layer i = 1 ... M is compared with teacher layer ceil(i N / M) of N: evenly spaced, last with last. Hidden
states are a layer's output, attention weights those before dropout; padding is not counted.

Every part is a separate term, so accumulation and several processes stay exact. The teacher reads the student's own
batch, with the same tokens masked, after the student has drawn its dropout, and draws nothing itself.

Shapes: B samples, T positions, D d_model, H heads, S keys, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.nn.heads import CachedOutput, ModelOutput
from tformer.objectives.base import LossResult, Objective, Term

DISTILLATION = "distillation"
"""The term of the soft targets; for a second objective of the same model with that objective's term in front."""

HIDDEN, ATTENTION = "hidden", "attention"
MIN_ATTENTION = 1e-9  # smaller attention weights are clamped, for their logarithm


class LayerPair(NamedTuple):
    """Names of a student's tap and of the compared teacher's tap."""

    student: str
    teacher: str

    @property
    def in_decoder(self) -> bool:
        return self.student.startswith("decoder.")


def teacher_layer(layer: int, *, student_layers: int, teacher_layers: int) -> int:
    """The teacher's layer for a student's, both counted from 0: i -> ceil(i N / M) counted from 1."""
    return -(-(layer + 1) * teacher_layers // student_layers) - 1


class Distillation(Objective):
    """The objective that trains a student: `inner` and a teacher. Validation uses `inner` alone.

    Args:
        inner: forms the hard terms from a forward pass that it can share; its members have soft losses.
        teacher: the forward pass of the model to learn from, in evaluation mode; its parameters need no gradients.
        order_L: place of each of the student's labels among the teacher's; None: the same places.
        temperature, alpha: see above.
        hidden, attention: weights of these terms; 0: not formed.
        hidden_pairs, attention_pairs: the layers that are compared.
        image_positions: positions of one image, patches and class token; None for text.
    """

    def __init__(
        self,
        inner: Objective,
        teacher: Callable[..., ModelOutput],
        *,
        order_L: Tensor | None = None,
        temperature: float,
        alpha: float,
        hidden: float = 0.0,
        attention: float = 0.0,
        hidden_pairs: Sequence[LayerPair] = (),
        attention_pairs: Sequence[LayerPair] = (),
        image_positions: int | None = None,
    ) -> None:
        self.inner, self.teacher, self.order_L = inner, teacher, order_L
        self.temperature, self.alpha = temperature, alpha
        first, *others = inner.members
        self.compared = {DISTILLATION: first, **{f"{other.head.kind}_{DISTILLATION}": other for other in others}}
        self.layers = {
            name: (weight, tuple(pairs), compare)
            for name, weight, pairs, compare in (
                (HIDDEN, hidden, hidden_pairs, hidden_loss),
                (ATTENTION, attention, attention_pairs, attention_loss),
            )
            if weight
        }
        pairs = [pair for _, pairs, _ in self.layers.values() for pair in pairs]
        self.taps = frozenset(pair.student for pair in pairs)
        self.teacher_taps = frozenset(pair.teacher for pair in pairs)
        self.image_positions = image_positions

    @property
    def heads(self) -> tuple[str, ...]:
        return self.inner.heads

    @property
    def collates_at_random(self) -> bool:
        return self.inner.collates_at_random

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """The inner objective's batch."""
        return self.inner.collate(samples, rng=rng, training=training)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """The inner objective's counts, which soft targets share; layers count positions times layers."""
        counts = self.inner.label_count(batch)
        counts |= {name: counts[objective.head.kind] for name, objective in self.compared.items()}
        return counts | {name: int(count) for name, count in self._layer_counts(batch).items()}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """The inner terms times alpha, soft targets times 1 - alpha, and terms of layers. Metrics: the inner ones."""
        inputs = batch.model_inputs()
        output = CachedOutput(**vars(model(**inputs, taps=self.taps)))
        with torch.no_grad():
            taught = self.teacher(**inputs, taps=self.teacher_taps)
        hard = self.inner.terms(output, batch)
        counts = self._layer_counts(batch)
        terms = {name: Term(term.sum, term.count, self.alpha * term.weight) for name, term in hard.terms.items()}
        for name, objective in self.compared.items():
            value = objective.soft_loss(output, taught, batch, temperature=self.temperature, order_L=self.order_L)
            term = hard.terms[objective.head.kind]
            terms[name] = Term(value, term.count, (1 - self.alpha) * term.weight)
        for name, (weight, pairs, compare_layer) in self.layers.items():
            values = [
                compare_layer(output.taps[pair.student], taught.taps[pair.teacher], self._mask(batch, pair))
                for pair in pairs
            ]
            terms[name] = Term(torch.stack(values).sum(), counts[name], weight)
        return LossResult(terms=terms, metrics=hard.metrics)

    def _layer_counts(self, batch: Batch) -> dict[str, Tensor | int]:
        """Real positions times layers, for each term of layers."""
        return {
            name: sum(self._positions(batch, pair) for pair in pairs) for name, (_, pairs, _) in self.layers.items()
        }

    def _positions(self, batch: Batch, pair: LayerPair) -> Tensor | int:
        """Real positions of the side that a pair of layers belongs to."""
        mask = self._mask(batch, pair)
        if mask is not None:
            return mask.sum()
        if batch.pixel_values is not None:
            assert self.image_positions is not None
            return len(batch.pixel_values) * self.image_positions
        ids = batch.input_ids if batch.decoder_input_ids is None or not pair.in_decoder else batch.decoder_input_ids
        assert ids is not None
        return ids.numel()

    def _mask(self, batch: Batch, pair: LayerPair) -> Tensor | None:
        beside_encoder = batch.decoder_input_ids is not None and pair.in_decoder
        return batch.decoder_attention_mask if beside_encoder else batch.attention_mask


def hidden_loss(student_BTD: Tensor, teacher_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Sum over real positions of the mean over D of (student - teacher)²."""
    distance_BT = (student_BTD.float() - teacher_BTD.float()).square().mean(-1)
    return (distance_BT if mask_BT is None else distance_BT.where(mask_BT.bool(), 0.0)).sum()


def attention_loss(student_BHTS: Tensor, teacher_BHTS: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Sum over real queries of the mean over heads of KL(teacher || student) over the keys."""
    ours, theirs = student_BHTS.float().clamp(min=MIN_ATTENTION), teacher_BHTS.float()
    logs = theirs.clamp(min=MIN_ATTENTION).log() - ours.log()
    divergence_BT = (theirs * logs).sum(-1).mean(1)
    return (divergence_BT if mask_BT is None else divergence_BT.where(mask_BT.bool(), 0.0)).sum()
