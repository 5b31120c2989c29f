"""The options of `tformer embed` and `tformer search`.

This module imports no model, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT
from tformer.support.options import (
    MACHINE,
    Checkpoint,
    Delimiter,
    Device,
    Encoding,
    InvalidUtf8,
    Panel,
    Precision,
    Quantize,
    Run,
    argument,
    check_quantize,
    require_at_most_one,
)

if TYPE_CHECKING:
    from tformer.data.sources.reading import Reading

INPUT, VECTOR, OUTPUT = Panel("What to embed"), Panel("The vector"), Panel("The output")
SEARCHED = Panel("The search")
NPY = ".npy"


@dataclass(frozen=True)
class EmbedOptions:
    """The options of `tformer embed` and `run.embed`."""

    run: Run = None
    text: Annotated[str | None, INPUT("--text", help="A text.")] = None
    input_path: Annotated[
        str | None,
        INPUT(
            "--input",
            metavar="FILE|-",
            help="Texts, one per line, or a table (csv, tsv, xlsx, jsonl, parquet).",
            default="standard input if it is piped",
        ),
    ] = None
    text_column: Annotated[
        str | None,
        INPUT("--text-column", metavar="C", help="Column of a table, by name or number.", default="as in training"),
    ] = None
    invalid_utf8: Annotated[InvalidUtf8, INPUT] = "strict"
    encoding: Annotated[Encoding, INPUT] = None
    delimiter: Annotated[Delimiter, INPUT] = None
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
        int | None,
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
    ] = None
    dtype: Annotated[
        Literal["float32", "int8"],
        OUTPUT("--dtype", help="Numbers of a .npy file. int8: each vector's largest number becomes 127."),
    ] = "float32"
    checkpoint: Checkpoint = "best"
    batch_size: Annotated[
        int | None,
        MACHINE("--batch-size", help="Inputs per batch; affects only the speed.", default="chosen by their length"),
    ] = None
    device: Device = "auto"
    precision: Precision = "auto"
    quantize: Quantize = "none"

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is computed."""
        if self.dimensions is not None and self.dimensions < 1:
            raise InputError(f"--dimensions must be at least 1, found {self.dimensions}")
        check_quantize(self.quantize, self.precision)

    def check_command(self) -> None:
        """Raise InputError for inputs and outputs that `tformer embed` cannot take."""
        self.check()
        require_at_most_one([("--text", self.text), ("--input", self.input_path)])
        if self.text is None and self.input_path is None and sys.stdin.isatty():
            raise InputError("nothing to embed", hint="give --text TEXT or --input FILE, or pipe one text a line")
        ending = "" if self.output is None else self.output.suffix.lower()
        if ending not in ("", NPY, ".jsonl", ".parquet"):
            raise InputError(f"--output {self.output}: found {ending}, expected .npy, .jsonl or .parquet")
        if self.dtype != "float32" and ending != NPY:
            raise InputError(f"--dtype {self.dtype} is for a .npy file", hint="--output FILE.npy")

    @property
    def files(self) -> list[str]:
        """The inputs as they were written; `-`: standard input."""
        return [] if self.text is not None else [self.input_path or STANDARD_INPUT]

    @property
    def reading(self) -> Reading:
        """How texts are read. Raises InputError for an unknown encoding or delimiter."""
        from tformer.data.sources.reading import Reading

        return Reading(self.invalid_utf8, self.encoding, self.delimiter)


@dataclass(frozen=True)
class SearchOptions:
    """The options of `tformer search`."""

    index: Annotated[Path, argument("INDEX", help="A .npy file of tformer embed.")]
    query: Annotated[
        str | None, argument("QUERY", help="The text to look for.", default="--input, or standard input")
    ] = None
    input_path: Annotated[
        str | None, SEARCHED("--input", metavar="FILE|-", help="Queries, one per line, in place of QUERY.")
    ] = None
    top: Annotated[int, SEARCHED("--top-k", metavar="K", help="Texts found for each query.")] = 10
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
        require_at_most_one([("QUERY", self.query), ("--input", self.input_path)])
        if self.query is None and self.input_path is None and sys.stdin.isatty():
            raise InputError("nothing to search for", hint=f'tformer search {self.index} "a text"')
