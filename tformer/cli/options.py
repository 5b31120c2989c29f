"""Options of commands: how a command declares them once, and those that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from tformer.errors import InputError

CHOICES = ("none", "int8")

Quantize = Annotated[
    str,
    typer.Option(
        "--quantize",
        metavar="|".join(CHOICES),
        help="int8: 8-bit weights and inputs of every product on a CPU; weights on disk stay as trained.",
        rich_help_panel="Model and machine",
    ),
]


def check_quantize(quantize: str, precision: str) -> None:
    """What can be refused before anything is loaded. Raises InputError."""
    if quantize not in CHOICES:
        raise InputError(f"--quantize must be {' or '.join(CHOICES)}, found '{quantize}'")
    if quantize == "int8" and precision == "fp16":
        raise InputError("--quantize int8 and --precision fp16 exclude each other", hint="beside 8 bits: bf16 or fp32")
