"""Table of a sweep: mean and standard deviation over seeds, as Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tformer.metrics import lower_is_better
from tformer.metrics.statistics import Stat
from tformer.support.files import write_text
from tformer.support.formatting import amount, csv_text, finite_number, json_text, mebibytes, minutes_and_seconds
from tformer.workflows.sweep.cells import DONE, TRAINED, Result
from tformer.workflows.sweep.grid import axes_of
from tformer.workflows.sweep.plan import SweepPlan

TWO_DECIMALS = frozenset({"bleu", "chrf"})


@dataclass(frozen=True)
class SweepRow:
    """One variant.

    Attributes:
        failures: number of failed trainings by kind of failure.
        stats: by measure: costs, `valid.NAME` at the best validation, `evaluate.LABEL`.
        metrics: the metric of each judged measure.
        failed_evaluations: by measure, the kind of failure.
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
    """A measure in the table. judged: it has better and worse values, and the best ones of a task are marked."""

    key: str
    title: str
    show: Callable[[float, str], str]
    judged: bool = False


@dataclass(frozen=True)
class SweepTable:
    """Rows in the order of the plan. labels: of the axes; about: a sentence on it.

    summary: what table.json has beside the rows.
    """

    name: str
    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[SweepRow, ...]
    summary: dict[str, Any] = field(default_factory=dict)
    about: str = ""

    @property
    def has_tasks(self) -> bool:
        return len({row.task for row in self.rows}) > 1

    @property
    def headings(self) -> list[str]:
        return [*(["task"] if self.has_tasks else []), *self.labels, *(column.title for column in self.columns)]

    def cells(
        self, row: SweepRow, *, mark: Callable[[str], str] = str, escape: Callable[[str], str] = str
    ) -> list[str]:
        """The row's texts under `headings`, each escaped; `mark` changes the best ones of a task."""
        words = [*([row.task] if self.has_tasks else []), *(row.choices.get(label, "") for label in self.labels)]
        texts, best = map(escape, [*words, *(_text(row, column) for column in self.columns)]), self.best(row)
        return [mark(text) if number in best else text for number, text in enumerate(texts)]

    def best(self, row: SweepRow) -> set[int]:
        """The numbers of the cells in which the row is the best of its task."""
        first = len(self.headings) - len(self.columns)
        return {number for number, column in enumerate(self.columns, first) if self._is_best(row, column)}

    def remarks(self) -> list[str]:
        """Sentences about the table, and about the marks if there are rivals."""
        remarks = [self.about] if self.about else []
        judged = [column for column in self.columns if column.judged]
        rivals = [found for row in self.rows for column in judged if len(found := self._rivals(row, column)) > 1]
        if not rivals:
            return remarks
        noise = "by less than twice the standard error of the difference over the seeds"
        if all(stat.count == 1 for stats in rivals for stat in stats):
            about = "one seed: no variant is marked as the best, as a difference may be chance (--seeds 3 measures it)"
        elif any(map(self.best, self.rows)):
            about = f"bold: the best variant of a task, and those that tie with it: they differ {noise}"
        else:
            about = f"no variant is marked as the best: they differ {noise}"
        return [*remarks, about]

    def _is_best(self, row: SweepRow, column: Column) -> bool:
        """Whether the row ties with the best of its task in a judged column; False if all rows tie."""
        own, rivals = row.stats.get(column.key), self._rivals(row, column)
        if not column.judged or own is None or own not in rivals:
            return False
        best = min(rivals, key=lambda stat: lower_is_better(row.metrics[column.key], stat.mean))
        return own.ties_with(best) and not all(stat.ties_with(best) for stat in rivals)

    def _rivals(self, row: SweepRow, column: Column) -> list[Stat]:
        """The finite values of the row's task in a column; none in a column of another task."""
        metric = row.metrics.get(column.key)
        alike = (other for other in self.rows if other.task == row.task and other.metrics.get(column.key) == metric)
        found = [other.stats[column.key] for other in alike if metric is not None and column.key in other.stats]
        return [stat for stat in found if math.isfinite(stat.mean)]


def show_count(value: float, _: str = "") -> str:
    return f"{value:,.0f}"


COSTS = (
    Column("parameters", "parameters", show_count),
    Column("flops_per_token", "FLOPs/token", lambda value, _: amount(value)),
    Column("seconds", "time s", lambda value, _: f"{value:,.1f}" if value < 100 else f"{value:,.0f}"),
    Column("tokens_per_second", "tokens/s", show_count),
    Column("peak_memory_bytes", "peak MiB", lambda value, _: mebibytes(value)),
    Column("peak_device_bytes", "GPU MiB", lambda value, _: mebibytes(value)),
)


def make_table(plan: SweepPlan, results: Sequence[Result]) -> SweepTable:
    """The table of the results so far, which are in the order of the rows."""
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
    return SweepTable(plan.name, labels, tuple(columns), rows)


def _row(task: str, choices: dict[str, str], results: Sequence[Result]) -> SweepRow:
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
    return SweepRow(task, choices, len(results), dict(failures), stats, metrics, refused)


