"""`bench train`, `generate`, ...: what is asked, who runs, and the order of measuring.

At each batch size one process measures what the machine can do at most, and ends; then every contender gets a process
of its own, which tells its times, in turn with the others, and its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from tformer.bench.isolate import run_isolated
from tformer.bench.race import race
from tformer.bench.task import OURS, Task
from tformer.recipe import recipe_from_yaml
from tformer.recipe.recipe import Recipe


class Entry(NamedTuple):
    """A contender by name. precision: empty where nothing is multiplied."""

    name: str
    precision: str

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}".strip()


@dataclass(frozen=True)
class SpeedBench:
    """What to measure; it travels to other processes as JSON.

    Attributes:
        model: what the model is called in a report.
        recipe_yaml: with every size decided.
        precision: of our products, `auto` resolved; entries: who runs.
        options: the work's own.
        max_seconds: of one measuring process, starting Python included, others' turns not.
    """

    work: str
    model: str
    recipe_yaml: str
    entries: tuple[Entry, ...]
    batch_sizes: tuple[int, ...]
    length: int
    precision: str
    device: str
    compile: bool = False
    threads: int | None = None
    repeats: int = 10
    max_seconds: float = 600.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SpeedBench:
        entries = tuple(Entry(*entry) for entry in document["entries"])
        return cls(**{**document, "entries": entries, "batch_sizes": tuple(document["batch_sizes"])})

    @property
    def recipe(self) -> Recipe:
        return recipe_from_yaml(self.recipe_yaml, name="the recipe")


@dataclass(frozen=True)
class Row:
    """One contender at one batch size: what was measured, or why nothing was.

    Attributes:
        seconds, spread, repeats: of a round (median; quartile distance as a share of it).
        tokens: of a round; cost: its `task.Cost` as a mapping.
        memory: peak_rss_bytes, and on a GPU peak_gpu_bytes, of its process.
        ceilings: of the machine, measured just before; None where nothing is multiplied.
        alone: memory was too small beside the others, so that its rounds were not in turn with theirs.
    """

    entry: Entry
    batch_size: int
    seconds: float = 0.0
    spread: float = 0.0
    repeats: int = 0
    tokens: int = 0
    cost: Mapping[str, Any] | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    ceilings: Mapping[str, Any] | None = None
    failed: str | None = None
    alone: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def is_ours(self) -> bool:
        return self.entry.name == OURS


Told = Callable[[Row], None]
"""Called with each row when it is known."""


def task_of(bench: SpeedBench, batch_size: int) -> Task:
    """The work at one of its batch sizes, for the process that does it."""
    return Task(
        work=bench.work,
        recipe=bench.recipe,
        batch_size=batch_size,
        length=bench.length,
        precision=bench.precision,
        device=torch.device(bench.device),
        compile=bench.compile,
        options=bench.options,
    )


def run_speed(bench: SpeedBench, *, told: Told, should_stop: Callable[[], bool]) -> list[Row] | None:
    """Every row, batch size after batch size, in the order of the entries; None when stopped."""
    rows: list[Row] = []
    for batch_size in bench.batch_sizes:
        found = _at(bench, batch_size, should_stop)
        if found is None:
            return None
        for row in found:
            told(row)
        rows += found
    return rows


def _at(bench: SpeedBench, batch_size: int, should_stop: Callable[[], bool]) -> list[Row] | None:
    given = {"bench": bench.to_json(), "batch_size": batch_size}
    bounds = run_isolated("bounds", given, max_seconds=bench.max_seconds, should_stop=should_stop)
    if bounds is None:
        return None
    if "failed" in bounds:
        return [Row(entry, batch_size, failed=f"{bounds['failed']} (ceilings)") for entry in bench.entries]
    raced = race(
        [{**given, "name": entry.name, "precision": entry.precision} for entry in bench.entries],
        repeats=bench.repeats,
        max_seconds=bench.max_seconds,
        should_stop=should_stop,
    )
    if raced is None:
        return None
    return [
        Row(entry, batch_size, failed=row["failed"])
        if "failed" in row
        else Row(
            entry,
            batch_size,
            seconds=row["median"],
            spread=row["spread"],
            repeats=row["repeats"],
            tokens=row["tokens"],
            cost=cost,
            memory=row["memory"],
            ceilings=bounds["ceilings"],
            alone=row.get("alone", False),
        )
        for entry, row, cost in zip(bench.entries, raced, bounds["costs"], strict=True)
    ]
