"""Random ids in the shape of training data: speed does not depend on what they say.

Every example has full length: nothing is padded, so that all libraries do the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tformer.bench.task import SEED, Task
from tformer.data.batch import Batch
from tformer.data.pair_set import PairExample
from tformer.data.windows import Example
from tformer.errors import InputError
from tformer.objectives.base import Objective, ObjectiveContext
from tformer.tokenizer.special import SpecialIds, decoder_tokens

SPECIAL = SpecialIds(pad=0, bos=1, eos=2, unk=3, cls=1, sep=2, mask=4)
FIRST_WORD = 5  # ids from here on stand for words
NUM_BATCHES = 4  # different ones, gone through in turn

Draw = Callable[[np.random.Generator, Task, int], Any]


def _windows(rng: np.random.Generator, task: Task, vocab_size: int) -> np.ndarray:
    return rng.integers(0, vocab_size, (task.batch_size, task.length + 1))


def _texts(rng: np.random.Generator, task: Task, vocab_size: int) -> list[Example]:
    return [Example(ids, label=0) for ids in rng.integers(FIRST_WORD, vocab_size, (task.batch_size, task.length))]


def _pairs(rng: np.random.Generator, task: Task, vocab_size: int) -> list[PairExample]:
    ids = rng.integers(FIRST_WORD, vocab_size, (task.batch_size, 2, task.length))
    return [PairExample(source, target) for source, target in ids]


SAMPLES: dict[str, Draw] = {
    "causal_lm": _windows,
    "masked_lm": _texts,
    "classification": _texts,
    "seq2seq": _pairs,
}
"""What one batch is made of, by objective."""


def objective_context(task: Task) -> ObjectiveContext:
    """What an objective is told of a vocabulary that nobody has: ids 0 to 4 are special, but for causal models."""
    model = task.recipe.model
    assert model.vocab_size is not None
    both = model.encoder is not None and model.decoder is not None
    causal = task.recipe.objectives[0].kind == "causal_lm"
    return ObjectiveContext(
        special_ids=SpecialIds() if causal else SPECIAL,
        seq_len=task.length,
        vocab_size=model.vocab_size,
        target=decoder_tokens(SPECIAL) if both else None,
        target_seq_len=task.length,
    )


def check_objectives(task: Task) -> None:
    """Raise InputError for an objective that has no random data here, or a vocabulary without words."""
    kinds = [options.kind for options in task.recipe.objectives]
    unknown = [kind for kind in kinds if kind not in SAMPLES]
    if unknown:
        raise InputError(f"objectives: {unknown[0]} is not benched, only {', '.join(SAMPLES)}")
    vocab_size = task.recipe.model.vocab_size
    assert vocab_size is not None
    if kinds != ["causal_lm"] and vocab_size <= FIRST_WORD:
        raise InputError(f"model.vocab_size: found {vocab_size}, expected more than {FIRST_WORD}")


def random_batches(task: Task, objective: Objective) -> list[Batch]:
    """Batches as training makes them, of what `check_objectives` lets pass."""
    vocab_size, kind = task.recipe.model.vocab_size, task.recipe.objectives[0].kind
    assert vocab_size is not None
    rng = np.random.default_rng(SEED)
    batches = [objective.collate(SAMPLES[kind](rng, task, vocab_size), rng=rng) for _ in range(NUM_BATCHES)]
    return [batch.pin_memory() for batch in batches] if task.device.type == "cuda" else batches


def random_ids(task: Task, rows: int, length: int) -> np.ndarray:
    """int64 [rows, length] ids of words."""
    vocab_size = task.recipe.model.vocab_size
    assert vocab_size is not None
    first = FIRST_WORD if vocab_size > 2 * FIRST_WORD else 0
    return np.random.default_rng(SEED).integers(first, vocab_size, (rows, length))


class Cycle:
    """The training loop's `Batches`: the same few again and again."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches, self._next = batches, 0

    def next(self) -> Sequence[Batch]:
        batch = self._batches[self._next % len(self._batches)]
        self._next += 1
        return [batch]

    def cursor(self) -> dict[str, Any]:
        return {"next": self._next}
