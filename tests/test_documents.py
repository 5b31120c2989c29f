"""Documents: every `tformer` command in a Markdown file parses, every link leads somewhere, every preset is named."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
HIDDEN = {".venv", "venv", "build", "dist", "runs", "node_modules"}
DOCUMENTS = sorted(
    path for path in ROOT.rglob("*.md") if not HIDDEN & set(path.parts) and not path.parent.name.startswith(".")
)
CODE = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PLACEHOLDER = re.compile(r"[…]|\.\.\.|\b(?:COMMAND|RUN|NAME|FILE|DIR|HF_DIR)\b|[|]")


def commands(document: str) -> list[str]:
    """Commands on the lines of code blocks and between backquotes, those with placeholders or alternatives left out."""
    lines = [
        part for block in CODE.findall(document) for line in block.splitlines() for part in re.split("&&|[|]", line)
    ]
    spans = re.findall(r"`([^`\n]+)`", CODE.sub("", document))
    texts = [text.split("  #")[0].strip().removeprefix("DATA=$DATA ") for text in lines + spans]
    return [text for text in texts if text.startswith("tformer ") and not PLACEHOLDER.search(text)]


def anchors(document: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", document), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_parses(path: Path, cli: Callable[..., Any]) -> None:
    for command in commands(path.read_text()):
        words = shlex.split(command)[1:]
        before = words.index("--") if "--" in words else len(words)
        outcome = cli(*words[:before], "--help")  # parses everything before it shows the help
        assert outcome.code == 0, f"{path}: {command}\n{outcome.err}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(path: Path) -> None:
    for link in LINK.findall(CODE.sub("", path.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{path}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{path}: {link}"


def test_the_commands_of_a_document_are_found() -> None:
    assert len(commands((ROOT / "README.md").read_text())) > 15
    assert "tformer generate" in commands("`tformer generate`") and not commands("`tformer generate RUN`")


def test_every_preset_is_described() -> None:
    described = (ROOT / "configs" / "README.md").read_text()
    for preset in (ROOT / "configs").rglob("*.yaml"):
        assert re.search(rf"\b{re.escape(preset.stem)}\b", described), preset.stem
        assert "@" not in preset.read_text().split("\n\n")[0], f"{preset} has an open figure"
