"""Terminal output of a training: a live line on a terminal, plain lines in a pipe; records go to metrics.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console as Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column

from tformer.recipe.recipe import Recipe
from tformer.support.errors import visible
from tformer.support.formatting import clock, fitted, short_rate
from tformer.workers.work import Progress as WorkProgress
from tformer.workers.work import no_progress

COLUMNS_OF_A_BAR = 110
"""Columns of a terminal in which the bar and the figures share one line."""

PLAIN_INTERVAL_SECONDS = 2.0
"""Minimum time between two training lines in a pipe."""

SHOWN_METRICS = {
    "perplexity": "perplexity {:,.2f}",
    "bits_per_byte": "{:.3f} bits per byte",
    "accuracy": "accuracy {:.4f}",
    "sequence_accuracy": "whole sequences {:.4f}",
    "bleu": "BLEU {:.2f}",
    "chrf": "chrF {:.2f}",
    "f1_macro": "macro F1 {:.4f}",
    "f1_micro": "micro F1 {:.4f}",
    "pearson": "Pearson {:.4f}",
    "spearman": "Spearman {:.4f}",
}
"""Metrics that a validation line shows beside the loss, with their formats."""

LABEL_WIDTH = 24


def formats_of(recipe: Recipe) -> dict[str, str]:
    """Formats of further metrics of a recipe: F1 of the second of two classes; the best_metric, whatever it is."""
    labels, formats = recipe.data.labels, {}
    if len(labels) == 2:
        positive = fitted(visible(labels[1]), LABEL_WIDTH).replace("{", "{{").replace("}", "}}")
        formats["f1_binary"] = f"F1 {{:.4f}} of '{positive}'"
    if recipe.training.best_metric == "mcc":
        formats["mcc"] = "Matthews correlation {:.4f}"
    return formats


class TrainingDisplay:
    """Shows the steps, records and samples of a training.

    processes: that train together; a rate is shown for all and for each.
    seconds_left: expected after this step, validations included; None: not known yet.
    progress: shows the parts of a training that take long, as `tformer.tasks.base.Work.progress` does.
    shown_metrics: formats of further metrics in the line of a validation.
    """

    def __init__(
        self,
        console: Console,
        *,
        max_steps: int,
        first_step: int = 0,
        unit: str = "tok",
        processes: int = 1,
        progress: WorkProgress = no_progress,
        seconds_left: Callable[[int], float | None] = lambda step: None,
        shown_metrics: Mapping[str, str] | None = None,
    ) -> None:
        self.console = console
        self.max_steps, self.unit, self._processes = max_steps, unit, processes
        self._first_step = first_step
        self._last_plain = -math.inf
        self._progress: Progress | None = None
        self._live: Live | None = None
        self._progress_of = progress
        self._seconds_left = seconds_left
        self._shown_metrics = SHOWN_METRICS | dict(shown_metrics or {})
        self._report: Callable[..., None] = lambda *_: None  # of steps, in a pipe
        self._stack = ExitStack()

    def __enter__(self) -> TrainingDisplay:
        if self.console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                *((BarColumn(bar_width=16),) if self.console.width >= COLUMNS_OF_A_BAR else ()),
                TextColumn("{task.fields[status]}", table_column=Column(overflow="fold")),  # wraps where it is narrow
                console=self.console,
            )
            self._task = self._progress.add_task("train", total=self.max_steps, completed=self._first_step, status="")
            self._live = Live(self._progress, console=self.console, transient=True, refresh_per_second=4)
            self._stack.enter_context(self._live)
        else:
            self._report = self._stack.enter_context(self._progress_of("training", total=self.max_steps, unit="steps"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @contextmanager
    def progress(self, description: str, total: float | None = None, unit: str = "") -> Iterator[Callable[..., None]]:
        """The progress of a part of the training, such as a validation, in place of the live line."""
        if self._live is not None:
            self._live.stop()
        try:
            with self._progress_of(description, total=total, unit=unit) as report:
                yield report
        finally:
            if self._live is not None:
                self._live.start()

    def stepped(self, step: int) -> None:
        """Count a step; its loss is shown by the next log line."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        self._report(step, self.max_steps)

    def log(self, record: dict[str, Any]) -> None:
        """Show the record of the last steps, or of a validation."""
        if record["split"] != "train":
            self._show_validation(record)
            return
        status = self._status(record)
        if self._progress is not None:
            self._progress.update(self._task, completed=record["step"], status=status)
        elif time.monotonic() - self._last_plain >= PLAIN_INTERVAL_SECONDS or record["step"] == self.max_steps:
            self._last_plain = time.monotonic()
            self.console.print(f"step {record['step']}/{self.max_steps}  {status}", markup=False)

    def _show_validation(self, record: dict[str, Any]) -> None:
        loss = "all held-out data: loss" if record["split"] == "final" else "valid loss"
        parts = [f"{loss} {record['loss']:.4f}"]
        parts += [
            form.format(record[name]) for name, form in self._shown_metrics.items() if record.get(name) is not None
        ]
        best = "  (best)" if record["is_best"] else ""
        self.console.print(f"[bold]step {record['step']}[/]  {escape(', '.join(parts))}{best}")

    def set_last_step(self, max_steps: int) -> None:
        """Take another step for the last one."""
        self.max_steps = max_steps
        if self._progress is not None:
            self._progress.update(self._task, total=max_steps)

    def skipped(self, step: int) -> None:
        self.console.print(f"[yellow]step {step}: the gradient is not finite; the step is skipped[/]")

    def sample(self, text: str) -> None:
        """Show a sample of the model's output."""
        self.console.print(f"[dim]{escape(visible(text.rstrip()))}[/]")

    def _status(self, record: dict[str, Any]) -> str:
        loss = "n/a" if record["loss"] is None else f"{record['loss']:.4f}"
        rate = record["tokens_per_second"]
        terms = [f"{key.removesuffix('_loss')} {value:.4f}" for key, value in record.items() if key.endswith("_loss")]
        terms += [form.format(record[name]) for name, form in self._shown_metrics.items() if name in record]
        parts = [f"loss {loss}", *terms, f"lr {record['lr']:.2e}", f"{short_rate(rate)} {self.unit}/s"]
        if self._processes > 1:
            parts[-1] += f" ({short_rate(rate / self._processes)} each)"
        if record.get("peak_share"):
            parts.append(f"{100 * record['peak_share']:.0f} % of peak")
        left = self._seconds_left(record["step"])
        if left is not None and record["step"] < self.max_steps:
            parts.append(f"ETA {clock(left)}")
        return "  ".join(parts)
