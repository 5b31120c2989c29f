"""Where a picture goes and in what format; nothing is left behind when it cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tformer.errors import InputError, StorageError
from tformer.viz.output import Output, choose_output, write_output


@pytest.mark.parametrize(
    ("output", "format_", "expected"),
    [
        (None, None, ("html", "stem.html")),
        (None, "png", ("png", "stem.png")),
        (None, "terminal", ("terminal", None)),
        (None, "json", ("json", None)),
        ("a.SVG", None, ("svg", "a.SVG")),
        ("a.htm", None, ("html", "a.htm")),
        ("a.txt", None, ("terminal", "a.txt")),
        ("a.svg", "csv", ("csv", "a.svg")),
        ("-", "html", ("html", None)),
        ("-", None, ("html", None)),
    ],
)
def test_format_and_place(output: str | None, format_: str | None, expected: tuple[str, str | None]) -> None:
    chosen = choose_output(None if output is None else Path(output), format_, stem="stem")
    assert chosen == Output(expected[0], None if expected[1] is None else Path(expected[1]))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"suffix \.gif, expected one of \.html"):
        choose_output(Path("a.gif"), None, stem="s")
    with pytest.raises(InputError, match="has no suffix"):
        choose_output(Path("picture"), None, stem="s")
    with pytest.raises(InputError, match="--format pdf: unknown"):
        choose_output(None, "pdf", stem="s")
    with pytest.raises(InputError, match=r"suffix \.csv, expected one of \.html, \.htm, \.png"):
        choose_output(Path("a.csv"), None, stem="s", offered=("html", "png"))
    with pytest.raises(InputError, match="is a folder"):
        choose_output(tmp_path, None, stem="s")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here.txt"
    write_output(Output("terminal", path), "é\n")
    write_output(Output("terminal", path), b"bytes")
    assert path.read_bytes() == b"bytes" and os.listdir(path.parent) == ["here.txt"]
    link = tmp_path / "link.txt"
    link.symlink_to(path)
    write_output(Output("terminal", link), "through")
    assert link.is_symlink() and path.read_text() == "through"


def test_a_refusal_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write /proc/none/a\.html"):
        write_output(Output("html", Path("/proc/none/a.html")), "x")
    target = tmp_path / "a.html"
    target.mkdir()
    with pytest.raises(StorageError):
        write_output(Output("html", target), "x")
    assert os.listdir(tmp_path) == ["a.html"]


def test_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_output(Output("json", None), '{"a": "é"}\n')
    write_output(Output("png", None), b"\x89PNG\xff")
    assert capfdbinary.readouterr().out == '{"a": "é"}\n'.encode() + b"\x89PNG\xff"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(Output("csv", pipe), "a,b\n")
    assert os.read(reader, 100) == b"a,b\n" and pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]
    os.close(reader)
