"""Built-in sources, which need no file and no download: text, labelled text and pairs.

- `builtin:python-docs`: the docstrings of the standard library's modules, classes and functions, with their
  signatures, and the help topics of `pydoc`. One document a module or topic.
- `builtin:python-stdlib`: the standard library's own source files, one document a file.
- `builtin:python-packages`: from which package of the standard library is this code? An example is a function or method
  with its comments and docstring, or a class's head and docstring, from the source files of sixteen packages; the
  label is the package. No text occurs twice, and no package has more than `MAX_PER_PACKAGE` examples.
- `builtin:python-tokens`: `NUM_TOKEN_LINES` lines of code, each word with the kind of token that it is, or is part of:
  identifier, keyword, number, string or comment, in BIO. No line occurs twice.
- `builtin:dates`: "Tuesday, 3rd of March 1987" is 1987-03-03. `NUM_DATES` days between 1900 and 2099, each written in
  one of `DATE_FORMS` and one of three cases. Every form means one day only, so 03/04/1987 is none of them. No text
  occurs twice, not even in another case.
- `builtin:repeats`: `NUM_REPEATS` documents for a language model that learns to copy (arXiv 2209.11895): 4 to 16
  different letters and digits in random order, four times. The first time cannot be predicted, the others can.
- `builtin:copy`, `builtin:reverse`, `builtin:sort`: `NUM_DIGIT_ROWS` different rows of 1 to `MAX_DIGITS` digits with
  spaces between them (as JoeyNMT's toy data, arXiv 1907.12484): does a model of pairs learn at all?

Source files are parsed, never imported; tests, IDLE and installed packages are left out. All choices are made by hashes
of names or numbers, so a source is always the same.
"""

from __future__ import annotations

import ast
import datetime
import functools
import hashlib
import inspect
import io
import keyword
import os
import string
import sys
import sysconfig
import textwrap
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from tformer.data.permutation import derive_key
from tformer.data.sources.files import DocumentChunk, cut_pieces
from tformer.data.sources.tables import LabelledRow, PairRow, TaggedRow
from tformer.support.errors import InputError, did_you_mean

PREFIX = "builtin:"
LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__", "turtledemo"}
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
NUM_DATES = 20_000
FIRST_DATE, LAST_DATE = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
# Spelled out: strftime follows the machine's language.
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DATE_FORMS = (
    *("{d} {month} {y}", "{d} {mon} {y}", "{d}-{mon}-{y}", "{d}. {month} {y}"),
    *("{nth} {month} {y}", "{nth} of {month} {y}", "the {nth} of {month}, {y}"),
    *("{month} {d}, {y}", "{mon} {d}, {y}", "{month} {nth}, {y}", "{mon} {nth} {y}", "{y} {month} {d}"),
    *("{weekday}, {d} {month} {y}", "{weekday}, {month} {d}, {y}", "{weekday} the {nth} of {month} {y}"),
    *("{day} {d} {mon} {y}", "{day}, {mon} {nth}, {y}"),
    *("{dd}.{mm}.{y}", "{d}.{m}.{y}", "{y}/{mm}/{dd}", "{y}.{mm}.{dd}"),
)
CASES: tuple[Callable[[str], str], ...] = (str, str, str.lower, str.upper)  # half of them as they are written
NUM_DIGIT_ROWS = 10_000
MAX_DIGITS = 9
NUM_TOKEN_LINES, LINE_WORDS = 10_000, range(3, 41)
TOKEN_KINDS = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.COMMENT: "comment"}
NUM_REPEATS = 20_000
REPEATED = string.ascii_letters + string.digits
REPEAT_LENGTHS, REPEAT_TIMES = range(4, 17), 4
DIGIT_TASKS: dict[str, Callable[[str], str]] = {
    "copy": str,
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
}


# -- Python's own text -------------------------------------------------------------------------------------------------


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


