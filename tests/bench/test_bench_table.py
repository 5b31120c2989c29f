"""Numbers with their units, and tables in Markdown."""

from __future__ import annotations

import pytest

from tformer.bench.table import Table, markdown, show_bytes, show_factor, show_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.12e-5, "0.081 ms"), (0.001234, "1.23 ms"), (0.0123, "12.3 ms"), (0.9994, "999 ms"), (0.9999, "1.00 s"),
     (4.561, "4.56 s"), (123.4, "123 s")],
)  # fmt: skip
def test_seconds(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


def test_bytes_and_factors() -> None:
    assert show_bytes(2**19) == "0.500 MiB"
    assert show_bytes(34.14 * 2**20) == "34.1 MiB"
    assert show_bytes(1.25 * 2**30) == "1.25 GiB"
    assert (show_factor(0.0811), show_factor(11.42)) == ("0.081 x", "11.4 x")


def test_markdown() -> None:
    text = markdown(Table("Times", ("kind", "512"), (("full", "1 ms"), ("a|b", ""))))
    assert text.splitlines() == ["Times", "", "| kind | 512 |", "| --- | ---: |", "| full | 1 ms |", "| a\\|b |  |"]
