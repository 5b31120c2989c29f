"""The user guide: its table of topics, its sections, and what finds them; `tformer guide` in a pipe and a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.lint.test_documents import anchors
from tformer import guide
from tformer.guide import (
    FOLDER,
    LINK,
    TOPICS,
    GuideSection,
    find,
    place_of,
    read_topic,
    sections,
    split_sections,
    with_subsections,
)

TEXT = """\
# First steps

Hello, see [stopping](#early-stopping), [flags](data.md), [data](data.md#the-csv), [rows
of it](../data/README.md),
[a page](https://example.org) and ![a picture](pictures/a.svg).

## Early stopping

```bash
# no heading
[not](a.md) a link
```

### On F1

Deep.

## `tformer train`

Flags.
"""


@pytest.fixture
def two_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"first-steps": TEXT, "data": "# Your data\n\n## The csv\n\nflags and columns\n"}
    monkeypatch.setattr(guide, "TOPICS", dict.fromkeys(texts, "summary"))
    monkeypatch.setattr(guide, "sections", lambda topic: tuple(split_sections(topic, texts[topic])))


def headings(words: str) -> list[str]:
    shown, others = find(words)
    return [shown.heading] if shown else [section.heading for section in others]


def test_the_table_and_the_files_agree() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_a_title_and_sections_with_anchors_of_their_own(topic: str) -> None:
    found = sections(topic)
    assert [section.level for section in found].index(1) == 0 and sum(section.level == 1 for section in found) == 1
    assert {section.anchor for section in found} == anchors(read_topic(topic)), "as GitHub makes them"
    assert len({section.anchor for section in found}) == len(found), "two headings are equal"
    assert with_subsections(found[0]).split() == read_topic(topic).split(), "nothing is lost"
    assert len(f"troubleshooting  {TOPICS[topic]}") <= 80, "a line of the list"


@pytest.mark.parametrize("topic", TOPICS)
def test_pictures_are_in_the_wheel(topic: str) -> None:
    for is_picture, _, link in LINK.findall(read_topic(topic)):
        if is_picture:
            assert (FOLDER / link).resolve().is_relative_to(FOLDER), f"{topic}: {link}"


@pytest.mark.parametrize("topic", TOPICS)
def test_the_command_of_every_section_finds_it(topic: str) -> None:
    for section in sections(topic):
        assert find(section.command.removeprefix("tformer guide "))[0] == section
    assert sections(topic)[0].command == f"tformer guide {topic}"


def test_headings_in_code_are_none() -> None:
    found = list(split_sections("first-steps", TEXT))
    assert [(one.level, one.heading) for one in found] == [
        (1, "First steps"), (2, "Early stopping"), (3, "On F1"), (2, "tformer train"),
    ]  # fmt: skip


@pytest.mark.usefixtures("two_topics")
def test_a_topic_precedes_a_heading_and_a_heading_a_text() -> None:
    assert headings("data") == headings("DATA") == ["Your data"]
    assert headings("first steps") == ["First steps"]
    assert headings("stopping early") == headings("first-steps early-stopping") == ["Early stopping"]
    assert headings("deep") == ["On F1"] and headings("flags") == ["First steps", "tformer train", "The csv"]
    assert headings("columns flags") == ["The csv"] == headings("flags and columns")
    assert headings("on") == ["On F1"], "words are found by how they begin"
    assert headings("data flags") == ["The csv"] and headings("first steps columns") == []


def test_looking_inside_is_the_topic_and_walks_from_loss_to_head_to_circuit() -> None:
    shown, _ = find("looking-inside")
    assert shown == sections("inside")[0]
    walk, _ = find("inside from loss to head to circuit")
    assert walk is not None
    commands = re.findall(r"^tformer ([\w-]+)", walk.text, re.M)
    assert commands == ["train", "viz-tokens", "lens", "heads", "patch", "patch"]


def test_other_headings_are_named_beside_the_section(cli: Callable[..., Any]) -> None:
    done = cli("guide", "memory")
    assert done.out.startswith("## Memory\n") and "see also: tformer guide troubleshooting out-of-memory" in done.err


@pytest.mark.usefixtures("two_topics")
def test_a_section_has_those_below_it_and_names_what_to_type() -> None:
    title, _ = find("first steps")
    shown = guide.with_commands(title)
    assert "stopping (`tformer guide first-steps early-stopping`), flags (`tformer guide data`)" in shown
    assert "data (`tformer guide data the-csv`), rows\nof it (`tformer/data/README.md`)" in shown
    assert "[a page](https://example.org) and *Picture: a picture.*" in shown and "[not](a.md) a link" in shown
    section, _ = find("early stopping")
    assert "### On F1" in with_subsections(section) and "Flags." not in with_subsections(section)


def test_a_link_leads_to_a_topic_or_out_of_the_guide() -> None:
    assert place_of("security.md#what-is-sent", "data") == ("security", "what-is-sent")
    assert place_of("#what-is-sent", "security") == ("security", "what-is-sent")
    assert place_of("../../README.md", "security") is None


def test_a_pipe_gets_the_markdown(cli: Callable[..., Any]) -> None:
    assert cli("guide", "security").out == read_topic("security")
    assert cli("guide", "What", "is", "SENT").out.startswith("## What is sent\n\nNothing.")
    assert [line.split()[0] for line in cli("guide").out.splitlines()] == list(TOPICS)


@pytest.mark.usefixtures("two_topics")
def test_a_terminal_gets_a_layout_and_what_to_type(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", cli("guide", "first", "steps").out).split())
    assert "flags (tformer guide data)" in shown and "# no heading [not](a.md) a link" in shown
    assert "##" not in shown and "```" not in shown and "a page (https://example.org) and Picture: a" in shown


def test_json_has_the_topics_or_the_sections(cli: Callable[..., Any]) -> None:
    assert json.loads(cli("guide", "--json").out) == TOPICS
    [found] = json.loads(cli("guide", "what is sent", "--json").out)
    assert found["topic"] == "security" and found["text"].startswith("## What is sent")


def test_an_unknown_name_is_answered_with_the_nearest(cli: Callable[..., Any]) -> None:
    done = cli("guide", "securty")
    assert done.code == 2 and "the guide has nothing about 'securty'" in done.err and "nearest: security" in done.err
    assert f"topics: {', '.join(TOPICS)}" in cli("guide", "qqqqqq").err


def test_the_guide_loads_no_torch() -> None:
    code = (
        "import sys\nfrom tformer.cli.app import main\n"
        "try:\n    main(['guide', 'security'])\n"
        "finally:\n    assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == read_topic("security"), done.stderr


def test_a_section_is_the_text_of_its_heading() -> None:
    assert GuideSection("data", 2, "Early stopping on F1: what?", "").anchor == "early-stopping-on-f1-what"
