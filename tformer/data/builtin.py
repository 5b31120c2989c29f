"""Text that is on every machine: what the running Python says about itself, dates, and rows of digits.

- `builtin:python-docs`: the docstrings of the standard library's modules, classes and functions, with their
  signatures, and the help topics of `pydoc`. One document a module or topic.
- `builtin:python-stdlib`: the standard library's own source files, one document a file.
- `builtin:python-packages`: functions and classes of some packages, one document each; with labels for those who ask
  (`builtin_labelled`).
- `builtin:dates`: dates as people write them and as ISO 8601 has them, one pair a document; as pairs for those who ask
  (`builtin_pairs`). Likewise `builtin:copy`, `builtin:reverse` and `builtin:sort`: rows of digits. These four are made
  from nothing.

Sources are parsed, never imported. Tests, IDLE and installed packages are left out.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tformer.errors import InputError, did_you_mean

PREFIX = "builtin:"
LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__", "turtledemo"}
# What a task reads when no data is given.
DEFAULTS = {"lm": "python-docs", "classification": "python-packages", "pairs": "dates"}


@cache
def stdlib_files() -> tuple[Path, ...]:
    """The standard library's .py files in sorted order, without tests, IDLE and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in LEFT_OUT and not name.startswith("config-"))
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    if not found:
        raise InputError(
            f"{root}: this Python has no source files of its standard library, so builtin: sources have no text",
            hint="give a text file with --data",
        )
    return tuple(sorted(found, key=lambda path: path.relative_to(root).as_posix()))


def _stdlib_sources() -> Iterator[str]:
    for path in stdlib_files():
        text = read_source(path)
        if text:
            yield text


def read_source(path: Path) -> str:
    """A source file's text, or nothing for the few that are not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return ""


@cache  # parsing takes seconds, and a tokenizer's training reads it before the model's does
def _docs() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    texts = {f"topic {name}": f"{text.strip()}\n" for name, text in topics.items()}
    root = Path(sysconfig.get_path("stdlib"))
    for path in stdlib_files():
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        texts[f"module {module}"] = _module_doc(module, read_source(path))
    # Mixed by a hash of the name: the last part, kept for validation, is then like the rest and not all topics.
    return tuple(texts[name] for name in sorted(texts, key=name_hash) if texts[name])


def name_hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _module_doc(module: str, source: str) -> str:
    """The docstrings of one module, indented as its code is; nothing when it has none."""
    tree = ast.parse(source)
    lines = _block(ast.get_docstring(tree), indent=0) + _members(tree, indent=0)
    return "\n".join([f"Module {module}", "", *lines]).rstrip() + "\n" if lines else ""


def _members(node: ast.AST, *, indent: int) -> list[str]:
    lines = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = _block(ast.get_docstring(child), indent=indent + 4)
            if isinstance(child, ast.ClassDef):
                inner += _members(child, indent=indent + 4)
            if inner:
                lines += [" " * indent + _signature(child), *inner]
    return lines


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{keyword} {node.name}({ast.unparse(node.args)}):"


def _block(docstring: str | None, *, indent: int) -> list[str]:
    if not docstring:
        return []
    lines = inspect.cleandoc(docstring).split("\n")
    return [(" " * indent + line).rstrip() for line in lines] + [""]


def _package_texts() -> Iterator[str]:
    from tformer.data.builtin_labelled import package_rows  # which needs this module

    for row in package_rows():
        yield f"{row.text}\n"


def _pair_texts(name: str) -> Iterator[str]:
    from tformer.data.builtin_pairs import PAIRS  # which needs this module

    for row in PAIRS[name]():
        yield f"{row.source}\t{row.target}\n"


@dataclass(frozen=True)
class BuiltinText:
    """One built-in source: its documents and a fingerprint of what they are made from."""

    name: str
    make: Callable[[], Iterable[str]]
    labelled: bool = False  # its documents also have labels
    paired: bool = False  # its documents are pairs, made from nothing

    def documents(self) -> Iterator[str]:
        yield from self.make()

    def fingerprint(self) -> str:
        if self.paired:
            return hashlib.sha256("".join(self.documents()).encode()).hexdigest()
        digest = hashlib.sha256(f"{self.name}:{sys.version}".encode())
        for path in stdlib_files():
            status = path.stat()
            digest.update(f"{path.name}:{status.st_size}:{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()


BUILTINS: dict[str, BuiltinText] = {
    "python-docs": BuiltinText("python-docs", _docs),
    "python-stdlib": BuiltinText("python-stdlib", _stdlib_sources),
    "python-packages": BuiltinText("python-packages", _package_texts, labelled=True),
    **{
        name: BuiltinText(name, functools.partial(_pair_texts, name), paired=True)
        for name in ("dates", "copy", "reverse", "sort")
    },
}


def find_builtin(path: str) -> BuiltinText:
    """The source of `builtin:NAME`; InputError with a suggestion for an unknown name."""
    name = path.removeprefix(PREFIX)
    if name not in BUILTINS:
        raise InputError(f"{path}: no such built-in source", hint=did_you_mean(name, BUILTINS))
    return BUILTINS[name]
