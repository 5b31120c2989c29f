"""Details of one run (differences from its preset, environment, metrics, checkpoints), and comparison of several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tformer.checkpoint import catalog
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.recipe import load_recipe, recipe_to_data
from tformer.recipe.load import leaves
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.workflows.runs.summary import RunSummary, number, summarise_run

OWN = ("schema", "arch", "preset")  # these name a recipe and define nothing


def flat_recipe(recipe: Recipe) -> dict[str, Any]:
    """{dotted key: value} in the schema's order; positions in lists are keys too (`objectives.0.kind`)."""
    data = recipe_to_data(recipe)
    return {".".join(path): _at(data, path) for path in leaves(data)}


def _at(data: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data


@dataclass(frozen=True)
class CheckpointLine:
    """One checkpoint: `score` of its validation (lower is better), `size_bytes` of its files."""

    step: int
    path: Path
    score: float | None
    size_bytes: int | None
    is_latest: bool
    is_best: bool


@dataclass(frozen=True)
class RunDetail:
    """All details of a run.

    Attributes:
        base: the recipe's preset, or the defaults where that is unknown; None: the recipe cannot be read.
        differences: {key: {"run": value, "base": value}}; a side without the key is left out.
        environment: of the last start; None: not recorded.
        metrics: {split: {first, best, last: record}}; no best for training.
    """

    summary: RunSummary
    base: str | None
    differences: dict[str, dict[str, Any]]
    environment: dict[str, Any] | None
    metrics: dict[str, dict[str, dict[str, Any]]]
    checkpoints: list[CheckpointLine]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.summary.to_json(),
            "base": self.base,
            "differences": self.differences,
            "environment": self.environment,
            "metrics": self.metrics,
            "checkpoints": [
                {
                    "step": line.step,
                    "path": str(line.path),
                    "score": line.score,
                    "size_bytes": line.size_bytes,
                    "latest": line.is_latest,
                    "best": line.is_best,
                }
                for line in self.checkpoints
            ],
        }


def describe_run(path: str | Path) -> RunDetail:
    """All details of a run; its summary lists what cannot be read."""
    folder = Path(path)
    summary, run = summarise_run(folder), RunDirectory(folder)
    base, differences = (None, {}) if summary.recipe is None else _against_base(summary.recipe)
    return RunDetail(
        summary=summary,
        base=base,
        differences=differences,
        environment=_environment(run),
        metrics=summary.logged.splits,
        checkpoints=_checkpoints(run),
    )


def _against_base(recipe: Recipe) -> tuple[str, dict[str, dict[str, Any]]]:
    name, base = _base_of(recipe)
    sides = {"run": flat_recipe(recipe), "base": base}
    differences = {}
    for key in {**sides["run"], **base}:
        values = {side: flat[key] for side, flat in sides.items() if key in flat}
        emptied = len(values) == 1 and next(iter(values.values())) in (None, [], {})  # the other side has keys inside
        if key not in OWN and not emptied and (len(values) == 1 or values["run"] != values["base"]):
            differences[key] = values
    return name, differences


def _base_of(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """Name and values of the preset as shipped today, else of the defaults of the recipe's sections."""
    if recipe.preset is not None:
        try:
            preset = load_recipe(arch=recipe.arch, preset=recipe.preset).recipe
            return f"preset {recipe.arch}/{recipe.preset}", flat_recipe(preset)
        except InputError:  # of another version
            pass
    set_keys = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return "the defaults", {key: value for key, value in flat_recipe(recipe).items() if not _is_set(set_keys, key)}


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


def _environment(run: RunDirectory) -> dict[str, Any] | None:
    try:
        return run.environment()
    except InputError:  # listed in the problems
        return None


def _checkpoints(run: RunDirectory) -> list[CheckpointLine]:
    try:
        entries = catalog.scan(run.checkpoints_path)
    except InputError:  # listed in the problems
        return []
    latest, best = catalog.latest(entries), catalog.best(entries)
    return [
        CheckpointLine(entry.step, entry.path, entry.score, _size(entry.path), entry is latest, entry is best)
        for entry in entries
    ]


def _size(path: Path) -> int | None:
    try:
        return sum(record.size for record in read_checkpoint(path, verify=False).manifest.files)
    except InputError:  # listed in the problems
        return None


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
    runs = [summarise_run(path) for path in paths]
    recipes = {index: flat_recipe(run.recipe) for index, run in enumerate(runs) if run.recipe is not None}
    keys = {key: None for recipe in recipes.values() for key in recipe}  # in order, each once
    rows = {key: {index: recipe[key] for index, recipe in recipes.items() if key in recipe} for key in keys}
    return Comparison(
        runs=runs,
        names=short_names([run.path for run in runs]),
        keys={key: row for key, row in rows.items() if _differs(row, len(recipes))},
        metrics=_metrics(runs),
    )


def short_names(paths: Sequence[Path]) -> list[str]:
    """The paths relative to their common folder."""
    places = [os.path.abspath(path) for path in paths]
    shared = os.path.commonpath([os.path.dirname(place) for place in places])
    return [os.path.relpath(place, shared) for place in places]


def _differs(row: dict[int, Any], count: int) -> bool:
    values = list(row.values())
    return len(values) < count or any(value != values[0] or type(value) is not type(values[0]) for value in values)


def _metrics(runs: Sequence[RunSummary]) -> dict[str, dict[int, float]]:
    """All figures of each run's best validation, the loss first."""
    table: dict[str, dict[int, float]] = {"loss": {}}
    for index, run in enumerate(runs):
        record = run.logged.record("valid", "best")
        for name in record:
            if name not in NOT_FIGURES and (value := number(record, name)) is not None:
                table.setdefault(name, {})[index] = value
    return {name: row for name, row in table.items() if row}
