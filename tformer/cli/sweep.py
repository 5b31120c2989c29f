"""`tformer sweep`: train every variant of a recipe over seeds and compare them in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

from tformer.cli.command import OptionsCommand, examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import emit, emit_json, print_table, progress_reporter, show_notes
from tformer.support.errors import InputError
from tformer.support.options import Arch, Json, Panel, Preset, RecipeFile, Sets, argument, flag_words, some_of
from tformer.training.options import TrainOptions

if TYPE_CHECKING:
    from tformer.workflows.sweep.cells import Result
    from tformer.workflows.sweep.grid import Cell
    from tformer.workflows.sweep.plan import Plan
    from tformer.workflows.sweep.run import Grid
    from tformer.workflows.sweep.table import Table

DEFAULT_ETA = 3

WHAT, HOW, RUN = Panel("What is compared"), Panel("How it is trained"), Panel("Run")

EPILOG = examples(
    "`tformer sweep --arch gpt --vary model.*.positions.kind=rope,alibi --out pe`",
    "`tformer sweep --arch bert --data a.tsv --vary optimizer.lr=1e-3,3e-4 --out lr`",
    "`tformer sweep --plan positions --out sweeps/positions --dry-run`",
    "`tformer sweep --arch bert --data train.tsv --vary model.*.norm.place,model.*.final_norm=[pre,true],[post,false] "
    "--vary optimizer.lr=1e-3,3e-4 --seeds 3 --out sweeps/norms`",
    "`tformer sweep --arch bert --data train.tsv --halving --max-steps 900 --vary optimizer.lr=3e-2,1e-2,3e-3 "
    "--vary model.encoder.dropout=0,0.1,0.2 --out sweeps/rates`",
    '`tformer sweep --arch gpt --vary model.decoder.dropout=0,0.1 --out sweeps/drop --evaluate "test=--data test.txt"`',
)


PASSED_ON = (
    *("data", "valid", "source", "target", "valid_source", "valid_target", "text_column", "label_column", "tokenizer"),
    *("max_minutes", "precision", "device"),
)
"""The options of `tformer train` that a sweep passes on to every training; others follow after `--`."""

if TYPE_CHECKING:
    from tformer.training.options import TrainOptions as TrainFlags
else:
    TrainFlags = some_of(TrainOptions, PASSED_ON)


@dataclass(frozen=True)
class TaskOptions:
    """Options that describe a plan of one task, in place of --plan."""

    config: Annotated[RecipeFile, WHAT] = None
    arch: Annotated[Arch, WHAT] = None
    preset: Annotated[Preset, WHAT] = None
    sets: Annotated[Sets, WHAT] = ()
    vary: Annotated[
        tuple[str, ...],
        WHAT(
            "--vary",
            metavar="KEY=a,b,c",
            help="An axis of the sweep; several: all combinations. `*` in a key: every stack. Keys that change "
            "together: KEY1,KEY2=[a,b],[c,d].",
        ),
    ] = ()
    evaluate: Annotated[
        tuple[str, ...],
        WHAT(
            "--evaluate",
            metavar="LABEL=FLAGS",
            help="Add a column with the result of `tformer evaluate` with these flags.",
        ),
    ] = ()
    train: TrainFlags = field(default_factory=TrainFlags)


@dataclass(frozen=True)
class SweepOptions:
    """The options of `tformer sweep`."""

    train_flags: Annotated[
        tuple[str, ...],
        argument("-- TRAIN FLAGS", help="After `--`: any other flags of `tformer train`."),
    ] = ()
    out: Annotated[Path | None, RUN("--out", help="Folder of the sweep; an unfinished sweep is continued.")] = None
    plan: Annotated[
        str | None,
        WHAT(
            "--plan",
            help="A plan file instead of the options of this panel, or the name of a shipped plan (positions, tears).",
        ),
    ] = None
    task: TaskOptions = TaskOptions()
    seeds: Annotated[
        int | None, HOW("--seeds", help="Number of trainings (random seeds) per variant.", default="1")
    ] = None
    max_steps: Annotated[int | None, HOW("--max-steps", help="Optimizer steps of each training.")] = None
    draws: Annotated[
        int | None,
        HOW(
            "--draws",
            metavar="N",
            help="Train N variants of the grid, drawn at random (fixed by the recipe's seed).",
            rare=True,
        ),
    ] = None
    halving: Annotated[
        bool,
        HOW(
            "--halving",
            help="Train all variants for a few steps, the best third for three times as many, and so on to all "
            "steps (successive halving); the rungs and their budget are shown first.",
        ),
    ] = False
    eta: Annotated[
        int | None,
        HOW(
            "--eta", metavar="N", help="With --halving: one of N variants goes on at each rung.", default="3", rare=True
        ),
    ] = None
    skip_invalid: Annotated[bool, RUN("--skip-invalid", help="Skip variants whose recipe is invalid.", rare=True)] = (
        False
    )
    dry_run: Annotated[bool, RUN("--dry-run", help="List the trainings; run none.")] = False
    as_json: Annotated[Json, RUN] = False

    def make_plan(self) -> Plan:
        """The written plan, with --seeds, --max-steps, --draws and --halving; or the plan that the options describe."""
        from tformer.workflows.sweep.plan import plan_of_flags, read_plan

        if self.eta is not None and not self.halving:
            raise InputError(f"--eta {self.eta} has no effect without --halving", hint="add --halving")
        halving = (self.eta or DEFAULT_ETA) if self.halving else None
        task = self.task
        train_words = [*flag_words(task.train), *self.train_flags]
        if self.plan is None:
            return plan_of_flags(
                config=task.config,
                arch=task.arch,
                preset=task.preset,
                sets=task.sets,
                train=train_words,
                vary=task.vary,
                evaluate=task.evaluate,
                seeds=self.seeds or 1,
                max_steps=self.max_steps,
                draws=self.draws,
                halving=halving,
            )
        described = list(flag_words(replace(task, train=TrainFlags()))) + (["a flag of train"] if train_words else [])
        if described:
            raise InputError(f"--plan and {described[0]} exclude each other", hint="write it into the plan")
        given = {"seeds": self.seeds, "max_steps": self.max_steps, "draws": self.draws, "halving": halving}
        return read_plan(self.plan).model_copy(update={key: n for key, n in given.items() if n is not None})


@takes_options
def sweep(options: SweepOptions) -> None:
    """Train every variant of a recipe, and compare them in a table.

    Each training is a separate process and run under OUT/runs. OUT then holds table.md, table.tex (LaTeX), table.csv,
    table.json, cells.csv and the plot curves.svg; with an axis data.fraction also learning-curve.html. With --halving
    only the best variants are trained to their end. Running the same command again continues an interrupted sweep and
    repeats trainings that failed, except those that diverged. The exit code is 1 where a training or its evaluation
    failed; one that diverged is a result, unless all did.
    """
    plan = options.make_plan()
    check_flags(plan)
    if options.out is None and not options.dry_run:
        raise InputError("--out is missing", hint="a folder for the sweep, for example --out sweeps/first")
    with StopFlag() as stop:
        from tformer.workflows.sweep.run import resolve_plan

        grid = resolve_plan(plan, skip_invalid=options.skip_invalid)
        show_notes([*grid.notes, *(f"left out: {result.cell}: {result.message}" for result in grid.invalid)])
        show_notes([ladder.describe() for ladder in grid.ladders])
        if options.out is None or options.dry_run:
            list_trainings(grid, as_json=options.as_json)
        else:
            run(plan, grid, options.out, stop, tolerant=options.skip_invalid, as_json=options.as_json)


def list_trainings(grid: Grid, *, as_json: bool) -> None:
    """Write the trainings of a dry run."""
    from tformer.workflows.sweep.cells import train_words

    cells = [
        {
            "cell": cell.name,
            "choices": dict(cell.variant.choices),
            "command": ["tformer", "train", *train_words(cell)],
        }
        for cell in grid.cells
    ]
    if as_json:
        left_out = [{"cell": result.cell, "message": result.message} for result in grid.invalid]
        ladders = {"halving": [ladder.to_json() for ladder in grid.ladders]} if grid.ladders else {}
        emit_json({"cells": cells, "left_out": left_out, **ladders})
        return
    for cell in grid.cells:
        emit("\t".join([cell.name, *(f"{key}={value}" for key, value in cell.variant.choices.items())]))
    show_notes([f"{grid.trainings} trainings"])


def run(
    plan: Plan,
    grid: Grid,
    out: Path,
    stop: StopFlag,
    *,
    tolerant: bool = False,
    as_json: bool,
    finish: Callable[[Sequence[Result]], str] = lambda results: "",
    **how: Any,
) -> None:
    """Train what is not finished, and show the table. Raises TformerError where a training failed.

    finish: writes more files, and returns their names. how: further arguments of `run_sweep`.
    """
    from tformer.workers.work import Work
    from tformer.workflows.sweep.run import require_success, run_sweep
    from tformer.workflows.sweep.table import document

    stop.be_patient()
    work = Work(should_stop=stop.should_stop)
    with Reporter() as reporter:
        table, results = run_sweep(plan, grid, out, observer=reporter, tolerant=tolerant, work=work, **how)
    more = finish(results)
    if as_json:
        emit_json(document(plan, table, results))
    else:
        show_table(table)
    show_notes([f"{out}: {more}table.md, table.tex, table.csv, table.json, cells.csv and curves"])
    require_success(results, out, tolerant=tolerant)


class Reporter:
    """Progress of a sweep on stderr: the trainings that run, and a line for each that ended."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._shown: dict[str, str] = {}  # of each training that runs

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def begins(self, cell: Cell, number: int, total: int, log: Path) -> None:
        self._shown[cell.name] = f"{number} of {total}  {cell.name}  (its log: {log})"
        self._show()

    def _show(self) -> None:
        self._running.close()
        if self._shown:
            self._running.enter_context(progress_reporter(", ".join(self._shown.values())))

    def ended(self, result: Result, number: int, total: int, *, seconds: float | None) -> None:
        from tformer.workflows.sweep.table import ended_line

        self._running.close()
        self._shown.pop(result.cell, None)
        show_notes([ended_line(result, number, total, seconds)])
        self._show()


