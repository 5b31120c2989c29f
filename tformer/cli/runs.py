"""`tformer runs`: list the runs on disk, show one in detail, compare several."""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from tformer.cli.command import CommandGroup, examples, takes_options
from tformer.cli.report import emit_json, emit_lines, show_notes, terminal_width
from tformer.support.bounds import Positive
from tformer.support.formatting import aligned, as_cell, decimal_bytes, duration, short_count
from tformer.support.options import Json, argument, option

if TYPE_CHECKING:
    from tformer.workflows.runs.compare import Comparison, RunDetail
    from tformer.workflows.runs.summary import RunSummary

Order = Literal["newest", "name", "metric", "parameters", "step", "seconds", "size"]

app = CommandGroup(
    help="List, show and compare the runs of `tformer train`.",
    examples=examples(
        "`tformer runs list`", "`tformer runs show runs/gpt-tiny-1`", "`tformer runs compare runs/a runs/b`"
    ),
)


@dataclass(frozen=True)
class RunsListOptions:
    folders: Annotated[
        tuple[Path, ...],
        argument("FOLDER", help="Folders to search, subfolders (of a sweep) included.", default="runs/"),
    ] = ()
    sort: Annotated[
        Order, option("--sort", metavar="KEY", help=f"{', '.join(get_args(Order))}: the largest or best first.")
    ] = "newest"
    limit: Annotated[Positive | None, option("--limit", metavar="N", help="Show only the first N.")] = None
    as_json: Json = False


@dataclass(frozen=True)
class RunsShowOptions:
    run: Annotated[str | None, argument("RUN", help="A run, or its name under runs/.", default="the newest")] = None
    as_json: Json = False


@dataclass(frozen=True)
class RunsCompareOptions:
    runs: Annotated[tuple[str, ...], argument("RUN", help="Two runs or more.")]
    as_json: Json = False


@app.command(
    "list",
    epilog=examples(
        "`tformer runs list`",
        "`tformer runs list sweeps/norms --sort metric --limit 5`",
        "`tformer runs list runs sweeps --json`",
    ),
)
@takes_options
def list_(options: RunsListOptions) -> None:
    """List runs, the newest first: state, steps, best validation, parameters, time and size on disk.

    Imported models are among them. A damaged run is listed with its problems.
    """
    if not options.folders and not Path("runs").is_dir():
        show_notes(["there is no runs/ here: train a model first, or name a folder of runs"])
        if options.as_json:
            emit_json([])
        return
    from tformer.workflows.runs.summary import find_runs, in_order, summarize_run

    runs = in_order(map(summarize_run, find_runs(options.folders or ["runs"])), options.sort)
    shown = runs[: options.limit]
    if options.as_json:
        emit_json([run.to_json() for run in shown])
        return
    emit_lines(list_lines(shown, width=terminal_width()))
    many = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    show_notes([many if len(shown) == len(runs) else f"{len(shown)} of {many}"])


@app.command(
    epilog=examples(
        "`tformer runs show`", "`tformer runs show runs/gpt-tiny-1`", "`tformer runs show gpt-tiny-1 --json`"
    )
)
@takes_options
def show(options: RunsShowOptions) -> None:
    """Show one run: differences from its preset, environment, data, metrics and checkpoints."""
    from tformer.workflows.runs.compare import describe_run
    from tformer.workflows.runs.summary import find_run

    detail = describe_run(find_run(options.run))
    if options.as_json:
        emit_json(detail.to_json())
    else:
        emit_lines(show_lines(detail))


@app.command(
    epilog=examples(
        "`tformer runs compare runs/gpt-tiny-1 runs/gpt-tiny-2`",
        "`tformer runs compare gpt-tiny-1 gpt-tiny-2 llama-tiny-1`",
        "`tformer runs compare runs/a runs/b --json`",
    )
)
@takes_options
def compare(options: RunsCompareOptions) -> None:
    """Compare runs: the recipe keys that differ, side by side, then metrics, parameters, time and speed."""
    from tformer.workflows.runs.compare import compare_runs
    from tformer.workflows.runs.summary import find_run

    comparison = compare_runs([find_run(name) for name in options.runs])
    if options.as_json:
        emit_json(comparison.to_json())
    else:
        emit_lines(compare_lines(comparison, width=terminal_width()))


UNKNOWN = "-"
DROPPED_FIRST = ("size", "parameters", "time", "recipe")  # columns of the list that a narrow terminal omits first
NUMBERS = frozenset({"step", "parameters", "time", "size"})


def list_lines(runs: Sequence[RunSummary], *, width: int | None = None) -> Iterator[str]:
    """A line for each run, followed by its problems; as many columns as fit into `width`."""
    if not runs:
        return
    rows = [_facts(run, short_count) for run in runs]
    names = list(rows[0])
    for dropped in (None, *DROPPED_FIRST):
        names = [name for name in names if name != dropped]
        table = aligned([names, *([row[name] for name in names] for row in rows)], right=NUMBERS & set(names))
        if width is None or max(map(len, table)) <= width:
            break
    else:
        for run, row in zip(runs, rows, strict=True):
            yield from (row["run"], f"  {row['state']}, step {row['step']}", f"  best {row['best']}")
            yield from _problem_lines(run)
        return
    yield table[0]
    for line, run in zip(table[1:], runs, strict=True):
        yield line
        yield from _problem_lines(run)


