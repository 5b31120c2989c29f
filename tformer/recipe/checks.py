"""What the schema cannot say: keys that contradict one another, and keys that are allowed but do nothing.

A contradiction is an error; the rest are notes for the person who starts the run. Old checkpoints are not checked: what
once trained must load.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from tformer.recipe.problems import Problem, raise_problems
from tformer.recipe.recipe import Recipe, SpecialTokens


class Needs(NamedTuple):
    """What an objective asks of the model, and which metrics it yields."""

    parts: tuple[str, ...]  # of the model section; those in `without` must be null
    without: tuple[str, ...]
    head: str
    metrics: tuple[str, ...]
    unused: tuple[str, ...]  # keys that it does not read


OBJECTIVE_NEEDS: dict[str, Needs] = {
    "causal_lm": Needs(
        parts=("decoder",),
        without=("encoder", "patches"),
        head="lm",
        metrics=("loss", "accuracy"),
        unused=(
            *("data.max_length_ratio", "data.image_mean", "data.image_std", "data.augment"),
            *(f"data.columns.{name}" for name in ("text2", "label", "source", "target")),
            *("tokenizer.source_path", "tokenizer.target_path", "generator", "teacher"),
            *(f"tokenizer.special_ids.{name}" for name in SpecialTokens.model_fields if name != "eos"),
            *("generation.beam_size", "generation.length_penalty", "generation.length_penalty_type"),
        ),
    )
}


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
        for part in needs.parts:
            if getattr(recipe.model, part) is None:
                yield Problem(path, f"{objective.kind} needs model.{part}, found null")
        for part in needs.without:
            if getattr(recipe.model, part) is not None:
                yield Problem(path, f"{objective.kind} needs a model without model.{part}, found one")
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
        yield "data.document_mask does nothing: data.packing is none, so documents never see each other anyway"
    yield from _unused(recipe)


def _unused(recipe: Recipe) -> Iterator[str]:
    """Keys that were set, and that no objective of this recipe reads."""
    kinds = [objective.kind for objective in recipe.objectives]
    who = " and ".join(dict.fromkeys(kinds))
    shared = set.intersection(*(set(OBJECTIVE_NEEDS[kind].unused) for kind in kinds))
    for key in sorted(shared):
        section, _, name = key.rpartition(".")
        owner = attrgetter(section)(recipe) if section else recipe
        value = getattr(owner, name)
        if value != type(owner).model_fields[name].default:
            found = f" ({value})" if isinstance(value, (int, float, str)) else ""
            yield f"{key}{found} is not used by {who}"
    decoder = recipe.model.decoder
    if decoder is not None and getattr(decoder.positions, "ids", "arange") == "nonpad_cumsum":
        yield (
            f"model.decoder.positions.ids (nonpad_cumsum) is not used by {who}: "
            "positions already count from the first token that is not padding"
        )
