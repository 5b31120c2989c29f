"""What a person asked of `tformer classify`, and what is wrong with it: before the model is loaded, and after."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tformer.cli.classify_input import STANDARD_INPUT
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.data.sources.files import Errors
    from tformer.evaluation.classifier import Classifier
    from tformer.recipe.sections import Columns


@dataclass(frozen=True)
class Asked:
    """What the command line says about the inputs."""

    text: str | None
    text2: str | None
    images: tuple[Path, ...]
    input_path: str | None
    text_column: str | None
    text2_column: str | None
    errors: str
    top: int | None
    threshold: float | None

    def check(self, batch_size: int | None) -> None:
        """What can be refused before anything is loaded."""
        given = [
            flag
            for flag, value in (("--text", self.text), ("--image", self.images or None), ("--input", self.input_path))
            if value is not None
        ]
        if len(given) > 1:
            raise InputError(f"{given[0]} and {given[1]} exclude each other")
        if self.text2 is not None and self.text is None:
            raise InputError("--text2 needs --text")
        if not given and sys.stdin.isatty():
            raise InputError(
                "nothing to classify",
                hint="give --text TEXT, --image FILE or --input FILE, or pipe one text a line into the command",
            )
        if self.top is not None and self.top < 1:
            raise InputError(f"--top must be at least 1, found {self.top}")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise InputError(f"--threshold must be between 0 and 1, found {self.threshold:g}")
        if batch_size is not None and batch_size < 1:
            raise InputError(f"--batch-size must be at least 1, found {batch_size}")
        if self.errors not in ("strict", "replace"):
            raise InputError(f"--errors must be strict or replace, found '{self.errors}'")

    def check_model(self, classifier: Classifier) -> None:
        """What the model cannot take."""
        path = classifier.path
        if classifier.reads_images and (self.text is not None or self.text_column or self.text2_column):
            raise InputError(f"{path} classifies images, not texts", hint="give --image FILE")
        if self.images and not classifier.reads_images:
            raise InputError(f"{path} classifies texts, not images", hint="give --text TEXT or --input FILE")
        second = "--text2" if self.text2 is not None else "--text2-column"
        if classifier.reads_pairs is False and (self.text2 is not None or self.text2_column is not None):
            raise InputError(f"{second}: {path} was trained on single texts, not on pairs", hint=f"leave {second} out")
        if classifier.reads_pairs and self.text is not None and self.text2 is None:
            raise InputError(f"{path} was trained on pairs of texts, found one", hint="give the second with --text2")
        if self.threshold is not None and classifier.kind != "labels":
            raise InputError(f"--threshold is for models with several labels an input, {path} has one")
        if self.top is not None and classifier.kind == "score":
            raise InputError(f"--top: {path} gives a score, not labels")

    @property
    def files(self) -> tuple[str, ...]:
        """What is read, as written; `-`: standard input."""
        if self.text is not None:
            return ()
        return tuple(map(str, self.images)) or (self.input_path or STANDARD_INPUT,)

    @property
    def utf8(self) -> Errors:
        return "replace" if self.errors == "replace" else "strict"

    def columns(self, trained: Columns) -> Columns:
        """Those named, over those that the model was trained on."""
        from tformer.data.sources.columns import parse_column

        named = {"text": self.text_column, "text2": self.text2_column}
        updates = {name: parse_column(column) for name, column in named.items() if column is not None}
        return trained.model_copy(update={"label": None, **updates})


def sort_out(arguments: list[str], images: list[Path]) -> tuple[str | None, list[Path]]:
    """The run, which is a folder, and further images, which are files: `--image *.png` gives several words."""
    runs = [word for word in arguments if not (images and Path(word).is_file())]
    if len(runs) > 1:
        raise InputError(
            f"unexpected argument '{runs[1]}'" + (": no such file" if images else ""),
            hint="see 'tformer classify --help'",
        )
    more = [Path(word) for word in arguments if word not in runs]
    return (runs[0] if runs else None), [*images, *more]
