"""The shell as text: nothing a user wrote can become markup or script, and nothing in it names another place."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re

import pytest

from tformer.viz.colours import COLOUR_MAPS, colour_at, colour_table
from tformer.viz.page import render_page, script_bytes

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
    [raw] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', made, re.S)
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
    from tformer.viz.pe.page import SCRIPTS

    assert script_bytes(SCRIPTS) < 60_000


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
    assert colour_at("twilight", 0) == colour_at("twilight", 1), "cyclic"
