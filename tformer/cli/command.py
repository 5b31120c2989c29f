"""The command of a function that takes a frozen dataclass of options: its help, and its form for Typer.

Typer is imported only where a command line is parsed: it takes longer to import than `--help` may.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from tformer.cli.help import COMPLETING, PLACEHOLDERS, HelpEntry, Page, entries_of, paragraphs, usage_of
from tformer.support.errors import InputError
from tformer.support.options import declared_option, facts_of, flag_of, hints_of
from tformer.support.rules import Checked, sentences_of

if TYPE_CHECKING:
    import typer

Options = TypeVar("Options")


@dataclass(frozen=True)
class OptionsCommand:
    """A function of one argument, a frozen dataclass of options.

    Call it in Python with ready options: `generate(GenerateOptions(prompt="x"))`. They are checked first.
    """

    run: Callable[[Any], None]
    options_type: type[Any]

    def __call__(self, options: Any) -> None:
        if isinstance(options, Checked):
            options.check()
        self.run(options)

    def page(self, command: str, examples: tuple[str, ...]) -> Page:
        """The help of the command under its name."""
        about = paragraphs(self.run.__doc__)
        usage, entries = usage_of(self.options_type), entries_of(self.options_type)
        topics = getattr(self.options_type, "HELP_ALL", "")
        _, rules = sentences_of(self.options_type)
        return Page(command, usage, about, entries, examples, rules=rules, rare_topics=topics)

    def for_typer(self) -> Callable[..., None]:
        """The function with one parameter for each option, in the order of the fields, as Typer inspects it."""

        def command(**values: Any) -> None:
            self(_filled(self.options_type, values))

        parameters = list(_parameters(self.options_type))
        command.__name__, command.__doc__, command.__module__ = (
            self.run.__name__,
            self.run.__doc__,
            self.run.__module__,
        )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command


def takes_options(run: Callable[[Options], None]) -> OptionsCommand:
    """The command of a function of one argument, a frozen dataclass of options.

    Every field is a parameter of the command: `name: Annotated[type, option("--name", help=...)] = default`; a `Panel`
    beside a shared option is the one that shows it, and other metadata is ignored. The class may state in `HELP_ALL`
    what its rare options are for. A field of type `tuple[T, ...]` takes any number of values. A field whose type is
    such a dataclass itself adds that one's fields, so that commands can share a group of options.
    """
    [argument] = inspect.signature(run).parameters
    return OptionsCommand(run, get_type_hints(run)[argument])


@dataclass
class CommandGroup:
    """Commands under one name, as `tformer runs list` and `tformer runs show`.

    Attributes:
        help: what they are for.
        examples: command lines.
        commands: each command by its name, with its examples.
    """

    help: str
    examples: tuple[str, ...]
    commands: dict[str, tuple[OptionsCommand, tuple[str, ...]]] = field(default_factory=dict)

    def command(
        self, name: str | None = None, *, epilog: tuple[str, ...]
    ) -> Callable[[OptionsCommand], OptionsCommand]:
        """Decorator that adds a command, by default under the name of its function; `epilog`: its examples."""

        def add(command: OptionsCommand) -> OptionsCommand:
            self.commands[name or command.run.__name__] = (command, epilog)
            return command

        return add

    def page(self, command: str, name: str | None = None) -> Page:
        """The help of the group, or of one of its commands."""
        if name is not None:
            one, its_examples = self.commands[name]
            return one.page(f"{command} {name}", its_examples)
        entries = [
            HelpEntry("Commands", name, paragraphs(one.run.__doc__)[0]) for name, (one, _) in self.commands.items()
        ]
        return Page(command, "COMMAND ...", paragraphs(self.help), entries, self.examples)

    def for_typer(self) -> typer.Typer:
        """The group as Typer registers it."""
        import typer

        app = typer.Typer(no_args_is_help=True, help=self.help)
        for name, (command, _) in self.commands.items():
            app.command(name)(command.for_typer())
        return app


def examples(*lines: str) -> tuple[str, ...]:
    """The examples of a command; marks of code are left out."""
    return tuple(line.strip("`") for line in lines)


def _parameters(options_type: Any) -> Iterator[inspect.Parameter]:
    hints, kinds = hints_of(options_type), get_type_hints(options_type)
    for each in fields(options_type):
        hint = hints[each.name]
        if is_dataclass(hint):
            yield from _parameters(hint)
        else:
            yield _parameter(each, hint, kinds[each.name])


def _parameter(each: Field[Any], hint: Any, kind: Any) -> inspect.Parameter:
    import typer

    default: Any = inspect.Parameter.empty if each.default is MISSING else each.default
    declared = declared_option(hint)
    if _is_tuple(kind):
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
        if default is not inspect.Parameter.empty:
            default = list(default) or None  # click 8.1, of the oldest typer that is allowed, refuses []
    # in place of typer's `<int>` in errors; a flag and choices have none
    named = next((PLACEHOLDERS[one] for one in (kind, *get_args(kind)) if declared.flags and one in PLACEHOLDERS), None)
    shown: dict[str, Any] = {
        "help": declared.help,  # a shell shows it beside a completed flag
        "metavar": declared.metavar or named,
    }
    if COMPLETING in os.environ:
        from tformer.cli.completion import completer

        shown["autocompletion"] = completer(declared.flags, declared.metavar)
    info = typer.Option(*declared.flags, **shown) if declared.flags else typer.Argument(**shown)
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _filled(options_type: Any, values: dict[str, Any]) -> Any:
    """The dataclass with the values from the command line; InputError, with the flag, for a ValueError of a field."""
    from tformer.support.bounds import out_of_bounds

    hints, declared = get_type_hints(options_type), hints_of(options_type)
    filled = {}
    for each in fields(options_type):
        hint = hints[each.name]
        if is_dataclass(hint):
            filled[each.name] = _filled(hint, values)
        else:
            value = values[each.name]
            filled[each.name] = tuple(value or ()) if _is_tuple(hint) else value
            if wrong := out_of_bounds(value, facts_of(declared[each.name])):
                raise InputError(f"{flag_of(options_type, each.name)} {wrong}")
    try:
        return options_type(**filled)
    except ValueError as error:  # names a field; the user knows its flag
        name = str(error).split(" ")[0].rstrip(":")
        raise InputError(flag_of(options_type, name) + str(error).removeprefix(name)) from error


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[1:] == (...,)
