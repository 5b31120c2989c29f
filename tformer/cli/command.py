"""The Typer command of a function that takes a frozen dataclass of options, and the examples in its help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from tformer.cli.completion import completer
from tformer.support.errors import InputError
from tformer.support.options import Panel, declared_option, facts_of, flag_of

Options = TypeVar("Options")

PLACEHOLDERS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""Names of values in help, by their type."""


def takes_options(run: Callable[[Options], None]) -> Callable[..., None]:
    """The Typer command of a function of one argument, a frozen dataclass of options.

    Every field is a parameter of the command: `name: Annotated[type, option("--name", help=...)] = default`, in the
    order of the fields; a `Panel` beside a shared option is the one that shows it, and other metadata is ignored. A
    field of type `tuple[T, ...]` takes any number of values. A field
    whose type is such a dataclass itself adds that one's fields, so that commands can share a group of options.

    The command can also be called in Python with ready options: `generate(GenerateOptions(prompt="x"))`.
    """
    [argument] = inspect.signature(run).parameters
    options_type = get_type_hints(run)[argument]

    def command(options: Any = None, /, **values: Any) -> None:
        run(_filled(options_type, values) if options is None else options)

    parameters = list(_parameters(options_type))
    command.__name__, command.__doc__, command.__module__ = run.__name__, run.__doc__, run.__module__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameters(options_type: Any) -> Iterator[inspect.Parameter]:
    hints, kinds = get_type_hints(options_type, include_extras=True), get_type_hints(options_type)
    for field in fields(options_type):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _parameters(hint)
        else:
            yield _parameter(field, hint, kinds[field.name])


def _parameter(field: Field[Any], hint: Any, kind: Any) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty if field.default is MISSING else field.default
    declared = declared_option(hint)
    panels = [fact.title for fact in facts_of(hint) if isinstance(fact, Panel)]
    if _is_tuple(kind):
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
        default = list(field.default) if isinstance(field.default, tuple) else default
    shown: dict[str, Any] = {
        "help": declared.help,
        # in place of typer's `<int>`; a flag and choices have none
        "metavar": declared.metavar
        or next((PLACEHOLDERS[one] for one in (kind, *get_args(kind)) if declared.flags and one in PLACEHOLDERS), None),
        "rich_help_panel": panels[0] if panels else declared.panel,
        "show_default": declared.show_default,
        "autocompletion": completer(declared.flags, declared.metavar),
    }
    info = typer.Option(*declared.flags, **shown) if declared.flags else typer.Argument(**shown)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _filled(options_type: Any, values: dict[str, Any]) -> Any:
    """The dataclass with the values from the command line; InputError, with the flag, for a ValueError of a field."""
    from tformer.support.bounds import out_of_bounds

    hints = get_type_hints(options_type)
    filled = {}
    for field in fields(options_type):
        hint = hints[field.name]
        if is_dataclass(hint):
            filled[field.name] = _filled(hint, values)
        else:
            value = values[field.name]
            filled[field.name] = tuple(value or ()) if _is_tuple(hint) else value
            if wrong := out_of_bounds(field.name, value):
                raise InputError(f"{flag_of(options_type, field.name)} {wrong}")
    try:
        return options_type(**filled)
    except ValueError as error:  # names a field; the user knows its flag
        name = str(error).split(" ")[0].rstrip(":")
        raise InputError(flag_of(options_type, name) + str(error).removeprefix(name)) from error


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[1:] == (...,)


def examples(*lines: str) -> str:
    """The epilog of a command's help: its examples, a paragraph each so that they keep their lines."""
    return "\n\n".join(("Examples:", *lines))
