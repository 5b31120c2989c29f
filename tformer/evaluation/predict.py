"""A model run over samples sorted by length: scores of a head, loss and metrics of an objective, loss by position.

Padding changes no score, and neither does what else is in a batch, to within the rounding of matrix products of
different sizes (fp32: 1e-5). What an objective draws (masks, replaced tokens) is keyed by the seed and the batch
number, so two models are measured on the same corrupted inputs. Sums are added over all batches in fp64 before any
division.

Shapes: N samples, L labels, B samples of a batch, T tokens, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from tformer.data.batching.batch import Batch
from tformer.data.batching.mixture import Samples
from tformer.data.permutation import derive_key
from tformer.decoding.inference import inference
from tformer.metrics.text import perplexity
from tformer.nn.heads import ModelOutput
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import Objective
from tformer.support.errors import InputError, require_finite
from tformer.support.processes import process_lock
from tformer.workers.work import QUIET, Work

# Tokens of a batch, padding included. A CPU is a fifth slower with 16384, which its caches do not hold.
BATCH_TOKENS = {"cpu": 4096}
ACCELERATOR_BATCH_TOKENS = 32768

Item = TypeVar("Item")

_DRAWS = process_lock()  # objectives draw from torch's global generator: one evaluation of a process at a time


@dataclass(frozen=True)
class GivenSamples:
    """Samples in memory."""

    given: Sequence[Any]
    seq_len: int
    lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.given)

    def examples(self, epoch: int, indices: np.ndarray) -> list[Any]:
        return [self.given[index] for index in indices]


def predict_scores(
    model: nn.Module, samples: Samples, collate: Callable[..., Batch], *, head: str, **options: Any
) -> np.ndarray:
    """fp32 [N, L]: output of `head` for each sample (before softmax or sigmoid). `options` of `predict`."""
    return predict(model, samples, collate, lambda output, _: output.head(head), **options)


def predict(
    model: nn.Module,
    samples: Samples,
    collate: Callable[..., Batch],
    read: Callable[[ModelOutput, Batch], torch.Tensor],
    **options: Any,
) -> np.ndarray:
    """fp32 [N, L]: what `read` takes from the model's output for a batch, a vector for each sample.

    options: of `predicted`. Once the work is stopped, the remaining vectors are NaN.
    """
    parts = list(predicted(model, samples, collate, read, **options))
    if not parts:
        return np.full((len(samples), 0), np.nan, dtype=np.float32)
    found_NL = torch.cat([vectors_NL for _, vectors_NL in parts]).cpu().numpy()  # one copy from the device, at the end
    require_finite(found_NL, "outputs")
    result_NL = np.full((len(samples), found_NL.shape[1]), np.nan, dtype=np.float32)
    result_NL[np.concatenate([indices for indices, _ in parts])] = found_NL
    return result_NL


def predicted(
    model: nn.Module,
    samples: Samples,
    collate: Callable[..., Batch],
    read: Callable[[ModelOutput, Batch], torch.Tensor],
    *,
    taps: Collection[str] = (),
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    work: Work = QUIET,
) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """(numbers of the samples, fp32 what `read` takes from the model's output) of every batch.

    The model runs as it is (its `compute_dtype`, on its device), in evaluation mode.

    Args:
        collate: makes a batch, as an objective does; called with training=False.
        taps: names of inner tensors that the output must hold.
        batch_size: samples at a time; None: as many as make `batch_tokens` tokens with their padding.
        batch_tokens: None: what suits the model's device.
        work: reports the finished samples, and is polled before every batch. Several workers divide the batches, and
            all get everything.
    """
    rng, done = np.random.default_rng(0), 0  # rng: for random padding, which changes no score
    device = next(model.parameters()).device

    def batches() -> Iterator[tuple[np.ndarray, Batch]]:
        budget = batch_tokens or default_batch_tokens(device)
        for indices in length_sorted_batches(samples, batch_size=batch_size, batch_tokens=budget):
            yield indices, collate(samples.examples(0, indices), rng=rng, training=False)

    def vectors(item: tuple[np.ndarray, Batch]) -> torch.Tensor:
        batch = item[1].to(device)
        return read(model(**batch.model_inputs(), taps=taps), batch).float()

    with inference(model):
        for (indices, _), vectors_NL in divided(batches(), vectors, work, dtype=torch.float32, device=device):
            yield indices, vectors_NL
            done += len(indices)
            work.report(done, len(samples))


def divided(
    items: Iterable[Item],
    answer: Callable[[Item], torch.Tensor],
    work: Work,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> Iterator[tuple[Item, torch.Tensor]]:
    """(item, its tensor) of all items in their order, until the work is stopped; several workers divide them."""
    return work.worker.divide(
        items,
        answer,
        should_stop=work.should_stop,
        to_json=torch.Tensor.tolist,
        from_json=partial(torch.tensor, dtype=dtype, device=device),
    )


def default_batch_tokens(device: torch.device) -> int:
    """Default number of tokens of a batch on this device."""
    return BATCH_TOKENS.get(device.type, ACCELERATOR_BATCH_TOKENS)


def length_sorted_batches(
    samples: Samples, *, batch_size: int | None = None, batch_tokens: int = ACCELERATOR_BATCH_TOKENS
) -> Iterator[np.ndarray]:
    """Batches that hold every sample once, the longest first, so that too little memory shows at once.

    `batch_size` samples at a time, None: as many as make `batch_tokens` tokens with their padding, and one at least.
    """
    total, lengths = len(samples), samples.lengths
    if lengths is None:
        order, sizes = np.arange(total), np.full(total, samples.seq_len)
    else:
        order = np.argsort(-lengths, kind="stable")
        sizes = lengths[order]
    start = 0
    while start < total:
        count = batch_size or max(1, batch_tokens // max(1, int(sizes[start])))
        yield order[start : start + count]
        start += count


Sums = tuple[float, float]
"""A sum, and the count that it is divided by."""


@dataclass
class Tally:
    """Sums over batches: of an objective's terms, with their weights, and of its metrics; the number of examples."""

    terms: dict[str, Sums] = field(default_factory=dict)
    sums: dict[str, Sums] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    examples: int = 0

    def add(self, other: Tally) -> None:
        """Add the sums of another tally."""
        for own, added in ((self.terms, other.terms), (self.sums, other.sums)):
            for name, (part, count) in added.items():
                before = own.get(name, (0.0, 0.0))
                own[name] = (before[0] + part, before[1] + count)
        self.weights |= other.weights
        self.examples += other.examples

    def metrics(self) -> dict[str, float]:
        """The metrics (NaN without examples).

        - loss: sum over the terms of weight * sum / count, as in training but without dropout and augmentation;
        - <term>_loss: sum / count, where there are several terms;
        - the metrics of the objective, such as accuracy and margin;
        - perplexity where tokens are predicted, never smoothed;
        - examples: number of examples.
        """
        losses = {name: _ratio(*sums) for name, sums in self.terms.items()}
        total = sum(self.weights[name] * loss for name, loss in losses.items()) if losses else float("nan")
        metrics = {"loss": total}
        if len(losses) > 1:
            metrics |= {f"{name}_loss": loss for name, loss in losses.items()}
        metrics |= {name: _ratio(*sums) for name, sums in self.sums.items()}
        if "nll" in metrics:
            metrics["perplexity"] = perplexity(metrics.pop("nll"))
        return metrics | {"examples": self.examples}


def tally_objective(
    model: nn.Module,
    objective: Objective,
    samples: Samples,
    *,
    batch_size: int | None = None,
    batch_tokens: int = ACCELERATOR_BATCH_TOKENS,
    seed: int = 0,
    work: Work = QUIET,
) -> Tally:
    """Sums of an objective over every sample, sorted by length: `batch_size` at a time, or `batch_tokens` tokens.

    Another model that the objective runs (ELECTRA's generator) must be in evaluation mode. `work` is polled before
    every batch; once it is stopped, the sums cover the samples read so far. Several workers divide the batches;
    all get all sums, added in the order of the batches.

    Raises InputError for no samples.
    """
    if not len(samples):
        raise InputError("there is nothing to evaluate: 0 examples")
    tally = Tally()
    device = next(model.parameters()).device

    def tally_batch(item: tuple[int, np.ndarray]) -> Tally:
        number, indices = item
        draw = np.random.default_rng([seed, number])
        torch.manual_seed(derive_key("evaluation", seed, number))
        batch = objective.collate(samples.examples(0, indices), rng=draw, training=False)
        result = objective.loss(model, batch.to(device))
        return Tally(
            {name: (float(term.sum), float(term.count)) for name, term in result.terms.items()},
            {name: (float(metric.sum), float(metric.count)) for name, metric in result.metrics.items()},
            {name: term.weight for name, term in result.terms.items()},
            len(indices),
        )

    with inference(model), _DRAWS, torch.random.fork_rng([device] if device.type == "cuda" else []):
        batches = length_sorted_batches(samples, batch_size=batch_size, batch_tokens=batch_tokens)
        for _, of_batch in work.worker.divide(
            enumerate(batches),
            tally_batch,
            should_stop=work.should_stop,
            to_json=asdict,
            from_json=lambda value: Tally(**value),
        ):
            tally.add(of_batch)
            work.report(tally.examples, len(samples))
    return tally


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def sums_by_position(
    model: nn.Module, objective: Objective, samples: Samples, *, batch_size: int | None, seed: int, work: Work
) -> np.ndarray:
    """fp64 [3, P]: number of predictions at each position, the sum of their loss in nats, and how many are correct.

    The batches, and with them the masks of a masked model, are those of `tally_objective`. Of an encoder-decoder the
    positions are the decoder's; they begin anew with a document that sees itself alone.
    """
    device = next(model.parameters()).device
    head = objective.members[0].head.kind
    found: list[np.ndarray] = [np.zeros((3, 1))]
    done = 0

    def sums(item: tuple[int, np.ndarray]) -> torch.Tensor:
        number, indices = item
        draw = np.random.default_rng([seed, number])
        batch = objective.collate(samples.examples(0, indices), rng=draw, training=False).to(device)
        labels: Any = batch.labels
        losses = model(**batch.model_inputs()).loss_terms(head, labels, reduction="none")
        labelled_N = labels.flatten() != IGNORED_LABEL
        places_n = _positions(batch).flatten()[labelled_N]
        columns = (torch.ones_like(losses.nll), losses.nll, losses.correct)
        return torch.stack([torch.bincount(places_n, column[labelled_N].double()) for column in columns]).cpu()

    batches = enumerate(length_sorted_batches(samples, batch_size=batch_size))
    with inference(model):
        for (_, indices), sums_3P in divided(batches, sums, work, device=torch.device("cpu")):
            found.append(sums_3P.numpy())
            done += len(indices)
            work.report(done, len(samples))
    longest = max(each.shape[1] for each in found)
    return np.sum([np.pad(each, ((0, 0), (0, longest - each.shape[1]))) for each in found], axis=0)


def _positions(batch: Batch) -> torch.Tensor:
    """int64 [B, T]: the position of each label among the tokens of its sequence, without padding."""
    labels: Any = batch.labels
    if batch.decoder_input_ids is None and batch.position_ids is not None:
        return batch.position_ids
    mask = batch.attention_mask if batch.decoder_input_ids is None else batch.decoder_attention_mask
    places = torch.ones_like(labels) if mask is None else mask.long()
    return (places.cumsum(dim=1) - 1).clamp(min=0)
