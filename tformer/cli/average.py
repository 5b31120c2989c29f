"""`tformer average`: the mean of several checkpoints' weights, as an ordinary checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import progress_reporter, report_result
from tformer.support.bounds import Positive
from tformer.support.errors import InputError
from tformer.support.options import Json, NewFolder, Panel, argument
from tformer.support.rules import Checked, required

WHICH, RESULT = Panel("Which checkpoints"), Panel("Result")

EPILOG = examples(
    "`tformer average --last 5 runs/transformer-base-1 --out runs/base-average`",
    "`tformer average runs/a runs/b --out averaged`",
    "`tformer average --last 10 --out averaged --json`",
)


@dataclass(frozen=True)
class AverageOptions(Checked):
    """The options of `tformer average`."""

    RULES = (required("--out", hint="--out runs/NAME-average"),)

    checkpoints: Annotated[
        tuple[str, ...],
        argument(
            "CHECKPOINT",
            help="Checkpoint folders, or runs (their best checkpoint); with --last one run.",
            default="with --last the newest run",
        ),
    ] = ()
    last: Annotated[
        Positive | None,
        WHICH(
            "--last",
            metavar="N",
            help="Average the last N checkpoints of a run (training.keep_last sets how many are kept). An older "
            "best checkpoint does not count.",
        ),
    ] = None
    out: Annotated[NewFolder, RESULT] = None
    as_json: Annotated[Json, RESULT] = False

    def check(self) -> None:
        """Raise InputError for options that can be refused before anything is read."""
        named = self.checkpoints
        super().check()
        if self.last is None and len(named) < 2:
            found = f"found one: {named[0]}" if named else "found none"
            raise InputError(
                f"name at least two checkpoints to average, or a run and --last N ({found})",
                hint=f"tformer average --last 5 {named[0] if named else 'RUN'} --out {self.out}",
            )
        if self.last is not None and len(named) > 1:
            raise InputError(
                f"--last {self.last} takes one run, found {len(named)}: {', '.join(named)}",
                hint="name the checkpoints themselves, without --last",
            )


@takes_options
def average(options: AverageOptions) -> None:
    """Average checkpoints of one model, often better than each.

    The result is an ordinary checkpoint for every command that takes a run (generate, evaluate, train --init-from). It
    has no optimizer state, so training cannot --resume from it. An ELECTRA generator is averaged too.
    """
    assert options.out is not None  # the rules require it
    with StopFlag() as flag:
        from tformer.checkpoint.average import average_checkpoints, require_new
        from tformer.checkpoint.catalog import is_complete
        from tformer.workers.work import Work

        require_new(options.out)
        work = Work(progress_reporter, flag.should_stop)
        while True:
            paths = _paths(options)
            try:
                with work.part("averaging", total=len(paths), unit="checkpoints") as part:
                    made = average_checkpoints(paths, options.out, work=part)
                break
            except InputError:
                if options.last is None or all(is_complete(path) for path in paths):
                    raise  # else a training of this run has removed one of its oldest: now others are the last
    steps = [step for _, step in made.sources]
    summary = f"average of {len(steps)} checkpoint{'s' * (len(steps) != 1)}: step {', '.join(map(str, steps))}"
    document = {
        "path": str(made.path),
        "step": made.step,
        "averaged": [{"path": str(path), "step": step} for path, step in made.sources],
        "parameters": made.num_parameters,
        "notes": made.notes,
    }
    report_result(
        [summary, *(f"note: {note}" for note in made.notes)], made.path, document if options.as_json else None
    )


def _paths(options: AverageOptions) -> list[Path]:
    """The checkpoint folders to average."""
    from tformer.checkpoint.resolve import last_checkpoints, newest_checkpoint, resolve_checkpoint

    if options.last is None:
        return [resolve_checkpoint(name) for name in options.checkpoints]
    run = Path(options.checkpoints[0]) if options.checkpoints else newest_checkpoint().parents[1]
    return last_checkpoints(run, options.last)
