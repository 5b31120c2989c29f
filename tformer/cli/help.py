"""Help that fits: no type beside arguments and flags without a value; a list in place of tables on a narrow terminal.

In the list each option has its own line, and its meaning stands below it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tformer.cli.report import emit

COLUMNS_NEED = 80
"""Columns of a terminal; in fewer, typer's tables cut names off."""

INDENT = "  "


def fit_help(command: Any, width: int) -> None:
    """Give a command of Typer, and its own commands, help for a terminal of this width."""
    for one in _with_subcommands(command):
        printing = partial(_print_help, one, width) if width < COLUMNS_NEED else one.format_help
        one.format_help = partial(_hide_types, one, printing)


def _with_subcommands(command: Any) -> Iterator[Any]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from _with_subcommands(inner)


def _hide_types(command: Any, printing: Callable[..., None], context: Any, formatter: Any) -> None:
    """Print the help without typer's `<bool>` beside a flag, which looks like its value, and types of arguments."""
    for parameter in command.get_params(context):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
    printing(context, formatter)


def _print_help(command: Any, width: int, context: Any, formatter: Any) -> None:
    """Write the help to stdout, as typer does with rich: what the formatter holds would become part of an error."""
    for text, indent in _help_lines(command, context):
        emit("\n".join(_wrapped(text, indent, width)))


def _help_lines(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    """(text, indentation) of every paragraph and entry."""
    yield " ".join(command.get_usage(context).split()), ""
    for paragraph in _paragraphs(command.help):
        yield "", ""
        yield paragraph, ""
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        usual = "Options" if parameter.param_type_name == "option" else "Arguments"
        record = parameter.get_help_record(context)
        if record is not None:
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
    for inner in getattr(command, "commands", {}).values():
        entry = (inner.name, next(iter(_paragraphs(inner.help)), ""))
        panels.setdefault(getattr(inner, "rich_help_panel", None) or "Commands", []).append(entry)
    for title, entries in panels.items():
        yield "", ""
        yield f"{title}:", ""
        for names, text in entries:
            yield names, INDENT
            if text:
                yield text.replace("`", ""), 3 * INDENT
    for paragraph in _paragraphs(command.epilog):
        yield "", ""
        yield paragraph, ""


def _paragraphs(text: str | None) -> list[str]:
    return [paragraph.replace("`", "") for paragraph in inspect.cleandoc(text or "").split("\n\n") if paragraph]


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    """Lines of at most this width; only a word that is longer than a line is cut."""
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False) or [""]
