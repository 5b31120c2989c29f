"""Built-in sources: text, labelled text and pairs that need no file and no download."""

from __future__ import annotations

import ast
import datetime
import functools
import hashlib
import inspect
import os
import sys
import sysconfig
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tformer.data.permutation import derive_key
from tformer.data.sources.labelled_tables import LabelledRow
from tformer.data.sources.pair_tables import PairRow
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

    for row in package_rows():
        yield f"{row.text}\n"


def _pair_texts(name: str) -> Iterator[str]:

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


NUM_ROWS = 10_000
MAX_DIGITS = 9
TASKS: dict[str, Callable[[str], str]] = {
    "copy": str,
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
}


@cache
def toy_rows(task: str) -> tuple[PairRow, ...]:
    """All pairs of a task, short and long ones mixed; always the same."""
    rows: dict[str, PairRow] = {}
    draw = 0
    while len(rows) < NUM_ROWS:
        number, length = divmod(derive_key("toys", draw), MAX_DIGITS)
        digits = f"{number % 10 ** (length + 1):0{length + 1}}"
        place = f"{PREFIX}{task}:{len(rows) + 1}"
        rows.setdefault(digits, PairRow(" ".join(digits), " ".join(TASKS[task](digits)), place))
        draw += 1
    return tuple(rows.values())


NUM_DATES = 20_000
FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
# Spelled out: strftime follows the machine's language.
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
FORMS = (
    "{d} {month} {y}",
    "{d} {mon} {y}",
    "{d}-{mon}-{y}",
    "{d}. {month} {y}",
    "{nth} {month} {y}",
    "{nth} of {month} {y}",
    "the {nth} of {month}, {y}",
    "{month} {d}, {y}",
    "{mon} {d}, {y}",
    "{month} {nth}, {y}",
    "{mon} {nth} {y}",
    "{y} {month} {d}",
    "{weekday}, {d} {month} {y}",
    "{weekday}, {month} {d}, {y}",
    "{weekday} the {nth} of {month} {y}",
    "{day} {d} {mon} {y}",
    "{day}, {mon} {nth}, {y}",
    "{dd}.{mm}.{y}",
    "{d}.{m}.{y}",
    "{y}/{mm}/{dd}",
    "{y}.{mm}.{dd}",
)
CASES: tuple[Callable[[str], str], ...] = (str, str, str.lower, str.upper)  # half of them as a book has them


@cache
def date_rows() -> tuple[PairRow, ...]:
    """All pairs, mixed; always the same."""
    rows: dict[str, PairRow] = {}
    draw = 0
    while len(rows) < NUM_DATES:
        number, form = divmod(derive_key("dates", draw), len(FORMS))
        number, case = divmod(number, len(CASES))
        day = FIRST + datetime.timedelta(days=number % ((LAST - FIRST).days + 1))
        text = CASES[case](write_date(day, FORMS[form]))
        rows.setdefault(text.lower(), PairRow(text, day.isoformat(), f"{PREFIX}dates:{len(rows) + 1}"))
        draw += 1
    return tuple(rows.values())


def write_date(day: datetime.date, form: str) -> str:
    """A date in one of the `FORMS`."""
    month, weekday = MONTHS[day.month - 1], WEEKDAYS[day.weekday()]
    return form.format(
        d=day.day,
        dd=f"{day.day:02}",
        nth=ordinal(day.day),
        m=day.month,
        mm=f"{day.month:02}",
        mon=month[:3],
        month=month,
        y=day.year,
        day=weekday[:3],
        weekday=weekday,
    )


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 21st."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


PAIRS: dict[str, Callable[[], tuple[PairRow, ...]]] = {
    "dates": date_rows,
    **{task: functools.partial(toy_rows, task) for task in TASKS},
}


@dataclass(frozen=True)
class PairBuiltin:
    """A built-in source of pairs. It is also known as text (`find_builtin`), a document a pair."""

    name: str = "dates"

    def rows(self) -> Iterator[PairRow]:
        yield from PAIRS[self.name]()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for row in self.rows():
            digest.update(f"{row.source}\t{row.target}\n".encode())
        return digest.hexdigest()

    def size_bytes(self) -> int | None:
        return None


def find_pair_builtin(path: str) -> PairBuiltin:
    """The source of `builtin:NAME`; InputError for an unknown one, and for one without pairs."""
    found = find_builtin(path)
    if not found.paired:
        paired = ", ".join(f"{PREFIX}{name}" for name, builtin in BUILTINS.items() if builtin.paired)
        raise InputError(f"{path}: is text without pairs", hint=f"with pairs: {paired}")
    return PairBuiltin(found.name)


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
