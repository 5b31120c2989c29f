"""The plan of a sweep: tasks, the axes along which each varies, seeds, and what is evaluated beside validation.

A written plan is YAML, read as strictly as a recipe:

    name: positions
    seeds: 3
    max_steps: 2000
    tasks:
      - name: characters
        arch: gpt                                  # or config: FILE
        preset: char-cpu
        set: {model.max_seq_len: 256}              # as --set of `tformer train`
        train: [--data, "${DATA}/train.txt"]       # its other flags; ${NAME} is the environment's
        vary:                                      # the product of all axes
          model.*.positions.kind: [rope, alibi]    # `*`: every stack that the recipe has
          model.*.norm.place, model.*.final_norm: [[pre, true], [post, false]]     # coupled: one value for each key
        evaluate: {longer: [--seq-len, "256"]}     # flags of `tformer evaluate`, a column each

The options of the command describe a plan of one task.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, model_validator

from tformer.recipe.overrides import read_set
from tformer.recipe.problems import Problem, raise_problems, unusable_values
from tformer.recipe.sections import Positive, Section
from tformer.recipe.yaml_text import Document, KeyPath, parse_yaml, read_yaml
from tformer.support.bounds import UNKNOWN_KEY, mistake_of
from tformer.support.errors import InputError, did_you_mean
from tformer.support.formatting import describe
from tformer.support.shipped import SWEEPS, preset_folder

OWN_KEYS = {"seed": "--seeds N", "arch": "separate tasks in a --plan", "preset": "separate tasks in a --plan"}
"""Keys that no axis may vary, and the option to use instead."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def _checked_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"found {name!r}, expected letters, digits and . _ - (it names folders)")
    return name


Name = Annotated[str, AfterValidator(_checked_name)]


class SweepTask(Section):
    """One recipe and its data, and the axes along which it varies."""

    name: Name = "sweep"
    config: str | None = None
    arch: str | None = None
    preset: str | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    train: tuple[str, ...] = ()
    vary: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    evaluate: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_sound_axes(self) -> SweepTask:
        for keys, values in self.vary.items():
            names = split_keys(keys)
            if not all(names):
                raise ValueError(f"vary: found the key {keys!r}, expected KEY or KEY1,KEY2")
            for name in names:
                if name in OWN_KEYS:
                    raise ValueError(f"vary: {name} is no axis: {OWN_KEYS[name]}")
            if not values:
                raise ValueError(f"vary: {keys} has no values")
            for value in values:
                if len(names) > 1 and (not isinstance(value, list) or len(value) != len(names)):
                    raise ValueError(
                        f"vary: {keys}: found {describe(value)}, expected a list of {len(names)}: a value for each key"
                    )
            written = [json.dumps(value, sort_keys=True) for value in values]
            counts = Counter(written)
            twice = next((text for text in written if counts[text] > 1), None)
            if twice is not None:
                raise ValueError(f"vary: {keys} has the value {twice} twice")
        return self


class SweepPlan(Section):
    """A whole sweep."""

    name: Name = "sweep"
    seeds: Positive = 1
    max_steps: Positive | None = None
    tasks: tuple[SweepTask, ...]

    @model_validator(mode="after")
    def _has_tasks_of_different_names(self) -> SweepPlan:
        if not self.tasks:
            raise ValueError("tasks: found none, expected at least one")
        names = [task.name for task in self.tasks]
        counts = Counter(names)
        twice = next((name for name in names if counts[name] > 1), None)
        if twice is not None:
            raise ValueError(f"tasks: two are called {twice!r}, expected different names")
        return self

    def place_of(self, task: SweepTask) -> str:
        """The start of a message about a task; empty where there is one."""
        return f"task {task.name}: " if len(self.tasks) > 1 else ""


def split_keys(keys: str) -> list[str]:
    """The keys of an axis; several keys, separated by commas, are coupled."""
    return [key.strip() for key in keys.split(",")]


def read_plan(name: str) -> SweepPlan:
    """A written plan: a file, or the name of a shipped one. Raises InputError with file, line and key."""
    path, shipped = Path(name), list_plans()
    if name in shipped and not path.is_file():
        path = shipped[name]
    elif not path.exists() and path.name == name and path.suffix == "":
        raise InputError(f"unknown plan '{name}'", hint=did_you_mean(name, shipped))
    return validated(read_yaml(path), str(path))


