"""`tformer viz-pe`: what positional encodings look like, as a page to explore, a picture, characters or numbers."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tformer.cli.command import examples
from tformer.cli.process import uncollected
from tformer.cli.report import console, emit
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.viz.output import Output
    from tformer.viz.pe.learned import Table
    from tformer.viz.pe.settings import Settings

WHAT, SIZES, RESULT = "What to show", "Sizes", "Result"
NAMES = "sinusoidal, learned, rope, alibi, t5_bias, shaw or patch2d"

EPILOG = examples(
    "`tformer viz-pe`",
    "`tformer viz-pe --encoding rope --view angles -o rope.png`",
    "`tformer viz-pe --compare sinusoidal,rope,alibi --format terminal`",
    "`tformer viz-pe --run runs/gpt-tiny-1 --view similarity -o learned.svg`",
)


def viz_pe(
    encoding: Annotated[
        str | None,
        typer.Option(
            "--encoding",
            metavar="KIND",
            help=f"{NAMES}. Default: sinusoidal, or the run's.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    view: Annotated[
        str | None,
        typer.Option(
            "--view",
            metavar="NAME",
            help="One plot of that kind, for example traces, heatmap, waves, gram, distance, wavelengths; a page opens "
            "at it. Default: the kind's first.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="KIND,...",
            help="Overlay the decay of these kinds with distance; `all` for every one that has a curve.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="A run, checkpoint or Hugging Face folder: its kind and sizes, and what it has learned.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option("--stack", metavar="SIDE", help="encoder or decoder of the run.", rich_help_panel=WHAT),
    ] = None,
    layer: Annotated[
        int,
        typer.Option(
            "--layer", metavar="N", help="Whose tables, from 0 (shaw has them per layer).", rich_help_panel=WHAT
        ),
    ] = 0,
    d_model: Annotated[
        int, typer.Option("--d-model", metavar="D", help="Width of the embeddings.", rich_help_panel=SIZES)
    ] = 512,
    positions: Annotated[
        int | None,
        typer.Option(
            "--positions",
            metavar="N",
            help="How many tokens. Default: what suits the view; pictures of traces: 50 and 500.",
            rich_help_panel=SIZES,
        ),
    ] = None,
    base: Annotated[
        float, typer.Option("--base", metavar="B", help="Base of the wavelengths.", rich_help_panel=SIZES)
    ] = 10000.0,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="NAME",
            help="sinusoidal: interleaved, halves or fairseq; rope: halves or interleaved.",
            rich_help_panel=SIZES,
        ),
    ] = None,
    dims: Annotated[
        str | None,
        typer.Option(
            "--dims",
            metavar="N,...",
            help="Dimensions to draw as waves; for rope pairs, for alibi heads (from 1).",
            rich_help_panel=SIZES,
        ),
    ] = None,
    heads: Annotated[
        int,
        typer.Option("--heads", metavar="H", help="Heads (alibi; rope's width is d_model / H).", rich_help_panel=SIZES),
    ] = 8,
    buckets: Annotated[int, typer.Option("--buckets", metavar="N", help="t5_bias.", rich_help_panel=SIZES)] = 32,
    max_distance: Annotated[
        int, typer.Option("--max-distance", metavar="N", help="t5_bias.", rich_help_panel=SIZES)
    ] = 128,
    clip: Annotated[int, typer.Option("--clip", metavar="K", help="shaw.", rich_help_panel=SIZES)] = 16,
    grid: Annotated[
        int, typer.Option("--grid", metavar="N", help="patch2d: patches a side.", rich_help_panel=SIZES)
    ] = 8,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write: .html, .png, .svg, .txt, .json or .csv. Default: a page named for the kind.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="html, png, svg, terminal, json or csv, whatever the file is called; text goes to standard output "
            "when no file is named.",
            rich_help_panel=RESULT,
        ),
    ] = None,
) -> None:
    """Show positional encodings: by default a page with every kind, its sizes under sliders, that needs no network.

    No model is needed, except for what a model has learned (--run). All numbers come from the modules that training
    uses.
    """
    from tformer.viz.output import choose_output
    from tformer.viz.pe.settings import Settings, check_encoding, check_settings

    settings = Settings(
        encoding=encoding or "sinusoidal",
        d_model=d_model,
        positions=positions,
        base=base,
        dims=None if dims is None else _numbers(dims),
        heads=heads,
        layout=layout,
        buckets=buckets,
        max_distance=max_distance,
        clip=clip,
        grid=grid,
        compare=() if compare is None else tuple(part.strip() for part in compare.split(",")),
    )
    stem = f"viz-pe-{'compare' if settings.compare else settings.encoding}"
    where = choose_output(output, format_, stem=stem)
    check_settings(settings)
    with uncollected():
        import_module("tformer.viz.pe.selection")  # with torch
    table = None
    if run is not None:
        from tformer.viz.pe.selection import read_run

        if encoding is not None:
            check_encoding(encoding)
        settings, table = read_run(run, settings, stack=stack, layer=layer, encoding=encoding)
        check_settings(settings)
    elif stack is not None or layer:
        part = "--stack" if stack is not None else "--layer"
        raise InputError(f"{part} names a part of a run: name the run too", hint="--run RUN")
    _write(where, settings, view, table)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--dims {text}: expected whole numbers with commas between, for example 0,8,16") from None


def _write(where: Output, settings: Settings, view: str | None, table: Table | None) -> None:
    from tformer.viz.output import write_output
    from tformer.viz.pe.selection import plots_of, subject

    content: str | bytes
    if where.format == "html":
        from tformer.viz.pe.page import check_view, explorer

        name = check_view(settings, view, table)
        command = " ".join(["tformer", *sys.argv[1:]]) if sys.argv[1:2] == ["viz-pe"] else "tformer viz-pe"
        content = explorer(settings, name, table, command=command)
    else:
        name, plots = plots_of(settings, view, table)
        heading = _heading(settings, subject(settings), table)
        if where.format in ("png", "svg"):
            from tformer.viz.figure import draw_plots

            with uncollected():
                content = draw_plots(plots, where.format, heading=heading)  # type: ignore[arg-type]
        elif where.format == "terminal":
            content = _characters(plots, heading, to_file=where.path is not None)
        elif where.format == "csv":
            from tformer.viz.plots import plots_to_csv

            content = plots_to_csv(plots)
        else:
            content = _json(settings, name, table, plots)
    write_output(where, content)
    if where.path is not None:
        if table is not None and not table.trained:
            console.print(f"note: {table.note}", markup=False)
        emit(str(where.path))


def _heading(settings: Settings, kind: str, table: Table | None) -> str:
    sizes = {
        "sinusoidal": f"d_model {settings.d_model}, base {settings.base:g}, {settings.layout_used}",
        "learned": "",
        "rope": f"head width {settings.head_dim}, base {settings.base:g}",
        "alibi": f"{settings.heads} heads",
        "t5_bias": f"{settings.buckets} buckets, maximum distance {settings.max_distance}",
        "shaw": f"k = {settings.clip}",
        "patch2d": f"{settings.grid} × {settings.grid} patches, d_model {settings.d_model}, base {settings.base:g}",
        "compare": f"d_model {settings.d_model}, {settings.heads} heads, base {settings.base:g}",
    }
    parts = [f"{kind} positions" if kind != "compare" else "Positions compared", sizes[kind]]
    if table is not None:
        parts.append(table.note)
    return " · ".join(part for part in parts if part)


def _characters(plots: Any, heading: str, *, to_file: bool) -> str:
    import shutil

    from tformer.viz.terminal import colour_support, draw_plot

    colour = "none" if to_file else colour_support(sys.stdout)
    width = 100 if to_file else min(shutil.get_terminal_size().columns, 160)
    return "\n".join([heading, "", *(draw_plot(plot, width=width, colour=colour) for plot in plots)])


def _json(settings: Settings, view: str, table: Table | None, plots: Any) -> str:
    import json
    from dataclasses import asdict

    from tformer.viz.pe.selection import subject
    from tformer.viz.plots import plots_to_json

    document = {
        "encoding": subject(settings),
        "view": view,
        "settings": asdict(settings),
        "run": None if table is None else {"name": table.name, "trained": table.trained},
        "plots": plots_to_json(plots),
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"
