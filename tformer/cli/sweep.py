"""`tformer sweep`: train every variant of a recipe over seeds and compare them in one table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from tformer.cli import evaluate, train
from tformer.cli.command import examples
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit, emit_json
from tformer.errors import InputError, TformerError, visible
from tformer.formatting import minutes_and_seconds

if TYPE_CHECKING:
    from tformer.workflows.sweep.cells import Result
    from tformer.workflows.sweep.grid import Cell
    from tformer.workflows.sweep.plan import Plan
    from tformer.workflows.sweep.table import Row, Table


def flag_words(options: dict[str, Any]) -> list[str]:
    """The options as they stand on the command line of `tformer train`."""
    words = []
    for flag, value in options.items():
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            words += [flag, str(item)]
    return words


def make_plan(name: str | None, chosen: dict[str, Any], *, seeds: int | None, max_steps: int | None) -> Plan:
    """The written plan, with the seeds and steps of the command line; or the plan that the command line is."""
    from tformer.workflows.sweep.plan import plan_of_flags, read_plan

    for flag, number in (("--seeds", seeds), ("--max-steps", max_steps)):
        if number is not None and number < 1:
            raise InputError(f"{flag} must be at least 1, found {number}")
    if name is None:
        return plan_of_flags(
            config=chosen["--config"],
            arch=chosen["--arch"],
            preset=chosen["--preset"],
            sets=chosen["--set"] or (),
            train=chosen["a flag of train"],
            vary=chosen["--vary"] or (),
            evaluate=chosen["--evaluate"] or (),
            seeds=seeds or 1,
            max_steps=max_steps,
        )
    given = next((flag for flag, value in chosen.items() if value), None)
    if given is not None:
        raise InputError(f"--plan and {given} exclude each other", hint="write it into the plan")
    written = read_plan(name)
    updates = {key: value for key, value in (("seeds", seeds), ("max_steps", max_steps)) if value is not None}
    return written.model_copy(update=updates)


def check_flags(plan: Plan) -> None:
    """Refuse, before anything is trained, flags that `tformer train` or `tformer evaluate` does not know."""
    for task in plan.tasks:
        of_task = f"task {task.name}: " if len(plan.tasks) > 1 else ""
        _parse("train", train.train, task.train, of_task)
        for label, flags in task.evaluate.items():
            _parse("evaluate", evaluate.evaluate, ["RUN", *flags], f"{of_task}evaluate {label}: ")


def _parse(name: str, command: Callable[..., Any], words: Sequence[str], place: str) -> None:
    app = typer.Typer(add_completion=False)
    app.command(name)(command)
    try:
        typer.main.get_command(app).make_context(name, list(words))
    except typer.Exit:  # of --help, which answers at once
        raise InputError(f"{place}found --help, expected flags of `tformer {name}`") from None
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        message = " ".join(str(error.format_message()).split())
        raise InputError(f"{place}{message}", hint=f"see 'tformer {name} --help'") from None


class Reporter:
    """Tells of each training on stderr: of the one that runs where it writes, of one that ended what it came to."""

    def __init__(self) -> None:
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> Reporter:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def begins(self, cell: Cell, number: int, total: int, log: Path) -> None:
        if self._status is not None:
            self._status.update(f"{number} of {total}  {cell.name}  (its log: {log})")

    def ended(self, result: Result, number: int, total: int, *, seconds: float | None) -> None:
        from tformer.workflows.sweep.table import show_metric

        if result.best is not None and result.status == "done":
            told = f"{result.metric} {show_metric(result.best, result.metric)} at step {result.best_step}"
        else:
            told = ": ".join(part for part in (result.status, result.message) if part)
        for label, entry in result.evaluate.items():
            value = entry.get("value")
            told += f", {label} {show_metric(value, entry['metric']) if value is not None else entry.get('failure')}"
        took = "finished before" if seconds is None else minutes_and_seconds(seconds)
        console.print(visible(f"{number} of {total}  {result.cell}  {told}  {took}"), markup=False)


def show_table(table: Table) -> None:
    """On a terminal a table, or a block for each variant where it is too narrow for one; else Markdown."""
    if not sys.stdout.isatty():
        from tformer.workflows.sweep.table import markdown

        emit(markdown(table).rstrip("\n"))
        return
    from rich.table import Table as RichTable

    wide = RichTable(title=table.name, title_justify="left")
    numbers = len(table.headings) - len(table.columns)
    for index, heading in enumerate(table.headings):
        wide.add_column(visible(heading), justify="left" if index < numbers else "right", no_wrap=True)
    previous = None
    for row in table.rows:
        if previous not in (None, row.task):
            wide.add_section()
        previous = row.task
        wide.add_row(*_cells(table, row))
    stdout = Console(highlight=False)
    if stdout.measure(wide, options=stdout.options.update(max_width=10_000)).maximum <= stdout.width:
        stdout.print(wide)
        return
    for row in table.rows:
        for heading, text in zip(table.headings, table.cells(row), strict=True):
            emit(visible(f"{heading}: {text}"))
        emit("")


def _cells(table: Table, row: Row) -> list[str]:
    """With markup around the best alone, whatever the texts hold."""
    plain, marked = table.cells(row), table.cells(row, mark=lambda text: f"*{text}")
    return [
        f"[bold]{escape(visible(text))}[/]" if text != other else escape(visible(text))
        for text, other in zip(plain, marked, strict=True)
    ]


EPILOG = examples(
    "`tformer sweep --arch gpt --vary model.*.positions.kind=rope,alibi,learned --out sweeps/positions`",
    "`tformer sweep --arch bert --data train.tsv --vary model.*.norm.place,model.*.final_norm=[pre,true],[post,false] "
    "--vary optimizer.lr=1e-3,3e-4 --seeds 3 --out sweeps/norms`",
    "`tformer sweep --plan positions --out sweeps/positions --dry-run`",
    '`tformer sweep --arch gpt --vary model.decoder.dropout=0,0.1 --out sweeps/drop --evaluate "test=--data test.txt"`',
)

WHAT, DATA, HOW, RUN = "What is compared", "Data", "How it is trained", "Run"


def sweep(
    train_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- TRAIN FLAGS", help="After `--`: any other flags of `tformer train`."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the sweep; with an unfinished one, it goes on there.", rich_help_panel=RUN),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help="A written plan instead of the options here: a file, or a shipped one (positions, tears).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A recipe file of your own.", rich_help_panel=WHAT)] = None,
    arch: Annotated[str | None, typer.Option(help="Or a family, and", rich_help_panel=WHAT)] = None,
    preset: Annotated[str | None, typer.Option(help="a shipped recipe of it.", rich_help_panel=WHAT)] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key in every variant.", rich_help_panel=WHAT),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=a,b,c",
            help="An axis: a variant for each value; several axes: their product. `*` in a key: every stack. "
            "Keys that change together: KEY1,KEY2=[a,b],[c,d].",
            rich_help_panel=WHAT,
        ),
    ] = None,
    evaluate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=FLAGS",
            help="A further column: what `tformer evaluate` with these flags finds.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Trainings of each variant (default 1).", rich_help_panel=HOW)
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps of each.", rich_help_panel=HOW)] = None,
    max_minutes: Annotated[float | None, typer.Option(help="At most so long each.", rich_help_panel=HOW)] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.", rich_help_panel=HOW)] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=HOW)] = None,
    data: Annotated[list[str] | None, typer.Option(help="As for train.", rich_help_panel=DATA)] = None,
    valid: Annotated[list[str] | None, typer.Option(help="Validation data.", rich_help_panel=DATA)] = None,
    source: Annotated[list[str] | None, typer.Option(help="Of aligned text.", rich_help_panel=DATA)] = None,
    target: Annotated[list[str] | None, typer.Option(help="Its target side.", rich_help_panel=DATA)] = None,
    valid_source: Annotated[list[str] | None, typer.Option(help="To validate on.", rich_help_panel=DATA)] = None,
    valid_target: Annotated[list[str] | None, typer.Option(help="To validate on.", rich_help_panel=DATA)] = None,
    text_column: Annotated[str | None, typer.Option(help="Name or number.", rich_help_panel=DATA)] = None,
    label_column: Annotated[str | None, typer.Option(help="Name or number.", rich_help_panel=DATA)] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json; nothing given: one is trained for all variants.", rich_help_panel=DATA),
    ] = None,
    skip_invalid: Annotated[
        bool,
        typer.Option("--skip-invalid", help="Leave out the variants that their recipe refuses.", rich_help_panel=RUN),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the trainings; run none.", rich_help_panel=RUN)
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", rich_help_panel=RUN)] = False,
) -> None:
    """Train every variant of a recipe, seed after seed, and compare them in one table.

    Each training is a process and a run of its own under OUT/runs. OUT then holds table.md, table.csv, table.json,
    cells.csv and the plot curves.svg. The same command again goes on where it stopped, and repeats what failed but did
    not diverge.
    """
    options: dict[str, Any] = {
        "--data": data,
        "--valid": valid,
        "--source": source,
        "--target": target,
        "--valid-source": valid_source,
        "--valid-target": valid_target,
        "--text-column": text_column,
        "--label-column": label_column,
        "--tokenizer": tokenizer,
        "--max-minutes": max_minutes,
        "--precision": precision,
        "--device": device,
    }
    train = [*flag_words(options), *(train_flags or ())]
    chosen = {"--config": config, "--arch": arch, "--preset": preset, "--set": set_, "--vary": vary}
    chosen |= {"--evaluate": evaluate, "a flag of train": train}
    asked = make_plan(plan, chosen, seeds=seeds, max_steps=max_steps)
    check_flags(asked)
    if out is None and not dry_run:
        raise InputError("--out is missing", hint="a folder for the sweep, for example --out sweeps/first")
    with StopFlag() as stop:
        from tformer.workflows.sweep.run import resolve_plan

        grid = resolve_plan(asked, skip_invalid=skip_invalid)
        for note in grid.notes:
            console.print(note, markup=False)
        for result in grid.invalid:
            console.print(f"left out: {result.cell}: {result.message}", markup=False)
        if dry_run:
            _list(grid, json_=json_)
            return
        assert out is not None
        _run(asked, grid, out, stop, tolerant=skip_invalid, json_=json_)


def _list(grid: Any, *, json_: bool) -> None:
    from tformer.workflows.sweep.cells import train_words

    cells = [
        {"cell": work.cell.name, "choices": dict(work.cell.variant.choices), "command": ["tformer", "train", *words]}
        for work in grid.works
        for words in [train_words(work)]
    ]
    if json_:
        left_out = [{"cell": result.cell, "message": result.message} for result in grid.invalid]
        emit_json({"cells": cells, "left_out": left_out})
        return
    for cell in cells:
        emit("\t".join([cell["cell"], *(f"{key}={value}" for key, value in cell["choices"].items())]))
    console.print(f"{len(cells)} trainings", markup=False)


def _run(plan: Plan, grid: Any, out: Path, stop: StopFlag, *, tolerant: bool, json_: bool) -> None:
    from tformer.workflows.sweep.run import run_sweep
    from tformer.workflows.sweep.table import document

    stop.be_patient()
    with Reporter() as reporter:
        table, results = run_sweep(
            plan,
            grid,
            out,
            observer=reporter,
            should_stop=stop.should_stop,
            interrupted=stop.interrupted,
            tolerant=tolerant,
        )
    if json_:
        emit_json(document(plan, table, results))
    else:
        show_table(table)
    console.print(f"{out}: table.md, table.csv, table.json, cells.csv and curves", markup=False)
    if not any(result.status == "done" for result in results):
        raise TformerError("every training failed", hint=f"see the logs in {out}/cells")
