"""What `bench quality` found, for people and programs: one line for each seed, mean and spread."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from tformer.bench.quality import QualityBench, QualityRow, spread_of
from tformer.bench.table import Table, markdown, show_bytes

SPREADS = ("seconds", "loss", "training_seconds", "tokens_per_second")


def quality_table(bench: QualityBench, rows: Sequence[QualityRow]) -> Table:
    """Seed after seed, and mean ± standard deviation."""
    headings = ("seed", "seconds from process start", "validation loss", "step", "in steps", "tokens/s", "peak memory")
    made = [_cells(row, len(headings)) for row in rows]
    if sum(row.failed is None for row in rows) > 1:
        of = {name: [getattr(row, name) for row in rows] for name in SPREADS}
        numbers = (
            _spread(of["seconds"], 1),
            _spread(of["loss"], 4),
            "",
            _spread(of["training_seconds"], 1),
            _spread(of["tokens_per_second"], 0),
            "",
        )
        made.append(("mean ± std", *numbers))
    return Table(f"bench quality: {settings_line(bench)}", headings, tuple(made))


def _cells(row: QualityRow, width: int) -> tuple[str, ...]:
    if row.failed is not None:
        return (str(row.seed), row.failed, *[""] * (width - 2))
    missed = "" if row.reached is not False else " (target not reached)"
    return (
        str(row.seed),
        _number(row.seconds, 1),
        _number(row.loss, 4) + missed,
        _number(row.steps, 0),
        _number(row.training_seconds, 1),
        _number(row.tokens_per_second, 0),
        "" if row.peak_rss_bytes is None else show_bytes(row.peak_rss_bytes),
    )


def _number(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:,.{decimals}f}"


def _spread(values: Sequence[float | None], decimals: int) -> str:
    found = spread_of(values)
    if found is None:
        return ""
    return _number(found.mean, decimals) + ("" if found.std is None else f" ± {_number(found.std, decimals)}")


def settings_line(bench: QualityBench) -> str:
    """What was trained, and to what."""
    until = "to the end" if bench.target is None else f"to a loss of {bench.target:g}"
    return ", ".join([f"{bench.arch}/{bench.preset}", *bench.sets, until, bench.device])


def quality_title(bench: QualityBench) -> str:
    """A heading."""
    until = "" if bench.target is None else f" to a validation loss of {bench.target:g}"
    return f"Time to quality, {bench.arch}/{bench.preset}{until}"


def quality_section(bench: QualityBench, rows: Sequence[QualityRow]) -> str:
    """One case of a report as Markdown: heading, command, table."""
    return "\n\n".join(
        [f"## {quality_title(bench)}", f"    {quality_command(bench)}", markdown(quality_table(bench, rows))]
    )


def quality_document(
    bench: QualityBench, rows: Sequence[QualityRow], *, environment: dict[str, Any], command: str
) -> dict[str, Any]:
    """Everything, as `--json` prints it."""
    spreads = {name: spread_of([getattr(row, name) for row in rows]) for name in SPREADS}
    return {
        "command": command,
        "environment": environment,
        "settings": bench.to_json(),
        "rows": [asdict(row) for row in rows],
        "spread": {name: None if found is None else asdict(found) for name, found in spreads.items()},
    }


def quality_command(bench: QualityBench) -> str:
    """The command that asks for the same; defaults are left out."""
    words = ["tformer", "bench", "quality"]
    usual = {field.name: field.default for field in fields(QualityBench)}
    for name in ("arch", "preset", "data", "valid", "target", "seeds", "device", "threads", "max_seconds"):
        value = getattr(bench, name)
        if value != usual[name]:
            shown = ",".join(map(str, value)) if name == "seeds" else f"{value:g}" if name == "target" else str(value)
            words += [f"--{name.replace('_', '-')}", shown]
    return shlex.join([*words, *(word for text in bench.sets for word in ("--set", text))])
