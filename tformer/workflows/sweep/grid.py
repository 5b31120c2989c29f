"""Cells of a sweep: the product of a task's axes times the seeds, and the recipe of each cell."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tformer.build import build_model
from tformer.recipe.recipe import Recipe
from tformer.recipe.schema import value_at
from tformer.recipe.yaml_text import read_yaml, resolve_scalar
from tformer.support.errors import InputError
from tformer.training.options import TrainOptions, read_words
from tformer.training.request import find_training
from tformer.training.training import Training
from tformer.workflows.sweep.plan import SweepTask, split_keys

STACKS = ("encoder", "decoder")
COMMON = frozenset({"kind", "place", "size", "rate"})
"Last words of keys that are ambiguous without the word before: the label is `norm.place`, not `place`."

MAX_SLUG = 80


@dataclass(frozen=True)
class Axis:
    """Keys that vary together; values[i][k] is the i-th value of the k-th key. `label` is the table's column."""

    keys: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    label: str


@dataclass(frozen=True)
class Variant:
    """One row of the table: a task with a value chosen on every axis.

    choices: by the axes' labels, as the table shows them. slug: unique name of its folders.
    sets: the choices as values of `--set`, without wildcards.
    """

    task: SweepTask
    slug: str
    choices: Mapping[str, str]
    sets: tuple[str, ...]

    def cell_name(self, seed: int) -> str:
        """The name of its training with this seed."""
        return f"{self.slug}-seed{seed}"


@dataclass(frozen=True)
class Cell:
    """One training: a variant and a seed, with the recipe that they give; sets: all its values of `--set`, in order."""

    variant: Variant
    seed: int
    recipe: Recipe
    sets: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.variant.cell_name(self.seed)


def axes_of(task: SweepTask) -> tuple[Axis, ...]:
    """The task's axes with the shortest labels that are unique."""
    coupled = [(split_keys(keys), values) for keys, values in task.vary.items()]
    shown = []
    for keys, values in coupled:
        # The first of coupled keys is enough where its value determines the others.
        first = {json.dumps(value[0], sort_keys=True) for value in values} if len(keys) > 1 else set()
        shown.append(keys if len(keys) > 1 and len(first) < len(values) else keys[:1])
    short = [_short(key) for keys in shown for key in keys]
    axes = []
    for (keys, values), visible in zip(coupled, shown, strict=True):
        names = [key if short.count(_short(key)) > 1 else _short(key) for key in visible]
        rows = tuple(tuple(value) if len(keys) > 1 else (value,) for value in values)
        axes.append(Axis(tuple(keys), rows, " + ".join(names)))
    return tuple(axes)


def variants_of(task: SweepTask, *, recipe: Mapping[str, Any], prefix: str) -> list[Variant]:
    """Every combination of the axes' values, the last axis fastest.

    recipe: the task's, as plain data: `*` in a key stands for its stacks.
    prefix: of the slugs.
    """
    axes = axes_of(task)
    variants: list[Variant] = []
    for combination in product(*(axis.values for axis in axes)):
        sets: list[str] = []
        choices: dict[str, str] = {}
        words = [prefix]
        for axis, row in zip(axes, combination, strict=True):
            for key, value in zip(axis.keys, row, strict=True):
                sets += [f"{place}={as_text(value)}" for place in expand_key(key, recipe)]
            shown = " + ".join(_shown(value) for value in row[: axis.label.count(" + ") + 1])
            choices[axis.label] = shown
            # A number or truth value follows its key.
            words.append(shown if isinstance(row[0], str | dict) else f"{_short(axis.keys[0])}-{shown}")
        slug = _slug(words, taken={variant.slug for variant in variants})
        variants.append(Variant(task, slug, choices, tuple(sets)))
    return variants


def expand_key(key: str, recipe: Mapping[str, Any]) -> list[str]:
    """The keys that a key with `*` stands for: one for each stack of the recipe."""
    parts = key.split(".")
    if "*" not in parts:
        return [key]
    at = parts.index("*")
    holder: Any = recipe
    for part in parts[:at]:
        holder = holder.get(part) if isinstance(holder, Mapping) else None
    stacks = [name for name in STACKS if isinstance(holder, Mapping) and holder.get(name) is not None]
    return [
        place for name in stacks for place in expand_key(".".join([*parts[:at], name, *parts[at + 1 :]]), recipe)
    ] or [key]  # no stack there: the recipe refuses the key


def as_text(value: Any) -> str:
    """A value as text for `--set key=value`, which reads the same value from it."""
    plain = isinstance(value, str) and value == value.strip() and value[:1] not in ("[", "{", '"', "'")
    return value if plain and resolve_scalar(value) == value else json.dumps(value, ensure_ascii=False)


