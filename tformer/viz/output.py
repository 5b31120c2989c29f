"""In what format a picture comes and where it goes: by --format, by the suffix of --output, else a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tformer.checkpoint.files import write_file
from tformer.errors import InputError, cannot_write, did_you_mean

FORMATS = ("html", "png", "svg", "terminal", "json", "csv")
SUFFIXES = {".html": "html", ".htm": "html", ".png": "png", ".svg": "svg", ".txt": "terminal", ".json": "json",
            ".csv": "csv"}  # fmt: skip
ON_STDOUT = ("terminal", "json", "csv")  # these are text to read on: without a file they go to standard output


@dataclass(frozen=True)
class Output:
    """format: one of FORMATS. path: the file to write; None: standard output."""

    format: str
    path: Path | None


def choose_output(
    output: Path | None, format_: str | None, *, stem: str, offered: Sequence[str] = FORMATS, default: str = "html"
) -> Output:
    """What was asked for, refused before long work begins when it cannot be had.

    Args:
        output: the file named, or None; `-` is standard output.
        format_: the format named, or None; it goes before the suffix.
        stem: name without suffix for a picture or page whose file is not named, in the current folder.
        offered: the formats that the command has.
        default: taken when nothing names a format.

    Raises:
        InputError: an unknown format or suffix, one that the command does not offer, or a folder as the file.
    """
    if output is not None and output.is_dir():
        raise InputError(f"{output} is a folder, expected the name of a file", hint=f"-o {output / stem}.{default}")
    if format_ is not None:
        if format_ not in offered:
            raise InputError(f"--format {format_}: unknown", hint=did_you_mean(format_, offered))
        kind = format_
    elif output is None or str(output) == "-":
        kind = default
    else:
        kind = _by_suffix(output, offered, default)
    if output is not None and str(output) == "-":
        return Output(kind, None)
    if output is None and kind not in ON_STDOUT:
        output = Path(f"{stem}.{kind}")
    return Output(kind, output)


def write_output(output: Output, content: str | bytes) -> None:
    """Put the content in its file, whole or not at all, or on standard output.

    Raises:
        StorageError: the file cannot be written; an old one is untouched.
    """
    raw = content.encode("utf-8") if isinstance(content, str) else content
    if output.path is None:
        stream = getattr(sys.stdout, "buffer", None)
        if stream is None:  # a stream of text only, as in a notebook
            sys.stdout.write(raw.decode("utf-8"))
        else:
            sys.stdout.flush()
            stream.write(raw)
        sys.stdout.flush()
        return
    try:
        output.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(output.path, error) from error
    write_file(output.path, [raw])


def _by_suffix(output: Path, offered: Sequence[str], default: str) -> str:
    suffix = output.suffix.lower()
    kind = SUFFIXES.get(suffix, "")
    if kind in offered:
        return kind
    found = f"has the suffix {suffix}" if suffix else "has no suffix"
    known = ", ".join(known for known, kind in SUFFIXES.items() if kind in offered)
    raise InputError(
        f"{output} {found}, expected one of {known}",
        hint=f"name it {output.with_suffix('.' + default)}, or say --format",
    )