def read_source(path: Path) -> str:
    """A source file's text; empty for the few that are not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return ""


@cache  # parsing takes seconds, and both the tokenizer's and the model's training read it
def python_docs() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    texts = {f"topic {name}": f"{text.strip()}\n" for name, text in topics.items()}
    root = Path(sysconfig.get_path("stdlib"))
    for path in stdlib_files():
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(read_source(path))
        lines = _indented(ast.get_docstring(tree), indent=0) + _members(tree, indent=0)
        texts[f"module {module}"] = "\n".join([f"Module {module}", "", *lines]).rstrip() + "\n" if lines else ""
    # Sorted by a hash of the name, so that the last part, kept for validation, does not consist of topics only.
    return tuple(texts[name] for name in sorted(texts, key=name_hash) if texts[name])


def name_hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _members(node: ast.AST, *, indent: int) -> list[str]:
    lines = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = _indented(ast.get_docstring(child), indent=indent + 4)
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


def _indented(docstring: str | None, *, indent: int) -> list[str]:
    if not docstring:
        return []
    lines = inspect.cleandoc(docstring).split("\n")
    return [(" " * indent + line).rstrip() for line in lines] + [""]


# -- repeats -----------------------------------------------------------------------------------------------------------


def repeats() -> Iterator[str]:
    """All documents; always the same."""
    for draw in range(NUM_REPEATS):
        number = int.from_bytes(hashlib.blake2b(f"repeats {draw}".encode()).digest(), "little")
        number, place = divmod(number, len(REPEAT_LENGTHS))
        left, chosen = list(REPEATED), []
        for _ in range(REPEAT_LENGTHS[place]):
            number, place = divmod(number, len(left))
            chosen.append(left.pop(place))
        yield "".join(chosen) * REPEAT_TIMES + "\n"


# -- labelled: which package is this code from? ------------------------------------------------------------------------


@cache  # parsing takes a second, and both the tokenizer's and the model's training read it
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
            text = _code(node, lines)
            words = " ".join(text.split())
            if text.count("\n") + 1 >= MIN_LINES and words not in seen:
                seen.add(words)
                place = f"{relative.as_posix()}:{node.lineno}"
                found[label][f"{relative.as_posix()} {name} {node.lineno}"] = LabelledRow(text, None, label, place)
    kept: dict[str, LabelledRow] = {}
    for rows in found.values():
        kept.update((name, rows[name]) for name in sorted(rows, key=name_hash)[:MAX_PER_PACKAGE])
    # A second hash: by the one that chose them, large packages would stand first.
    return tuple(kept[name] for name in sorted(kept, key=lambda name: name_hash(f"order {name}")))


def _definitions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Classes and functions with their full names, without those inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            yield f"{prefix}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, f"{prefix}{child.name}.")


def _code(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """The source of a function, or the head and docstring of a class, cut at the end of a line when it is long."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = node.end_lineno or node.lineno
    if isinstance(node, ast.ClassDef):
        last = (node.body[0].end_lineno or last) if ast.get_docstring(node) else first
    text = textwrap.dedent("\n".join(lines[first - 1 : last]))
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS].rpartition("\n")[0] or text[:MAX_CHARACTERS]


@cache
def token_rows() -> tuple[TaggedRow, ...]:
    """Lines of the library's files in an order of their own, without templates and strings of several lines."""
    rows: dict[str, TaggedRow] = {}
    for path in sorted(stdlib_files(), key=lambda path: name_hash(path.name)):
        words, tags, is_whole = list[str](), list[str](), True
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(read_source(path)).readline))
        except (SyntaxError, tokenize.TokenError):
            continue
        for kind, text, *_ in tokens:
            if kind in (tokenize.NEWLINE, tokenize.NL):
                if is_whole and len(words) in LINE_WORDS:
                    row = TaggedRow.of(words, tags, f"{PREFIX}python-tokens:{len(rows) + 1}")
                    rows.setdefault(row.text, row)
                words, tags, is_whole = [], [], True
                continue
            is_name = kind == tokenize.NAME
            name = ("keyword" if keyword.iskeyword(text) else "identifier") if is_name else TOKEN_KINDS.get(kind)
            parts = text.split()
            words += parts
            tags += ["O"] * len(parts) if name is None else [f"{'I' if n else 'B'}-{name}" for n in range(len(parts))]
            # Python 3.12 cuts templates (f"...") into tokens, 3.11 does not.
            is_template = "STRING" in tokenize.tok_name[kind] and (name is None or "f" in text.partition(text[-1])[0])
            is_whole &= not is_template and "\n" not in text.strip()
        if len(rows) >= NUM_TOKEN_LINES:
            break
    return tuple(islice(rows.values(), NUM_TOKEN_LINES))


# -- pairs -------------------------------------------------------------------------------------------------------------