def _short(key: str) -> str:
    parts = [part for part in key.split(".") if part != "*"]
    return ".".join(parts[-2:] if parts[-1] in COMMON else parts[-1:])


def _shown(value: Any) -> str:
    """`rope` for {kind: rope}; else the value as typed on a command line."""
    if isinstance(value, dict) and "kind" in value:
        rest = ", ".join(f"{key} {_shown(item)}" for key, item in value.items() if key != "kind")
        return f"{value['kind']} ({rest})" if rest else str(value["kind"])
    return as_text(value)


UNSAFE = re.compile(r"(?:(?!(?<=\de)\+\d|(?<=-)-\d)[^A-Za-z0-9._])+")
"""Characters that a slug does not keep. It keeps the signs of numbers: 1e+30 is not 1e-30, and lr--1 is not lr-1."""


def _slug(words: Sequence[str], *, taken: set[str]) -> str:
    slug = "-".join(filter(None, (UNSAFE.sub("-", word).strip("-.") for word in words))) or "base"
    if len(slug) > MAX_SLUG:
        slug = f"{slug[: MAX_SLUG - 9]}-{hashlib.sha256(slug.encode()).hexdigest()[:8]}"
    number, unique = 1, slug
    while unique in taken:
        number += 1
        unique = f"{slug}-{number}"
    return unique


OWN_FLAGS = (
    *("--arch", "--preset", "--config", "--out", "--resume", "--json", "--dry-run", "--seed", "--stop-at-step"),
    *("--help", "-h"),
)
"""Flags of `tformer train` that a sweep sets itself."""

OWN_HINTS = {
    "--seed": "--seeds N, or --set seed=S for the first",
    "--out": "--out of the sweep",
    "--stop-at-step": "--max-steps N",
}


LEAST_POINTS = 10
"""Validations of every training of a sweep, where nothing else is asked for: fewer are no curve."""

EVAL_EVERY = "training.eval_every"


def eval_every_for_a_curve(task: SweepTask, sets: Sequence[str], recipe: Recipe) -> float | None:
    """A `training.eval_every` that gives enough validations; None if there are enough or the user set it."""
    training, given = recipe.training, [*task.set, *sets, *train_options(task.train).sets]
    stated = {} if task.config is None else read_yaml(Path(task.config)).value
    if any(text.partition("=")[0].strip() in (EVAL_EVERY, "training") for text in given):
        return None
    if value_at(tuple(EVAL_EVERY.split(".")), stated) is not None:
        return None
    enough = (training.eval_every or math.inf) * LEAST_POINTS <= training.max_steps
    if training.max_epochs is not None:
        enough = training.eval_every is None and training.max_epochs >= LEAST_POINTS
    return None if enough and training.minutes is None else 1 / LEAST_POINTS


def all_sets(
    task: SweepTask, sets: Sequence[str], *, max_steps: int | None, seed: int | None, eval_every: float | None = None
) -> tuple[str, ...]:
    """All values of `--set`, in order: the task's, the variant's, the sweep's own.

    The sweep's own are no flags, since `--set` overrides flags.
    """
    own = (("training.max_steps", max_steps), ("seed", seed), (EVAL_EVERY, eval_every))
    decided = (f"{key}={value}" for key, value in own if value is not None)
    return (*(f"{key}={as_text(value)}" for key, value in task.set.items()), *sets, *decided)


def start_of(task: SweepTask, sets: Sequence[str], *, max_steps: int | None, seed: int | None = None) -> Training:
    """The start of `tformer train` with these settings. Raises InputError for a wrong recipe."""
    options, config = train_options(task.train), None if task.config is None else Path(task.config)
    sets = (*options.sets, *all_sets(task, sets, max_steps=max_steps, seed=seed))
    return find_training(replace(options, arch=task.arch, preset=task.preset, config=config, sets=sets))


def check_model(recipe: Recipe) -> None:
    """Build the model on the meta device. Raises InputError for sizes that do not fit together."""
    vocabulary, labels = recipe.tokenizer.train.vocab_size, len(recipe.data.labels) or 2
    target = vocabulary if recipe.separate_vocabularies else None
    for model in (recipe.model, recipe.generator):
        if model is not None:
            build_model(model, vocab_size=vocabulary, target_vocab_size=target, num_labels=labels, device="meta")


def train_options(words: Sequence[str]) -> TrainOptions:
    """The options of `tformer train` in these words that decide on the recipe; a teacher is loaded by the training.

    Raises InputError for a flag that the sweep sets itself.
    """
    for word in words:
        flag, _, _ = word.partition("=")
        if flag in OWN_FLAGS:
            raise InputError(f"{flag}: a sweep sets this flag of its trainings itself", hint=OWN_HINTS.get(flag))
    return replace(read_words(words), teacher=None, distil=None)
