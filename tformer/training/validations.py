"""The share of the held-out data that validations read, chosen by the length of the training.

All of a large text takes minutes, also beside a training of seconds. Operations are known before the first step, so the
share is a function of the recipe and the data, the same on every machine. It is frozen into the recipe of the run
(`training.valid_share`), and all validations read the same part of the data, so that their figures compare. The best
checkpoint is measured on all of it at the end (`training.final_validation`), as `tformer evaluate` measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tformer.training.clock import MOST_VALIDATING
from tformer.training.prepare import whole_steps
from tformer.training.training import Training

MOST_OF_OPERATIONS = 0.2
"""Operations of all validations, as a share of those of the training. One by time has `clock.MOST_VALIDATING`."""

MOST_AT_THE_END = 1.0
"""Operations of the validation on all held-out data at the end, as a multiple of those of the training."""

FEW_OPERATIONS = 1e11
"""Validations with fewer operations in all read everything: a core computes them within two seconds."""

FORWARD, BACKWARD = 2, 4
"""Operations for each parameter and position."""


def plan_validations(training: Training, note: Callable[[str], None]) -> Training:
    """The training with the share of the held-out data that validations read, and whole numbers of steps."""
    recipe, section = training.recipe, training.recipe.training
    steps = training.planned_steps or section.max_steps
    assert section.eval_every is not None and section.save_every is not None  # set by `settle_steps`
    every, share, final = whole_steps(section.eval_every, steps), section.valid_share, section.final_validation
    weights = training.weights
    if weights is not None and share == weights.recipe.training.valid_share and share != 1.0:
        share, final = None, None if final else final  # the run it starts from read other data
    decided = training.resumed is not None or recipe.schedule.points is not None  # by the training that is repeated
    if share is None and not decided:
        most = MOST_OF_OPERATIONS if section.minutes is None else MOST_VALIDATING
        number = -(-steps // every)
        share, times = _share(training, steps, number, most)
        if share is not None:
            if final is None:
                final = section.minutes is None and times <= number * MOST_AT_THE_END
            note(share_text(training, share))
            if final and section.minutes is None:
                note("the best checkpoint is measured on all of it at the end (--set training.final_validation=false)")
    updates = {"valid_share": share, "final_validation": final, "eval_every": every}
    updates["save_every"] = whole_steps(section.save_every, steps)
    recipe = recipe.model_copy(update={"training": section.model_copy(update=updates)})
    return replace(training, recipe=recipe, share_is_given=section.valid_share is not None)


def share_text(training: Training, share: float) -> str:
    """The note on validations that read a share of the held-out data."""
    unit = "images" if training.data.tokenizer is None else "texts"
    return f"validation reads {100 * min(share, 0.99):.2g} % of the held-out {unit}, to save time"


def _share(training: Training, steps: int, validations: int, most: float) -> tuple[float | None, float]:
    """(share of the held-out data, operations of validations on all data / operations of the training).

    None: all of it.

    A validation reads at least as many positions as a step, so all together take less than the training.
    """
    parameters, of_step, held_out = training.num_parameters, training.tokens_per_step, training.data.valid_tokens
    learning = (FORWARD + BACKWARD) * parameters * steps * of_step
    validating = FORWARD * parameters * validations * held_out
    share = max(most * learning, FEW_OPERATIONS) / max(validating, 1.0)
    share = float(f"{max(share, of_step / max(held_out, 1.0)):.3g}")
    return (share if share < 1.0 else None), validating / learning
