"""What the tests of this folder find out about each class and each published configuration, as tables of Markdown.

A test notes what it measures; pytest keeps the notes with the test's report, so that those of a failed one do not count
and those of other processes arrive (`conftest.py`).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator

from tests.interop.published import PUBLISHED, class_of
from tformer.interop import architectures, to_gguf, to_onnx
from tformer.interop.architecture import Architecture
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.read_model import ForeignModel

Note = tuple[str, str, str | float]  # a class, a published configuration or a model_type; a column; what was found
NOTES: list[Note] = []  # of the running test
COLUMNS = ("import", "export", "largest error", "generation", "tokenizer", "GGUF", "ONNX")
OWN = {name: one for name, one in ARCHITECTURES.items() if one.code is None}  # of the library, not tformer's own


def note(name: str, **columns: str | float) -> None:
    NOTES.extend((name, column.replace("_", " "), value) for column, value in columns.items())


def note_exchange(name: str, foreign: ForeignModel, error: float) -> None:
    """Of a model that came in with this error and went out tensor by tensor."""
    note(name, **{"import": "yes", "export": "yes"}, largest_error=error)
    family, model_type = foreign.architecture.family, foreign.architecture.model_type
    refusals = {
        "GGUF": to_gguf.refusal(foreign.model, family=family, model_type=model_type),
        "ONNX": to_onnx.refusal(foreign.model),
    }
    note(name, **{column: "yes" for column, refusal in refusals.items() if refusal is None})


def tables(notes: Iterable[Note]) -> str:
    found: dict[str, dict[str, set[str | float]]] = {}
    for name, column, value in notes:
        found.setdefault(name, {}).setdefault(column, set()).add(value)
    types = {name: one.model_type for one in OWN.values() for name in one.classes}
    classes, published = ([name for name in names if name in found] for names in (types, PUBLISHED))
    for name in (*classes, *published):
        kind = types[name] if name in types else PUBLISHED[name][0]["model_type"]
        found[name]["tokenizer"] = found.get(kind, {}).get("tokenizer", set())
    files = {
        file: [name for one in ones for name in one.classes if name in found] for file, (_, ones) in by_file().items()
    }
    together = [[f"`{file}`", ", ".join(names), *_cells(found, names)[2:]] for file, names in files.items() if names]
    lines = [
        [f"`{file}`", str(length), ", ".join(one.model_type for one in ones)]
        for file, (length, ones) in by_file().items()
    ]
    parts = [
        f"{len(classes)} classes, by the file of their architecture",
        *_rows(["file", "class", *COLUMNS[2:]], together),
        "Every class",
        *_rows(["class", *COLUMNS], ([name, *_cells(found, [name])] for name in classes)),
        f"{len(published)} published configurations, with fewer layers and narrower",
        *_rows(
            ["configuration", "class", *COLUMNS],
            ([name, class_of(PUBLISHED[name][0]), *_cells(found, [name])] for name in published),
        ),
        "Lines that the architectures took",
        *_rows(["file", "lines", "model_type"], lines),
    ]
    return "\n".join(parts)


def by_file() -> dict[str, tuple[int, list[Architecture]]]:
    """Name of a file of architectures -> its length and what it defines."""
    found = {}
    for module in pkgutil.iter_modules(architectures.__path__):
        loaded = importlib.import_module(f"{architectures.__name__}.{module.name}")
        text = inspect.getsource(loaded)
        targets = re.findall(r"^([A-Z][\w, ]*)(?:: \w+)? = ", text, re.M)
        assigned = [vars(loaded)[name] for target in targets for name in target.split(", ")]
        if ones := [one for one in OWN.values() if any(one is value for value in assigned)]:
            found[f"{module.name}.py"] = len(text.splitlines()), ones
    return found


def _cells(found: dict[str, dict[str, set[str | float]]], names: list[str]) -> list[str]:
    """What was found of all these names, for each column."""
    union = {column: set().union(*(found[name].get(column, set()) for name in names)) for column in COLUMNS}
    most = max(map(float, union["largest error"]), default=0.0)
    error = f"{most:.1e}" if most else "0"
    return [
        error if column == "largest error" else ", ".join(sorted(map(str, union[column]))) or "–" for column in COLUMNS
    ]


def _rows(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield ""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"
    yield ""
