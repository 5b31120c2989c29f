"""`tformer plot`: loss, metrics, learning rate and throughput of runs, as a page, a picture or in the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tformer.cli.command import examples, takes_options
from tformer.cli.process import uncollected
from tformer.cli.report import emit_document, show_notes
from tformer.support.bounds import Must
from tformer.support.errors import InputError
from tformer.support.files import refuse_to_replace
from tformer.support.options import Panel, PictureFormat, argument
from tformer.support.rules import Checked

if TYPE_CHECKING:
    from tformer.viz.plot.series import Choices, PlottedRun

METRICS_FILE = "metrics.jsonl"
FILE_WIDTH = 100  # columns of text in a file or pipe
SHOWN, PICTURE = Panel("What is shown"), Panel("The picture")

EPILOG = examples(
    "`tformer plot`",
    "`tformer plot runs/gpt-tiny-1 runs/gpt-tiny-2 -o curves.html`",
    "`tformer plot sweeps/norms --metric valid.loss,lr --x tokens -o norms.svg`",
    "`tformer plot gpt-tiny-1 --smooth 0.9 --log-y --format terminal`",
)


@dataclass(frozen=True)
class PlotOptions(Checked):
    """The options of `tformer plot`."""

    runs: Annotated[
        tuple[str, ...],
        argument(
            "RUN",
            help="Runs, names of runs under runs/, or folders of runs such as a sweep.",
            default="the newest run",
        ),
    ] = ()
    metric: Annotated[
        tuple[str, ...],
        SHOWN(
            "--metric",
            metavar="NAME",
            help="loss, valid.loss, accuracy, lr, ... or all; separate several by commas or repeat the option.",
            default="loss",
        ),
    ] = ()
    x: Annotated[
        Literal["step", "tokens", "time"], SHOWN("--x", help="Horizontal axis: steps, trained tokens or seconds.")
    ] = "step"
    smooth: Annotated[
        float,
        Must(lambda weight: 0 <= weight < 1, "at least 0 and below 1"),
        SHOWN(
            "--smooth",
            metavar="W",
            help="Smooth training curves by an exponential moving average with this weight of past values; 0 <= W < 1.",
        ),
    ] = 0.0
    log_x: Annotated[bool, SHOWN("--log-x", help="A logarithmic axis.")] = False
    log_y: Annotated[bool, SHOWN("--log-y", help="A logarithmic axis.")] = False
    title: Annotated[str | None, PICTURE("--title", metavar="TEXT", help="Heading.")] = None
    output: Annotated[
        Path | None,
        PICTURE(
            "-o",
            "--output",
            metavar="FILE",
            help="Output file, whose suffix sets the format; -: standard output.",
            default="curves.html",
        ),
    ] = None
    format: Annotated[PictureFormat, PICTURE] = None


@takes_options
def plot(options: PlotOptions) -> None:
    """Plot loss, metrics, learning rate and throughput of runs.

    The page (default) holds all metrics of all runs, lets you choose and smooth them, and works offline. A picture has
    a panel for each --metric. A validation is drawn at the number of tokens, or the training time, that preceded it. A
    run may still be training.
    """
    from tformer.viz.output import choose_output

    chosen = choose_output(options.output, options.format, stem="curves")
    with uncollected():
        from tformer.viz.plot.series import choose_metrics, read_runs

    paths = find_curves(options.runs)
    refuse_to_replace(chosen.path, [path / METRICS_FILE for path in paths], option="-o")
    runs = _with_metrics(read_runs(paths))
    choices = choose_metrics(runs, [name for word in options.metric for name in word.split(",") if name])
    show_notes(_lacking(runs, choices), dim=True)
    emit_document(chosen, _content(runs, choices, options, chosen.format, to_file=chosen.path is not None))


def find_curves(names: Sequence[str]) -> list[Path]:
    """The named runs, and all runs in a named folder; without names the run under runs/ that logged last.

    Raises:
        InputError: a name without a run.
    """
    from tformer.workflows.runs.summary import find_run, find_runs, looks_like_run

    if not names:
        runs = find_runs(["runs"]) if Path("runs").is_dir() else []
        logging = [run for run in runs if (run / METRICS_FILE).is_file()]
        if not logging:
            raise InputError(
                "there is no run with metrics under runs/", hint="train one first: tformer train --arch gpt"
            )
        return [max(logging, key=lambda run: (run / METRICS_FILE).stat().st_mtime)]
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir() and not (looks_like_run(path) or (path / METRICS_FILE).is_file()):
            inside = find_runs([path])
            found += inside or [find_run(name)]  # a folder within a run, or an error
        else:
            found.append(path if path.is_dir() else find_run(name))
    return found


def _with_metrics(runs: list[PlottedRun]) -> list[PlottedRun]:
    """The runs with metrics, and a message for each of the others. InputError if no run has any."""
    kept = [run for run in runs if run.tracks]
    empty = [run for run in runs if not run.tracks]
    if not kept:
        what = f"{empty[0].path} has no metrics" if len(empty) == 1 else f"none of {len(empty)} runs has metrics"
        raise InputError(
            f"{what}: no line of {METRICS_FILE} has any",
            hint="the first comes after training.log_every steps: tformer train --set training.log_every=1",
        )
    for run in empty:
        show_notes([f"omitted: {run.path} has no metrics"], dim=True)
    return kept


def _lacking(runs: list[PlottedRun], choices: Choices) -> list[str]:
    """A message for each metric that some runs lack."""
    notes = []
    for metric in choices:
        without = [run.name for run in runs if not any(metric in run.tracks[s].values for s in run.tracks)]
        if without:
            notes.append(f"no {metric}: {', '.join(without[:6])}{' ...' if len(without) > 6 else ''}")
    return notes


def _content(
    runs: list[PlottedRun], choices: Choices, options: PlotOptions, format_: Any, *, to_file: bool
) -> str | bytes:
    from tformer.viz.plot.page import as_csv, as_json, render
    from tformer.viz.plot.series import axis_label, make_panels

    x: Any = options.x
    panels = make_panels(runs, choices, x=x, smooth=options.smooth)
    label = axis_label(runs, x)
    log = {"log_x": options.log_x, "log_y": options.log_y}
    if format_ == "html":
        return render(runs, choices, title=options.title or "Training curves", x=x, smooth=options.smooth, **log)
    if format_ == "json":
        return as_json(runs, panels, x=x, x_label=label, smooth=options.smooth)
    if format_ == "csv":
        return as_csv(runs, choices, smooth=options.smooth)
    if format_ == "terminal":
        from tformer.viz.terminal import colour_support, draw_curves

        colour = "none" if to_file else colour_support(sys.stdout)
        width = FILE_WIDTH if to_file else shutil.get_terminal_size((FILE_WIDTH, 24)).columns
        return draw_curves(panels, title=options.title or "", x_label=label, width=width, colour=colour, **log)
    from tformer.viz.figure import draw_panels

    title = options.title if options.title is not None else (runs[0].name if len(runs) == 1 else "")
    return draw_panels(panels, format_, title=title, x_label=label, **log)
