"""`tformer average`: the mean of several checkpoints' weights, as a checkpoint like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tformer.cli.command import examples
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit, emit_json, progress_reporter
from tformer.errors import InputError

WHICH, RESULT = "Which checkpoints", "Result"

EPILOG = examples(
    "`tformer average --last 5 runs/transformer-base-1 --out runs/base-average`",
    "`tformer average runs/a/checkpoints/step-00001000 runs/a/checkpoints/step-00002000 --out averaged`",
    "`tformer average --last 10 --out averaged --json`",
)


def average(
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoint folders, or runs (their best); with --last one run, default: the newest.",
        ),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(
            "--last",
            metavar="N",
            help="The last N checkpoints of a run; training.keep_last decides how many it keeps. A best one that was "
            "kept from earlier is none of them.",
            rich_help_panel=WHICH,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The new checkpoint; must not exist yet.", rich_help_panel=RESULT),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.", rich_help_panel=RESULT)
    ] = False,
) -> None:
    """Average the weights of checkpoints of one model: often better than each of them.

    The result is an ordinary checkpoint, to be named wherever a run can be (generate, evaluate, train --init-from). It
    has no optimizer state, so training cannot --resume from it. An ELECTRA generator is averaged like the rest.
    """
    named = checkpoints or []
    _check_usage(named, out, last)
    assert out is not None
    with StopFlag() as flag:
        from tformer.checkpoint import average_checkpoints
        from tformer.checkpoint.average import require_new

        require_new(out)
        paths = _chosen(named, last)
        with progress_reporter("averaging", total=len(paths)) as progress:
            made = average_checkpoints(paths, out, progress=progress, should_stop=flag.should_stop)
    steps = [step for _, step in made.sources]
    many = f"{len(steps)} checkpoint{'s' * (len(steps) != 1)}"
    console.print(f"average of {many}: step {', '.join(map(str, steps))}", markup=False)
    for note in made.notes:
        console.print(f"note: {note}", markup=False)
    if as_json:
        emit_json(
            {
                "path": str(made.path),
                "step": made.step,
                "averaged": [{"path": str(path), "step": step} for path, step in made.sources],
                "parameters": made.num_parameters,
                "notes": made.notes,
            }
        )
    else:
        emit(str(made.path))


def _check_usage(named: list[str], out: Path | None, last: int | None) -> None:
    """What can be refused before anything is read."""
    if out is None:
        raise InputError("--out is missing: where shall the new checkpoint go?", hint="--out runs/NAME-average")
    if last is None and len(named) < 2:
        found = f"found one: {named[0]}" if named else "found none"
        raise InputError(
            f"name at least two checkpoints to average, or a run and --last N ({found})",
            hint=f"tformer average --last 5 {named[0] if named else 'RUN'} --out {out}",
        )
    if last is not None and last < 1:
        raise InputError(f"--last must be at least 1, found {last}")
    if last is not None and len(named) > 1:
        raise InputError(
            f"--last {last} takes one run, found {len(named)}: {', '.join(named)}",
            hint="name the checkpoints themselves, without --last",
        )


def _chosen(named: list[str], last: int | None) -> list[Path]:
    """The folders of the checkpoints that were asked for."""
    from tformer.checkpoint import last_checkpoints, newest_checkpoint, resolve_checkpoint

    if last is None:
        return [resolve_checkpoint(name) for name in named]
    run = Path(named[0]) if named else newest_checkpoint().parents[1]
    return last_checkpoints(run, last)
