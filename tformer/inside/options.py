"""Options of the commands that look inside a model; in Python the keywords of the methods with their names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from tformer.evaluation.options import DataOptions
from tformer.support.errors import InputError
from tformer.support.options import DATA, Checkpoint, Device, Panel, PictureFormat, Run

RANDOM, SHOWN = Panel("Random tokens"), Panel("What is shown")
MOST_SAMPLES = 10_000
MAX_EXAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class HeadOptions(DataOptions):
    """The options of `tformer heads`."""

    run: Run = None
    length: Annotated[
        int | None, RANDOM("--length", metavar="T", help="Tokens of a sequence.", default="25, or as many as fit")
    ] = None
    copies: Annotated[int, RANDOM("--copies", metavar="N", help="Number of times that each sequence is read.")] = 4
    samples: Annotated[int, RANDOM("--samples", metavar="N", help="Number of sequences.")] = 10
    seed: Annotated[int, RANDOM("--seed", help="Seed of the tokens.")] = 0
    max_examples: Annotated[
        int | None,
        DATA(
            "--max-examples",
            metavar="N",
            help="Read this many examples at most, evenly spread.",
            default=str(MAX_EXAMPLES),
        ),
    ] = None
    over_training: Annotated[
        bool, SHOWN("--over-training", help="Score every checkpoint of the run, and draw a curve for each head.")
    ] = False
    output: Annotated[
        Path | None,
        SHOWN("-o", "--output", metavar="FILE", help="File, whose suffix sets the format.", default="heads.html"),
    ] = None
    format: Annotated[PictureFormat, SHOWN] = None
    checkpoint: Checkpoint = "best"
    device: Device = "auto"

    @property
    def data_options(self) -> DataOptions:
        """The options of the data alone."""
        return DataOptions(**{each.name: getattr(self, each.name) for each in fields(DataOptions)})

    @property
    def reads_data(self) -> bool:
        """Whether an option of the data was given: then examples are read, by default of the run's validation data."""
        return self.max_examples is not None or any(self.data_options.given())

    @property
    def random_option(self) -> str | None:
        """The flag of an option of random tokens that was given."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        names = ("length", "copies", "samples", "seed")
        return next((f"--{name}" for name in names if values[name][0] != values[name][1]), None)

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        super().check()
        for name, least, most in (("length", 2, None), ("copies", 2, None), ("samples", 1, MOST_SAMPLES)):
            value = getattr(self, name)
            if value is not None and (value < least or value > (most or value)):
                bounds = f"at least {least}" if most is None else f"{least} to {most:,}"
                raise InputError(f"--{name} must be {bounds}, found {value:,}")
        if self.reads_data and self.random_option is not None:
            raise InputError(f"{self.random_option} is of random tokens, which are not read beside examples of data")
