"""Output format and file of the viz commands: by --format, by the suffix of --output, by default a page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tformer.support.errors import InputError, did_you_mean
from tformer.support.files import encode_text, require_writable, write_file

SUFFIXES = {".html": "html", ".htm": "html", ".png": "png", ".svg": "svg", ".txt": "terminal", ".json": "json",
            ".csv": "csv"}  # fmt: skip
FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))
ON_STDOUT = ("terminal", "json", "csv")  # text: without a file it goes to standard output


@dataclass(frozen=True)
class OutputTarget:
    """Where output goes. format: one of FORMATS; path: the file to write, None for standard output."""

    format: str
    path: Path | None


def choose_output(output: Path | None, format_: str | None, *, stem: str, option: str = "-o") -> OutputTarget:
    """The format and the file, checked before long work begins.

    Args:
        output: the named file, or None; `-` is standard output.
        format_: the named format, or None; it takes precedence over the suffix.
        stem: name without suffix of an unnamed picture or page, in the current folder.
        option: the flag that names the file, for messages.

    Raises:
        InputError: an unknown format or suffix, a folder as the file, or a folder that does not exist.
        StorageError: the file cannot be written.
    """
    if output is not None and output.is_dir():
        raise InputError(f"{output} is a folder, expected the name of a file", hint=f"{option} {output / stem}.html")
    if format_ is not None:
        if format_ not in FORMATS:
            raise InputError(f"--format {format_}: unknown", hint=did_you_mean(format_, FORMATS))
        kind = format_
    elif output is None or str(output) == "-":
        kind = "html"
    else:
        suffix = output.suffix.lower()
        if suffix not in SUFFIXES:
            found = f"has the suffix {suffix}" if suffix else "has no suffix"
            raise InputError(
                f"{output} {found}, expected one of {', '.join(SUFFIXES)}",
                hint=f"name it {output.with_suffix('.html')}" + (", or use --format" if option == "-o" else ""),
            )
        kind = SUFFIXES[suffix]
    if output is None and kind not in ON_STDOUT:
        output = Path(f"{stem}.{kind}")
    if output is None or str(output) == "-":
        return OutputTarget(kind, None)
    require_writable(output, option=option)
    return OutputTarget(kind, output)


def write_output(output: OutputTarget, content: str | bytes) -> None:
    """Write the content to its file (completely or not at all) or to standard output.

    Raises:
        StorageError: the file cannot be written; an old one is untouched.
    """
    raw = encode_text(content) if isinstance(content, str) else content
    if output.path is None:
        stream = getattr(sys.stdout, "buffer", None)
        if stream is None:  # a text stream, as in a notebook
            sys.stdout.write(raw.decode("utf-8"))
        else:
            sys.stdout.flush()
            stream.write(raw)
        sys.stdout.flush()
        return
    write_file(output.path, [raw], bytes_needed=len(raw))
