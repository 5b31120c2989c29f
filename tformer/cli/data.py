"""`tformer data`: a look at data before training: columns, labels, lengths, duplicates, rows that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from tformer.cli.command import examples, takes_options
from tformer.cli.report import emit_document, emit_json, emit_lines, show_notes
from tformer.support.bounds import Positive
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
    Quotes,
    Text2Column,
    TextColumn,
    argument,
)
from tformer.support.rules import Checked, exclude, needs

OBJECTIVES = (
    *("classification", "multi_label", "regression", "seq2seq", "causal_lm"),
    *("token_classification", "question_answering"),
)
OF_IMAGES = {"paths", "output", "format", "as_json"}  # options that a look at images takes
LENGTHS, OUTPUT = Panel("Lengths"), Panel("Output")

EPILOG = examples(
    "`tformer data reviews.csv`",
    "`tformer data train.en --target train.de --tokenizer tokenizer.json`",
    "`tformer data train.tsv --valid valid.tsv -o look.html`",
    "`tformer data reviews.xlsx --text-column review --dropped dropped.jsonl --json`",
)


@dataclass(frozen=True)
class DataOptions(Checked):
    """The options of `tformer data`."""

    RULES = (
        exclude("--json", ("-o", "--format")),
        needs("--max-length", "--tokenizer", hint="it counts tokens: --tokenizer RUN"),
    )

    paths: Annotated[tuple[str, ...], argument("FILE", help="Tables, texts, images, folders, patterns or URLs.")] = ()
    target: Annotated[tuple[str, ...], DATA("--target", metavar="FILE", help="Target of each line of FILE.")] = ()
    valid: Annotated[
        tuple[str, ...], DATA("--valid", metavar="PATH", help="Validation data, looked for in the others.")
    ] = ()
    valid_target: Annotated[
        tuple[str, ...], DATA("--valid-target", metavar="FILE", help="Target of each line of --valid.", rare=True)
    ] = ()
    text_column: TextColumn = None
    text2_column: Text2Column = None
    label_column: LabelColumn = None
    source_column: Annotated[str | None, DATA("--source-column", metavar="C", help="Column of sources.", rare=True)] = (
        None
    )
    target_column: Annotated[str | None, DATA("--target-column", metavar="C", help="Column of targets.", rare=True)] = (
        None
    )
    objective: Annotated[
        Literal[*OBJECTIVES] | None,  # type: ignore[valid-type]
        DATA(
            "--objective",
            metavar="NAME",
            help=f"Training that the data is for: {', '.join(OBJECTIVES)}.",
            default="what its columns fit",
        ),
    ] = None
    invalid_utf8: Annotated[Errors, DATA("--invalid-utf8", help="Invalid UTF-8: an error or U+FFFD.", rare=True)] = (
        "strict"
    )
    encoding: Encoding = None
    delimiter: Delimiter = None
    quotes: Quotes = None
    tokenizer: Annotated[
        str | None,
        LENGTHS("--tokenizer", metavar="RUN|FILE", help="Count tokens of this run or tokenizer.json.", default="words"),
    ] = None
    max_length: Annotated[
        Positive | None,
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
        super().check()
        if not self.paths:
            raise InputError("there is no table to look at", hint="tformer data FILE")
        for file, option in ((self.dropped, "--dropped"), (self.output, "-o")):
            if file is not None and str(file) != "-":
                require_writable(file, option=option)
                refuse_to_replace(file, [*self.paths, *self.target, *self.valid, *self.valid_target], option=option)


@takes_options
def data(options: DataOptions) -> None:
    """Look at data: columns, labels, lengths, duplicates, bad rows.

    Labelled tables, pairs, running text, words with tags (CoNLL, jsonl), questions about contexts (SQuAD's json), and
    images in a folder for each label (number, size, labels, what a training holds out).
    Near duplicates are texts that differ in case, white space and punctuation only. Bad rows have no label, no text or
    missing cells. `train` says the same of its data, and never divides equal texts between training and validation.
    """
    from tformer.data.sources.reading import Reading
    from tformer.tasks.base import bad_row_lines, named_columns
    from tformer.viz.output import choose_output
    from tformer.viz.picture import render_plots
    from tformer.workflows.look import DataLook, ImageLook, has_images, specs_of

    found: DataLook | ImageLook
    if any(map(has_images, options.paths)):
        given = {each.name for each in fields(options) if getattr(options, each.name) != each.default}
        if len(options.paths) > 1 or not given <= OF_IMAGES:
            hint = "leave out other files and options for texts"
            raise InputError(f"{options.paths[0]}: a folder of images is looked at by itself", hint=hint)
        found = ImageLook(options.paths[0])
    else:
        found = DataLook(
            specs_of(options.paths, options.target, option="--target"),
            specs_of(options.valid, options.valid_target, option="--valid-target"),
            named_columns(options),
            Reading(options.invalid_utf8, options.encoding, options.delimiter, "drop", options.quotes),
            objective=options.objective,
            tokenizer=None if options.tokenizer is None else Path(options.tokenizer),
            most=options.max_length,
        )
    if options.dropped is not None and isinstance(found, DataLook):
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
