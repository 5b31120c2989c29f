"""In-batch negatives (InfoNCE): find the second text of each pair among all second texts of the batch.

    loss = - sum_i log( exp(s cos(a_i, b_i)) / sum_j exp(s cos(a_i, b_j)) ),   s = scale, the inverse temperature

(arXiv 1705.00652, 1807.03748; scale 20 as in Sentence-BERT, 1908.10084.) Hard negatives of any pair are further b_j.
Texts j that equal b_i, or whose partner equals a_i, are no negatives of i. The loss is no sum over parts of a batch, so
the whole batch is one micro-batch.

Gradient caching (GradCache, arXiv 2101.06983): with `chunk_size` the model reads that number of texts at a time, keeps
the vectors alone, and reads each chunk again when its gradient is there. The batch is then limited by time only.

Matryoshka sizes (arXiv 2205.13147): the loss is the mean of that of the whole vectors and of their first n numbers.

Shapes: B pairs, N second texts and negatives, R = B + N rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tformer.data.batching.batch import Batch
from tformer.nn.classification_heads import EmbeddingHeadOptions
from tformer.nn.options import require, require_positive
from tformer.objectives.base import CheckedOptions, LossResult, Metric, Objective, Term
from tformer.objectives.collate import pad_examples
from tformer.objectives.labelled import LabelledObjective


class VectorObjective(Objective):
    """Base class of objectives that compare the vectors of two texts. The model reads each text alone."""

    data = "text_pairs"
    head = EmbeddingHeadOptions()
    parts = ("encoder",)
    without = ("decoder",)
    unused_keys = (*LabelledObjective.unused_keys, "data.label_separator", "data.labels", "data.columns.group")
    compares_batch = True
    trains_bodies = True

    @property
    def collates_at_random(self) -> bool:
        return self.context.padding == "random"

    def originals(self, sample: Any) -> dict[str, np.ndarray]:
        return {"text": sample[0].ids, "text2": sample[1].ids}

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """One batch [R, T] of tuples of `Example`: all first texts, all second ones, all negatives.

        labels: the scores [B]; zeros beside negatives, so that their length is the number of pairs; else None.
        """
        sides = [sample[side] for side in (0, 1) for sample in samples]
        negatives = [text for sample in samples for text in sample[2:]]
        batch = pad_examples([*sides, *negatives], self.context, rng=rng)
        labels = [0.0 if first.label is None else first.label for first, *_ in samples]
        if samples[0][0].label is None and not negatives:
            return batch
        return replace(batch, labels=torch.tensor(np.array(labels, dtype=np.float32)))

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{term: pairs of this host batch}."""
        return {self.head.kind: _pairs(batch)}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """The mean of `compare` over the sizes of vectors."""
        inputs, size = batch.model_inputs(), self.options.chunk_size
        rows, pairs = len(inputs["input_ids"]), _pairs(batch)

        def read(start: int) -> Tensor:
            output = model(**{name: tensor[start : start + (size or rows)] for name, tensor in inputs.items()})
            found: Tensor = output.head(self.head.kind)
            return found

        if size is None or size >= rows:
            vectors_RD = read(0)
        else:
            chunks = range(0, rows, size)
            vectors_RD = torch.cat([checkpoint(read, start, use_reentrant=False) for start in chunks])
        found = []
        for width in (None, *self.options.sizes):
            unit_RD = F.normalize(vectors_RD[:, :width].float(), dim=-1)
            found.append(self.compare(unit_RD[:pairs], unit_RD[pairs:], batch))
        total = torch.stack([one for one, _ in found]).mean()
        return LossResult({self.head.kind: Term(total, pairs, self.options.weight)}, metrics=found[0][1])

    def compare(self, a_BD: Tensor, b_ND: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        """(sum of the loss over the pairs, metrics) of vectors of length 1; b: of second texts, and negatives."""
        raise NotImplementedError


def _pairs(batch: Batch) -> int:
    """B."""
    assert batch.input_ids is not None
    return len(batch.input_ids) // 2 if batch.labels is None else len(batch.labels)


class Contrastive(VectorObjective):
    """Finds the second text of each pair among all second texts of the batch and the hard negatives."""

    metrics = ("loss", "accuracy", "recall_1", "mrr", "ndcg_10")
    shown_metrics: ClassVar[Mapping[str, str]] = {"mrr": "MRR {:.4f}"}
    predicts = "which second text of the batch belongs to the first"

    def compare(self, a_BD: Tensor, b_ND: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        assert batch.input_ids is not None
        pairs, pairs_B = len(a_BD), torch.arange(len(a_BD), device=a_BD.device)
        text_R = torch.unique(batch.input_ids, dim=0, return_inverse=True)[1]
        first_B, second_N = text_R[:pairs], text_R[pairs:]
        equal_BN = second_N[:pairs, None] == second_N
        equal_BN[:, :pairs] |= first_B[:, None] == first_B
        scores_BN = (self.options.scale * a_BD @ b_ND.T).masked_fill(equal_BN.fill_diagonal_(False), -torch.inf)
        correct = (scores_BN.argmax(dim=1) == pairs_B).sum()
        return F.cross_entropy(scores_BN, pairs_B, reduction="sum"), {"accuracy": Metric(correct, pairs)}


@dataclass(frozen=True)
class VectorOptions(CheckedOptions):
    """Base class of the options of objectives on vectors. Raises ValueError for sizes and scales of 0 or less."""

    kind: str
    scale: float = 20.0  # of cosines or their differences, the inverse of the temperature
    chunk_size: int | None = None  # texts read at a time, to save memory (arXiv 2101.06983); null: all of a batch
    sizes: tuple[int, ...] = ()  # the first n numbers of a vector are trained as vectors, too (arXiv 2205.13147)
    weight: float = 1.0  # factor of this loss

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(scale=self.scale, chunk_size=self.chunk_size)
        require(all(size > 0 for size in self.sizes), f"sizes must be positive, found {self.sizes}")


@dataclass(frozen=True)
class ContrastiveOptions(VectorOptions):
    """In-batch negatives: find the second text of each pair among all second texts of the batch."""

    kind: Literal["contrastive"] = "contrastive"
    objective: ClassVar[type[Objective]] = Contrastive
