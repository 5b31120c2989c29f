"""What a person asked of `tformer viz-attention`, and what is wrong with it before a model is loaded."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from tformer.loading import Loaded
    from tformer.viz.attention.weights import Chosen

KINDS = ("encoder", "decoder", "cross")
VIEWS = ("head", "model", "rollout", "summary")
SCALES = ("row", "global", "sqrt", "log")
COLOURS = ("viridis", "cividis")
PICTURES = ("png", "svg")
MEAN = "mean"
LARGEST_NUMBER = 100_000


@dataclass(frozen=True)
class Request:
    """The options that choose what is read and shown; None where one was not given."""

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

    def view_in(self, format_: str) -> str:
        """The view asked for, else the one that suits: a picture shows all heads unless one was chosen."""
        if self.view is not None:
            return self.view
        one = self.heads == MEAN or len(self.head_numbers() or ()) == 1
        return "model" if format_ in PICTURES and not one else "head"

    def head_numbers(self) -> tuple[int, ...] | None:
        """None: all, also where their mean is wanted."""
        return None if self.heads == MEAN else parse_numbers(self.heads, "--heads")

    def wants_mean(self, format_: str) -> bool:
        """Whether each layer is shown as the mean of its heads."""
        return self.heads == MEAN or self._is_brief(format_)

    def _is_brief(self, format_: str) -> bool:
        """Whether one matrix is enough: in a terminal, where nobody asked for more."""
        nothing = self.layers is None and self.heads is None
        return format_ == "terminal" and self.view_in(format_) == "head" and nothing

    def chosen_in(self, format_: str, loaded: Loaded) -> Chosen:
        """Which attentions, layers and heads are needed. A picture, and the terminal, show one kind of attention."""
        from tformer.viz.attention.weights import Chosen, kinds_of, modules_of

        kinds: Any = None if self.attention is None else (self.attention,)
        if kinds is None and format_ in (*PICTURES, "terminal"):
            known = kinds_of(loaded)
            kinds = ("cross",) if "cross" in known else known[:1]
        layers = parse_numbers(self.layers, "--layers")
        if self._is_brief(format_):
            layers = (len(modules_of(loaded, kinds[0])) - 1,) if kinds[0] in kinds_of(loaded) else None
        return Chosen(kinds, layers, self.head_numbers())

    def limits_in(self, format_: str) -> dict[str, Any]:
        """What `make_scene` has to keep to: only pages, and files of numbers, grow without end."""
        from tformer.viz.attention.document import BYTES_PER_WEIGHT

        numbers = format_ in BYTES_PER_WEIGHT and self.view_in(format_) in ("head", "model")
        if not numbers and format_ != "html":
            return {"max_bytes": None}
        sizes = {"bytes_per_cell": BYTES_PER_WEIGHT[format_]} if numbers else {}
        return {"max_bytes": self.max_megabytes * 1e6, **sizes}


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
