"""Details of one run (differences from its preset, environment, metrics, checkpoints), and comparison of several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tformer.checkpoint import catalog
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.recipe import load_recipe, recipe_to_data
from tformer.recipe.load import leaves
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.support.formatting import unique_names
from tformer.workflows.runs.summary import RunReader, RunSummary, number, summarize_run

OWN = ("schema", "arch", "preset")  # these name a recipe and define nothing


def flat_recipe(recipe: Recipe) -> dict[str, Any]:
    """{dotted key: value} in the schema's order; positions in lists are keys too (`objectives.0.kind`)."""
    data, flat = recipe_to_data(recipe), {}
    for path in leaves(data):
        value: Any = data
        for key in path:
            value = value[int(key)] if isinstance(value, list) else value[key]
        flat[".".join(path)] = value
    return flat


@dataclass(frozen=True)
class RunDetail:
    """All details of a run.

    Attributes:
        base: the recipe's preset, or the defaults where that is unknown; None: the recipe cannot be read.
        differences: {key: {"run": value, "base": value}}; a side without the key is left out.
        environment: of the last start; None: not recorded.
        metrics: {split: {first, best, last: record}}; no best for training.
        checkpoints: of each its step, path, score (lower is better), bytes, and whether it is the latest and the best.
    """

    summary: RunSummary
    base: str | None
    differences: dict[str, dict[str, Any]]
    environment: dict[str, Any] | None
    metrics: dict[str, dict[str, dict[str, Any]]]
    checkpoints: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        own = ("base", "differences", "environment", "metrics", "checkpoints")
        return self.summary.to_json() | {name: getattr(self, name) for name in own}


def describe_run(path: str | Path) -> RunDetail:
    """All details of a run; its summary lists what cannot be read."""
    folder, reader = Path(path), RunReader([])
    summary, run = summarize_run(folder), RunDirectory(folder)
    base, differences = (None, {}) if summary.recipe is None else _against_base(summary.recipe)
    entries = reader.read(lambda: catalog.scan(run.checkpoints_path)) or []
    latest, best = catalog.latest(entries), catalog.best(entries)
    checkpoints = []
    for entry in entries:
        read = reader.read(partial(read_checkpoint, entry.path, verify=False))
        size = None if read is None else sum(record.size for record in read.manifest.files)
        line = {"step": entry.step, "path": str(entry.path), "score": entry.score, "size_bytes": size}
        checkpoints.append(line | {"latest": entry is latest, "best": entry is best})
    environment = reader.read(run.environment)
    return RunDetail(summary, base, differences, environment, summary.logged.splits, checkpoints)


def _against_base(recipe: Recipe) -> tuple[str, dict[str, dict[str, Any]]]:
    """The preset as shipped today, else the defaults of the recipe's sections, and the keys that differ."""
    sides = {"run": flat_recipe(recipe)}
    try:
        sides["base"] = flat_recipe(load_recipe(arch=recipe.arch, preset=recipe.preset).recipe) if recipe.preset else {}
    except InputError:  # of another version
        sides["base"] = {}
    name = f"preset {recipe.arch}/{recipe.preset}"
    if not sides["base"]:
        name, set_keys = "the defaults", recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        sides["base"] = {key: value for key, value in sides["run"].items() if not _is_set(set_keys, key)}
    differences = {}
    for key in {**sides["run"], **sides["base"]}:
        values = {side: flat[key] for side, flat in sides.items() if key in flat}
        emptied = len(values) == 1 and next(iter(values.values())) in (None, [], {})  # the other side has keys inside
        if key not in OWN and not emptied and (len(values) == 1 or values["run"] != values["base"]):
            differences[key] = values
    return name, differences


def _is_set(data: Any, key: str) -> bool:
    """Whether a dotted key, or a section that contains it, differs from the defaults."""
    for part in key.split("."):
        if isinstance(data, list):
            data = data[int(part)]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            return False
    return True


NOT_FIGURES = ("step", "examples")


@dataclass(frozen=True)
class Comparison:
    """Rows with a value for each run, in the given order of the runs.

    Attributes:
        keys: {key of the recipe: {number of the run: value}}, of runs that have the key.
        metrics: {figure: {number of the run: value}}, at the run's best validation.
    """

    runs: list[RunSummary]
    names: list[str]
    keys: dict[str, dict[int, Any]]
    metrics: dict[str, dict[int, float]]

    def to_json(self) -> dict[str, Any]:
        def by_name(row: dict[int, Any]) -> dict[str, Any]:
            return {str(self.runs[number].path): value for number, value in row.items()}

        return {
            "runs": [run.to_json() for run in self.runs],
            "recipe": {key: by_name(row) for key, row in self.keys.items()},
            "metrics": {name: by_name(row) for name, row in self.metrics.items()},
        }


def compare_runs(paths: Sequence[str | Path]) -> Comparison:
    """Compare runs, damaged ones as far as possible. Raises InputError for fewer than two, or one named twice."""
    places = [os.path.realpath(path) for path in paths]
    twice = next((str(path) for path, place in zip(paths, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice")
    if len(paths) < 2:
        raise InputError(
            f"expected at least two runs to compare, found {len(paths)}", hint="for a single run: tformer runs show RUN"
        )
    runs = [summarize_run(path) for path in paths]
    recipes = {index: flat_recipe(run.recipe) for index, run in enumerate(runs) if run.recipe is not None}
    keys: dict[str, dict[int, Any]] = {}
    for key in {key: None for recipe in recipes.values() for key in recipe}:  # in order, each once
        row = {index: recipe[key] for index, recipe in recipes.items() if key in recipe}
        first, *others = row.values()
        differs = any(value != first or type(value) is not type(first) for value in others)
        if differs or len(row) < len(recipes):
            keys[key] = row
    metrics: dict[str, dict[int, float]] = {"loss": {}}  # the loss is the first
    for index, run in enumerate(runs):
        record = run.logged.best
        for name in record:
            if name not in NOT_FIGURES and (value := number(record, name)) is not None:
                metrics.setdefault(name, {})[index] = value
    return Comparison(
        runs=runs,
        names=unique_names([run.path for run in runs]),
        keys=keys,
        metrics={name: row for name, row in metrics.items() if row},
    )
