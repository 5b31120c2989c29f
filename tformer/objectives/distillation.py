"""Knowledge distillation: a student learns from labels and from what its teacher makes of the same batch.

    loss = alpha * hard + (1 - alpha) * T² * KL(teacher_T || student_T) + hidden * L_hidden + attention * L_attention

hard is the loss of the objective inside; soft targets are Hinton et al.'s (arXiv 1503.02531), p_T = softmax(z / T). Of
a decision between yes and no (multi-label) the KL is that of its two outcomes; of a score the soft target is the
teacher's score itself, and (student - teacher)² takes the place of T² KL.

    L_hidden      mean over layers, positions and d of (h_student - h_teacher)²                    (arXiv 1909.10351)
    L_attention   mean over layers, heads and queries of KL(a_teacher || a_student) over the keys  (arXiv 2002.10957)

Student layer i = 1 ... M looks at teacher layer ceil(i N / M) of N: evenly spaced, last at last. Hidden states are what
a layer hands to the next, attention weights those before dropout; padding counts nowhere.

Every part is a term of its own, so accumulation and several processes stay exact. The teacher sees the very batch of
the student, damaged in the same places, after the student has drawn its dropout, and draws nothing itself.

Shapes: B samples, T positions, D d_model, H heads, S keys, L labels, N labelled positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.nn.heads import (
    MASKED,
    Output,
)
from tformer.nn.losses import IGNORED_LABEL
from tformer.nn.soft_targets import Projection, linear_divergence, soft_binary_cross_entropy, soft_cross_entropy
from tformer.objectives.base import LossResult, SharedObjective, Term

DISTILLATION = "distillation"
"""The term of the soft targets; of a second objective in the same model it is called after that one's term too."""

HIDDEN, ATTENTION = "hidden", "attention"
LEAST_WEIGHT = 1e-9  # attention weights below count as this much, for their logarithm


@dataclass(frozen=True)
class Teacher:
    """The model that is learned from.

    Attributes:
        forward: in evaluation mode; its parameters need no gradients.
        order_L: where each of the student's labels stands among the teacher's; None: in the same places.
    """

    forward: Callable[..., Output]
    order_L: Tensor | None = None


class LayerPair(NamedTuple):
    """Names of a tap of the student and of the teacher's that it is to resemble."""

    student: str
    teacher: str

    @property
    def in_decoder(self) -> bool:
        return self.student.startswith("decoder.")


@dataclass
class OnceFormed(Output):
    """An output whose heads answer once: labels and teacher judge the same predictions, under the same dropout."""

    formed: dict[str, Tensor] = field(default_factory=dict)

    def head(self, name: str) -> Tensor:
        if name not in self.formed:
            self.formed[name] = super().head(name)
        return self.formed[name]


SoftLoss = Callable[[Output, Output, Batch, str, float, Tensor | None], Tensor]
"""(student, teacher, batch, head, temperature, order of the teacher's labels) -> sum over the head's predictions."""


def vocabulary_loss(
    student: Output, teacher: Output, batch: Batch, head: str, temperature: float, order_L: Tensor | None
) -> Tensor:
    """Sum over the labelled positions of T² KL over the vocabulary."""
    assert batch.labels is not None
    counted_N = batch.labels.flatten() != IGNORED_LABEL
    # Leaving positions out means counting them, which would stall any device but a CPU; of masked ones it still pays.
    kept_N = counted_N if counted_N.device.type == "cpu" or head == MASKED else slice(None)
    sides = []
    for output in (student, teacher):
        module: Any = output.heads[head]
        features = module.features(output.hidden.flatten(0, 1)[kept_N])
        sides.append(Projection(features, module.matrix(), module.bias, module.softcap))
    return linear_divergence(sides[0], sides[1], temperature=temperature, counted_N=counted_N[kept_N])


def class_loss(
    student: Output, teacher: Output, batch: Batch, head: str, temperature: float, order_L: Tensor | None
) -> Tensor:
    """Sum over the examples of T² KL over the classes."""
    theirs_BL = _in_order(teacher.head(head), order_L)
    return soft_cross_entropy(student.head(head), theirs_BL, temperature=temperature).sum()


def decision_loss(
    student: Output, teacher: Output, batch: Batch, head: str, temperature: float, order_L: Tensor | None
) -> Tensor:
    """Sum over examples and labels of T² KL over yes and no."""
    theirs_BL = _in_order(teacher.head(head), order_L)
    return soft_binary_cross_entropy(student.head(head), theirs_BL, temperature=temperature).sum()


