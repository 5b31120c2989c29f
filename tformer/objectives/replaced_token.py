"""Replaced-token detection: a small generator fills in masked tokens, the model detects which tokens were replaced.

ELECTRA (arXiv 2003.10555, section 2): with m the masked positions of x,

    x_masked  = x with [MASK] at m
    x_corrupt = x with a token at each of m drawn from p_G( . | x_masked)
    loss      = generator_weight * mean over m of -log p_G(x_t | x_masked)
              + weight * mean over all t of BCE(D(x_corrupt, t), [x_corrupt_t != x_t])

A token that the generator predicted correctly counts as original. No gradient flows through the draw: generator and
discriminator are trained together and share their embeddings (`nn/init.py`, tie_embeddings).

Shapes: B samples, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.nn.classification_heads import ReplacedTokenHeadOptions
from tformer.nn.heads import MaskedLmHeadOptions
from tformer.nn.losses import IGNORED_LABEL
from tformer.nn.options import require, require_positive
from tformer.objectives.base import LossResult, Metric, Objective, ObjectiveContext, Term
from tformer.objectives.masked_lm import UNUSED_BY_ENCODERS, MaskedLm, MaskedLmOptions

MASKED_LM = MaskedLmHeadOptions.kind
"""The generator's head."""

GENERATOR = "generator"
"""The name of the generator's loss term."""


