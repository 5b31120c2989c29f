"""What a person asked of `tformer viz-attention`, and what is wrong with it before a model is loaded."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from tformer.errors import InputError, did_you_mean

KINDS = ("encoder", "decoder", "cross")
VIEWS = ("head", "model", "rollout", "summary")
SCALES = ("row", "global", "sqrt", "log")
COLOURS = ("viridis", "cividis")
MEAN = "mean"
LARGEST_NUMBER = 100_000


@dataclass(frozen=True)
class Request:
    """The options that choose what is shown. `heads`: None: all; (): the mean of each layer's."""

    text: str | None
    text2: str | None
    target: str | None
    image: Path | None
    attention: str | None
    view: str | None
    layers: str | None
    heads: str | None
    top_k: int
    scale: str | None
    colours: str
    max_tokens: int | None
    max_new_tokens: int | None
    max_megabytes: float

    def check(self) -> None:
        """Raises InputError for words and numbers that no model could take."""
        for option, value, known in (
            ("--attention", self.attention, KINDS),
            ("--view", self.view, VIEWS),
            ("--scale", self.scale, SCALES),
            ("--colours", self.colours, COLOURS),
        ):
            if value is not None and value not in known:
                raise InputError(f"{option} {value}: unknown", hint=did_you_mean(value, known))
        for option, number in (("--top-k", self.top_k), ("--max-tokens", self.max_tokens),
                               ("--max-new-tokens", self.max_new_tokens)):  # fmt: skip
            if number is not None and number < 1:
                raise InputError(f"{option} must be at least 1, found {number}")
        if not self.max_megabytes > 0:
            raise InputError(f"--max-megabytes must be above 0, found {self.max_megabytes:g}")
        if self.image is not None and (self.text is not None or self.text2 is not None or self.target is not None):
            other = "--text" if self.text is not None else "--text2" if self.text2 is not None else "--target"
            raise InputError(f"--image and {other} exclude each other")
        if self.text is None and self.image is None:
            raise InputError("nothing to look at", hint="give --text TEXT, or of a model of images --image FILE")
        parse_numbers(self.layers, "--layers")
        self.head_numbers()

    @property
    def wants_mean(self) -> bool:
        return self.heads == MEAN

    def layer_numbers(self) -> tuple[int, ...] | None:
        return parse_numbers(self.layers, "--layers")

    def head_numbers(self) -> tuple[int, ...] | None:
        """None: all, also where their mean is wanted."""
        return None if self.wants_mean else parse_numbers(self.heads, "--heads")


def parse_numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """`0,3-5` as (0, 3, 4, 5), in order, each once; None stays None. InputError for anything else."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None:
            expected = "numbers and ranges like 0,3-5" + (", or mean" if option == "--heads" else "")
            raise InputError(f"{option} {text}: expected {expected}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > LARGEST_NUMBER:
            raise InputError(f"{option} {text}: {part.strip()} is no range", hint="write the smaller number first")
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def command_line() -> str:
    """How the command was called, as a shell reads it."""
    return shlex.join(["tformer", *sys.argv[1:]])
