"""`tformer data`: a look at tables before training: columns, labels, lengths, duplicates, rows that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tformer.cli.command import examples, takes_options
from tformer.cli.report import emit_document, emit_json, emit_lines, show_notes
from tformer.support.errors import InputError
from tformer.support.files import in_blocks, refuse_to_replace, require_writable, write_file
from tformer.support.options import (
    DATA,
    Delimiter,
    Encoding,
    Errors,
    Json,
    LabelColumn,
    Panel,
    PictureFormat,
    Text2Column,
    TextColumn,
    argument,
    require_at_most_one,
)

LENGTHS, OUTPUT = Panel("Lengths"), Panel("Output")

EPILOG = examples(
    "`tformer data reviews.csv`",
    "`tformer data train.tsv --valid valid.tsv -o look.html`",
    "`tformer data reviews.xlsx --text-column review --dropped dropped.jsonl --json`",
)


@dataclass(frozen=True)
class DataOptions:
    """The options of `tformer data`."""

    paths: Annotated[tuple[str, ...], argument("FILE", help="Tables, folders, patterns or URLs.")] = ()
    valid: Annotated[
        tuple[str, ...], DATA("--valid", metavar="PATH", help="Validation data, looked for in the others.")
    ] = ()
    text_column: TextColumn = None
    text2_column: Text2Column = None
    label_column: LabelColumn = None
    objective: Annotated[
        Literal["classification", "multi_label", "regression"], DATA("--objective", help="What the labels are.")
    ] = "classification"
    invalid_utf8: Annotated[Errors, DATA("--invalid-utf8", help="Invalid UTF-8: an error or U+FFFD.", rare=True)] = (
        "strict"
    )
    encoding: Encoding = None
    delimiter: Delimiter = None
    tokenizer: Annotated[
        str | None,
        LENGTHS("--tokenizer", metavar="RUN|FILE", help="Count tokens of this run or tokenizer.json.", default="words"),
    ] = None
    max_length: Annotated[
        int | None,
        LENGTHS("--max-length", metavar="N", help="Count longer texts, which are cut.", default="the run's"),
    ] = None
    dropped: Annotated[
        Path | None,
        OUTPUT("--dropped", metavar="FILE.jsonl", help="Write the rows that `train --bad-rows drop` leaves out."),
    ] = None
    output: Annotated[
        Path | None,
        OUTPUT("-o", "--output", metavar="FILE", help="Pictures; the suffix sets the format.", default="text"),
    ] = None
    format: Annotated[PictureFormat, OUTPUT] = None
    as_json: Annotated[Json, OUTPUT] = False

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is read."""
        if not self.paths:
            raise InputError("there is no table to look at", hint="tformer data FILE")
        if self.max_length is not None and self.tokenizer is None:
            raise InputError("--max-length counts tokens, whose tokenizer is missing", hint="add --tokenizer RUN")
        pictures = self.output if self.output is not None else self.format
        require_at_most_one([("--json", self.as_json or None), ("-o and --format", pictures)])
        for file, option in ((self.dropped, "--dropped"), (self.output, "-o")):
            if file is not None and str(file) != "-":
                require_writable(file, option=option)
                refuse_to_replace(file, [*self.paths, *self.valid], option=option)


@takes_options
def data(options: DataOptions) -> None:
    """Look at tables before training: columns, labels, lengths, duplicates, bad rows.

    Near duplicates are texts that differ in case, white space and punctuation only. Bad rows have no label, no text or
    missing cells. `train` says the same of its data, and never divides equal texts between training and validation.
    """
    options.check()
    from tformer.data.sources.columns import parse_column
    from tformer.data.sources.reading import Reading
    from tformer.recipe.sections import Columns
    from tformer.tasks.base import bad_row_lines
    from tformer.viz.output import choose_output
    from tformer.viz.picture import render_plots
    from tformer.workflows.look import DataLook
    from tformer.workflows.tokenizing import open_subject

    named = {"text": options.text_column, "text2": options.text2_column, "label": options.label_column}
    found = DataLook(
        options.paths,
        options.valid,
        Columns(**{role: parse_column(column) for role, column in named.items()}),
        Reading(options.invalid_utf8, options.encoding, options.delimiter, "drop"),
        subject=None if options.tokenizer is None else open_subject(Path(options.tokenizer)),
        most=options.max_length,
        multi_label=options.objective == "multi_label",
        numeric_label=options.objective == "regression",
        separator="|",
    )
    if options.dropped is not None:
        write_file(options.dropped, in_blocks(bad_row_lines(found.sources)))
        show_notes([f"{options.dropped}: {found.bad.total:,} rows"])
    if options.as_json:
        emit_json(found.document())
    elif options.output is None and options.format in (None, "terminal"):
        emit_lines(found.lines())
    else:
        chosen = choose_output(options.output, options.format, stem="data")
        to_file = chosen.path is not None
        emit_document(chosen, render_plots(found.plots(), chosen.format, title=found.name, to_file=to_file))
        if chosen.path is not None:
            show_notes([f"wrote {chosen.path}"], dim=True)
