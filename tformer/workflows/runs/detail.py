"""All of one run: where its recipe departs from its preset, what it ran on, its figures and its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tformer.checkpoint import RunDirectory, catalog, read_checkpoint
from tformer.errors import InputError
from tformer.recipe import load_recipe
from tformer.recipe.recipe import Recipe
from tformer.workflows.runs.summary import RunSummary, best_record, summarise_run
from tformer.workflows.runs.values import OWN, flat_recipe


@dataclass(frozen=True)
class CheckpointLine:
    """One checkpoint: `score` as validation gave it (lower is better), `size_bytes` of the files it names."""

    step: int
    path: Path
    score: float | None
    size_bytes: int | None
    is_latest: bool
    is_best: bool


@dataclass(frozen=True)
class RunDetail:
    """A run at length.

    Attributes:
        base: what the recipe is held against: its preset, or, where it has none that is known here, the defaults.
        differences: {key: {"run": its value, "base": the base's}}; a side that has no such key is left out.
        environment: of its last start; None: not recorded.
        metrics: {split: {first, best, last: record}}; training has no best.
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
    """What is known of a run; what is wrong with it is among the problems of its summary."""
    folder = Path(path)
    summary, run = summarise_run(folder), RunDirectory(folder)
    base, differences = (None, {}) if summary.recipe is None else _against_base(summary.recipe)
    return RunDetail(
        summary=summary,
        base=base,
        differences=differences,
        environment=_environment(run),
        metrics=_metrics(run),
        checkpoints=_checkpoints(run),
    )


def _against_base(recipe: Recipe) -> tuple[str, dict[str, dict[str, Any]]]:
    name, base = _base_of(recipe)
    sides = {"run": flat_recipe(recipe), "base": base}
    differences = {}
    for key in {**sides["run"], **base}:
        values = {side: flat[key] for side, flat in sides.items() if key in flat}
        emptied = len(values) == 1 and next(iter(values.values())) in (None, [], {})  # the other has keys inside
        if key not in OWN and not emptied and (len(values) == 1 or values["run"] != values["base"]):
            differences[key] = values
    return name, differences


def _base_of(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """The preset's recipe as it is today; without one, the defaults of every section that the recipe has."""
    if recipe.preset is not None:
        try:
            preset = load_recipe(arch=recipe.arch, preset=recipe.preset).recipe
            return f"preset {recipe.arch}/{recipe.preset}", flat_recipe(preset)
        except InputError:  # of an older version, or of somebody else
            pass
    set_keys = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return "the defaults", {key: value for key, value in flat_recipe(recipe).items() if not _is_set(set_keys, key)}


def _is_set(data: Any, key: str) -> bool:
    """Whether a dotted key, or what holds it, is among what departs from the defaults."""
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
    except InputError:  # among the problems already
        return None


def _metrics(run: RunDirectory) -> dict[str, dict[str, dict[str, Any]]]:
    try:
        records = list(run.metrics())
    except InputError:  # among the problems already
        return {}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for split in ("train", "valid"):
        own = [record for record in records if record.get("split") == split]
        if own:
            found[split] = {"first": own[0], **_best(own), "last": own[-1]}
    return found


def _best(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    best = best_record(records)
    return {"best": best} if best else {}


def _checkpoints(run: RunDirectory) -> list[CheckpointLine]:
    entries = catalog.scan(run.checkpoints_path)
    latest, best = catalog.latest(entries), catalog.best(entries)
    return [
        CheckpointLine(entry.step, entry.path, entry.score, _size(entry.path), entry is latest, entry is best)
        for entry in entries
    ]


def _size(path: Path) -> int | None:
    try:
        return sum(record.size for record in read_checkpoint(path, verify=False).manifest.files)
    except InputError:  # among the problems already
        return None
