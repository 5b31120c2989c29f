"""`tformer train`: train a Transformer from a recipe and data into a run directory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.process import STARTED, StopFlag
from tformer.cli.report import console, emit, emit_json, message_width, progress_reporter, show_notes, spinner
from tformer.cli.workers import run_in_workers
from tformer.support.formatting import mebibytes
from tformer.support.options import flag_words
from tformer.training.options import TrainOptions
from tformer.workers.work import Job

if TYPE_CHECKING:
    from tformer.workers.worker import Worker

EPILOG = examples(
    "`tformer train --arch gpt`",
    "`tformer train --arch bert --data train.tsv --valid valid.tsv`",
    "`tformer train --arch transformer --source train.en --target train.de`",
    "`tformer train --resume --out runs/gpt-tiny-1 --max-steps 2000`",
    "`tformer train --arch bert --data train.tsv --folds 5 --out folds`",
)


@takes_options
def train(options: TrainOptions) -> None:
    """Train a Transformer from scratch, fine-tune or resume a run.

    Heads of another shape than those of --init-from are initialized from scratch. --max-steps and --max-epochs replace
    the preset's limits. A table's columns are found by usual names: text, label, source, target and the like.

    --folds K cross-validates labelled data: K trainings, each measured on the K-th of the data that it has not read.
    OUT then holds a table with mean, deviation and interval, the predictions for every example, and the runs. With
    --devices N, N of them train at the same time. The same command again goes on.
    """
    options.recipe_values()  # refuses contradictions at once, before torch is imported or other processes start
    from tformer.training.loggers import logger_names

    logger_names(options.log_to)
    with StopFlag() as stop:
        if options.folds is not None:
            _cross_validate(options, stop)
            return

        def job(begun: Path | None) -> Job:
            chosen = options if begun is None else options.resuming(begun)
            return Job(lambda worker: _train(chosen, stop, worker), ["train", *flag_words(chosen)])

        if options.dry_run:
            _train(options, stop, None)
        else:
            run_in_workers(
                job,
                devices=options.devices,
                device=options.device or "auto",
                max_restarts=options.max_restarts,
                stop=stop,
            )


def _cross_validate(options: TrainOptions, stop: StopFlag) -> None:
    """The trainings of `--folds`, as a sweep over the folds."""
    from tformer.cli.trainings import list_trainings, run
    from tformer.workflows.folds import default_folder, fold_table, plan_of_folds, slots_of, write_predictions
    from tformer.workflows.sweep.run import resolve_plan

    plan = plan_of_folds(options)
    grid, slots = resolve_plan(plan), slots_of(options)
    show_notes(grid.notes)
    if options.dry_run:
        list_trainings(grid, as_json=options.as_json)
        return
    out = options.out or default_folder(plan)
    finish = partial(write_predictions, out)
    run(plan, grid, out, stop, as_json=options.as_json, finish=finish, slots=slots, tabulate=fold_table)


def _train(options: TrainOptions, stop: StopFlag, worker: Worker | None) -> None:
    """Train, alone or as one of several processes, and write the result."""

    def begin() -> None:
        stop.be_patient()
        spinner.end()  # from here on the training shows itself

    from tformer.training.session import run_training
    from tformer.workers.work import Work
    from tformer.workers.worker import Worker

    worker = worker or Worker()
    of_several = {"--parallel": options.parallel, "--max-restarts": options.max_restarts or None}
    idle = [f"{flag} {value}" for flag, value in of_several.items() if value is not None]
    if worker.world_size == 1 and not options.dry_run and idle:
        console.print(f"one process: {', '.join(idle)} without effect (several: --devices N)", markup=False)
    summary = run_training(
        options,
        console=console.rich,
        work=Work(progress_reporter, stop.should_stop),
        training_begins=begin,
        began=STARTED,
        worker=worker,
    )
    if not worker.leads:
        return
    if options.as_json:
        emit_json(summary)
    elif options.dry_run:
        from tformer.tasks.example import example_lines

        emit(summary["recipe_yaml"].rstrip())  # first: on a terminal it would scroll the rest away
        memory = (f"{name.removesuffix('_bytes')} {mebibytes(size)} MiB" for name, size in summary["memory"].items())
        console.print(f"\nmemory: {', '.join(memory)}")
        batch = ", ".join(f"{name} {value}" for name, value in summary["batch"].items())
        console.print(f"one batch: {batch}", markup=False)
        if "sizes" in summary:
            show_notes(["", "sizes for this time", *summary["sizes"]])
        show_notes(["", "its first example", *example_lines(summary["example"], width=message_width())])
    else:
        emit(summary["run"])