def _facts(run: RunSummary, count: Callable[[int], str] = "{:,}".format) -> dict[str, str]:
    """The columns that the commands show for a run. count: formats the number of parameters."""
    step, of_all = run.step, "" if run.max_steps is None else f"/{run.max_steps}"
    return {
        "run": as_cell(str(run.path)),
        "recipe": as_cell(run.kind or UNKNOWN),
        "state": run.state,
        "step": (UNKNOWN if step is None else str(step)) + of_all,
        "best": UNKNOWN if (best := run.best) is None else f"{best.metric} {figure(best.value)} @ {best.step}",
        "parameters": UNKNOWN if run.parameters is None else count(run.parameters),
        "time": UNKNOWN if run.seconds is None else duration(run.seconds),
        "size": decimal_bytes(run.size_bytes),
    }


def _problem_lines(run: RunSummary) -> Iterator[str]:
    for problem in run.problems:
        yield f"  ! {as_cell(problem)}"


def show_lines(detail: RunDetail) -> Iterator[str]:
    """All details of one run, section after section."""
    run = detail.summary
    facts, rate = _facts(run), run.tokens_per_second
    facts["time"] += "" if rate is None else f", {rate:,.0f} tokens/s"
    updated = datetime.datetime.fromtimestamp(run.updated).isoformat(" ", "seconds") if run.updated else UNKNOWN
    yield from aligned([*map(list, facts.items()), ["updated", updated]])
    yield from _problem_lines(run)
    if detail.base is not None:
        yield from ("", f"differs from {detail.base} in {len(detail.differences)} keys")
        for key, sides in detail.differences.items():
            own = text_of(sides["run"]) if "run" in sides else UNKNOWN
            yield f"  {key}: {own}" + (f"  ({text_of(sides['base'])})" if "base" in sides else "")
    yield from _environment_lines(detail.environment)
    for split, records in detail.metrics.items():
        yield from ("", {"train": "training", "valid": "validation", "final": "all held-out data"}[split])
        yield from _record_table(records)
    if detail.checkpoints:
        yield from ("", "checkpoints")
        yield from _checkpoint_lines(detail)


def _environment_lines(environment: dict[str, Any] | None) -> Iterator[str]:
    if environment is None:
        return
    command, versions = environment.get("command"), environment.get("versions")
    facts = {key: environment.get(key) for key in ("started", "device", "platform", "python")}
    facts["versions"] = ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else None
    facts |= {"commit": environment.get("git_commit"), "data": environment.get("data_fingerprint")}
    facts["command"] = shlex.join(map(str, command)) if isinstance(command, list) else None
    yield from ("", "environment of its last start")
    known = [["", key, as_cell(str(value))] for key, value in facts.items() if value is not None]
    yield from aligned(known) if known else ()


def _record_table(records: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A row for each figure; columns: first, best and last record."""
    figures = {
        key: None
        for record in records.values()
        for key, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    rows = [["", name, *(figure(record.get(name)) for record in records.values())] for name in figures]
    yield from aligned([["", "", *records], *rows], right=set(records))


def _checkpoint_lines(detail: RunDetail) -> Iterator[str]:
    rows = [
        [
            "",
            f"step {line['step']:,}",
            "" if line["score"] is None else f"score {figure(line['score'])}",
            UNKNOWN if line["size_bytes"] is None else decimal_bytes(line["size_bytes"]),
            ", ".join(word for word in ("latest", "best") if line[word]),
        ]
        for line in detail.checkpoints
    ]
    yield from aligned(rows)


def compare_lines(comparison: Comparison, *, width: int | None = None) -> Iterator[str]:
    """A row for each different key and each figure, a column for each run; a block for each row where too wide."""
    runs = comparison.runs
    recipe = [
        [key, *(text_of(row[index]) if index in row else UNKNOWN for index in range(len(runs)))]
        for key, row in comparison.keys.items()
    ]
    columns = [
        _facts(run)
        | {"tokens/s": UNKNOWN if (rate := run.tokens_per_second) is None else f"{rate:,.0f}"}
        | {name: figure(row.get(index)) for name, row in comparison.metrics.items()}
        for index, run in enumerate(runs)
    ]
    names = ("state", "step", "best", *comparison.metrics, "parameters", "time", "tokens/s", "size")
    results = [[name, *(column[name] for column in columns)] for name in names]
    heading = ["", *map(as_cell, comparison.names)]
    unread = sum(run.recipe is None for run in runs)
    equal = (
        f"no difference found: {unread} of {len(runs)} recipes cannot be read" if unread else "the recipes are equal"
    )
    sections = [recipe or [[equal, *("" for _ in runs)]], results]
    table = aligned([heading, *(row for section in sections for row in section)])
    if width is None or max(map(len, table)) <= width:
        yield from table[: 1 + len(sections[0])]
        yield ""
        yield from table[1 + len(sections[0]) :]
    else:
        for section in sections:
            for key, *values in section:
                yield key
                yield from (f"  {name}: {value}" for name, value in zip(heading[1:], values, strict=True) if value)
            yield ""
    for run, name in zip(runs, comparison.names, strict=True):
        yield from (f"! {name}: {as_cell(problem)}" for problem in run.problems)


def text_of(value: Any) -> str:
    """A value of a recipe as in YAML, on one line."""
    if isinstance(value, str) and value.strip():
        return as_cell(value)
    return json.dumps(value, ensure_ascii=False)


def figure(value: Any) -> str:
    """A measured number in five digits; an integer in full."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return UNKNOWN
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.5g}"
