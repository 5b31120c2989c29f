"""`tformer guide`: the user guide in the terminal."""

from __future__ import annotations

import difflib
import sys
import textwrap
from dataclasses import dataclass
from typing import Annotated

from tformer.cli.command import examples, takes_options
from tformer.cli.report import emit, emit_json, emit_lines, show_notes, spinner, terminal_width
from tformer.guide import TOPICS, GuideSection, find, sections, with_commands, with_subsections
from tformer.support.errors import InputError
from tformer.support.formatting import aligned
from tformer.support.options import Json, argument

EPILOG = examples("`tformer guide`", "`tformer guide lora`", "`tformer guide early stopping`")

MAX_COLUMNS = 100
"""Of text on a wide terminal."""

MAX_OTHERS = 5
"""Sections that are named below the one that is shown."""


@dataclass(frozen=True)
class GuideOptions:
    words: Annotated[
        tuple[str, ...], argument("[TOPIC]", help="A topic, or words to look for in headings and texts.")
    ] = ()
    as_json: Json = False


@takes_options
def guide(options: GuideOptions) -> None:
    """Show the user guide, by topic, or the list of topics.

    Words that are no topic are looked for in the headings, then in the texts: a single match is shown, several are
    listed with the command that shows each. On a terminal the text is laid out; a pipe gets its Markdown.
    """
    words = " ".join(options.words)
    if not words:
        _list_topics(as_json=options.as_json)
        return
    shown, others = find(words)
    found = [*filter(None, [shown]), *others]
    if not found:
        known = [*TOPICS, *(section.heading.lower() for topic in TOPICS for section in sections(topic))]
        near = difflib.get_close_matches(words.lower(), known, n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(near)}" if near else f"topics: {', '.join(TOPICS)}"
        raise InputError(f"the guide has nothing about '{words}'", hint=hint)
    if options.as_json:
        emit_json([{"topic": one.topic, "heading": one.heading, "command": one.command,
                    "text": with_subsections(one)} for one in found])  # fmt: skip
    elif shown is None:
        _emit_columns([(one.command, one.heading) for one in others])
    else:
        _show(shown)
        show_notes((f"see also: {one.command}" for one in others[:MAX_OTHERS]), dim=True)


def _list_topics(*, as_json: bool) -> None:
    if as_json:
        emit_json(TOPICS)
        return
    _emit_columns(list(TOPICS.items()))
    ways = ("TOPIC: shows it", "WORDS: finds the section")
    show_notes([f"tformer guide {way}" for way in ways], dim=True)


def _emit_columns(rows: list[tuple[str, str]]) -> None:
    """Two columns, or below each other on a terminal that is too narrow for them."""
    lines, width = aligned(rows), terminal_width()
    if width is not None and max(map(len, lines)) > width:
        lines = [line for name, about in rows for line in (name, *textwrap.wrap(about, width - 2))]
    emit_lines(lines)


def _show(section: GuideSection) -> None:
    if not sys.stdout.isatty():
        emit(with_subsections(section).rstrip("\n"))
        return
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.theme import Theme

    spinner.end()
    code = {"markdown.code": "bold cyan", "markdown.code_block": "none"}  # blocks without a background
    terminal = Console(theme=Theme(code), width=min(terminal_width() or MAX_COLUMNS, MAX_COLUMNS))
    terminal.print(Markdown(with_commands(section), hyperlinks=False, code_theme="ansi_light"))
