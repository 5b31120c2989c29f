"""Looking at runs: which there are, what each is and came to, and where several differ."""

from __future__ import annotations

from tformer.workflows.runs.compare import (
    Comparison,
    RunDetail,
    compare_runs,
    describe_run,
)
from tformer.workflows.runs.summary import (
    ORDERS,
    RunSummary,
    find_run,
    find_runs,
    in_order,
    summarise_run,
)

__all__ = [
    "ORDERS",
    "Comparison",
    "RunDetail",
    "RunSummary",
    "compare_runs",
    "describe_run",
    "find_run",
    "find_runs",
    "in_order",
    "summarise_run",
]
