"""Documents: every command of a document or a hint parses, every link leads somewhere, every preset is described."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tformer.cli.app import COMMANDS
from tformer.guide import split_sections
from tformer.objectives import OBJECTIVES

ROOT = Path(__file__).parents[2]
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


def texts_in(value: ast.AST) -> Iterator[str]:
    """The texts of an expression, with `1` in place of each value of an f-string."""
    if isinstance(value, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in value.values)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    else:
        for child in ast.iter_child_nodes(value):
            yield from texts_in(child)


def hints(path: Path) -> Iterator[str]:
    for call in ast.walk(ast.parse(path.read_text())):
        for keyword in call.keywords if isinstance(call, ast.Call) else ():
            if keyword.arg == "hint":
                yield from texts_in(keyword.value)


def test_every_command_of_a_hint_parses(cli: Callable[..., Any]) -> None:
    """And each file of the checkout that a hint names is there."""
    texts = [(path, text) for path in sorted((ROOT / "tformer").rglob("*.py")) for text in hints(path)]
    found = {(path, *re.findall(r"[^\s`',;:()]+", match)) for path, text in texts
             for match in re.findall(r"\b(tformer [a-z][^`',;:()]*)", text.replace("...", ""))}  # fmt: skip
    assert len(found) > 12
    for path, _, *words in found:
        outcome = cli(*words[: words.index("--") if "--" in words else None], "--help")
        assert outcome.code == 0, f"{path}: {' '.join(words)}\n{outcome.err}"
    for path, text in texts:
        for name in re.findall(r"\b[\w/]+\.md\b", text):
            assert (ROOT / name).is_file(), f"{path}: {text}"


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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_that_a_document_names_exists(path: Path) -> None:
    for name in re.findall(r"`([\w./]+/[\w.]+\.py)(?:::\w+)?`", CODE.sub("", path.read_text())):
        found = any((folder / name).is_file() for folder in (ROOT, ROOT / "tformer", path.parent))
        assert found or "NAME" in name, f"{path}: {name}"


def test_every_run_of_an_example_is_made_by_one_example() -> None:
    """So commands can be copied as they stand: `--out` must be empty or new. `runs/a` and `runs/b` are any two runs."""
    guides = [ROOT / "README.md", *(ROOT / "tformer" / "guide").glob("*.md")]
    texts = {command for path in guides for command in commands(path.read_text())}
    made = [name for text in texts if "--resume" not in text for name in re.findall(r"--out (runs/[\w-]+)", text)]
    assert len(made) > 15 and len(set(made)) == len(made), sorted(made)
    read = {name for text in texts for name in re.findall(r"(?<![\w/])runs/[\w-]+", text)}
    assert read <= {*made, "runs/a", "runs/b"}, sorted(read - set(made))


def test_the_commands_of_a_document_are_found() -> None:
    assert len(commands((ROOT / "README.md").read_text())) > 15
    assert "tformer generate" in commands("`tformer generate`") and not commands("`tformer generate RUN`")


def test_every_command_has_a_row_in_the_readme_whose_link_leads_to_a_command_line_with_it() -> None:
    rows = re.findall(r"^\|.*\|.*\|$", (ROOT / "README.md").read_text(), re.M)
    for name in COMMANDS:
        [link] = {link for row in rows for link in re.findall(rf"\[`{name}`\]\(([^)]+)\)", row)}
        file, _, anchor = link.partition("#")
        shown = list(split_sections("", (ROOT / file).read_text()))
        texts = [section.text for section in shown if not anchor or section.anchor == anchor]
        assert any(f"tformer {name}" in text for text in texts), f"{link} has no `tformer {name}`"


def test_every_preset_has_a_line_in_config_list_and_every_plan_a_section_of_results(cli: Callable[..., Any]) -> None:
    listed = [line.split() for line in cli("config", "list").out.splitlines()]
    described = {name for name, *about in listed if about}
    planned = re.findall(r"`--plan ([\w-]+)`", (ROOT / "tformer" / "guide" / "results.md").read_text())
    for preset in (ROOT / "configs").rglob("*.yaml"):
        folder, name = preset.parent.name, preset.stem
        assert name in planned if folder == "sweeps" else f"{folder}/{name}" in described, preset
        assert "@" not in preset.read_text().split("\n\n")[0], f"{preset} has an open figure"


def test_the_student_of_the_distillation_example_is_smaller_than_its_teacher(cli: Callable[..., Any]) -> None:
    parameters = []
    for command in commands((ROOT / "tformer/guide/distillation.md").read_text()):
        words = shlex.split(command)
        if words[1] == "train" and "runs/teacher" in words:
            chosen = [word for flag, value in pairwise(words) if flag in ("--arch", "--preset", "--set")
                      for word in (flag, value)]  # fmt: skip
            parameters.append(json.loads(cli("inspect", *chosen, "--json").out)["parameters"])
    teacher, student = parameters
    assert student < teacher


def messages() -> Iterator[str]:
    """The texts of the package's code, with `...` in place of each value of an f-string."""
    for path in (ROOT / "tformer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_message_of_the_troubleshooting_tables_is_one_of_the_code() -> None:
    known = "\n".join(messages())
    rows = re.findall(r"^\| (`.*)$", (ROOT / "tformer/guide/troubleshooting.md").read_text(), re.M)
    quoted = [span for row in rows for span in re.findall(r"`([^`]+)`", row.split(" | ")[0]) if span.count(" ") > 1]
    assert len(quoted) > 20
    for span in quoted:
        parts = map(re.escape, filter(None, (part.strip() for part in span.split("..."))))
        assert re.search(".*".join(parts), known), span


def test_the_table_of_validation_metrics_is_that_of_the_objectives() -> None:
    rows = {"classification": "classification", "multi_label": "several labels", "regression": "regression",
            "contrastive": "`contrastive`", "similarity": "`similarity`", "dpo": "`dpo`",
            "token_classification": "`token_classification`", "question_answering": "`question_answering`",
            "seq2seq": "pairs of texts", "causal_lm": "language models", "masked_lm": "language models"}  # fmt: skip
    guide = (ROOT / "tformer/guide/training.md").read_text().split("may be |\n")[1].split("\n\n")[0]
    for kind, row in rows.items():
        [cell] = re.findall(rf"^\| {row} \| (.*) \|$", guide, re.M)
        assert sorted(re.findall(r"`(\w+)`", cell)) == sorted(OBJECTIVES[kind].metrics), kind