def measures(result: Result) -> Iterator[tuple[str, float]]:
    """Every number of a result, by its name in columns and files."""
    for column in COSTS:
        value = getattr(result, column.key)
        if value is not None:
            yield column.key, float(value)
    if result.best is not None:
        yield f"valid.{result.metric}", float(result.best)
    for key, value in result.validation.items():
        if key != result.metric and finite_number(value) is not None:
            yield f"valid.{key}", float(value)
    for label, entry in result.evaluate.items():
        if finite_number(entry.get("value")) is not None:
            yield f"evaluate.{label}", float(entry["value"])


def _text(row: SweepRow, column: Column) -> str:
    stat, metric = row.stats.get(column.key), row.metrics.get(column.key, "")
    if not column.judged:
        return "" if stat is None else column.show(stat.mean, metric)
    if column.key not in row.metrics and column.key not in row.failed_evaluations:
        return ""  # of another task
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


def ended_line(result: Result, number: int, total: int, seconds: float | None) -> str:
    """One line about a training that has ended; seconds: None: it was finished before."""
    if result.best is not None and result.status == DONE:
        text = f"{result.metric} {show_metric(result.best, result.metric)} at step {result.best_step}"
    else:
        text = ": ".join(part for part in (result.status, result.message) if part)
    for label, entry in result.evaluate.items():
        value = entry.get("value")
        text += f", {label} {show_metric(value, entry['metric']) if value is not None else entry.get('failure')}"
    took = "finished before" if seconds is None else minutes_and_seconds(seconds)
    return f"{number} of {total}  {result.cell}  {text}  {took}"


OF_A_CELL = ("status", "message", "steps", "tokens", "metric", "best_step")
CURVES = ("curve", "training_curve")


def write_tables(plan: SweepPlan, table: SweepTable, results: Sequence[Result], out: Path) -> None:
    """table.md, table.tex, table.csv (a row a variant), cells.csv (a row a training) and table.json, each whole."""
    write_text(out / "table.md", markdown(table) + "".join(f"\n{remark}\n" for remark in table.remarks()))
    write_text(out / "table.tex", latex(table))
    variants = []
    for row in table.rows:
        failed = sum(row.failures.values())
        cells: dict[str, Any] = {"task": row.task, **{label: row.choices.get(label, "") for label in table.labels}}
        cells |= {"seeds": row.seeds, "failed": failed, "failures": ", ".join(row.failures)}
        for key, stat in row.stats.items():
            cells |= {key: stat.mean, f"{key}.sd": stat.deviation}
        variants.append(cells)
    write_text(out / "table.csv", _csv(variants))
    trainings = [
        {"task": result.task, **{label: result.choices.get(label, "") for label in table.labels}, "seed": result.seed}
        | {name: getattr(result, name) for name in OF_A_CELL}
        | dict(measures(result))
        for result in results
    ]
    write_text(out / "cells.csv", _csv(trainings))
    write_text(out / "table.json", json_text(document(plan, table, results), indent=1))


def markdown(table: SweepTable) -> str:
    """The table as Markdown, the best ones of each task in bold."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    numbers = len(table.columns)
    rule = ["---"] * (len(table.headings) - numbers) + ["---:"] * numbers
    rows = [table.cells(row, mark=lambda text: f"**{text}**") for row in table.rows]
    return "\n".join(map(line, [table.headings, rule, *rows])) + "\n"


LATEX = str.maketrans(
    {
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
        **{letter: f"{{{letter}}}" for letter in "[*"},  # after a row's end they would be read as its options
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"},
        **dict.fromkeys(map(chr, (*range(32), *range(127, 160))), " "),  # control characters
    }
)


def latex(table: SweepTable) -> str:
    """The table as a LaTeX tabular with rules of booktabs, for \\input; the best ones of each task in bold."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(cells) + r" \\"

    def escape(text: str) -> str:
        return text.translate(LATEX)

    lines, task = [line(list(map(escape, table.headings)))], None
    for row in table.rows:
        lines += [r"\midrule"] if row.task != task else []
        lines.append(line(table.cells(row, mark=lambda text: rf"\textbf{{{text}}}", escape=escape)))
        task = row.task
    numbers = len(table.columns)
    columns = "l" * (len(table.headings) - numbers) + "r" * numbers
    comments = [f"% {remark}" for remark in [r"needs \usepackage{booktabs}", *table.remarks()]]
    rows = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *lines, r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*comments, *rows]) + "\n"


def document(plan: SweepPlan, table: SweepTable, results: Sequence[Result]) -> dict[str, Any]:
    """The JSON document of `--json`: everything but the curves."""
    cells = [{key: value for key, value in asdict(result).items() if key not in CURVES} for result in results]
    rows = [asdict(row) | {"text": dict(zip(table.headings, table.cells(row), strict=True))} for row in table.rows]
    axes = list(table.labels)
    shown = {"name": plan.name, "axes": axes, "columns": table.headings, **table.summary}
    return {**shown, "rows": rows, "cells": cells}


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with different keys as CSV: the columns are the union of the keys."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    return csv_text([names, *([row.get(name, "") for name in names] for row in rows)])
