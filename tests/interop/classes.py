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
from tformer.interop import architectures
from tformer.interop.architecture import Architecture
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.choose import choose_class
from tformer.interop.read_model import ForeignModel
from tformer.interop.to_gguf import _form_of
from tformer.support.errors import InputError

Note = tuple[str, str, str | float]  # a class, a published configuration or a model_type; a column; what was found
NOTES: list[Note] = []  # of the running test
COLUMNS = ("import", "export", "largest error", "generation", "tokenizer", "GGUF", "ONNX")
OWN = {name: one for name, one in ARCHITECTURES.items() if one.code is None}  # of the library, not tformer's own


def note(name: str, **columns: str | float) -> None:
    NOTES.extend((name, column.replace("_", " "), value) for column, value in columns.items())


def note_exchange(name: str, foreign: ForeignModel, error: float) -> None:
    """Of a model that came in with this error and went out tensor by tensor."""
    note(name, **{"import": "yes", "export": "yes"}, largest_error=error)
    choice = choose_class(foreign.model, family=foreign.architecture.family, model_type=foreign.architecture.model_type)
    try:
        _form_of(choice)
        note(name, GGUF="yes")
    except InputError:
        pass


def tables(notes: Iterable[Note]) -> str:
    found: dict[str, dict[str, set[str | float]]] = {}
    for name, column, value in notes:
        found.setdefault(name, {}).setdefault(column, set()).add(value)
    known = {name: one for one in OWN.values() for name in one.classes}
    for name, one in known.items():
        if name in found:
            found[name]["tokenizer"] = found.get(one.model_type, {}).get("tokenizer", set())
    for name, (config, _) in PUBLISHED.items():
        if name in found:
            found[name]["tokenizer"] = found.get(config["model_type"], {}).get("tokenizer", set())
    files = {
        file: [name for one in ones for name in one.classes if name in found] for file, (_, ones) in by_file().items()
    }
    together = [[f"`{file}`", ", ".join(names), *_cells(found, names)[2:]] for file, names in files.items() if names]
    lines = [
        [f"`{file}`", str(length), ", ".join(one.model_type for one in ones)]
        for file, (length, ones) in by_file().items()
    ]
    classes = [name for name in known if name in found]
    published = [name for name in PUBLISHED if name in found]
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
        names = [name for name, value in vars(loaded).items() if isinstance(value, Architecture)]
        if ones := [
            vars(loaded)[name]
            for name in names
            if re.search(rf"^{name}(: \w+)? = (Architecture|replace)\(", text, re.M)
        ]:
            found[f"{module.name}.py"] = len(text.splitlines()), [one for one in ones if one.code is None]
    return {file: entry for file, entry in found.items() if entry[1]}


def _cells(found: dict[str, dict[str, set[str | float]]], names: list[str]) -> list[str]:
    """What was found of all these names, for each column."""
    union = {column: set().union(*(found[name].get(column, set()) for name in names)) for column in COLUMNS}
    error = f"{max(map(float, union['largest error']), default=0.0):.1e}"
    return [
        error if column == "largest error" else ", ".join(sorted(map(str, union[column]))) or "–" for column in COLUMNS
    ]


def _rows(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield ""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"
    yield ""
