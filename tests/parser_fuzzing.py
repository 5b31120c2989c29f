"""Fuzzing of parsers: damaged copies of valid content, and the property that a parser holds for any of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from tformer.support.errors import TformerError

SECONDS = 5.0
MAX_LINES = 6  # a recipe's mistakes are reported together, up to five
PIECES = [
    *(b"\n", b"\r", b"\r\n", b"\t", b" ", b",", b":", b"- ", b"? ", b"'", b'"', b"{", b"}", b"[", b"]", b"=", b"#"),
    *(b"&a ", b"*a", b"!!python/object:os.system ", b"!", b"%YAML 1.1\n", b"---\n", b"|\n", b">", b"<<", b"~"),
    *(b"0", b"-1", b"1e999", b"9" * 400, b"9" * 5000, b"-" + b"9" * 400, b"nan", b".inf", b"NaN", b"Infinity", b"1_0"),
    *(b"null", b"true", b"[]", b"{}", b"[[[[", b'{"a":', b"\\u0000", b"\\ud800", b"\\Uffffffff", b"\xef\xbb\xbf"),
    *("\x85".encode(), "\u2028".encode(), b"\x0b", b"\x0c", b"\x1c", b"\x1d", b"\x1e", b"\x1b[31m", "é😀".encode()),
    *(b"\0", b"@", b"`", b"\\", b"\xff", b"\xc3", b"\xed\xa0\x80", b"kind", b"model", b"text", b"label", b"step"),
    b"a" * 3000,
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, valid: Sequence[bytes]) -> bytes:
    """One of the valid contents with a few pieces inserted, removed, replaced or repeated; seldom cut short."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        removed = draw(st.sampled_from((0, 0, 1, 4, 30)))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=6) | st.just(bytes(data[start : start + 20])))
        data[start : start + removed] = piece * draw(st.sampled_from((1, 1, 1, 1, 40)))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 9 else data)


def answer(action: Callable[[], Any]) -> Any:
    """What the action returns, or the user's error that it raises, for which it takes less than `SECONDS`.

    Any other exception ends the test, and so does an error that is not one of input (exit code 2) or is longer than
    the mistakes of a recipe.
    """
    for _ in range(2):  # a collection of the garbage of earlier tests falls into one of two
        began = time.thread_time()  # threads that earlier tests left are not counted
        try:
            found = action()
        except TformerError as error:
            assert error.exit_code == 2, error
            assert 0 < len(error.message.split("\n")) <= MAX_LINES
            found = error
        if time.thread_time() - began < SECONDS:
            return found
    raise AssertionError(f"it takes more than {SECONDS} s")
