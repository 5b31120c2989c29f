"""Several models as one: the next token's probability is the mean of theirs, log p = logsumexp_n(log p_n) - log N.

The mean is taken of probabilities, not of their logarithms, as in fairseq: one model that excludes a token does not
veto it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from tformer.decoding.stepper import Stepper
from tformer.errors import InputError


class EnsembleStepper:
    """Steppers of the same sentences over the same target vocabulary, behind the interface of one (`Stepper`)."""

    def __init__(self, steppers: Sequence[Stepper]) -> None:
        """Raises InputError for different vocabulary sizes, ValueError for different sentences or none."""
        if not steppers:
            raise ValueError("an ensemble needs at least one stepper")
        sizes = [stepper.vocab_size for stepper in steppers]
        if len(set(sizes)) > 1:
            raise InputError(
                f"the models of an ensemble have vocabularies of {', '.join(map(str, sizes))} tokens, expected one",
                hint="combine checkpoints that were trained with the same tokenizer",
            )
        if len({stepper.num_sentences for stepper in steppers}) > 1:
            raise ValueError("the steppers of an ensemble were given different numbers of sentences")
        self._steppers = list(steppers)
        self.vocab_size = sizes[0]
        self.rooms = [min(rooms) for rooms in zip(*(stepper.rooms for stepper in steppers), strict=True)]
        self.max_steps = max(self.rooms)

    @property
    def num_sentences(self) -> int:
        return self._steppers[0].num_sentences

    def start(self, beams: int) -> Tensor:
        return mean_log_probabilities([stepper.start(beams) for stepper in self._steppers])

    def step(self, ids_R: Tensor) -> Tensor:
        return mean_log_probabilities([stepper.step(ids_R) for stepper in self._steppers])

    def reorder(self, rows_R: Tensor) -> None:
        for stepper in self._steppers:
            stepper.reorder(rows_R)

    def keep(self, sentences: Tensor) -> None:
        for stepper in self._steppers:
            stepper.keep(sentences)


def mean_log_probabilities(logprobs: Sequence[Tensor]) -> Tensor:
    """Logarithm of the mean of the probabilities whose logarithms are given, tensors of one shape; -inf is 0."""
    if len(logprobs) == 1:
        return logprobs[0]
    return reduce(torch.logaddexp, logprobs) - math.log(len(logprobs))
