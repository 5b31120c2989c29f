"""How much of the held-out data a training validates on: a share that suits the length of the training.

All of a large text takes minutes, also beside a training of seconds. Operations are known before the first step, so the
share is a function of the recipe and the data, the same on every machine. It is frozen into the recipe of the run
(`training.valid_share`), and all validations read the same part of the data. `tformer evaluate` reads all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tformer.cost.flops import mean_lengths
from tformer.training.clock import MOST_VALIDATING
from tformer.training.prepare import Prepared, whole_steps

MOST_OF_OPERATIONS = 0.2
"""Operations of all validations, as a share of those of the training. One by time has `clock.MOST_VALIDATING`."""

FEW_OPERATIONS = 1e11
"""Validations with fewer operations in all read everything: a core computes them within two seconds."""

FORWARD, BACKWARD = 2, 4
"""Operations for each parameter and position."""


def plan_validations(prepared: Prepared, note: Callable[[str], None]) -> Prepared:
    """The preparation with the share of the held-out data that validations read, and whole numbers of steps."""
    recipe, start = prepared.recipe, prepared.start
    training, steps = recipe.training, prepared.planned_steps or recipe.training.max_steps
    assert training.eval_every is not None and training.save_every is not None  # set by `settle_steps`
    every, share = whole_steps(training.eval_every, steps), training.valid_share
    if start.weights is not None and share == start.weights.recipe.training.valid_share and share != 1.0:
        share = None  # it was that of other data
    decided = start.resumed is not None or recipe.schedule.points is not None  # by the training that is repeated
    if share is None and not decided:
        most = MOST_OF_OPERATIONS if training.minutes is None else MOST_VALIDATING
        share, times = _share(prepared, steps, -(-steps // every), most)
        if share is not None:
            took = f"{times:.0f} times as long as" if times >= 1.5 else f"{times:.0%} of the time of"
            note(
                f"validating on {share:.2g} of the held-out data, evenly spread: all of it would take {took} the "
                "training (--full-validation reads all, as tformer evaluate does)"
            )
    updates = {"eval_every": every, "save_every": whole_steps(training.save_every, steps), "valid_share": share}
    return replace(prepared, recipe=recipe.model_copy(update={"training": training.model_copy(update=updates)}))


def _share(prepared: Prepared, steps: int, validations: int, most: float) -> tuple[float | None, float]:
    """(share of the held-out data, operations of validations on all of it as a multiple of those of the training).

    None: all of it.

    A validation reads at least as many positions as a step, so all together take less than the training.
    """
    data, parameters = prepared.data, prepared.num_parameters
    of_step = positions_of_step(prepared)
    training = (FORWARD + BACKWARD) * parameters * steps * of_step
    validating = FORWARD * parameters * validations * data.valid_tokens
    share = max(most * training, FEW_OPERATIONS) / max(validating, 1.0)
    share = float(f"{max(share, of_step / max(data.valid_tokens, 1.0)):.3g}")
    return (share if share < 1.0 else None), validating / training


def positions_of_step(prepared: Prepared) -> float:
    """Positions of an optimizer step, of pairs those of the longer side."""
    training = prepared.recipe.training
    if training.batch_tokens is not None:
        return training.batch_tokens * training.grad_accum
    each = max(mean_lengths(prepared.data.samples, prepared.data.tokens_per_sample))
    return (training.batch_size or 1) * training.grad_accum * each
