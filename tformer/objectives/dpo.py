"""Direct preference optimization (arXiv 2305.18290): the chosen answer to a prompt becomes likelier than the rejected.

    h = log p(y_w | x) / p0(y_w | x) - log p(y_l | x) / p0(y_l | x)        w: chosen, l: rejected, p0: the reference
    sigmoid     loss = - (1 - eps) log sigma(beta h) - eps log sigma(- beta h)      equation 7; eps: label smoothing
    hinge       loss = max(0, 1 - beta h)                                           SLiC (2305.10425)
    ipo         loss = (h' - 1 / (2 beta))^2, with h' of log-probabilities per token of an answer (2310.12036)

The reference is the frozen base of the trained adapters: the same model, for a moment without them. The reward of an
answer is beta log p / p0, the margin that of the chosen answer less that of the rejected one. All is computed without
dropout, whose noise would be larger than the differences.

Shapes: B pairs; a batch has 2B rows, the chosen answers before the rejected ones, each after its prompt; T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import SECOND, Example
from tformer.nn.heads import LmHeadOptions
from tformer.nn.lora import without_adapters
from tformer.nn.losses import IGNORED_LABEL
from tformer.nn.options import require, require_positive
from tformer.objectives.base import CheckedOptions, LossResult, Metric, Objective, Term
from tformer.objectives.chat import InstructionTuning, answer_labels
from tformer.objectives.collate import pad_shifted


class Dpo(Objective):
    """The objective; a sample holds two sequences, and its label is the marks of their ids.

    Attributes:
        base: the reference, where the model itself has no adapters; set by an evaluation.
    """

    data = "preferences"
    head = LmHeadOptions()
    parts = ("decoder",)
    without = ("encoder",)
    metrics = ("loss", "accuracy", "margin")
    shown_metrics: ClassVar = {"margin": "margin {:.4f}"}
    predicts = "which of two answers is the better one, by their probabilities"
    compares_base = True
    unused_keys = (*InstructionTuning.unused_keys, "data.packing", "data.format")
    base: Any = None

    @property
    def collates_at_random(self) -> bool:
        return False  # random padding changes no loss

    def originals(self, sample: Any) -> dict[str, np.ndarray]:
        chosen, rejected = _sides([sample])
        return {"chosen": chosen.ids, "rejected": rejected.ids}

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """One batch [2B, T] with labels on answers."""
        sides = _sides(samples)
        return pad_shifted(sides, list(map(answer_labels, sides)), self.context, rng=rng)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{term: pairs of this host batch}."""
        assert batch.labels is not None
        return {self.head.kind: len(batch.labels) // 2}

    def loss(self, model: Any, batch: Batch) -> LossResult:
        """One term; the means of rewards, margin and accuracy. The model stays in evaluation mode."""
        assert batch.labels is not None
        model.eval()
        with torch.no_grad(), without_adapters(model):
            reference_2B = self.log_probabilities(self.base or model, batch)
        ratios_2B = self.log_probabilities(model, batch) - reference_2B
        tokens_2B = (batch.labels != IGNORED_LABEL).sum(dim=1)
        losses_B = preference_loss(ratios_2B, tokens_2B, self.options)
        chosen_B, rejected_B = (self.options.beta * ratios_2B.detach()).chunk(2)
        means = {"accuracy": (chosen_B > rejected_B).to(chosen_B.dtype), "margin": chosen_B - rejected_B}
        means |= {"chosen_reward": chosen_B, "rejected_reward": rejected_B}
        metrics = {name: Metric(value.sum(), len(losses_B), is_logged=True) for name, value in means.items()}
        return LossResult({self.head.kind: Term(losses_B.sum(), len(losses_B), self.options.weight)}, metrics)

    def log_probabilities(self, model: Any, batch: Batch) -> Tensor:
        """[2B]: of each answer, the sum over its tokens; one row at a time, whose logits alone exist."""
        assert batch.labels is not None
        output = model(**batch.model_inputs())
        rows = (replace(output, hidden=hidden_TD[None]) for hidden_TD in output.hidden)
        losses = [row.loss_terms(self.head.kind, labels).loss for row, labels in zip(rows, batch.labels, strict=True)]
        return -torch.stack(losses)


def _sides(samples: Sequence[Any] | np.ndarray) -> list[Example]:
    """The prompts with chosen answers, then those with rejected ones."""
    found = []
    for side in (0, SECOND):
        for sample in samples:
            own = np.asarray(sample.label) & SECOND == side
            found.append(Example(sample.ids[own], label=sample.label[own]))
    return found


def preference_loss(ratios_2B: Tensor, tokens_2B: Tensor, options: DpoOptions) -> Tensor:
    """[B]: the loss of pairs from log p / p0 of their answers, chosen before rejected, and the answers' tokens."""
    if options.loss == "ipo":
        ratios_2B = ratios_2B / tokens_2B
    chosen_B, rejected_B = ratios_2B.chunk(2)
    h_B, beta, smoothing = chosen_B - rejected_B, options.beta, options.label_smoothing
    if options.loss == "ipo":
        return (h_B - 1 / (2 * beta)).square()
    if options.loss == "hinge":
        return (1 - beta * h_B).relu()
    return -(1 - smoothing) * F.logsigmoid(beta * h_B) - smoothing * F.logsigmoid(-beta * h_B)


@dataclass(frozen=True)
class DpoOptions(CheckedOptions):
    """The chosen one of two answers becomes likelier, compared with the frozen base of adapters."""

    kind: Literal["dpo"] = "dpo"
    beta: float = 0.1  # of the rewards: the larger, the nearer the model stays to its base
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"  # DPO's own, SLiC's (2305.10425) or IPO's (2310.12036)
    label_smoothing: float = 0.0  # sigmoid: the share of pairs whose answers may be interchanged
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = Dpo

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(beta=self.beta)
        smoothed = self.label_smoothing and self.loss != "sigmoid"
        require(not smoothed, f"label_smoothing: found {self.label_smoothing:g}, expected 0 with the loss {self.loss}")
