"""Several runs side by side: the recipe's keys in which they differ, then what they came to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tformer.checkpoint.logs import read_metrics
from tformer.errors import InputError
from tformer.workflows.runs.summary import RunSummary, best_record, number, summarise_run
from tformer.workflows.runs.values import flat_recipe

NOT_FIGURES = ("step", "examples")


@dataclass(frozen=True)
class Comparison:
    """Rows of one value for each run, in the order that the runs were named.

    Attributes:
        keys: {key of the recipe: value of each run that has the key, by its number}.
        metrics: {figure: value of each run that measured it, by its number}, at the run's best validation.
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
    """Raises InputError for fewer than two runs, or one named twice; a damaged run is compared as far as it goes."""
    places = [os.path.realpath(path) for path in paths]
    twice = next((str(path) for path, place in zip(paths, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice")
    if len(paths) < 2:
        raise InputError(
            f"comparing takes two runs or more, found {len(paths)}", hint="one alone: tformer runs show RUN"
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
    """The paths without the folders that all of them share."""
    places = [os.path.abspath(path) for path in paths]
    shared = os.path.commonpath([os.path.dirname(place) for place in places])
    return [os.path.relpath(place, shared) for place in places]


def _differs(row: dict[int, Any], count: int) -> bool:
    values = list(row.values())
    return len(values) < count or any(value != values[0] or type(value) is not type(values[0]) for value in values)


def _metrics(runs: Sequence[RunSummary]) -> dict[str, dict[int, float]]:
    """Whatever was measured at each run's best validation; the loss first."""
    table: dict[str, dict[int, float]] = {"loss": {}}
    for index, run in enumerate(runs):
        try:
            record = best_record(list(read_metrics(run.path / "metrics.jsonl")))
        except (InputError, OSError):  # among the run's problems already
            continue
        for name in record:
            if name not in NOT_FIGURES and (value := number(record, name)) is not None:
                table.setdefault(name, {})[index] = value
    return {name: row for name, row in table.items() if row}