def score_loss(
    student: Output, teacher: Output, batch: Batch, head: str, temperature: float, order_L: Tensor | None
) -> Tensor:
    """Sum over the examples of the squared distance to the teacher's score."""
    return (student.head(head) - teacher.head(head)).square().sum()


def _in_order(scores_BL: Tensor, order_L: Tensor | None) -> Tensor:
    return scores_BL if order_L is None else scores_BL[:, order_L]


# Of each objective: the head, which is also the name of its term, and how its soft targets compare.
SOFT_LOSSES: dict[str, tuple[str, SoftLoss]] = {
    "causal_lm": ("lm", vocabulary_loss),
    "seq2seq": ("lm", vocabulary_loss),
    "span_corruption": ("lm", vocabulary_loss),
    "denoising": ("lm", vocabulary_loss),
    "masked_lm": ("masked_lm", vocabulary_loss),
    "next_sentence": ("next_sentence", class_loss),
    "classification": ("classifier", class_loss),
    "multi_label": ("classifier", decision_loss),
    "regression": ("regression", score_loss),
}


def teacher_layer(layer: int, *, student_layers: int, teacher_layers: int) -> int:
    """The teacher's layer for a student's, both counted from 0: i -> ceil(i N / M) counted from 1."""
    return -(-(layer + 1) * teacher_layers // student_layers) - 1


class Distillation:
    """The objective that trains a student: `inner` with a teacher beside it. Validation asks `inner` alone.

    Args:
        inner: forms the hard terms, of a forward pass that it can share.
        kinds: of the objectives that `inner` consists of.
        temperature, alpha: see above.
        hidden, attention: weights of these terms; 0: the states are not looked at.
        hidden_pairs, attention_pairs: which layers of whom.
        image_positions: of one image, patches and class token; None for text.
    """

    def __init__(
        self,
        inner: SharedObjective,
        teacher: Teacher,
        *,
        kinds: Sequence[str],
        temperature: float,
        alpha: float,
        hidden: float = 0.0,
        attention: float = 0.0,
        hidden_pairs: Sequence[LayerPair] = (),
        attention_pairs: Sequence[LayerPair] = (),
        image_positions: int | None = None,
    ) -> None:
        self.inner, self.teacher = inner, teacher
        self.temperature, self.alpha = temperature, alpha
        self.soft = {
            DISTILLATION if number == 0 else f"{SOFT_LOSSES[kind][0]}_{DISTILLATION}": SOFT_LOSSES[kind]
            for number, kind in enumerate(kinds)
        }
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

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """The inner objective's batch."""
        return self.inner.collate(samples, rng=rng, training=training)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """Those of the inner objective; of each soft term its hard term's; of layers, positions times layers."""
        counts = self.inner.label_count(batch)
        soft = {name: counts[term] for name, (term, _) in self.soft.items()}
        return counts | soft | {name: int(count) for name, count in self._layer_counts(batch).items()}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """The inner terms times alpha, the soft ones times 1 - alpha, and those of the layers. Metrics: the inner's."""
        inputs = batch.model_inputs()
        output = OnceFormed(**vars(model(**inputs, taps=self.taps)))
        with torch.no_grad():
            seen = self.teacher.forward(**inputs, taps=self.teacher_taps)
        hard = self.inner.terms(output, batch)
        counts = self._layer_counts(batch)
        terms = {name: Term(term.sum, term.count, self.alpha * term.weight) for name, term in hard.terms.items()}
        for name, (head, compare) in self.soft.items():
            value = compare(output, seen, batch, head, self.temperature, self.teacher.order_L)
            terms[name] = Term(value, hard.terms[head].count, (1 - self.alpha) * hard.terms[head].weight)
        for name, (weight, pairs, compare_layer) in self.layers.items():
            values = [
                compare_layer(output.taps[pair.student], seen.taps[pair.teacher], self._mask(batch, pair))
                for pair in pairs
            ]
            terms[name] = Term(torch.stack(values).sum(), counts[name], weight)
        return LossResult(terms=terms, metrics=hard.metrics)

    def _layer_counts(self, batch: Batch) -> dict[str, Tensor | int]:
        """Of each term of layers: real positions times layers."""
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
    ours, theirs = student_BHTS.float().clamp(min=LEAST_WEIGHT), teacher_BHTS.float()
    logs = theirs.clamp(min=LEAST_WEIGHT).log() - ours.log()
    divergence_BT = (theirs * logs).sum(-1).mean(1)
    return (divergence_BT if mask_BT is None else divergence_BT.where(mask_BT.bool(), 0.0)).sum()
