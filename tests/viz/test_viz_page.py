"""The shell of HTML pages, and the choice of output format and file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from tests.viz.pages import script_bytes
from tformer.support.errors import InputError, StorageError
from tformer.viz.output import OutputTarget, choose_output, write_output
from tformer.viz.page import render_page
from tformer.viz.plots import COLOUR_MAPS, colour_at, colour_table

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 'x' \"y\" & é"


@pytest.fixture(scope="module")
def made() -> str:
    return render_page(
        title=HOSTILE,
        subtitle=HOSTILE,
        body="<p id='mine'>body</p>",
        scripts=("pe.js",),
        data={"text": HOSTILE, HOSTILE: [1.5, None, float("inf")], "lone": "\ud800"},
        blobs={"x": b"bytes" * 100},
        notes=[HOSTILE],
    )


def test_data_comes_back_and_ends_no_element(made: str) -> None:
    [raw] = re.findall(r'<script type="application/json" id="page-data">(.*?)</script>', made, re.S)
    assert "<" not in raw and "\u2028" not in raw
    data = json.loads(raw)
    assert data["text"] == HOSTILE and data[HOSTILE] == [1.5, None, None]
    made.encode("utf-8")


def test_blobs_are_gzip_in_base64(made: str) -> None:
    [raw] = re.findall(r'id="blob-x">(.*?)</script>', made)
    assert gzip.decompress(base64.b64decode(raw)) == b"bytes" * 100


def test_the_policy_names_exactly_the_scripts_that_are_there(made: str) -> None:
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', made)
    assert policy.startswith("default-src 'none'") and "unsafe-inline'; img-src" in policy
    assert "script-src 'unsafe" not in policy and "http" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", made, re.S)
    digests = {"sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in scripts}
    assert digests == set(re.findall(r"'(sha256-[^']+)'", policy)) and len(scripts) > 5


def test_user_text_is_escaped_and_nothing_is_fetched(made: str) -> None:
    assert "<script>alert" not in made
    assert made.count("&lt;/script&gt;") == 8, "two in each of title, heading, subtitle and note"
    without_names = made.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")
    assert not re.search(r"https?://|\ssrc=|@import|url\((?!#)", without_names)
    assert 'name="color-scheme" content="light dark"' in made and made.startswith("<!doctype html>")


def test_equal_pages_are_equal_bytes() -> None:
    first, second = (
        render_page(title="t", subtitle="s", body="", scripts=(), data={"a": 1}, blobs={"x": b"1"}) for _ in range(2)
    )
    assert first == second


def test_the_explorer_has_less_than_60_kb_of_script() -> None:
    from tformer.viz.pe.page import explorer
    from tformer.viz.pe.settings import EncodingSettings

    assert script_bytes(explorer(EncodingSettings(d_model=8, heads=2), None, None, command="")) < 60_000


def test_colour_maps_are_the_published_ones() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    for name in COLOUR_MAPS:
        table = colour_table(name)
        assert len(table) == 768
        ours = [tuple(table[at : at + 3]) for at in range(0, 768, 3)]
        theirs = matplotlib.colormaps[name].resampled(256)
        for index, colour in enumerate(ours):
            expected = [255 * part for part in theirs(index)[:3]]
            assert max(abs(a - b) for a, b in zip(colour, expected, strict=True)) < 5.5, (name, index)
    assert colour_at("RdBu_r", 0.5) == (0xF7, 0xF6, 0xF6) and colour_at("viridis", 7) == (0xFD, 0xE7, 0x25)


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
    assert chosen == OutputTarget(expected[0], None if expected[1] is None else Path(expected[1]))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"suffix \.gif, expected one of \.html"):
        choose_output(Path("a.gif"), None, stem="s")
    with pytest.raises(InputError, match="has no suffix"):
        choose_output(Path("picture"), None, stem="s")
    with pytest.raises(InputError, match="--format pdf: unknown"):
        choose_output(None, "pdf", stem="s")
    with pytest.raises(InputError, match="is a folder"):
        choose_output(tmp_path, None, stem="s")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here.txt"
    path.parent.mkdir()
    write_output(OutputTarget("terminal", path), "é\n")
    write_output(OutputTarget("terminal", path), b"bytes")
    assert path.read_bytes() == b"bytes" and os.listdir(path.parent) == ["here.txt"]
    link = tmp_path / "link.txt"
    link.symlink_to(path)
    write_output(OutputTarget("terminal", link), "through")
    assert link.is_symlink() and path.read_text() == "through"


def test_a_refusal_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write /proc/none/a\.html"):
        write_output(OutputTarget("html", Path("/proc/none/a.html")), "x")
    target = tmp_path / "a.html"
    target.mkdir()
    with pytest.raises(InputError, match="is a folder, expected a file"):
        write_output(OutputTarget("html", target), "x")
    assert os.listdir(tmp_path) == ["a.html"]


def test_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_output(OutputTarget("json", None), '{"a": "é"}\n')
    write_output(OutputTarget("png", None), b"\x89PNG\xff")
    assert capfdbinary.readouterr().out == '{"a": "é"}\n'.encode() + b"\x89PNG\xff"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(OutputTarget("csv", pipe), "a,b\n")
    assert os.read(reader, 100) == b"a,b\n" and pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]
    os.close(reader)
