"""What the schema cannot say: keys that contradict one another, and keys that are allowed but do nothing.

A contradiction is an error; the rest are notes for the person who starts the run. Old checkpoints are not checked: what
once trained must load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tformer.recipe.problems import Problem, raise_problems
from tformer.recipe.recipe import Recipe


class Needs(NamedTuple):
    """What an objective asks of the model, and which metrics it yields."""

    stacks: tuple[str, ...]
    head: str
    metrics: tuple[str, ...]


OBJECTIVE_NEEDS: dict[str, Needs] = {"causal_lm": Needs(stacks=("decoder",), head="lm", metrics=("loss", "accuracy"))}


def check_recipe(recipe: Recipe) -> list[str]:
    """The notes on a recipe; `InputError` if its keys contradict one another."""
    raise_problems(list(contradictions(recipe)), lambda path: "")
    return list(notes(recipe))


def contradictions(recipe: Recipe) -> Iterator[Problem]:
    """What cannot be trained as it stands."""
    seq_len, longest = recipe.data.seq_len, recipe.model.max_seq_len
    if seq_len is not None and seq_len > longest:
        yield Problem(("data", "seq_len"), f"found {seq_len}, expected at most model.max_seq_len ({longest})")
    tokenizer = recipe.tokenizer
    if (tokenizer.source_path is None) != (tokenizer.target_path is None):
        missing = "source_path" if tokenizer.source_path is None else "target_path"
        yield Problem(("tokenizer", missing), "missing, expected a file for each side (or tokenizer.path for both)")
    if tokenizer.path is not None and tokenizer.source_path is not None:
        yield Problem(("tokenizer", "path"), "excludes tokenizer.source_path and tokenizer.target_path, found them all")
    yield from _unmet_needs(recipe)


def _unmet_needs(recipe: Recipe) -> Iterator[Problem]:
    heads = tuple(head.kind for head in recipe.model.heads)
    for index, objective in enumerate(recipe.objectives):
        path = ("objectives", str(index), "kind")
        needs = OBJECTIVE_NEEDS[objective.kind]
        for stack in needs.stacks:
            if getattr(recipe.model, stack) is None:
                yield Problem(path, f"{objective.kind} needs model.{stack}, found null")
        if needs.head not in heads:
            found = ", ".join(heads) or "none"
            yield Problem(path, f"{objective.kind} needs a head of kind {needs.head}, found {found}")
    metrics = {metric for objective in recipe.objectives for metric in OBJECTIVE_NEEDS[objective.kind].metrics}
    if recipe.training.best_metric not in metrics:
        best, known = recipe.training.best_metric, ", ".join(sorted(metrics))
        yield Problem(("training", "best_metric"), f"found '{best}', expected what the objectives yield: {known}")


def notes(recipe: Recipe) -> Iterator[str]:
    """What is allowed but probably not meant."""
    training, schedule, optimizer = recipe.training, recipe.schedule, recipe.optimizer
    if schedule.warmup_steps > training.max_steps:
        yield (
            f"schedule.warmup_steps ({schedule.warmup_steps}) is more than training.max_steps ({training.max_steps}): "
            "the learning rate never reaches its peak"
        )
    elif schedule.decay_steps is not None and schedule.warmup_steps >= schedule.decay_steps:
        yield (
            f"schedule.warmup_steps ({schedule.warmup_steps}) leaves nothing of schedule.decay_steps "
            f"({schedule.decay_steps}) to decay in"
        )
    waits_for_validation = "training.early_stopping" if training.early_stopping else ""
    if schedule.kind == "plateau":
        waits_for_validation = "schedule.kind plateau"
    if waits_for_validation and training.eval_every >= training.max_steps:
        yield (
            f"{waits_for_validation} does nothing: training.eval_every ({training.eval_every}) is not below "
            f"training.max_steps ({training.max_steps})"
        )
    if optimizer.adam_lr is not None and optimizer.kind != "muon":
        yield f"optimizer.adam_lr does nothing: it belongs to muon, and optimizer.kind is {optimizer.kind}"
    if recipe.data.document_mask and recipe.data.packing == "none":
        yield "data.document_mask does nothing: data.packing is none, so every example is one document"
