"""`tformer runs`: which runs there are, what one is and came to, and where several differ."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from tformer.cli.command import examples
from tformer.cli.report import console, emit, emit_json
from tformer.errors import InputError, did_you_mean, visible

SORTS = "newest, name, metric, parameters, step, seconds or size"

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="List, show and compare runs: what `tformer train` left behind.",
    epilog=examples(
        "`tformer runs list`", "`tformer runs show runs/gpt-tiny-1`", "`tformer runs compare runs/a runs/b`"
    ),
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@app.command(
    "list",
    epilog=examples(
        "`tformer runs list`",
        "`tformer runs list sweeps/norms --sort metric --limit 5`",
        "`tformer runs list runs sweeps --json`",
    ),
)
def list_(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER", help="Where to look, also in folders inside (a sweep's); default: runs/."),
    ] = None,
    sort: Annotated[str, typer.Option("--sort", metavar="KEY", help=f"{SORTS}: the largest or best first.")] = "newest",
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="The first N of them only.")] = None,
    json_: Json = False,
) -> None:
    """List runs, the newest first: state, steps, best validation, parameters, time and size on disk.

    A damaged run is listed with what is wrong with it.
    """
    _check_list_options(sort, limit)
    if not folders and not Path("runs").is_dir():
        console.print("there is no runs/ here: train a model first, or name a folder of runs", markup=False)
        if json_:
            emit_json([])
        return
    from tformer.cli.runs_text import list_lines
    from tformer.workflows.runs import find_runs, in_order, summarise_run

    runs = in_order(map(summarise_run, find_runs(folders or ["runs"])), sort)
    shown = runs[:limit]
    if json_:
        emit_json([run.to_json() for run in shown])
        return
    _emit_lines(list_lines(shown, width=_width()))
    many = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    console.print(many if len(shown) == len(runs) else f"{len(shown)} of {many}", markup=False)


@app.command(
    epilog=examples(
        "`tformer runs show`",
        "`tformer runs show runs/gpt-tiny-1`",
        "`tformer runs show gpt-tiny-1 --json`",
    )
)
def show(
    run: Annotated[str | None, typer.Argument(help="A run, or its name under runs/; default: the newest.")] = None,
    json_: Json = False,
) -> None:
    """Show one run: where its recipe departs from its preset, environment, data, metrics and checkpoints."""
    from tformer.cli.runs_text import show_lines
    from tformer.workflows.runs import describe_run, find_run

    detail = describe_run(find_run(run))
    if json_:
        emit_json(detail.to_json())
    else:
        _emit_lines(show_lines(detail))


@app.command(
    epilog=examples(
        "`tformer runs compare runs/gpt-tiny-1 runs/gpt-tiny-2`",
        "`tformer runs compare gpt-tiny-1 gpt-tiny-2 llama-tiny-1`",
        "`tformer runs compare runs/a runs/b --json`",
    )
)
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Two runs or more.", show_default=False)],
    json_: Json = False,
) -> None:
    """Compare runs: the keys of their recipes that differ, side by side, then figures, parameters, time and speed."""
    from tformer.cli.runs_text import compare_lines
    from tformer.workflows.runs import compare_runs, find_run

    comparison = compare_runs([find_run(name) for name in runs])
    if json_:
        emit_json(comparison.to_json())
    else:
        _emit_lines(compare_lines(comparison, width=_width()))


def _check_list_options(sort: str, limit: int | None) -> None:
    known = SORTS.replace(" or ", ", ").split(", ")
    if sort not in known:
        raise InputError(f"--sort: found '{sort}', expected {SORTS}", hint=did_you_mean(sort, known))
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, found {limit}")


def _emit_lines(lines: Iterable[str]) -> None:
    for line in lines:
        emit(visible(line))


def _width() -> int | None:
    """Columns of the terminal that the lines are for; None in a pipe, where a line may be as long as it is."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
