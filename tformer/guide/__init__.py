"""The user guide: one Markdown file a topic, in the wheel. Its topics, sections, links and search.

`tformer guide` shows it in a terminal. A topic is a row of TOPICS and a file of that name; its first heading is the
title.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TOPICS = {
    "first-steps": "install, the first command and what it wrote, five tutorials",
    "data": "text, tables, pairs, images, large corpora; what is held out",
    "training": "objectives, length, early stopping, resume, fine-tuning, sweeps",
    "lora": "adapters of a frozen model, peft; rates of fine-tuning",
    "distillation": "a small model from the predictions of a larger one",
    "devices": "several processes, GPUs and machines; SLURM, kinds, failures",
    "using": "generate, translate, classify, files, Python, servers",
    "serving": "models over HTTP: OpenAI's API, endpoints, errors, limits",
    "inside": "cost, shapes, tokens, attention, loss, lens, circuits, taps",
    "recipe": "recipes, presets, variants, optimizers, schedules",
    "commands": "what commands share, import, export, evaluate; words",
    "troubleshooting": "a message or symptom, and what to do",
    "results": "measured quality and speed, variants compared",
    "security": "what is read, sent and kept; how to report a vulnerability",
    "contributing": "set up, where to start, what a change needs, style",
}
"""One-line summary of each topic, in the order of reading."""

FENCE = re.compile(r"^ *```")
FOLDER = Path(__file__).parent
CODE = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)
PICTURE = re.compile(r"!\[([^\]]*)\]\([^)]*\)")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class GuideSection:
    """A heading and the text below it, up to the next heading.

    Attributes:
        topic: its file.
        level: 1 is the title of the topic.
        heading: without Markdown.
        text: Markdown, with the line of the heading.
    """

    topic: str
    level: int
    heading: str
    text: str

    @property
    def anchor(self) -> str:
        """The name in links, as GitHub makes it."""
        return anchor_of(self.heading)

    @property
    def command(self) -> str:
        """The command that shows this section."""
        return f"tformer guide {self.topic}" + (f" {self.anchor}" if self.level > 1 else "")


def anchor_of(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def read_topic(topic: str) -> str:
    """The Markdown of a topic."""
    return (FOLDER / f"{topic}.md").read_text(encoding="utf-8")


@cache
def sections(topic: str) -> tuple[GuideSection, ...]:
    """The sections of a topic, in order; the first is its title."""
    return tuple(split_sections(topic, read_topic(topic)))


def split_sections(topic: str, text: str) -> Iterator[GuideSection]:
    """The sections of a Markdown text that begins with a heading; `#` in a block of code is no heading."""
    lines: list[str] = []
    in_code = False
    for line in text.splitlines():
        in_code ^= bool(FENCE.match(line))
        if not in_code and re.match("#+ ", line) and lines:
            yield _section(topic, lines)
            lines = []
        lines.append(line)
    yield _section(topic, lines)


def _section(topic: str, lines: list[str]) -> GuideSection:
    marks, _, heading = lines[0].partition(" ")
    return GuideSection(topic, len(marks), heading.replace("`", ""), "\n".join(lines).strip() + "\n")


def with_subsections(section: GuideSection) -> str:
    """The Markdown of a section with its subsections; for a title the whole topic."""
    every = sections(section.topic)
    parts = [section.text]
    for other in every[every.index(section) + 1 :]:
        if other.level <= section.level:
            break
        parts.append(other.text)
    return "\n".join(parts)


def find(words: str) -> tuple[GuideSection | None, list[GuideSection]]:
    """(the section to show, others that match).

    A topic's name, else an anchor is shown, with headings that have the words beside it. Else headings, the phrase and
    the words in texts are looked for, in this order, and a single match is shown. `training early stopping` searches in
    one topic. Case and hyphens do not matter.
    """
    name = anchor_of(" ".join(words.split())).strip("-")
    if name in TOPICS:
        return sections(name)[0], []
    first = next((topic for topic in TOPICS if name.startswith(topic + "-")), None)
    topics, wanted = ([first], name.removeprefix(f"{first}-")) if first else (list(TOPICS), name)
    texts = {one: f"-{anchor_of(' '.join(one.text.split()))}" for topic in topics for one in sections(topic)}
    begins = [f"-{part}" for part in wanted.split("-")]  # of words
    headed = [one for one in texts if all(part in f"-{one.anchor}" for part in begins)]
    found = headed or [one for one, text in texts.items() if f"-{wanted}" in text]
    found = found or [one for one, text in texts.items() if all(part in text for part in begins)]
    named = next((one for one in headed if one.anchor == wanted), None)
    shown = found[0] if len(found) == 1 else named
    return shown, [one for one in found if one != shown]


def place_of(link: str, topic: str) -> tuple[str, str] | None:
    """(topic, anchor or "") that a link of a topic leads to; None outside the guide."""
    file, _, anchor = link.partition("#")
    target = file.removesuffix(".md") if file else topic
    return (target, anchor) if target in TOPICS else None


def with_commands(section: GuideSection) -> str:
    """The Markdown of a section with those below it, where links name the command that shows their target.

    A link to another file becomes its text and the path in the source tree; code and web addresses stay. A picture
    becomes its description: rich would draw over the words of a paragraph that follow one.
    """

    def replaced(match: re.Match[str]) -> str:
        is_picture, shown, link = match.groups()
        if is_picture or "://" in link:
            return match[0]
        path = posixpath.normpath(posixpath.join("tformer/guide", link.partition("#")[0]))
        if place := place_of(link, section.topic):
            path = " ".join(filter(None, ("tformer guide", *place)))
        return f"{shown} (`{path}`)"

    parts = enumerate(CODE.split(with_subsections(section)))
    return PICTURE.sub(r"*Picture: \1.*", "".join(part if n % 2 else LINK.sub(replaced, part) for n, part in parts))
