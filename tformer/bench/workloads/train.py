"""`bench train`: optimizer steps of the training loop on random batches, prepared beforehand.

A step is what `tformer train` does: forward and backward of the recipe's objective, clipping, the recipe's optimizer.
Ids are random, for speed does not depend on them; every example has full length, so that nothing is padded and all
libraries process as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tformer.bench.workloads import SEED, BenchTask, Cost, Workload, synchronize
from tformer.cost.flops import example_flops, product_shape
from tformer.cost.memory import training_memory
from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.data.shards.pair_tokens import PairExample
from tformer.objectives import build_objective
from tformer.objectives.base import Objective, ObjectiveContext
from tformer.recipe.recipe import Recipe
from tformer.support.device import DTYPES
from tformer.support.errors import InputError
from tformer.tokenizer.special import SpecialIds, decoder_tokens
from tformer.training import assemble
from tformer.training.loop import Events, Trainer

SPECIAL = SpecialIds(pad=0, bos=1, eos=2, unk=3, cls=1, sep=2, mask=4)
FIRST_WORD = 5  # ids from here on stand for words
NUM_BATCHES = 4  # different batches, used in turn

Draw = Callable[[np.random.Generator, BenchTask], Any]


def _windows(rng: np.random.Generator, task: BenchTask) -> np.ndarray:
    return rng.integers(0, task.vocab_size, (task.batch_size, task.length + 1))


def _texts(rng: np.random.Generator, task: BenchTask) -> list[Example]:
    return [Example(ids, label=0) for ids in rng.integers(FIRST_WORD, task.vocab_size, (task.batch_size, task.length))]


def _pairs(rng: np.random.Generator, task: BenchTask) -> list[PairExample]:
    ids = rng.integers(FIRST_WORD, task.vocab_size, (task.batch_size, 2, task.length))
    return [PairExample(source, target) for source, target in ids]


SAMPLES: dict[str, Draw] = {"text": _windows, "masked_text": _texts, "labelled": _texts, "pairs": _pairs}
"""What one batch is collated from, by the objective's kind of data."""


def objective_context(task: BenchTask) -> ObjectiveContext:
    """The objective's context for random ids: 0 to 4 are special tokens, except in causal models."""
    model = task.recipe.model
    both = model.encoder is not None and model.decoder is not None
    return ObjectiveContext(
        special_ids=SPECIAL if _needs_special_ids(task) else SpecialIds(),
        seq_len=task.length,
        vocab_size=task.vocab_size,
        target=decoder_tokens(SPECIAL) if both else None,
        target_seq_len=task.length,
    )


def _has_random_data(objective: type[Objective]) -> bool:
    """True if we can make unpadded samples ourselves (not for corrupted text, whose targets vary in length)."""
    makes_targets = objective.data == "masked_text" and "decoder" in objective.parts
    has_labels = objective.head.label_kind in (None, "classes")
    return objective.data in SAMPLES and has_labels and not makes_targets and not objective.needs_generator


def _needs_special_ids(task: BenchTask) -> bool:
    """Whether an objective reads other data than windows of plain text."""
    return any(options.objective.data != "text" for options in task.recipe.objectives)


def random_ids(task: BenchTask, rows: int, length: int) -> np.ndarray:
    """int64 [rows, length] ids of words."""
    first = FIRST_WORD if task.vocab_size > 2 * FIRST_WORD else 0
    return np.random.default_rng(SEED).integers(first, task.vocab_size, (rows, length))


class Cycle:
    """The training loop's `Batches`: the same few in turn."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches, self._next = batches, 0

    def next(self) -> Sequence[Batch]:
        batch = self._batches[self._next % len(self._batches)]
        self._next += 1
        return [batch]

    def cursor(self) -> dict[str, Any]:
        return {"next": self._next}


STEPS = {"cpu": 1, "cuda": 10}
"""Steps of a round. A GPU is synchronized after each round; training does not do that after each step."""

WARM_UP_STEPS = 3
NEVER = 10**9
BYTES_PER_PARAMETER = 16  # a step reads weight, gradient and both of Adam's moments once, in fp32


def measured_recipe(task: BenchTask) -> Recipe:
    """The task's recipe without validation, saving and averages of weights."""
    pauses: dict[str, Any] = dict.fromkeys(("max_steps", "eval_every", "save_every"), NEVER)
    left_out = dict.fromkeys(("save_every_minutes", "ema_decay"))
    return task.recipe.model_copy(update={"training": task.recipe.training.model_copy(update=pauses | left_out)})


class TrainingSteps(Workload):
    """The recipe's training, without data, validation and saving."""

    step, batch_sizes = "optimizer step", (16,)

    @staticmethod
    def check(task: BenchTask) -> None:
        """Refuses an objective without random data here, and a vocabulary of special tokens alone."""
        for options in task.recipe.objectives:
            if not _has_random_data(options.objective):
                raise InputError(f"objectives: {options.kind} cannot be benchmarked")
        if _needs_special_ids(task) and task.vocab_size <= FIRST_WORD:
            raise InputError(f"model.vocab_size: found {task.vocab_size}, expected more than {FIRST_WORD}")

    @staticmethod
    def cost(task: BenchTask, precision: str) -> Cost:
        """Forward and backward as training logs them: a head counts for positions with a label only.

        A step reads the state of training once.
        """
        model, steps = task.model(), STEPS[task.device.type]
        example = example_flops(task.recipe, model, None, source_length=task.length, target_length=task.length)
        return Cost(
            flops=example.training * steps * task.batch_size,
            bytes_read=float(BYTES_PER_PARAMETER * model.num_parameters() * steps),
            steps=steps,
            examples=steps * task.batch_size,
            memory=training_memory(
                measured_recipe(task),
                [model],
                tokens_per_micro_batch=task.batch_size * task.length,
                dtype=DTYPES[precision],
                seq_len=task.length,
                target_seq_len=None,
                on_cpu=task.device.type == "cpu",
            ).to_json(),
        )

    @staticmethod
    def product(task: BenchTask) -> tuple[int, int, int]:
        """The feed-forward product of a whole batch."""
        training = task.recipe.training.model_copy(update={"batch_size": task.batch_size, "batch_tokens": None})
        return product_shape(task.recipe.model_copy(update={"training": training}), task.length)

    def prepare(self) -> None:
        task = self.task
        recipe = measured_recipe(task)
        models = assemble.make_models(recipe, task.device, dtype=DTYPES[self.precision])
        objective = build_objective(recipe.objectives, objective_context(task))
        self._trainer = Trainer(
            recipe,
            models,
            objective,
            Cycle(self._batches(objective)),
            device=task.device,
            forward=assemble.compiled(models.main, wanted=task.compile),
        )
        self._train(WARM_UP_STEPS)

    def run(self) -> int:
        before = self._trainer.state.tokens
        self._train(STEPS[self.task.device.type])
        return self._trainer.state.tokens - before

    def _batches(self, objective: Objective) -> list[Batch]:
        """Batches as training makes them, for objectives that pass `check`."""
        draw, rng = SAMPLES[self.task.recipe.objectives[0].objective.data], np.random.default_rng(SEED)
        batches = [objective.collate(draw(rng, self.task), rng=rng) for _ in range(NUM_BATCHES)]
        return [batch.pin_memory() for batch in batches] if self.device.type == "cuda" else batches

    def _train(self, steps: int) -> None:
        self._trainer.run(_Few(steps))
        synchronize(self.task.device)


class _Few(Events):
    """Stops a training after some steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def should_stop(self) -> bool:
        self._left -= 1
        return self._left < 0
