"""Results over seeds: each measure's mean and sample standard deviation, one row a variant."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tformer.training.loop import HIGHER_IS_BETTER
from tformer.workflows.sweep.grid import axes_of
from tformer.workflows.sweep.plan import Plan
from tformer.workflows.sweep.results import DONE, TRAINED, Result

TWO_DECIMALS = frozenset({"bleu", "chrf"})
SUFFIXES = ("", " k", " M", " G", " T", " P")


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation (n - 1) over `count` seeds; of one seed no deviation."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Stat | None:
        """None for no values; values that are not finite give what is not finite."""
        if not values:
            return None
        if len(values) == 1 or not all(map(math.isfinite, values)):
            return cls(sum(values) / len(values), None, len(values))
        return cls(statistics.fmean(values), statistics.stdev(values), len(values))


@dataclass(frozen=True)
class Row:
    """One variant. `failures` counts its trainings that came to nothing, by how they failed.

    stats: by measure: costs, `valid.NAME` for what was measured at the best validation, `evaluate.LABEL`.
    metrics: of each judged measure, the metric that it is. failed_evaluations: by measure, how they failed.
    """

    task: str
    choices: dict[str, str]
    seeds: int
    failures: dict[str, int]
    stats: dict[str, Stat]
    metrics: dict[str, str]
    failed_evaluations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """A measure as the table shows it. judged: better and worse exist, so that the best of a task is marked."""

    key: str
    title: str
    show: Callable[[float, str], str]
    judged: bool = False


@dataclass(frozen=True)
class Table:
    """Rows in the plan's order; `labels` are the axes'."""

    name: str
    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def has_tasks(self) -> bool:
        return len({row.task for row in self.rows}) > 1

    @property
    def headings(self) -> list[str]:
        return [*(["task"] if self.has_tasks else []), *self.labels, *(column.title for column in self.columns)]

    def cells(self, row: Row, *, mark: Callable[[str], str] = str) -> list[str]:
        """The row's texts under `headings`; `mark` is put around the best of a task."""
        texts = [*([row.task] if self.has_tasks else []), *(row.choices.get(label, "") for label in self.labels)]
        for column in self.columns:
            text = _text(row, column)
            texts.append(mark(text) if column.judged and self._is_best(row, column) else text)
        return texts

    def _is_best(self, row: Row, column: Column) -> bool:
        def score(other: Row) -> float | None:
            stat = other.stats.get(column.key)
            if stat is None or not math.isfinite(stat.mean) or other.metrics.get(column.key) != metric:
                return None
            return stat.mean if metric in HIGHER_IS_BETTER else -stat.mean

        metric = row.metrics.get(column.key)
        if metric is None:
            return False  # another task's column
        own = score(row)
        rivals = [value for other in self.rows if other.task == row.task and (value := score(other)) is not None]
        return own is not None and min(rivals) < own == max(rivals)


COSTS = (
    Column("parameters", "parameters", lambda value, _: f"{value:,.0f}"),
    Column("flops_per_token", "FLOPs/token", lambda value, _: si(value)),
    Column("seconds", "time s", lambda value, _: f"{value:,.1f}" if value < 100 else f"{value:,.0f}"),
    Column("tokens_per_second", "tokens/s", lambda value, _: f"{value:,.0f}"),
    Column("peak_memory_bytes", "peak MiB", lambda value, _: f"{value / 2**20:,.0f}"),
    Column("peak_device_bytes", "GPU MiB", lambda value, _: f"{value / 2**20:,.0f}"),
)


def make_table(plan: Plan, results: Sequence[Result]) -> Table:
    """The table of what has been run so far; `results` in the order of their rows."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[Result]] = {}
    for result in results:
        groups.setdefault((result.task, tuple(result.choices.items())), []).append(result)
    rows = tuple(_row(task, dict(choices), group) for (task, choices), group in groups.items())
    labels = tuple(dict.fromkeys(axis.label for task in plan.tasks for axis in axes_of(task)))
    metrics = dict.fromkeys(result.metric for result in results)
    evaluations = dict.fromkeys(label for task in plan.tasks for label in task.evaluate)
    columns = [column for column in COSTS if any(column.key in row.stats for row in rows)]
    columns += [Column(f"valid.{metric}", metric, show_metric, judged=True) for metric in metrics]
    columns += [Column(f"evaluate.{label}", label, show_metric, judged=True) for label in evaluations]
    return Table(plan.name, labels, tuple(columns), rows)


def _row(task: str, choices: dict[str, str], results: Sequence[Result]) -> Row:
    good = [result for result in results if result.status in (DONE, TRAINED)]
    values: dict[str, list[float]] = {}
    metrics: dict[str, str] = {}
    refused: dict[str, str] = {}
    for result in good:
        for key, value in measures(result):
            values.setdefault(key, []).append(value)
        for label, entry in result.evaluate.items():
            if "failure" in entry:
                refused[f"evaluate.{label}"] = entry["failure"]
            else:
                metrics[f"evaluate.{label}"] = entry["metric"]
    for result in results:
        metrics[f"valid.{result.metric}"] = result.metric
    failures = Counter(result.status for result in results if result not in good)
    stats = {key: stat for key, found in values.items() if (stat := Stat.of(found)) is not None}
    return Row(task, choices, len(results), dict(failures), stats, metrics, refused)


def measures(result: Result) -> Iterator[tuple[str, float]]:
    """Every number of a result, by the name that columns and files know it by."""
    for column in COSTS:
        value = getattr(result, column.key)
        if value is not None:
            yield column.key, float(value)
    if result.best is not None:
        yield f"valid.{result.metric}", float(result.best)
    for key, value in result.validation.items():
        if key != result.metric and _is_number(value):
            yield f"valid.{key}", float(value)
    for label, entry in result.evaluate.items():
        if _is_number(entry.get("value")):
            yield f"evaluate.{label}", float(entry["value"])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(row: Row, column: Column) -> str:
    stat, metric = row.stats.get(column.key), row.metrics.get(column.key, "")
    if not column.judged:
        return "" if stat is None else column.show(stat.mean, metric)
    if column.key not in row.metrics and column.key not in row.failed_evaluations:
        return ""  # another task's
    parts = []
    if stat is not None:
        spread = "" if stat.deviation is None else f" ± {column.show(stat.deviation, metric)}"
        parts.append(column.show(stat.mean, metric) + spread)
    elif column.key in row.failed_evaluations:
        parts.append(row.failed_evaluations[column.key])
    if column.key.startswith("valid."):
        failed = [word if count == row.seeds else f"{count} of {row.seeds} {word}"
                  for word, count in row.failures.items()]  # fmt: skip
        parts += [", ".join(failed)] if failed and not parts else [f"({', '.join(failed)})"] if failed else []
    return " ".join(parts)


def show_metric(value: float, metric: str) -> str:
    return f"{value:.2f}" if metric in TWO_DECIMALS else f"{value:.4f}"


def si(value: float) -> str:
    """Three digits and a suffix: 5.31 M."""
    power = 0
    while value >= 999.5 and power < len(SUFFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g}{SUFFIXES[power]}"
