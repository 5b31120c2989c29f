"""Similarity scores: cosines of the vectors of two texts as far apart, or in the same order, as given scores.

    cosent    loss = log(1 + sum over y_i < y_j of exp(s (cos_i - cos_j)))     the order alone (CoSENT, Su 2022)
    cosine    loss = sum_i (cos_i - (y_i - low) / (high - low))^2              low, high: `range` of the scores

Without `range`, `cosine` takes scores that lie in [-1, 1] already. (Regression as in arXiv 1908.10084, section 3.)

Shapes: B pairs, N = B second texts, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.nn.options import require
from tformer.objectives.base import Metric, Objective
from tformer.objectives.contrastive import VectorObjective, VectorOptions


class Similarity(VectorObjective):
    """Cosines that follow the scores of the pairs."""

    reads_scores = True
    metrics = ("loss", "pearson", "spearman")
    predicts = "the score of the pair, by the cosine of its vectors"

    def compare(self, a_BD: Tensor, b_ND: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        labels_B, cosines_B = batch.labels, (a_BD * b_ND).sum(dim=-1)
        assert labels_B is not None
        if self.options.loss == "cosine":
            low, high = self.options.range or (0.0, 1.0)
            return (cosines_B - (labels_B - low) / (high - low)).square().sum(), {}
        gaps_BB = self.options.scale * (cosines_B[:, None] - cosines_B)
        gaps_BB = gaps_BB.masked_fill(labels_B[:, None] >= labels_B, -torch.inf)
        all_gaps = torch.cat([gaps_BB.flatten(), gaps_BB.new_zeros(1)])  # the 1 in the logarithm
        return len(labels_B) * all_gaps.logsumexp(dim=0), {}


@dataclass(frozen=True)
class SimilarityOptions(VectorOptions):
    """Cosines of the vectors of two texts that follow given scores."""

    kind: Literal["similarity"] = "similarity"
    loss: Literal["cosent", "cosine"] = "cosent"  # the order of the scores alone, or squared differences
    range: tuple[float, float] | None = None  # lowest and highest score, for cosine; null: they are cosines
    objective: ClassVar[type[Objective]] = Similarity

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.range is not None:
            require(self.range[0] < self.range[1], f"range must be two numbers, the lower first, found {self.range}")