def show_table(table: Table) -> None:
    """Write the table to stdout, the best ones of each task in bold, and what that means to stderr."""
    from tformer.workflows.sweep.table import markdown

    rows = [table.cells(row) for row in table.rows]
    marked = [table.cells(row, mark=lambda text: f"*{text}") for row in table.rows]
    print_table(
        table.headings,
        rows,
        title=table.name,
        markdown=markdown(table),
        text_columns=len(table.headings) - len(table.columns),
        bold={
            (number, column)
            for number, (plain, best) in enumerate(zip(rows, marked, strict=True))
            for column, (cell, other) in enumerate(zip(plain, best, strict=True))
            if cell != other
        },
        section_starts={
            number for number in range(1, len(rows)) if table.rows[number].task != table.rows[number - 1].task
        },
    )
    show_notes(table.remarks())


def check_flags(plan: Plan) -> None:
    """Raise InputError, before anything is trained, for flags unknown to `tformer train` or `tformer evaluate`."""
    from tformer.cli.evaluate import evaluate
    from tformer.cli.train import train

    for task in plan.tasks:
        of_task = f"task {task.name}: " if len(plan.tasks) > 1 else ""
        _parse("train", train, task.train, of_task)
        for label, flags in task.evaluate.items():
            _parse("evaluate", evaluate, ["RUN", *flags], f"{of_task}evaluate {label}: ")


def _parse(name: str, command: OptionsCommand, words: Sequence[str], place: str) -> None:
    import typer

    app = typer.Typer(add_completion=False)
    app.command(name)(command.for_typer())
    try:
        typer.main.get_command(app).make_context(name, list(words))
    except typer.Exit:  # of --help
        raise InputError(f"{place}found --help, expected flags of `tformer {name}`") from None
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        message = " ".join(str(error.format_message()).split())
        raise InputError(f"{place}{message}", hint=f"see 'tformer {name} --help'") from None
