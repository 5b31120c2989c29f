"""`--help`, written from the declarations of the options alone: neither typer nor rich is imported for it.

    Usage: tformer average [OPTIONS] [CHECKPOINT]...

    Average the weights of several checkpoints ...

    Examples:
      tformer average --last 5 runs/a --out averaged

    Result:
      --out DIR               Folder to write; must not exist yet.

Options that are declared as rare, further examples and details are for `--help-all`. A terminal of fewer than
`LIST_BELOW` columns gets the meaning of an option below its name.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tformer.cli.report import emit
from tformer.support.options import Option, Panel, bare_name, declared_fields, declared_option, facts_of
from tformer.support.rules import sentences_of

HELP, HELP_ALL = ("-h", "--help"), "--help-all"

COMPLETING = "_TFORMER_COMPLETE"
"""Environment variable of a call in which a shell asks for the words that it completes."""

COMMON_EXAMPLES = 3
"""Examples in `--help`; the others are in `--help-all`."""

LIST_BELOW = 60
"""Columns of a terminal; in fewer, two columns of text would be too narrow."""

INDENT, MOST_NAMES = 2, 26
"""Columns before a name; the most columns of names, after which the meanings begin."""

PLACEHOLDERS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""Names of values, by their type."""


@dataclass(frozen=True)
class HelpEntry:
    """An entry of help for a command, option or argument: its name with the name of its value, and its meaning."""

    panel: str
    name: str
    text: str
    rare: bool = False


@dataclass(frozen=True)
class Page:
    """The help of a command.

    Attributes:
        command: as it is called: `tformer bench train`.
        arguments: what follows it: `[OPTIONS] [RUN]`.
        about: paragraphs; the first one is the summary.
        entries: options or commands in the order in which they are shown; a panel's stand together.
        examples: command lines.
        examples_title: what stands above them.
        rules: sentences on options that exclude each other; only `--help-all` shows them.
        rare_topics: what the rare options are for, in a few words; "": the page does not say.
    """

    command: str
    arguments: str
    about: Sequence[str]
    entries: Sequence[HelpEntry]
    examples: Sequence[str]
    examples_title: str = "Examples"
    rules: Sequence[str] = ()
    rare_topics: str = ""

    def lines(self, width: int, *, everything: bool) -> Iterator[str]:
        """The text, wrapped. A command without rare options shows everything at once."""
        everything = everything or not any(entry.rare for entry in self.entries)
        summary, *details = self.about
        yield from _wrapped(f"Usage: {self.command} {self.arguments}", width)
        yield from ("", *_wrapped(summary, width))
        if self.examples:
            yield from ("", _heading(self.examples_title))
            for example in self.examples[: None if everything else COMMON_EXAMPLES]:
                yield from _wrapped(example, width, INDENT)
        shown = [entry for entry in self.entries if everything or not entry.rare]
        names = min(MOST_NAMES, max((INDENT + len(entry.name) + 2 for entry in shown), default=0))
        for panel in dict.fromkeys(entry.panel for entry in shown):
            yield from ("", _heading(panel))
            for entry in shown:
                if entry.panel == panel:
                    yield from _entry_lines(entry, width, names)
        if everything:
            for paragraph in (*details, " ".join(self.rules)):
                yield from ("", *_wrapped(paragraph, width)) if paragraph else ()
        else:
            left_out = len(self.entries) - len(shown)
            more = f"{left_out} more option{'s' * (left_out != 1)}" + (
                f": {self.rare_topics}" if self.rare_topics else " and details" * bool(details)
            )
            yield from ("", *_wrapped(f"{HELP_ALL} shows {more}.", width))


def show(page: Page, *, everything: bool) -> None:
    """Write a page to stdout."""
    lines = page.lines(shutil.get_terminal_size().columns, everything=everything)
    emit("\n".join(lines))


