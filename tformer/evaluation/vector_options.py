"""The options of `tformer embed` and `tformer search`.

This module imports no model, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tformer.data.sources.reading import ReadsTexts
from tformer.support.bounds import Positive
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT
from tformer.support.options import (
    AS_STRINGS,
    IN_ARGUMENT,
    RETURNED,
    Checkpoint,
    Delimiter,
    Device,
    Devices,
    Encoding,
    InputsPerBatch,
    InvalidUtf8,
    Panel,
    Precision,
    Quantize,
    Quotes,
    Run,
    TableColumn,
    argument,
)
from tformer.support.rules import OF_FILES, QUANTIZE_RULE, WITH_INPUT, Checked, exclude

INPUT, VECTOR, OUTPUT = Panel("What to embed"), Panel("The vector"), Panel("The output")
SEARCHED = Panel("The search")
NPY = ".npy"


@dataclass(frozen=True)
class EmbedOptions(ReadsTexts, Checked):
    """The options of `tformer embed` and `run.embed`."""

    RULES = (
        exclude("--text", "--input"),
        exclude("--text", ("--text-column", *OF_FILES), hint=WITH_INPUT),
        QUANTIZE_RULE,
    )

    run: Run = None
    text: Annotated[str | None, INPUT("--text", help="A text."), IN_ARGUMENT] = None
    input_path: Annotated[
        str | None,
        INPUT(
            "--input",
            metavar="FILE|-",
            help="Texts, one per line, or a table (csv, tsv, xlsx, jsonl, parquet).",
            default="standard input if it is piped",
        ),
        IN_ARGUMENT,
    ] = None
    text_column: Annotated[TableColumn, INPUT, AS_STRINGS] = None
    invalid_utf8: Annotated[InvalidUtf8, INPUT, AS_STRINGS] = "strict"
    encoding: Annotated[Encoding, INPUT, AS_STRINGS] = None
    delimiter: Annotated[Delimiter, INPUT, AS_STRINGS] = None
    quotes: Annotated[Quotes, INPUT, AS_STRINGS] = None
    pooling: Annotated[
        str | None,
        VECTOR(
            "--pooling",
            metavar="mean|cls|max|last",
            help="One vector of the states of all tokens: their mean, the first, the maximum, or the last.",
            default="that of the model's head, else mean",
        ),
    ] = None
    normalize: Annotated[
        bool, VECTOR("--normalize", help="Vectors of length 1, as a model trained for vectors gives by itself.")
    ] = False
    dimensions: Annotated[
        Positive | None,
        VECTOR(
            "--dimensions",
            metavar="N",
            help="The first N numbers of each vector (Matryoshka), at length 1 if the vector was.",
            default="all",
        ),
    ] = None
    layer: Annotated[
        int | None,
        VECTOR("--layer", help="States after this layer, from 0; negative: from the end.", default="the model's last"),
    ] = None
    output: Annotated[
        Path | None,
        OUTPUT(
            "--output",
            "-o",
            metavar="FILE.npy|.jsonl|.parquet",
            help="Output file; `tformer search` reads .npy.",
            default="standard output, as jsonl",
        ),
        RETURNED,
    ] = None
    dtype: Annotated[
        Literal["float32", "int8"],
        OUTPUT("--dtype", help="Numbers of a .npy file. int8: each vector's largest number becomes 127."),
        RETURNED,
    ] = "float32"
    checkpoint: Checkpoint = "best"
    batch_size: InputsPerBatch = None
    device: Device = "auto"
    devices: Devices = None
    precision: Precision = "auto"
    quantize: Quantize = "none"

    def check_command(self) -> None:
        """Raise InputError for inputs and outputs that `tformer embed` cannot take."""
        if self.text is None and self.input_path is None and sys.stdin.isatty():
            raise InputError("nothing to embed", hint="give --text TEXT or --input FILE, or pipe one text a line")
        ending = self.ending
        if ending not in ("", NPY, ".jsonl", ".parquet"):
            raise InputError(f"--output {self.output}: found {ending}, expected .npy, .jsonl or .parquet")
        if self.dtype != "float32" and ending != NPY:
            raise InputError(f"--dtype {self.dtype} is for a .npy file", hint="--output FILE.npy")

    @property
    def ending(self) -> str:
        """The ending of the output file; "" without an output file."""
        return "" if self.output is None else self.output.suffix.lower()

    @property
    def files(self) -> list[str]:
        """The inputs as they were written; `-`: standard input."""
        return [] if self.text is not None else [self.input_path or STANDARD_INPUT]


@dataclass(frozen=True)
class SearchOptions(Checked):
    """The options of `tformer search`."""

    RULES = (exclude("QUERY", "--input"),)

    index: Annotated[Path, argument("INDEX", help="A .npy file of tformer embed.")]
    query: Annotated[
        str | None, argument("QUERY", help="The text to look for.", default="--input, or standard input")
    ] = None
    input_path: Annotated[
        str | None, SEARCHED("--input", metavar="FILE|-", help="Queries, one per line, in place of QUERY.")
    ] = None
    top: Annotated[Positive, SEARCHED("--top-k", metavar="K", help="Texts found for each query.")] = 10
    run: Annotated[
        str | None,
        SEARCHED("--run", metavar="RUN", help="The model that reads the query.", default="the index names it"),
    ] = None
    texts: Annotated[
        str | None,
        SEARCHED("--texts", metavar="FILE", help="The texts, one a line.", default="they stand beside the index"),
    ] = None
    as_json: Annotated[bool, SEARCHED("--json", help="Write one JSON object per query, each on its own line.")] = False
    device: Device = "auto"

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        super().check()
        if self.query is None and self.input_path is None and sys.stdin.isatty():
            raise InputError("nothing to search for", hint=f'tformer search {self.index} "a text"')
