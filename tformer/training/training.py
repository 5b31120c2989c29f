"""One training as one value, which its stages replace; `tformer.training` tells how a training begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tformer.checkpoint.run import RunDirectory
from tformer.cost.flops import mean_lengths
from tformer.data.batching.padding import padded_lengths
from tformer.recipe.recipe import Recipe
from tformer.support.device import Precision
from tformer.tasks.base import TrainingData, TrainingStart
from tformer.training.assemble import TrainedModels
from tformer.training.embeddings import Vectors

LATER: Any = None
"""Placeholder of a value that a later stage sets."""


@dataclass(frozen=True)
class SizeChoice:
    """The recipes among which a training by time chooses, from the smallest model to the largest.

    tokens_per_parameter, dropout: the same as in `Ladder`; 0 for a training in one size, None where the user set it.
    """

    recipes: tuple[Recipe, ...] = ()
    tokens_per_parameter: float = 0.0
    dropout: tuple[int, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Training(TrainingStart):
    """One training; each stage returns a copy with more of it known, and `recipe` is the only live recipe.

    Attributes:
        notes: for the user, of the request.
        out: None: a new default directory.
        may_exist: of --resume: the directory may hold a run.
        run: of --resume: the run, locked since before its checkpoint was read.
        given_labels: label names that the recipe had before the data was read.
        sizes: of a training by time.
        new_time: of --resume with --minutes: the time counts from now on.

        data: to train and validate on.
        device, precision: where, and in which number format, the model computes.
        shapes: the models on the meta device, for counts and estimates.
        max_minutes: limit of this command, not part of the recipe.
        vectors: of tokens, by the name of the table that starts with them.

        planned_steps: expected number of steps of a training by time.
        alternatives: the sizes among which such a training chose.
        share_is_given: the recipe names the share of the held-out data that validations read.
    """

    notes: tuple[str, ...] = ()
    out: Path | None = None
    may_exist: bool = False
    run: RunDirectory | None = None
    given_labels: tuple[str, ...] = ()
    sizes: SizeChoice = SizeChoice()
    new_time: bool = False

    data: TrainingData = LATER
    device: torch.device = LATER
    precision: Precision = LATER
    shapes: TrainedModels = LATER
    max_minutes: float | None = None
    vectors: dict[str, Vectors] = LATER

    planned_steps: int = 0
    alternatives: tuple[Any, ...] = ()
    share_is_given: bool = False

    @property
    def num_parameters(self) -> int:
        """Parameters of the main model, tied ones counted once."""
        return self.shapes.main.num_parameters()

    @property
    def longest(self) -> tuple[int, int]:
        """Largest number of positions of a sample in the encoder and in the decoder, padded.

        With `batch_tokens` both values are the larger one.
        """
        recipe = self.recipe
        found = mean_lengths(self.data.samples, self.data.tokens_per_sample, of=np.max)
        most = recipe.seq_len, recipe.target_seq_len
        source, target = np.minimum(padded_lengths(np.array(found)), most).astype(int).tolist()
        return (source, target) if recipe.training.batch_tokens is None else (max(source, target),) * 2

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of a micro-batch of the longest samples."""
        training = self.recipe.training
        return training.batch_size or max(1, (training.batch_tokens or 1) // max(self.longest))

    @property
    def mean_length(self) -> float:
        """Tokens of an example, of the longer side."""
        return max(mean_lengths(self.data.samples, self.data.tokens_per_sample))

    @property
    def tokens_per_step(self) -> float:
        """Tokens of an optimizer step; of pairs, tokens of the longer side."""
        training = self.recipe.training
        return training.grad_accum * (training.batch_tokens or (training.batch_size or 1) * self.mean_length)
