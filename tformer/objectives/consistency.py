"""Consistency of two passes over the same batch: R-Drop (arXiv 2106.14448) and SimCut (arXiv 2206.02368).

    r_drop    loss = ½ (CE(p) + CE(q)) + alpha ½ (KL(p || q) + KL(q || p)),   p, q: two draws of dropout
    simcut    loss = CE(p) + alpha KL(p || q)

Token cut-off (arXiv 2009.13818): q reads a vector of zeros for each token with probability `cut`, which is 0 for R-Drop
unless it is set.

CE is the loss of the inner objective; p and q are its predictions, and gradients flow through both. R-Drop's paper adds
both CE where this takes their mean, so the alpha of its equation is twice this one. The divergence is a mean over the
predictions: tokens, examples or decisions. Of scores it is (p - q)², as in R-Drop's STS-B. Tokens are cut off in the
source and in the decoder's input.

Both passes are computed as one forward pass over a batch that has every row twice, at the cost of two. Each copy has
its own dropout; LayerDrop skips the same layers for both. Validation uses the inner objective alone.

Shapes: B samples, T tokens; 2B rows: both copies of the first sample, then of the second, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.nn.heads import CachedOutput, Output
from tformer.nn.options import require, require_positive
from tformer.objectives.base import ComparingObjective, LossResult, Objective, Term

CONSISTENCY = "consistency"
"""The term of the divergence; for a second objective of the same model with that objective's term in front."""

EMBEDDING_MASKS = {"input_ids": "embedding_mask", "decoder_input_ids": "decoder_embedding_mask"}
"""The input of the model that cuts off tokens of each input of ids."""


class Consistency(ComparingObjective):
    """Base class of the kinds: the objective of a training with two passes.

    Attributes:
        weights: of KL(p || q) and KL(q || p).
        learns_both: whether the second pass has a cross-entropy.
    """

    copies = 2
    weights: ClassVar[tuple[float, float]]
    learns_both: ClassVar[bool]

    def __init__(self, inner: Objective, options: Any) -> None:
        super().__init__(inner, CONSISTENCY)
        self.options = options

    @property
    def collates_at_random(self) -> bool:
        return self.options.cut > 0 or super().collates_at_random

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """The inner objective's batch with the tokens that the second pass sees; `rng` draws them, in training only."""
        batch = super().collate(samples, rng=rng, training=training)
        if not training or not self.options.cut:
            return batch
        masks: dict[str, Any] = {}
        for name, mask in EMBEDDING_MASKS.items():
            ids = getattr(batch, name)
            if ids is not None:
                masks[mask] = torch.from_numpy(rng.random(tuple(ids.shape)) >= self.options.cut)
        return replace(batch, **masks)

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """The inner terms and one divergence for each inner objective. Metrics: the inner's, of the first pass."""
        doubled = {name: tensor.repeat_interleave(2, dim=0) for name, tensor in batch.model_inputs().items()}
        for name in EMBEDDING_MASKS.values():
            if name in doubled:
                doubled[name][0::2] = True  # the first pass sees all tokens
        output = model(**doubled)
        first, second = (_every_second(output, start) for start in range(2))
        learned = self.inner.terms(first, batch)
        terms = dict(learned.terms)
        if self.learns_both:
            again = self.inner.terms(second, batch)
            terms = {name: replace(term, sum=(term.sum + again.terms[name].sum) / 2) for name, term in terms.items()}
        for name, objective in self.compared.items():
            term = terms[objective.head.kind]
            divergence = objective.consistency_loss(first, second, batch, self.weights)
            terms[name] = Term(divergence, term.count, self.options.alpha * term.weight)
        return LossResult(terms=terms, metrics=learned.metrics)


class RDrop(Consistency):
    """Two draws of dropout, both learned from the labels."""

    weights = (0.5, 0.5)
    learns_both = True


@dataclass(frozen=True)
class RDropOptions:
    """Two draws of dropout should give the same predictions (R-Drop, arXiv 2106.14448)."""

    kind: Literal["r_drop"] = "r_drop"
    alpha: float = 1.0  # weight of the divergence; the paper's alpha (translation 5, GLUE 0.1 to 1) is twice this one
    cut: float = 0.0  # share of the tokens whose vectors are zeros in the second pass (token cut-off, arXiv 2009.13818)
    objective: ClassVar[type[Consistency]] = RDrop

    def __post_init__(self) -> None:
        require_positive(alpha=self.alpha)
        require(0 <= self.cut < 1, f"cut must be 0 or lie between 0 and 1, found {self.cut}")


class SimCut(Consistency):
    """The whole input, learned from the labels, and one in which vectors of tokens are cut off."""

    weights = (1.0, 0.0)
    learns_both = False


@dataclass(frozen=True)
class SimCutOptions:
    """An input with tokens cut off should give the predictions of the whole input (SimCut, arXiv 2206.02368)."""

    kind: Literal["simcut"] = "simcut"
    alpha: float = 3.0  # weight of the divergence
    cut: float = 0.05  # share of the tokens whose vectors are zeros in the second pass
    objective: ClassVar[type[Consistency]] = SimCut

    def __post_init__(self) -> None:
        require_positive(alpha=self.alpha)
        require(0 < self.cut < 1, f"cut must lie between 0 and 1, found {self.cut}")


ConsistencyOptions = RDropOptions | SimCutOptions


def _every_second(output: Output, start: int) -> Output:
    """The output of one copy of every row."""

    def rows(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[start::2]

    return CachedOutput(
        output.hidden[start::2],
        output.heads,
        rows(output.mask),
        encoder_hidden=rows(output.encoder_hidden),
        compiled=output.compiled,
    )
