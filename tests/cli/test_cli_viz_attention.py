"""What `viz-attention` refuses before it loads a model, and how it reads numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tformer.cli.viz_attention_request import parse_numbers
from tformer.errors import InputError


@pytest.mark.parametrize(
    ("text", "numbers"),
    [(None, None), ("0", (0,)), ("0,3-5", (0, 3, 4, 5)), ("3-5, 0,4", (0, 3, 4, 5)), (" 2 - 3 ", (2, 3))],
)
def test_numbers_and_ranges(text: str | None, numbers: tuple[int, ...] | None) -> None:
    assert parse_numbers(text, "--layers") == numbers


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1.5", "0-99999999", "mean"])
def test_what_is_no_number_is_one_line(text: str) -> None:
    with pytest.raises(InputError, match="--layers"):
        parse_numbers(text, "--layers")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to look at"),
        (["--text", "a", "--attention", "encodr"], "--attention encodr: unknown"),
        (["--text", "a", "--view", "neuron"], "--view neuron: unknown"),
        (["--text", "a", "--scale", "cube"], "--scale cube: unknown"),
        (["--text", "a", "--layers", "x"], "--layers x: expected numbers and ranges like 0,3-5"),
        (["--text", "a", "--heads", "mode"], "--heads mode: expected numbers and ranges like 0,3-5, or mean"),
        (["--text", "a", "--top-k", "0"], "--top-k must be at least 1, found 0"),
        (["--text", "a", "--max-tokens", "0"], "--max-tokens must be at least 1, found 0"),
        (["--text", "a", "--max-megabytes", "0"], "--max-megabytes must be above 0"),
        (["--text", "a", "--image", "b.png"], "--image and --text exclude each other"),
        (["--text", "a", "--format", "pdf"], "--format pdf: unknown"),
        (["--text", "a", "-o", "a.pdf"], "a.pdf has the suffix .pdf"),
        (["--text", "a", "-o", "a"], "a has no suffix"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], words: str, cli: Callable[..., Any]) -> None:
    outcome = cli("viz-attention", "runs/x", *arguments)
    assert outcome.code == 2 and outcome.out == ""
    [error, *hint] = outcome.err.splitlines()
    assert error.startswith("error: ") and words in error and len(hint) <= 1
