"""Labelled text that is on every machine: which part of Python's standard library is this function from?

`builtin:python-packages`: an example is one function or method with its comments and docstring, or a class's head and
docstring, out of the source files of sixteen packages; the label is the package. Nothing names the package but the code
itself. No text occurs twice, and no package has more than `MAX_PER_PACKAGE` examples, drawn by a hash of their names.
"""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tformer.data.builtin import BUILTINS, PREFIX, BuiltinText, find_builtin, name_hash, read_source, stdlib_files
from tformer.data.labelled_tables import LabelledRow
from tformer.errors import InputError

PACKAGES = {  # by the first part of the path
    **{name: name for name in ("asyncio", "email", "http", "importlib", "inspect", "ipaddress", "logging", "mailbox")},
    **{name: name for name in ("multiprocessing", "tarfile", "typing", "unittest", "urllib", "xml")},
    "datetime": "datetime",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
}
MAX_PER_PACKAGE = 240
MIN_LINES = 3
MAX_CHARACTERS = 1000
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@cache  # parsing takes a second, and a tokenizer's training reads it before the model's does
def package_rows() -> tuple[LabelledRow, ...]:
    """All examples, mixed: by a hash of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, dict[str, LabelledRow]] = defaultdict(dict)
    seen: set[str] = set()
    for path in stdlib_files():
        relative = path.relative_to(root)
        label = PACKAGES.get(relative.parts[0].removesuffix(".py"))
        if label is None:
            continue
        source = read_source(path)
        lines = source.splitlines()
        for name, node in _definitions(ast.parse(source), ""):
            text = _text(node, lines)
            words = " ".join(text.split())
            if text.count("\n") + 1 >= MIN_LINES and words not in seen:
                seen.add(words)
                place = f"{relative.as_posix()}:{node.lineno}"
                found[label][f"{relative.as_posix()} {name} {node.lineno}"] = LabelledRow(text, None, label, place)
    kept: dict[str, LabelledRow] = {}
    for rows in found.values():
        kept.update((name, rows[name]) for name in sorted(rows, key=name_hash)[:MAX_PER_PACKAGE])
    # Another hash than the one that drew them: by the same, large packages would stand first.
    return tuple(kept[name] for name in sorted(kept, key=lambda name: name_hash(f"order {name}")))


def _definitions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Classes and functions with their full names; what is defined inside a function belongs to it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            yield f"{prefix}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, f"{prefix}{child.name}.")


def _text(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """The source of a function, or the head and docstring of a class, cut at the end of a line when it is long."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = node.end_lineno or node.lineno
    if isinstance(node, ast.ClassDef):
        last = (node.body[0].end_lineno or last) if ast.get_docstring(node) else first
    text = textwrap.dedent("\n".join(lines[first - 1 : last]))
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS].rpartition("\n")[0] or text[:MAX_CHARACTERS]


class LabelledBuiltin:
    """A built-in source of labelled rows. It is also known as text (`find_builtin`), without its labels."""

    def __init__(self, text: BuiltinText) -> None:
        self.text = text

    def rows(self) -> Iterator[LabelledRow]:
        yield from package_rows()

    def fingerprint(self) -> str:
        return self.text.fingerprint()

    def size_bytes(self) -> int | None:
        return None


def find_labelled_builtin(path: str) -> LabelledBuiltin:
    """The source of `builtin:NAME`; InputError for an unknown one, and for one without labels."""
    text = find_builtin(path)
    if not text.labelled:
        labelled = ", ".join(f"{PREFIX}{name}" for name, builtin in BUILTINS.items() if builtin.labelled)
        raise InputError(f"{path}: is text without labels", hint=f"with labels: {labelled}")
    return LabelledBuiltin(text)