def paragraphs(text: str | None) -> list[str]:
    """The paragraphs of a docstring, without marks of code."""
    parts = (" ".join(part.split()) for part in (text or "").replace("`", "").split("\n\n"))
    return [part for part in parts if part]


# --- entries of declared options --------------------------------------------------------------------------------------


def entries_of(options_type: type[Any]) -> list[HelpEntry]:
    """The options and arguments that the fields of a dataclass declare; arguments come first."""
    needed, _ = sentences_of(options_type)
    found = list(_declarations(options_type))
    arguments = [
        HelpEntry("Arguments", bare_name(option), _meaning(option, default))
        for option, _, default, _ in found
        if not option.flags
    ]
    flags = [
        HelpEntry(
            panel,
            ", ".join(option.flags) + _value_name(option, kind),
            _meaning(option, default, next((needed[flag] for flag in option.flags if flag in needed), None)),
            option.rare,
        )
        for option, kind, default, panel in found
        if option.flags
    ]
    return arguments + flags


def usage_of(options_type: type[Any]) -> str:
    """The arguments in a usage line: `[OPTIONS] [RUN]...`."""
    words = ["[OPTIONS]"]
    for option, kind, default, _ in _declarations(options_type):
        if not option.flags:
            name = bare_name(option)
            words.append((name if default is MISSING else f"[{name}]") + "..." * (get_origin(kind) is tuple))
    return " ".join(words)


def _declarations(options_type: type[Any]) -> Iterator[tuple[Option, Any, Any, str]]:
    """(declaration, type, default, panel) of every option."""
    for _, field, hint in declared_fields(options_type):
        option = declared_option(hint)
        panels = [fact.title for fact in facts_of(hint) if isinstance(fact, Panel)]
        yield option, _bare(hint), field.default, panels[0] if panels else option.panel or "Options"


def _bare(hint: Any) -> Any:
    """The type of a value, without metadata and None."""
    while hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    given = [each for each in get_args(hint) if each is not type(None)]
    return _bare(given[0]) if type(None) in get_args(hint) else hint


def _value_name(option: Option, kind: Any) -> str:
    """The name of the value after a flag, with a space before it; "" for a switch."""
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        name = option.metavar or "|".join(map(str, get_args(kind)))
    else:
        item = get_args(kind)[0] if get_origin(kind) is tuple else kind
        name = option.metavar or PLACEHOLDERS[item]
    return f" {name}"


def _meaning(option: Option, default: Any, needed: str | None = None) -> str:
    """The meaning of an option, with the options that it needs and its default."""
    about = option.help if needed is None else f"{option.help} {needed[0].upper()}{needed[1:]}."
    if option.default is not None:
        words = option.default
    elif default is MISSING or default in (None, False, ()):
        return about
    else:
        words = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{about} Default: {words}."


# --- layout -----------------------------------------------------------------------------------------------------------


def _entry_lines(entry: HelpEntry, width: int, names: int) -> list[str]:
    """An option or command: its name in `names` columns, its meaning beside it, or below it on a narrow terminal."""
    text = entry.text.replace("`", "")
    if width < LIST_BELOW:
        return [*_wrapped(entry.name, width, INDENT), *(_wrapped(text, width, 3 * INDENT) if text else [])]
    first, *others = textwrap.wrap(text, width - names, break_on_hyphens=False) or [""]
    name = " " * INDENT + entry.name
    gap = " " * (names - len(name))
    beside = [_coloured(name) + gap + first] if len(gap) > 1 else [_coloured(name), " " * names + first]
    return [line.rstrip() for line in (*beside, *(" " * names + line for line in others))]


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Lines of at most this width; only a word that is longer than a line is cut."""
    space = " " * indent
    return textwrap.wrap(text, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False)


def _heading(title: str) -> str:
    return f"\x1b[1m{title}:\x1b[0m" if has_colours() else f"{title}:"


def _coloured(name: str) -> str:
    return f"\x1b[36m{name}\x1b[0m" if has_colours() else name


def has_colours() -> bool:
    """Whether standard output shows colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
