"""The plan that a command line of `tformer sweep` means, and its flags for other commands checked by those commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from tformer.cli import evaluate, train
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.workflows.sweep.plan import Plan


def flag_words(options: dict[str, Any]) -> list[str]:
    """The options as they stand on the command line of `tformer train`."""
    words = []
    for flag, value in options.items():
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            words += [flag, str(item)]
    return words


def make_plan(name: str | None, chosen: dict[str, Any], *, seeds: int | None, max_steps: int | None) -> Plan:
    """The written plan, with the seeds and steps of the command line; or the plan that the command line is."""
    from tformer.workflows.sweep.flags import plan_of_flags
    from tformer.workflows.sweep.plan import read_plan

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
