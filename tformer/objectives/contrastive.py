"""In-batch negatives: the second text of each pair is to be found among those of the whole batch (InfoNCE).

    loss = - sum_i log( exp(s cos(a_i, b_i)) / sum_j exp(s cos(a_i, b_j)) ),   s = scale, the inverse temperature

(arXiv 1705.00652, 1807.03748; scale 20 as in Sentence-BERT, 1908.10084.) Texts j that equal b_i, or whose partner
equals a_i, are no negatives of i. The loss is no sum over parts of a batch, so the whole batch is one micro-batch.

Gradient caching (GradCache, arXiv 2101.06983): with `chunk_size` the model reads that number of texts at a time, keeps
the vectors alone, and reads each chunk again when its gradient is there. The batch is then limited by time only.

Matryoshka sizes (arXiv 2205.13147): the loss is the mean of that of the whole vectors and of their first n numbers.

Shapes: B pairs, D width.
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
from tformer.objectives.base import CheckedOptions, LossResult, Objective, Term
from tformer.objectives.collate import pad_examples
from tformer.objectives.labelled import LabelledObjective


class VectorObjective(Objective):
    """Base class of the objectives that compare the vectors of two texts, each of which the model reads alone."""

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
        """One batch [2B, T] of pairs of `Example`: all first texts, then all second texts; labels [B] if there are."""
        sides = [side for sides in zip(*samples, strict=True) for side in sides]
        batch, labels = pad_examples(sides, self.context, rng=rng), [first.label for first, _ in samples]
        return batch if labels[0] is None else replace(batch, labels=torch.tensor(np.array(labels, dtype=np.float32)))

    def label_count(self, batch: Batch) -> dict[str, int]:
        """{term: pairs of this host batch}."""
        assert batch.input_ids is not None
        return {self.head.kind: len(batch.input_ids) // 2}

    def loss(self, model: Callable[..., Any], batch: Batch) -> LossResult:
        """The mean of `compare` over the sizes of vectors."""
        inputs, size = batch.model_inputs(), self.options.chunk_size
        rows = len(inputs["input_ids"])

        def read(start: int) -> Tensor:
            output = model(**{name: tensor[start : start + (size or rows)] for name, tensor in inputs.items()})
            found: Tensor = output.head(self.head.kind)
            return found

        if size is None or size >= rows:
            vectors_2BD = read(0)
        else:
            chunks = range(0, rows, size)
            vectors_2BD = torch.cat([checkpoint(read, start, use_reentrant=False) for start in chunks])
        found = []
        for width in (None, *self.options.sizes):
            a_BD, b_BD = F.normalize(vectors_2BD[:, :width].float(), dim=-1).chunk(2)
            found.append(self.compare(a_BD, b_BD, batch))
        total, count = torch.stack([one for one, _ in found]).mean(), rows // 2
        metrics = {name: value.detach() for name, value in found[0][1].items()}
        metrics["count"] = torch.full((), count, device=total.device)
        return LossResult({self.head.kind: Term(total, count, self.options.weight)}, metrics)

    def compare(self, a_BD: Tensor, b_BD: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """(sum of the loss over the pairs, metrics) of vectors of length 1."""
        raise NotImplementedError


class Contrastive(VectorObjective):
    """The second text of each pair among those of the batch."""

    metrics = ("loss", "accuracy", "recall_1", "mrr", "ndcg_10")
    shown_metrics: ClassVar[Mapping[str, str]] = {"mrr": "MRR {:.4f}"}
    predicts = "which second text of the batch belongs to the first"

    def compare(self, a_BD: Tensor, b_BD: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.input_ids is not None
        scores_BB = self.options.scale * a_BD @ b_BD.T
        pairs_B = torch.arange(len(a_BD), device=a_BD.device)
        first_B, second_B = torch.unique(batch.input_ids, dim=0, return_inverse=True)[1].chunk(2)
        equal_BB = (first_B[:, None] == first_B) | (second_B[:, None] == second_B)
        scores_BB = scores_BB.masked_fill(equal_BB & (pairs_B[:, None] != pairs_B), -torch.inf)
        return F.cross_entropy(scores_BB, pairs_B, reduction="sum"), {
            "correct": (scores_BB.argmax(dim=1) == pairs_B).sum()
        }


class VectorOptions(CheckedOptions):
    """Base class of the options of objectives on vectors. Raises ValueError for sizes and scales of 0 or less."""

    scale: float
    chunk_size: int | None
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(scale=self.scale, chunk_size=self.chunk_size)
        require(all(size > 0 for size in self.sizes), f"sizes must be positive, found {self.sizes}")


@dataclass(frozen=True)
class ContrastiveOptions(VectorOptions):
    """In-batch negatives: find the second text of each pair among those of the batch."""

    kind: Literal["contrastive"] = "contrastive"
    scale: float = 20.0  # of cosines, the inverse of the temperature
    chunk_size: int | None = None  # texts read at a time, to save memory (arXiv 2101.06983); null: all of a batch
    sizes: tuple[int, ...] = ()  # the first n numbers of a vector are trained as vectors, too (arXiv 2205.13147)
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = Contrastive
