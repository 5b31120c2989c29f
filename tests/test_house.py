"""The house rules that a machine can check: imports point down, files stay small, nothing is unpickled."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tformer"

# Rooms from top to bottom. A room may import those of later rows only, and itself.
LAYERS = (
    ("cli",),
    ("workflows", "bench"),
    ("training", "viz"),
    ("tasks",),
    ("evaluation",),
    ("decoding",),
    ("loading",),
    ("interop",),
    ("checkpoint",),
    ("cost",),
    ("build",),
    ("recipe",),
    ("objectives", "optim", "model"),
    ("nn", "data", "metrics"),
    ("tokenizer",),
    ("kernels",),
    ("device", "options", "output_files"),
    ("errors", "formatting"),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FREE_OF_FILES = {"nn", "model"}  # these see torch and the rooms below that hold no file, tokenizer or optimizer

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    for module in imported_modules(path):
        parts = module.split(".")
        if parts[0] != "tformer" or len(parts) < 2 or parts[1] not in LEVEL or parts[1] == room:
            continue
        assert LEVEL[parts[1]] > LEVEL[room], f"{room} imports {module}, which is not below it"


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) in FREE_OF_FILES], ids=str)
def test_the_core_sees_torch_and_itself_only(path: Path) -> None:
    allowed = {"tformer", "torch", "__future__", "collections", "dataclasses", "typing", "math", "functools", "difflib"}
    allowed |= {"abc", "itertools", "contextlib", "copy", "enum", "logging", "types"}
    for module in imported_modules(path):
        assert module.split(".")[0] in allowed, f"{path} imports {module}"
        if module.startswith("tformer."):
            assert module.split(".")[1] in {"nn", "model"}, f"{path} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rich_and_plotting_stay_where_they_belong(path: Path) -> None:
    roots = {module.split(".")[0] for module in imported_modules(path)}
    inside = path.relative_to(PACKAGE).as_posix()
    if "rich" in roots:
        assert inside.startswith("cli/") or inside == "training/display.py"
    if "typer" in roots:
        assert inside.startswith("cli/")
    if "matplotlib" in roots:
        assert inside.startswith("viz/")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_one_idea(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    if path.name != "__init__.py" or text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{path} does not say what it is"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_ever_unpickled(path: Path) -> None:
    text = path.read_text()
    assert not re.search(
        r"\b(torch\.load|import pickle|from pickle|allow_pickle=True|yaml\.(unsafe_|full_)?load\()", text
    )


def test_top_level_holds_what_was_agreed() -> None:
    agreed = {"tformer", "tests", "configs", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    ignored = {"runs", "build", "dist"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert {name for name in found - ignored if not name.endswith(".egg-info")} <= agreed
