"""The last lines of a training: where the result is, how good it is beside a guess, and what to try next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from tformer.checkpoint.run import RunDirectory
from tformer.metrics import lower_is_better
from tformer.objectives.base import Objective
from tformer.recipe.recipe import Recipe
from tformer.support.errors import TformerError, visible
from tformer.support.files import STANDARD_INPUT
from tformer.tasks.base import Baselines, TrainingData
from tformer.tasks.baselines import stored_baselines, write_baselines
from tformer.training.display import SHOWN_METRICS, formats_of
from tformer.training.state import TrainerState

FORMATS = SHOWN_METRICS | {"mae": "mean absolute error {:.4f}", "mcc": "Matthews correlation {:.4f}"}
COMPARED = ("bleu", "perplexity", "accuracy", "mae")
"""Metrics that are compared with baselines, the first one that both have, after the run's `best_metric`."""


def first_look(
    recipe: Recipe,
    data: TrainingData,
    run: RunDirectory,
    state: TrainerState,
    objective: Objective,
    *,
    say: Callable[[str], None],
) -> Baselines:
    """Say the three lines, and return the baselines, which are stored with the run; {} without a checkpoint."""
    best = run.best()
    if best is None:
        return {}
    baselines = baselines_of(data, run, objective)
    step = int(best.name.rpartition("-")[2])
    of_all = f"best checkpoint: step {step} of {state.step}" if step != state.step else f"checkpoint: step {step}"
    say(f"result    {run.path} ({of_all})")
    records = {each.get("split"): each for each in run.metrics() if each.get("step") == step}
    values = records.get("final") or records.get("valid", {})
    formats = FORMATS | formats_of(recipe)
    quality, is_worse = compare(values, baselines, best_metric=recipe.training.best_metric, formats=formats)
    is_improving = is_worse and step == state.step
    if quality:
        quality += ": train longer" if is_improving else ""
        say(f"quality   {visible(quality)}" + ("; on all held-out data" if "final" in records else ""))
    again = ["train", "--resume", "--out", str(run.path)]
    command, *options = data.first_try
    if command == "evaluate" and any(spec.path == STANDARD_INPUT for spec in recipe.data.valid or recipe.data.train):
        command, options = "inspect", []  # that data cannot be read again
    words = [command, str(run.path), *options]
    if state.step < recipe.training.max_steps and not state.finished:
        words = again
    elif is_improving:
        minutes, steps = recipe.training.minutes, recipe.training.max_steps
        words = [*again, *(("--max-steps", str(2 * steps)) if minutes is None else ("--minutes", f"{2 * minutes:g}"))]
    say(f"next      {visible(shlex.join(['tformer', *words]))}")
    return baselines


def baselines_of(data: TrainingData, run: RunDirectory, objective: Objective) -> Baselines:
    """The stored baselines, or measured and stored now. A training does not fail for them: {} then."""
    if stored := stored_baselines(run.path):
        return stored
    try:
        baselines = data.baselines(objective)
        write_baselines(run.path, baselines)
    except TformerError:  # data that is no longer there, or a full disk
        return {}
    return baselines


def compare(
    values: Mapping[str, Any],
    baselines: Baselines,
    *,
    best_metric: str,
    formats: Mapping[str, str] = FORMATS,
) -> tuple[str, bool]:
    """(the quality of a model in words, whether a baseline is at least as good); "" without a validation.

    values: of the validation. best_metric: of the run. formats: of the metrics in words.
    """
    order = [name for name in (best_metric, *COMPARED) if name != "loss"] + ["loss"]
    known = [name for name in order if values.get(name) is not None]
    if not known:
        return "", False
    rivals = {name: [each for each in baselines.values() if isinstance(each.get(name), float)] for name in known}
    metric = next((name for name in known if rivals[name]), known[0])
    form = formats.get(metric, metric + " {:.4f}")
    number = form[form.index("{") : form.index("}") + 1]
    shown, score = form.format(values[metric]), lower_is_better(metric, values[metric])
    guesses = [(lower_is_better(metric, each[metric]), each["guess"], each[metric]) for each in rivals[metric]]
    best, guess, value = min(guesses, default=(math.inf, "", 0.0))
    if best <= score:
        return f"{shown}; not yet better than {guess} ({number.format(value)})", True
    others = ", ".join(f"{guess} {number.format(value)}" for _, guess, value in guesses)
    return (f"{shown}; {others}" if others else shown), False
