"""`tformer sweep`: train every variant of a recipe over seeds and compare them in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tformer.cli.command import OptionsCommand, examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import show_notes
from tformer.cli.trainings import list_trainings, run
from tformer.support.bounds import Positive
from tformer.support.errors import InputError
from tformer.support.options import Arch, Json, Panel, Preset, RecipeFile, Sets, argument, flag_words, some_of
from tformer.support.rules import Checked, exclude, required
from tformer.training.options import TrainOptions

if TYPE_CHECKING:
    from tformer.workflows.sweep.plan import SweepPlan

WHAT, HOW, RUN = Panel("What is compared"), Panel("How it is trained"), Panel("Run")

EPILOG = examples(
    "`tformer sweep --arch gpt --vary model.*.positions.kind=rope,alibi --out pe`",
    "`tformer sweep --arch bert --data a.tsv --vary optimizer.lr=1e-3,3e-4 --out lr`",
    "`tformer sweep --plan positions --out sweeps/positions --dry-run`",
    "`tformer sweep --arch bert --data train.tsv --vary model.*.norm.place,model.*.final_norm=[pre,true],[post,false] "
    "--vary optimizer.lr=1e-3,3e-4 --seeds 3 --out sweeps/norms`",
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
class SweepOptions(Checked):
    """The options of `tformer sweep`."""

    RULES = (
        exclude("--plan", (TaskOptions, "-- TRAIN FLAGS"), hint="write it into the plan"),
        required("--out", unless="--dry-run", hint="a folder for the sweep, for example --out sweeps/first"),
    )

    train_flags: Annotated[
        tuple[str, ...], argument("-- TRAIN FLAGS", help="After `--`: any other flags of `tformer train`.")
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
        Positive | None, HOW("--seeds", help="Number of trainings (random seeds) per variant.", default="1")
    ] = None
    max_steps: Annotated[Positive | None, HOW("--max-steps", help="Optimizer steps of each training.")] = None
    skip_invalid: Annotated[bool, RUN("--skip-invalid", help="Skip variants whose recipe is invalid.", rare=True)] = (
        False
    )
    dry_run: Annotated[bool, RUN("--dry-run", help="List the trainings; run none.")] = False
    as_json: Annotated[Json, RUN] = False

    def make_plan(self) -> SweepPlan:
        """The written plan, with --seeds and --max-steps; or the plan that the options describe."""
        from tformer.workflows.sweep.plan import plan_of_flags, read_plan

        asked = {"seeds": self.seeds, "max_steps": self.max_steps}
        given: dict[str, Any] = {key: number for key, number in asked.items() if number is not None}
        task, train_words = self.task, [*flag_words(self.task.train), *self.train_flags]
        if self.plan is None:
            named = {name: getattr(task, name) for name in ("config", "arch", "preset", "sets", "vary", "evaluate")}
            return plan_of_flags(**named, train=train_words, **given)
        return read_plan(self.plan).model_copy(update=given)


@takes_options
def sweep(options: SweepOptions) -> None:
    """Train every variant of a recipe, and compare them in a table.

    Each training is a separate process and run under OUT/runs. OUT then holds table.md, table.tex (LaTeX), table.csv,
    table.json, cells.csv and the plot curves.svg; with an axis data.fraction also learning-curve.html. Running the
    same command again continues an interrupted sweep and repeats trainings that failed, except those that diverged.
    The exit code is 1 where a training or its evaluation failed; one that diverged is a result, unless all did.
    """
    plan = options.make_plan()
    check_flags(plan)
    with StopFlag() as stop:
        from tformer.workflows.sweep.run import resolve_plan

        grid = resolve_plan(plan, skip_invalid=options.skip_invalid)
        show_notes([*grid.notes, *(f"left out: {result.cell}: {result.message}" for result in grid.invalid)])
        if options.out is None or options.dry_run:
            list_trainings(grid, as_json=options.as_json)
        else:
            run(plan, grid, options.out, stop, tolerant=options.skip_invalid, as_json=options.as_json)


def check_flags(plan: SweepPlan) -> None:
    """Raise InputError, before anything is trained, for flags unknown to `tformer train` or `tformer evaluate`."""
    from tformer.cli.evaluate import evaluate
    from tformer.cli.train import train

    for task in plan.tasks:
        of_task = plan.place_of(task)
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