def list_plans() -> dict[str, Path]:
    """The shipped plans by name."""
    return {path.stem: path for path in sorted((preset_folder() / SWEEPS).glob("*.yaml"))}


def validated(document: Document, name: str, *, expand: bool = True) -> SweepPlan:
    """The plan in a document. name: for messages; empty for a plan from options.

    Raises InputError with line and key of every mistake.
    """

    def where(path: KeyPath) -> str:
        while path and path not in document.lines:
            path = path[:-1]
        return f"{name}:{document.lines[path]}" if path else name

    raise_problems(list(unusable_values(document.value)), where)
    data = _expanded(document.value, (), where) if expand else document.value
    try:
        return SweepPlan.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = list(_problems(error))
        if not name:  # messages of a plan from options name no task
            problems = [problem._replace(path=problem.path[2:]) for problem in problems]
        raise_problems(problems, where)
        raise


def _expanded(value: Any, path: KeyPath, where: Any) -> Any:
    """The value with `${NAME}` expanded in all texts. Raises InputError for a variable that is not set."""
    if isinstance(value, dict):
        return {key: _expanded(item, (*path, str(key)), where) for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item, (*path, str(index)), where) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise InputError(
                f"{where(path)}: {'.'.join(path)}: the environment variable {match[1]} is not set",
                hint=f"set it: {match[1]}=... tformer sweep ...",
            )
        return os.environ[match[1]]

    return VARIABLE.sub(variable, value)


def _problems(error: ValidationError) -> Iterator[Problem]:
    """pydantic's errors as problems with readable messages."""
    for entry in error.errors(include_url=False):
        kind, path = entry["type"], tuple(map(str, entry["loc"]))
        if kind in UNKNOWN_KEY:
            known = (SweepTask if len(path) > 2 and path[0] == "tasks" else SweepPlan).model_fields
            yield Problem(path, "unknown key", did_you_mean(path[-1], known))
        else:
            yield Problem(path, mistake_of(entry))


def plan_of_flags(
    *,
    config: Path | None,
    arch: str | None,
    preset: str | None,
    sets: Sequence[str],
    train: Sequence[str],
    vary: Sequence[str],
    evaluate: Sequence[str],
    **of_plan: int | str,
) -> SweepPlan:
    """The plan of one task that options describe; of_plan: keys of `SweepPlan`. InputError names the option."""
    axes: dict[str, list[Any]] = {}
    for text in vary:
        keys, values = parse_vary(text)
        if keys in axes:
            raise InputError(f"--vary: {keys} is given twice", hint="list all its values in one --vary")
        axes[keys] = values
    task = {
        "name": "sweep",
        "config": None if config is None else str(config),
        "arch": arch,
        "preset": preset,
        "set": dict(map(read_set, sets)),
        "train": list(train),
        "vary": axes,
        "evaluate": dict(map(_parse_evaluate, evaluate)),
    }
    return validated(Document({**of_plan, "tasks": [task]}, {}), "", expand=False)


def parse_vary(text: str) -> tuple[str, list[Any]]:
    """`KEY=a,b` or `KEY1,KEY2=[a,b],[c,d]`: the keys, and the values of a YAML list."""
    keys, equals, values = text.partition("=")
    keys = ",".join(split_keys(keys))
    if not equals or not keys or not values.strip():
        raise InputError(
            f"--vary: found '{text}', expected KEY=value,value", hint="for example --vary model.*.norm.place=pre,post"
        )
    try:
        return keys, list(parse_yaml(f"values: [{values}]", name="--vary").value["values"])
    except InputError as error:
        raise InputError(
            f"--vary {keys}: the values '{values}' are no YAML list: {error.message}", hint=error.hint
        ) from None


def _parse_evaluate(text: str) -> tuple[str, list[str]]:
    label, equals, flags = text.partition("=")
    if not equals or not label.strip() or label.startswith("-"):
        raise InputError(
            f"--evaluate: found '{text}', expected LABEL=flags of `tformer evaluate`",
            hint="for example --evaluate 'test=--data test.tsv'",
        )
    try:
        return label.strip(), shlex.split(flags)
    except ValueError as error:
        raise InputError(f"--evaluate {label}: {error} in '{flags}'") from None
