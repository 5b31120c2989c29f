"""An objective's own figures on held-out samples, for any objective: masked LM, next sentence, replaced tokens, ...

What an objective draws (masks, ELECTRA's replacements) is keyed by the seed and the batch, so two models, or one model
at two steps, are asked the same questions. It is drawn beside training's streams, never from them. Sums are added over
all batches before anything is divided, in fp64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tformer.data.batch import Batch
from tformer.data.permutation import derive_key
from tformer.errors import InputError
from tformer.evaluation.predict import ACCELERATOR_BATCH_TOKENS, Samples, length_sorted_batches
from tformer.metrics import perplexity
from tformer.objectives.base import Objective

PERPLEXITY_OF = ("masked_lm", "lm")  # terms that predict tokens


@dataclass
class Tally:
    """What is added up over batches before anything is divided.

    Attributes:
        sums: "term NAME.sum" and "term NAME.count" of each term, and the objective's metrics.
        weights: of the terms.
        examples: how many were read.
    """

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    weights: dict[str, float] = field(default_factory=dict)
    examples: int = 0

    def add(self, objective: Objective, model: nn.Module, batch: Batch, *, examples: int) -> None:
        """Add the terms and metrics of a batch of so many examples."""
        result = objective.loss(model, batch)
        for name, term in result.terms.items():
            self.sums[f"term {name}.sum"] += float(term.sum)
            self.sums[f"term {name}.count"] += float(term.count)
            self.weights[name] = term.weight
        for name, value in result.metrics.items():
            self.sums[name] += float(value)
        self.examples += examples


def evaluate_objective(
    model: nn.Module,
    objective: Objective,
    samples: Samples,
    *,
    batch_size: int | None = None,
    batch_tokens: int = ACCELERATOR_BATCH_TOKENS,
    seed: int = 0,
    should_stop: Callable[[], bool] | None = None,
    progress: Callable[..., None] | None = None,
) -> dict[str, float]:
    """The figures of every sample once (epoch 0), sorted by length: `batch_size` at a time, or `batch_tokens` tokens.

    The figures are those of `figures`; the arguments and errors those of `tally_objective`.
    """
    return figures(
        [
            tally_objective(
                model,
                objective,
                samples,
                batch_size=batch_size,
                batch_tokens=batch_tokens,
                seed=seed,
                should_stop=should_stop,
                progress=progress,
            )
        ]
    )


def figures(tallies: Sequence[Tally]) -> dict[str, float]:
    """What some tallies together say (NaN for none).

    - loss: sum over the terms of weight * sum / count, as in training but without dropout and augmentation;
    - <term>_loss: sum / count, where there are several terms;
    - accuracy, and <name>_accuracy for each further part that reports one (next_sentence, generator);
    - perplexity where tokens are predicted (lm, masked_lm), never smoothed;
    - examples: how many.
    """
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = {}
    for tally in tallies:
        weights |= tally.weights
        for name, value in tally.sums.items():
            sums[name] += value
    return _figures(sums, weights) | {"examples": sum(tally.examples for tally in tallies)}


def tally_objective(
    model: nn.Module,
    objective: Objective,
    samples: Samples,
    *,
    batch_size: int | None = None,
    batch_tokens: int = ACCELERATOR_BATCH_TOKENS,
    seed: int = 0,
    should_stop: Callable[[], bool] | None = None,
    progress: Callable[..., None] | None = None,
) -> Tally:
    """What an objective adds up over every sample.

    Another model that the objective runs (ELECTRA's generator) is expected in evaluation mode. `should_stop` is polled
    before every batch; when it says so, the sums are those of the samples read so far.

    Raises InputError for no samples.
    """
    if not len(samples):
        raise InputError("there is nothing to evaluate: 0 examples")
    tally = Tally()
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for number, indices in enumerate(
                length_sorted_batches(samples, batch_size=batch_size, batch_tokens=batch_tokens)
            ):
                if should_stop is not None and should_stop():
                    break
                draw = np.random.default_rng([seed, number])
                torch.manual_seed(derive_key("evaluation", seed, number))
                batch = objective.collate(samples.examples(0, indices), rng=draw, training=False)
                tally.add(objective, model, batch.to(device), examples=len(indices))
                if progress is not None:
                    progress(tally.examples, len(samples))
    finally:
        model.train(was_training)
    return tally


def _figures(sums: dict[str, Any], weights: dict[str, float]) -> dict[str, float]:
    losses = {name: _ratio(sums[f"term {name}.sum"], sums[f"term {name}.count"]) for name in weights}
    figures = {"loss": sum(weights[name] * loss for name, loss in losses.items()) if losses else float("nan")}
    if len(losses) > 1:
        figures |= {f"{name}_loss": loss for name, loss in losses.items()}
    for name in list(sums):
        if name.endswith("correct"):
            prefix = name.removesuffix("correct")
            figures[f"{prefix.replace('.', '_')}accuracy"] = _ratio(sums[name], sums[f"{prefix}count"])
    if any(name in losses for name in PERPLEXITY_OF):
        figures["perplexity"] = perplexity(_ratio(sums["nll_sum"], sums["count"]))
    return figures


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
