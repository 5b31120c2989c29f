"""Rows in memory (dicts, tuples, strings, a data frame) as a jsonl file that every reader of tables opens.

The name of the file is the hash of its content: the same rows give the same file, and so the same caches of tokens.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tformer.support import files
from tformer.support.errors import InputError, TformerError
from tformer.support.formatting import shortened

SHOWN_CHARACTERS = 60  # of a row in a message


def is_path(data: object) -> bool:
    """Whether data is named by its path (also `builtin:NAME`, `-` or a pattern), not given as rows."""
    return isinstance(data, str | os.PathLike)


def keep_rows(data: Iterable[Any], folder: Path, *, keys: Sequence[tuple[str, ...]], name: str) -> Path:
    """Write rows into `folder` as jsonl, and return the file.

    Args:
        data: dicts, as they are; tuples or lists, and strings (tuples of one value), under `keys`; or a data frame
            (pandas, Polars, or anything with `columns` and a column for each), whose rows are dicts.
        keys: those of a tuple's values, one entry for each accepted length.
        name: of the data in messages.

    Raises InputError, with the number of the row from 0, for anything else, and for no rows.
    """
    lines = (_line(row, keys, place=f"{name}[{number}]") for number, row in enumerate(_rows(data)))
    temporary = folder / f"{files.TEMPORARY}rows-{os.getpid()}"
    try:
        files.make_folders(folder)
        size, digest = files.write_durably(temporary, files.in_blocks(lines))
        if not size:
            raise InputError(f"{name}: no rows")
        path = folder / f"{digest[:16]}.jsonl"
        # A file with the same content stays: another training may read it.
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            files.rename(temporary, path)
        files.fsync_dir(folder)
    finally:
        with suppress(OSError):
            files.unlink(temporary)
    return path


@contextmanager
def rows_in_messages(names: Mapping[Path, str]) -> Iterator[None]:
    """Messages of user errors name the row `data[0]` in place of line 1 of the file that keeps it.

    names: of the data, by file.
    """
    try:
        yield
    except TformerError as error:
        for path, name in names.items():
            parts = re.split(re.escape(str(path)) + r"(?::(\d+)\b)?", error.message)
            rows = [name if line is None else f"{name}[{int(line) - 1}]" for line in parts[1::2]]
            if len(parts) > 1:
                parts[-1] = re.sub(r"\blines? (\d+(?:, \d+)*)", _as_rows, parts[-1])
            error.message = "".join(map("".join, zip(parts[::2], [*rows, ""], strict=True)))
        error.args = (error.message,)
        raise


def _as_rows(lines: re.Match[str]) -> str:
    """Numbers of rows from 0 in place of numbers of lines."""
    return f"rows {', '.join(str(int(line) - 1) for line in lines[1].split(', '))}"


def _rows(data: Any) -> Iterator[Any]:
    """The rows. Each row of a data frame is a dict."""
    if isinstance(data, Mapping):
        raise _wrong_rows("a dict", hint="a list of dicts has a row in each; a dict of columns is no list of rows")
    if hasattr(data, "columns") and hasattr(data, "__getitem__"):
        names = [str(column) for column in data.columns]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"data: two columns have the name '{twice[0]}'")
        columns = [data[column] for column in data.columns]
        return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
    if not isinstance(data, Iterable):
        raise _wrong_rows(type(data).__name__)
    return _not_names_of_files(iter(data))


def _not_names_of_files(rows: Iterator[Any]) -> Iterator[Any]:
    for number, row in enumerate(rows):
        if isinstance(row, os.PathLike):
            raise InputError(f"data: path {row} among rows", hint="give rows, or paths alone")
        if number == 0 and isinstance(row, str) and len(row) < 4096 and "\0" not in row and os.path.exists(row):
            raise InputError(
                f"data: '{row}' is a file, and a list of strings is a list of texts",
                hint=f"for the file give '{row}' alone, for several a list of pathlib.Path",
            )
        yield row


def _wrong_rows(found: str, *, hint: str | None = None) -> InputError:
    return InputError(
        f"data: found {found}, expected a path, rows (dicts, tuples or strings) or a data frame", hint=hint
    )


def _line(row: Any, keys: Sequence[tuple[str, ...]], *, place: str) -> bytes:
    """A row as a line of jsonl."""
    if isinstance(row, Mapping):
        values = {str(key): _plain(value) for key, value in row.items()}
    elif isinstance(row, str | tuple | list):
        cells = (row,) if isinstance(row, str) else tuple(row)
        names = next((names for names in keys if len(names) == len(cells)), None)
        if names is None:
            forms = [f"({', '.join(names)})" if len(names) > 1 else f"a {names[0]}" for names in keys]
            expected = " or ".join(forms) or "the path of a folder, not rows"
            raise InputError(f"{place}: found {_shown(row)}, expected {expected}")
        values = dict(zip(names, map(_plain, cells), strict=True))
    else:
        raise InputError(f"{place}: found {type(row).__name__}, expected a dict, a tuple or a string")
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: {_shown(row)} holds half a surrogate pair") from error
    except (TypeError, ValueError) as error:  # ValueError: infinity
        raise InputError(f"{place}: {_shown(row)}: {error}") from error


def _shown(row: Any) -> str:
    return shortened(repr(row), SHOWN_CHARACTERS)


def _plain(value: Any) -> Any:
    """A value that JSON has: numbers of numpy become Python's, dates text, a missing one (NaN, NA, NaT) null."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    missing = (
        value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)
    )
    return None if missing else str(value) if isinstance(value, datetime.date) else value
