"""`tformer plot`: loss, metrics, learning rate and throughput of runs, as a page, a picture or in the terminal."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tformer.cli.command import examples
from tformer.cli.process import uncollected
from tformer.cli.report import console
from tformer.errors import InputError, did_you_mean, visible
from tformer.output_files import refuse_to_replace

if TYPE_CHECKING:
    from tformer.viz.output import Output
    from tformer.viz.plot.series import Axis, Choice, Run

STEM = "curves"
METRICS_FILE = "metrics.jsonl"
AXES = ("step", "tokens", "time")
FILE_WIDTH = 100  # columns of characters where no terminal tells its own
SHOWN, PICTURE = "What is shown", "The picture"

EPILOG = examples(
    "`tformer plot`",
    "`tformer plot runs/gpt-tiny-1 runs/gpt-tiny-2 -o curves.html`",
    "`tformer plot sweeps/norms --metric valid.loss,lr --x tokens -o norms.svg`",
    "`tformer plot gpt-tiny-1 --smooth 0.9 --log-y --format terminal`",
)


def plot(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Runs, their names under runs/, or folders of runs such as a sweep; default: the newest.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="loss, valid.loss, accuracy, lr, ... or all; several: again, or by commas. Default: loss.",
            rich_help_panel=SHOWN,
        ),
    ] = None,
    x: Annotated[
        str,
        typer.Option(
            "--x",
            metavar="step|tokens|time",
            help="Along steps, tokens trained on, or seconds in training steps.",
            rich_help_panel=SHOWN,
        ),
    ] = "step",
    smooth: Annotated[
        float,
        typer.Option(
            "--smooth",
            metavar="W",
            help="Weight of the past in an exponential average of what training logged; 0 <= W < 1.",
            rich_help_panel=SHOWN,
        ),
    ] = 0.0,
    log_x: Annotated[bool, typer.Option("--log-x", help="A logarithmic axis.", rich_help_panel=SHOWN)] = False,
    log_y: Annotated[bool, typer.Option("--log-y", help="A logarithmic axis.", rich_help_panel=SHOWN)] = False,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", rich_help_panel=PICTURE)] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Its suffix is the format; - is standard output. Default: curves.html.",
            rich_help_panel=PICTURE,
        ),
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", metavar="html|png|svg|terminal|json|csv", rich_help_panel=PICTURE)
    ] = None,
) -> None:
    """Plot what runs logged: loss, every validation metric, learning rate, throughput, gradient norm.

    The page (default) holds all metrics of all runs, to choose from and to smooth while looking, and needs no
    network. A picture has a panel for each --metric. Validation stands at the tokens and the time of training that
    led to it. A run may still be training.
    """
    axis = _checked_axis(x, smooth)
    from tformer.viz.output import choose_output, write_output

    chosen = choose_output(output, format_, stem=STEM)
    with uncollected():
        from tformer.viz.plot.series import choose_metrics, read_runs

    paths = find_curves(runs or [])
    refuse_to_replace(chosen.path, [path / METRICS_FILE for path in paths], option="-o")
    read = _with_metrics(read_runs(paths))
    choices = choose_metrics(read, [name for word in metric or [] for name in word.split(",") if name])
    for note in _lacking(read, choices):
        console.print(visible(note), style="dim", markup=False)
    write_output(chosen, _content(read, choices, chosen, axis, smooth, (log_x, log_y), title))
    if chosen.path is not None:
        console.print(visible(f"wrote {chosen.path}"), style="dim", markup=False)


def find_curves(names: list[str]) -> list[Path]:
    """The runs that the words name, folders of runs opened; without a word the one under runs/ that logged last.

    Raises:
        InputError: nothing there, or no run.
    """
    from tformer.workflows.runs.summary import (
        find_run,
        find_runs,
        looks_like_run,
    )

    if not names:
        return [_newest()]
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir() and not (looks_like_run(path) or (path / METRICS_FILE).is_file()):
            inside = find_runs([path])
            found += inside or [find_run(name)]  # a place within a run, or its complaint
        else:
            found.append(path if path.is_dir() else find_run(name))
    return found


def _newest() -> Path:
    from tformer.workflows.runs.summary import find_runs

    runs = find_runs(["runs"]) if Path("runs").is_dir() else []
    logging = [run for run in runs if (run / METRICS_FILE).is_file()]
    if not logging:
        raise InputError("there is no run with metrics under runs/", hint="train one first: tformer train --arch gpt")
    return max(logging, key=lambda run: (run / METRICS_FILE).stat().st_mtime)


def _checked_axis(x: str, smooth: float) -> Axis:
    if not 0 <= smooth < 1:
        raise InputError(f"--smooth must be at least 0 and below 1, found {smooth:g}")
    for axis in AXES:
        if x == axis:
            return axis  # type: ignore[return-value]
    raise InputError(f"--x: found '{x}', expected {', '.join(AXES[:-1])} or {AXES[-1]}", hint=did_you_mean(x, AXES))


def _with_metrics(runs: list[Run]) -> list[Run]:
    """Those that logged something; of the others one line is told, an error where nothing else is left."""
    kept = [run for run in runs if run.tracks]
    empty = [run for run in runs if not run.tracks]
    if not kept:
        what = f"{empty[0].path} has no metrics" if len(empty) == 1 else f"none of {len(empty)} runs has metrics"
        raise InputError(
            f"{what}: no line of {METRICS_FILE} tells any", hint="they come with the first training.log_every steps"
        )
    for run in empty:
        console.print(visible(f"left out: {run.path} has no metrics"), style="dim", markup=False)
    return kept


def _lacking(runs: list[Run], choices: list[Choice]) -> list[str]:
    """For each metric the runs that have none of it."""
    notes = []
    for choice in choices:
        without = [run.name for run in runs if not any(choice.metric in run.tracks[s].values for s in run.tracks)]
        if without:
            notes.append(f"no {choice.metric}: {', '.join(without[:6])}{' ...' if len(without) > 6 else ''}")
    return notes


def _content(
    runs: list[Run],
    choices: list[Choice],
    chosen: Output,
    x: Axis,
    smooth: float,
    log: tuple[bool, bool],
    title: str | None,
) -> str | bytes:
    from tformer.viz.plot.page import (
        as_csv,
        as_json,
    )
    from tformer.viz.plot.series import axis_label, make_panels

    panels = make_panels(runs, choices, x=x, smooth=smooth)
    label = axis_label(runs, x)
    log_x, log_y = log
    if chosen.format == "html":
        from tformer.viz.plot.page import render

        return render(runs, choices, title=title or "Training curves", x=x, smooth=smooth, log_x=log_x, log_y=log_y)
    if chosen.format == "json":
        return as_json(runs, panels, x=x, x_label=label, smooth=smooth)
    if chosen.format == "csv":
        return as_csv(runs, choices, smooth=smooth)
    if chosen.format == "terminal":
        from tformer.viz.terminal import colour_support, draw_text

        colour = colour_support(sys.stdout) if chosen.path is None else "none"
        width = FILE_WIDTH if chosen.path is not None else shutil.get_terminal_size((FILE_WIDTH, 24)).columns
        return draw_text(panels, title=title or "", x_label=label, width=width, colour=colour, log_x=log_x, log_y=log_y)
    from tformer.viz.figure import draw_panels

    kind: Literal["png", "svg"] = "png" if chosen.format == "png" else "svg"
    heading = title if title is not None else (runs[0].name if len(runs) == 1 else "")
    return draw_panels(panels, kind, title=heading, x_label=label, log_x=log_x, log_y=log_y)
