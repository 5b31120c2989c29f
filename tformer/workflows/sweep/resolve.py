"""What a cell will train, known before anything is trained: its recipe resolved and its model built without memory.

`tformer train` reads its own flags; those among a plan's that decide on the recipe are read here as well, by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tformer.build import build_model
from tformer.errors import InputError
from tformer.recipe.overrides import flag_origin
from tformer.recipe.recipe import Recipe
from tformer.recipe.yaml_text import resolve_scalar
from tformer.training.request import Start, TrainRequest, find_start
from tformer.workflows.sweep.grid import as_text
from tformer.workflows.sweep.plan import Task

KEYS = (
    *("tokenizer.path", "tokenizer.source_path", "tokenizer.target_path", "data.errors", "optimizer.lr", "seed"),
    *(f"data.columns.{name}" for name in ("text", "text2", "label", "source", "target")),
    *(f"training.{name}" for name in ("max_steps", "max_epochs", "max_minutes", "batch_size", "batch_tokens")),
    *(f"training.{name}" for name in ("grad_accum", "precision", "device", "compile")),
)
BY_FLAG = {flag_origin(key).where: key for key in KEYS}
"""The key of the recipe that a flag of `tformer train` sets."""

NAMED = {"--arch": "arch", "--preset": "preset", "--config": "config", "--init-from": "init_from"}
PARTS = {"--data": "data.train", "--source": "data.train", "--valid": "data.valid", "--valid-source": "data.valid"}
TARGETS = {"--target": "data.train", "--valid-target": "data.valid"}
OWN = ("--out", "--resume", "--json", "--dry-run", "--seed", "--help", "-h", *NAMED.keys() - {"--init-from"})
"""Flags of `tformer train` that a sweep gives itself."""


@dataclass
class Flags:
    """What flags of `tformer train` say about the recipe."""

    keys: dict[str, Any] = field(default_factory=dict)
    sets: list[str] = field(default_factory=list)
    init_from: Path | None = None


def base_words(task: Task) -> list[str]:
    """The flags of `tformer train` that name a task's recipe."""
    named = (("--config", task.config), ("--arch", task.arch), ("--preset", task.preset))
    return [word for flag, value in named if value is not None for word in (flag, value)]


def all_sets(task: Task, sets: Sequence[str], *, max_steps: int | None, seed: int | None) -> list[str]:
    """Everything that `--set` says, in order: the task's, `sets` of a variant, and what the sweep decides itself.

    The latter is no flag, for `--set` wins over flags.
    """
    texts = [*(f"{key}={as_text(value)}" for key, value in task.set.items()), *sets]
    own = (("training.max_steps", max_steps), ("seed", seed))
    return texts + [f"{key}={value}" for key, value in own if value is not None]


def start_of(task: Task, sets: Sequence[str], *, max_steps: int | None, seed: int | None = None) -> Start:
    """What `tformer train` would start from. Errors: `InputError` for whatever is wrong with the recipe."""
    flags = read_flags(task.train)
    request = TrainRequest(
        arch=task.arch,
        preset=task.preset,
        config=None if task.config is None else Path(task.config),
        flags=flags.keys,
        sets=(*flags.sets, *all_sets(task, sets, max_steps=max_steps, seed=seed)),
        init_from=flags.init_from,
    )
    return find_start(request)


def check_model(recipe: Recipe) -> None:
    """Build the model without memory, as `tformer config validate` does. Errors: sizes that do not fit together."""
    vocabulary, labels = recipe.tokenizer.train.vocab_size, len(recipe.data.labels) or 2
    for model in (recipe.model, recipe.generator):
        if model is not None:
            sizes = {"vocab_size": vocabulary, "target_vocab_size": vocabulary}
            build_model(model, **sizes, num_labels=labels, device="meta")


def read_flags(words: Sequence[str]) -> Flags:
    """What the flags say of the recipe. Flags that say nothing of it are left to `tformer train`.

    Errors: a flag that the sweep gives itself.
    """
    flags = Flags()
    for flag, value in _pairs(words):
        if flag in OWN:
            raise InputError(f"{flag}: a sweep gives this flag to its trainings itself", hint=OWN_HINTS.get(flag))
        if value is None:
            continue
        if flag == "--set":
            flags.sets.append(value)
        elif flag == "--init-from":
            flags.init_from = Path(value)
        elif flag == "--objective":
            flags.keys["objectives"] = [{"kind": kind.strip()} for kind in value.split(",")]
        elif flag == "--vocabulary":
            flags.keys["tokenizer.separate"] = value == "separate"
            flags.keys |= {"model.tie.source_target": False} if value == "separate" else {}
        elif flag in PARTS:
            flags.keys.setdefault(PARTS[flag], []).append({"path": value})
        elif flag in TARGETS:
            _add_target(flags.keys.get(TARGETS[flag], []), value)
        elif flag in BY_FLAG:
            flags.keys[BY_FLAG[flag]] = resolve_scalar(value)
    return flags


OWN_HINTS = {"--seed": "--seeds N, or --set seed=S for the first", "--out": "--out of the sweep"}


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each flag and its value, which is the next word unless that is a flag too."""
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        flag, equals, value = word.partition("=")
        after = words[index + 1] if index + 1 < len(words) else None
        yield flag, value if equals else None if after is None or after.startswith("--") else after


def _add_target(entries: list[dict[str, Any]], path: str) -> None:
    """The target side belongs to the first source that has none yet."""
    for entry in entries:
        if "target_path" not in entry:
            entry["target_path"] = path
            return