@cache
def date_rows() -> tuple[PairRow, ...]:
    """All pairs, mixed; always the same."""
    rows: dict[str, PairRow] = {}
    draw = 0
    while len(rows) < NUM_DATES:
        number, form = divmod(derive_key("dates", draw), len(DATE_FORMS))
        number, case = divmod(number, len(CASES))
        day = FIRST_DATE + datetime.timedelta(days=number % ((LAST_DATE - FIRST_DATE).days + 1))
        text = CASES[case](write_date(day, DATE_FORMS[form]))
        rows.setdefault(text.lower(), PairRow(text, day.isoformat(), f"{PREFIX}dates:{len(rows) + 1}"))
        draw += 1
    return tuple(rows.values())


def write_date(day: datetime.date, form: str) -> str:
    """A date in one of the `DATE_FORMS`."""
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


@cache
def digit_rows(task: str) -> tuple[PairRow, ...]:
    """All pairs of a task, short and long ones mixed; always the same."""
    rows: dict[str, PairRow] = {}
    draw = 0
    while len(rows) < NUM_DIGIT_ROWS:
        number, length = divmod(derive_key("toys", draw), MAX_DIGITS)
        digits = f"{number % 10 ** (length + 1):0{length + 1}}"
        place = f"{PREFIX}{task}:{len(rows) + 1}"
        rows.setdefault(digits, PairRow(" ".join(digits), " ".join(DIGIT_TASKS[task](digits)), place))
        draw += 1
    return tuple(rows.values())


# -- the table ---------------------------------------------------------------------------------------------------------


Contents = Literal["text", "labels", "tags", "pairs"]

DEFAULTS: dict[Contents, str] = {
    "text": f"{PREFIX}python-docs",
    "labels": f"{PREFIX}python-packages",
    "tags": f"{PREFIX}python-tokens",
    "pairs": f"{PREFIX}dates",
}
"""What is read where no data is given."""


@dataclass(frozen=True)
class Builtin:
    """A built-in source; all can be read as text.

    Attributes:
        holds: "text": `make` gives documents; else it gives rows with labels, or pairs.
        from_files: it is made of the standard library's files.
    """

    name: str
    holds: Contents
    make: Callable[[], Iterable[Any]]
    from_files: bool = False
    contents: ClassVar[tuple[()]] = ()

    def rows(self) -> Iterator[Any]:
        """Every row of labels, tags or pairs."""
        yield from self.make()

    def texts(self) -> Iterator[str]:
        """Every document; each row is one."""
        for item in self.make():
            match item:
                case LabelledRow():
                    yield f"{item.text}\n"
                case PairRow():
                    yield f"{item.source}\t{item.target}\n"
                case _:
                    yield item

    def documents(self) -> Iterator[DocumentChunk]:
        """The pieces of every document."""
        for text in self.texts():
            yield from cut_pieces(text)

    def fingerprint(self) -> str:
        """SHA-256 of the standard library's file names, sizes and times, or of the texts of a generated source."""
        if not self.from_files:
            return hashlib.sha256("".join(self.texts()).encode()).hexdigest()
        digest = hashlib.sha256(f"{self.name}:{sys.version}".encode())
        for path in stdlib_files():
            status = path.stat()
            digest.update(f"{path.name}:{status.st_size}:{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()


BUILTINS: dict[str, Builtin] = {
    builtin.name: builtin
    for builtin in (
        Builtin("python-docs", "text", python_docs, from_files=True),
        Builtin("python-stdlib", "text", lambda: filter(None, map(read_source, stdlib_files())), from_files=True),
        Builtin("python-packages", "labels", package_rows, from_files=True),
        Builtin("python-tokens", "tags", token_rows, from_files=True),
        Builtin("repeats", "text", repeats),
        Builtin("dates", "pairs", date_rows),
        *(Builtin(task, "pairs", functools.partial(digit_rows, task)) for task in DIGIT_TASKS),
    )
}


def find_builtin(path: str, *, holds: Contents = "text") -> Builtin:
    """The source of `builtin:NAME`. Raises InputError for an unknown name, and one without labels, tags or pairs."""
    name = path.removeprefix(PREFIX)
    if name not in BUILTINS:
        raise InputError(f"{path}: no such built-in source", hint=did_you_mean(name, BUILTINS))
    if holds not in ("text", BUILTINS[name].holds):
        fitting = ", ".join(f"{PREFIX}{name}" for name, builtin in BUILTINS.items() if builtin.holds == holds)
        raise InputError(f"{path}: is text without {holds}", hint=f"with {holds}: {fitting}")
    return BUILTINS[name]
