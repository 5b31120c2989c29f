"""Orders of a list of runs, each with the end first that a person looks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tformer.training.loop import HIGHER_IS_BETTER
from tformer.workflows.runs.summary import RunSummary


def _metric(run: RunSummary) -> tuple[str, float] | None:
    """Runs of one metric stand together, the best first."""
    if run.best is None:
        return None
    sign = -1 if run.best.metric in HIGHER_IS_BETTER else 1
    return run.best.metric, sign * run.best.value


def _largest(value: float | None) -> float | None:
    return None if value is None else -value


ORDERS: dict[str, Callable[[RunSummary], Any]] = {
    "newest": lambda run: -run.updated,
    "name": lambda run: str(run.path),
    "metric": _metric,
    "parameters": lambda run: _largest(run.parameters),
    "step": lambda run: _largest(run.step),
    "seconds": lambda run: _largest(run.seconds),
    "size": lambda run: -run.size_bytes,
}


def in_order(runs: Iterable[RunSummary], order: str = "newest") -> list[RunSummary]:
    """By a key of `ORDERS`; runs of which it is not known come last, equal ones by path."""
    key = ORDERS[order]
    return sorted(runs, key=lambda run: ((value := key(run)) is None, value if value is not None else 0, str(run.path)))