class ReplacedToken(Objective):
    """The objective; the model is the discriminator, `context.generator` the generator.

    The draws come from torch's global generator: equal seeds give equal replacements.
    """

    data = "masked_text"
    head = ReplacedTokenHeadOptions()
    parts = ("encoder",)
    without = ("decoder",)
    metrics = ("loss", "accuracy")
    shown_metrics: ClassVar[Mapping[str, str]] = {
        "replaced_accuracy": "of the replaced tokens {:.4f}",
        "generator_accuracy": "generator {:.4f}",
    }
    special_tokens = ("mask",)
    needs_generator = True
    predicts = (
        "the original of every masked token, for the generator; the model reads the generator's choices in their place "
        "and tells for every token whether it was replaced"
    )
    unused_keys = UNUSED_BY_ENCODERS

    def __init__(self, options: ReplacedTokenOptions, context: ObjectiveContext) -> None:
        self.options, self.generator = options, context.generator
        masking = MaskedLmOptions(mask_share=options.mask_share, mask_token_share=1.0, random_share=0.0)
        self.masked_lm = MaskedLm(masking, context)

    @property
    def heads(self) -> tuple[str, ...]:
        """The model's and the generator's."""
        return (self.head.kind, MASKED_LM)

    @staticmethod
    def predicted_share(head: str, options: ReplacedTokenOptions) -> float:
        """The share of tokens that are masked, for the generator's head; the detection judges all tokens."""
        return options.mask_share if head == MASKED_LM else 1.0

    def collate(
        self, samples: Sequence[Example | np.ndarray] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """The generator's batch: masked ids, and the originals of the masked ones as labels."""
        return self.masked_lm.collate(samples, rng=rng, training=training)

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{"replaced_token": real tokens, "generator": masked tokens} of this host batch."""
        return {self.head.kind: batch.num_tokens, GENERATOR: self.masked_lm.label_count(batch)[MASKED_LM]}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """Two terms, in nats. Metrics: accuracy of the detection and generator_accuracy of the masked LM.

        replaced_accuracy is that of the replaced tokens alone, since most are original.
        """
        assert self.generator is not None and batch.input_ids is not None and batch.labels is not None
        inputs = batch.model_inputs()
        masked_BT = batch.labels != IGNORED_LABEL
        generated = self.generator(**inputs)
        loss_sum, _, count, correct = generated.loss_terms(MASKED_LM, batch.labels, num_labels=batch.num_labels)
        with torch.no_grad():
            chunks = generated.logit_chunks(MASKED_LM, masked_BT, count=batch.num_labels)
            drawn = torch.cat(self._draw(chunks, batch))
        corrupted_BT = batch.input_ids.masked_scatter(masked_BT, drawn)
        replaced_BT = masked_BT & (corrupted_BT != batch.labels)
        output = model(**{**inputs, "input_ids": corrupted_BT})
        detection = detection_terms(output.head(self.head.kind), replaced_BT, batch.attention_mask)
        return LossResult(
            terms={
                self.head.kind: Term(detection.nll, detection.count, self.options.weight),
                GENERATOR: Term(loss_sum, count, self.options.generator_weight),
            },
            metrics={
                "accuracy": Metric(detection.correct, detection.count),
                "replaced_accuracy": Metric(detection.found, replaced_BT.sum()),
                f"{GENERATOR}_accuracy": Metric(correct, count),
            },
        )

    def _draw(self, chunks: Iterator[Tensor], batch: Batch) -> list[Tensor]:
        """The generator's choices for each chunk of logits."""
        if batch.share is None:
            return [draw_tokens(logits_NV) for logits_NV in chunks]
        assert self.shared is not None and batch.labels is not None
        uniform_N1 = self.shared.of_rows(1, batch.labels.device, batch.share.labels_per_row)
        found, start = [], 0
        for logits_NV in chunks:
            found.append(draw_tokens(logits_NV, uniform_N1[start : start + len(logits_NV)]))
            start += len(logits_NV)
        return found


@dataclass(frozen=True)
class ReplacedTokenOptions:
    """Replaced-token detection (ELECTRA, arXiv 2003.10555): loss = generator's masked LM + weight * detection."""

    kind: Literal["replaced_token"] = "replaced_token"
    mask_share: float = 0.15  # share of the tokens that the generator replaces
    weight: float = 50.0  # factor of the loss of detection
    generator_weight: float = 1.0  # factor of the generator's loss
    objective: ClassVar[type[Objective]] = ReplacedToken

    def __post_init__(self) -> None:
        require(0 < self.mask_share < 1, f"mask_share must lie between 0 and 1, found {self.mask_share}")
        require_positive(weight=self.weight, generator_weight=self.generator_weight)


@dataclass(frozen=True)
class Detection:
    """Sums of the detection over all tokens but padding: `nll` with gradient; `found`: replaced ones detected."""

    nll: Tensor
    correct: Tensor
    count: Tensor
    found: Tensor


def detection_terms(logits_BT: Tensor, replaced_BT: Tensor, mask_BT: Tensor | None) -> Detection:
    """The sums of the detection; mask: False for padding, None: there is none."""
    real_BT = torch.ones_like(replaced_BT) if mask_BT is None else mask_BT.bool()
    nll_BT = F.binary_cross_entropy_with_logits(logits_BT, replaced_BT.to(logits_BT.dtype), reduction="none")
    right_BT = (logits_BT > 0) == replaced_BT
    return Detection(
        nll_BT.where(real_BT, 0.0).sum(),
        (right_BT & real_BT).sum(),
        real_BT.sum(),
        (right_BT & replaced_BT & real_BT).sum(),
    )


def draw_tokens(logits_NV: Tensor, uniform_N1: Tensor | None = None) -> Tensor:
    """One token [N] per row from softmax(logits): the first where the cumulative sum exceeds a draw from U(0, 1).

    uniform_N1: the draws; None: from torch's global generator.

    One random number per row instead of one per logit: an eighth of the time of `torch.multinomial` on a CPU.
    """
    sums_NV = (logits_NV - logits_NV.amax(dim=-1, keepdim=True)).exp_().cumsum_(dim=-1)
    if uniform_N1 is None:
        uniform_N1 = torch.rand(len(sums_NV), 1, device=sums_NV.device)
    threshold_N1 = uniform_N1 * sums_NV[:, -1:]
    tokens_N1 = torch.searchsorted(sums_NV, threshold_N1, right=True)
    return tokens_N1.squeeze(1).clamp_(max=logits_NV.shape[-1] - 1)
