"""`tformer tokenize`: the pieces of texts by each tokenizer, and the model's input: ids, template, padding, mask."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tformer.cli.command import examples, takes_options
from tformer.cli.report import emit, emit_json, emit_lines, print_table, show_notes
from tformer.support.bounds import Positive
from tformer.support.errors import InputError, visible
from tformer.support.files import STANDARD_INPUT
from tformer.support.formatting import TOKEN_SIGNS, aligned, as_cell, whole_number
from tformer.support.options import Checkpoint, InvalidUtf8, Json, Panel, SpecialTokens, argument
from tformer.support.rules import WITH_INPUT, Checked, exclude, needs

if TYPE_CHECKING:
    from tformer.data.encoding import TextReader
    from tformer.workflows.tokenizing import NamedTokenizer, TokenizedText

INPUT, READING, OUTPUT = Panel("Input"), Panel("What the model reads"), Panel("Output")
MOST_TOKENS = 2**20  # of a text, padding included
MOST_DETAILED = 200  # tokens that the plain output shows one by one; of more it shows the pieces only
COLOURS = ("black on bright_cyan", "black on bright_yellow")
SPECIAL_COLOUR, UNKNOWN_COLOUR = "white on magenta", "white on red"

EPILOG = examples(
    '`tformer tokenize runs/bert-tiny-1 --text "The cats sat." --text "A dog."`',
    '`tformer tokenize --text "The cats sat." --text2 "They slept." --max-length 12`',
    "`tformer tokenize bpe.json unigram.json --input corpus.txt`",
    '`tformer tokenize runs/gpt-tiny-1 --ids "12 7 345"`',
)


@dataclass(frozen=True)
class TokenizeOptions(Checked):
    """The options of `tformer tokenize`."""

    RULES = (
        exclude("--text", "--input", "--ids"),
        exclude(("--text", "--ids"), "--invalid-utf8", hint=WITH_INPUT),
        exclude("--ids", ("--no-template", "--special-tokens")),
        exclude("--ids", ("--max-length", "--truncation", "--pad", "--padding-side")),
        exclude("--no-template", "--text2", hint="nothing would separate the texts"),
        needs("--text2", "--text"),
    )

    paths: Annotated[
        tuple[str, ...],
        argument(
            "RUN|tokenizer.json",
            help="Runs, checkpoints, Hugging Face folders or tokenizer.json files, compared with each other when "
            "there are several.",
            default="the newest run",
        ),
    ] = ()
    text: Annotated[tuple[str, ...], INPUT("--text", metavar="TEXT", help="A text; repeat it for a batch.")] = ()
    text2: Annotated[str | None, INPUT("--text2", metavar="TEXT", help="The second text of a pair.")] = None
    input_path: Annotated[
        str | None,
        INPUT(
            "--input",
            metavar="FILE|-",
            help="Texts, one per line.",
            default="standard input if it is piped",
        ),
    ] = None
    invalid_utf8: Annotated[InvalidUtf8, INPUT] = "strict"
    ids: Annotated[
        str | None, INPUT("--ids", metavar="IDS", help='Decode these ids, as in "12 7 345", instead of a text.')
    ] = None
    side: Annotated[
        Literal["source", "target"] | None,
        READING("--side", help="Side of an encoder-decoder: the target has its own start and end tokens.", rare=True),
    ] = None
    no_template: Annotated[bool, READING("--no-template", help="Leave out the special tokens around the text.")] = False
    special_tokens: Annotated[SpecialTokens, READING] = False
    max_length: Annotated[
        Positive | None,
        READING(
            "--max-length",
            metavar="N",
            help=f"Cut longer inputs to N tokens; default: the model's context. Without one, a text has at most "
            f"{MOST_TOKENS:,} tokens.",
        ),
    ] = None
    truncation: Annotated[
        Literal["head", "tail", "head_tail"] | None,
        READING(
            "--truncation",
            help="The part of a longer text that is kept.",
            default="as in training, else head",
            rare=True,
        ),
    ] = None
    pad: Annotated[
        Literal["longest", "max"] | None,
        READING(
            "--pad", help="Width of the batch: its longest text, or --max-length.", default="as in training", rare=True
        ),
    ] = None
    padding_side: Annotated[
        Literal["right", "left"] | None,
        READING("--padding-side", help="Side of the padding.", rare=True, default="as in training, else right"),
    ] = None
    checkpoint: Checkpoint = "best"
    as_json: Annotated[Json, OUTPUT] = False

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is read."""
        super().check()
        if self.text2 is not None and len(self.text) != 1:
            raise InputError(f"--text2 makes a pair with one --text, found {len(self.text)}")
        if self.pad == "max" and self.max_length is not None and self.max_length > MOST_TOKENS:
            raise InputError(f"--max-length with --pad max must be at most {MOST_TOKENS:,}, found {self.max_length:,}")
        if not self.text and self.input_path is None and self.ids is None and sys.stdin.isatty():
            raise InputError("there is no text", hint="give --text TEXT, --input FILE or --ids IDS, or pipe text in")

    def reader(self, subject: NamedTokenizer) -> TextReader:
        """The subject's reading with the changes that the options ask for."""
        from tformer.data.shards.template import plain_template

        named = ("max_length", "truncation", "padding_side")
        changes: dict[str, Any] = {name: value for name in named if (value := getattr(self, name)) is not None}
        if self.pad is not None:
            changes["pad_to"] = self.pad
        if self.special_tokens:
            changes["tokenizer"] = subject.tokenizer.reading_special()
        if self.no_template:
            changes |= {"single": plain_template(), "pair": None, "starts": ()}
        reader = replace(subject.reader, **changes)
        if reader.pad_to == "max" and reader.max_length is None:
            raise InputError(f"--pad max: {subject.name} has no maximum length", hint="add --max-length N")
        return reader


@takes_options
def tokenize(options: TokenizeOptions) -> None:
    """Show how a text becomes tokens: pieces, ids, offsets, masks.

    A run or checkpoint shows exactly what its model reads; a tokenizer.json shows its own template. Several tokenizers
    are compared on the same text by bytes per token.
    """
    from tformer.workflows.tokenizing import decoded_document, open_subject

    paths: list[Path | None] = [Path(path) for path in options.paths] or [None]
    subjects = [open_subject(path, checkpoint=options.checkpoint, side=options.side) for path in paths]
    for subject in subjects:
        show_notes(subject.notes)
    if options.ids is not None:
        ids = parse_ids(options.ids)
        documents = [decoded_document(subject, ids) for subject in subjects]
        if options.as_json:
            emit_json({"tokenizers": documents})
            return
        for document in documents:
            pieces = "|".join(piece.translate(TOKEN_SIGNS) for piece in document["pieces"])
            emit_lines([f"{document['path']}: {pieces}", as_cell(document["text"])])
        return
    subjects = [replace(subject, reader=options.reader(subject)) for subject in subjects]
    _report(options, subjects)


Named = tuple[str, tuple[str, ...]]
"""A text, or a pair, with its name in messages."""


def _texts(options: TokenizeOptions) -> Iterator[Named]:
    """Each text, or pair of texts, read when it is its turn."""
    if options.text:
        second = () if options.text2 is None else (options.text2,)
        yield from ((f"--text {number}", (text, *second)) for number, text in enumerate(options.text, start=1))
        return
    from tformer.decoding.lines import BLOCK_LINES, line_blocks, name_of
    from tformer.support.file_kinds import RUNNING_TEXT

    path = STANDARD_INPUT if options.input_path is None else options.input_path
    blocks = line_blocks(path, errors=options.invalid_utf8, size=BLOCK_LINES, accepts=RUNNING_TEXT)
    lines = (line for block in blocks for line in block)
    yield from ((f"{name_of(path)}:{number}", (line,)) for number, line in enumerate(lines, start=1))


def parse_ids(text: str) -> list[int]:
    """Ids separated by spaces, commas or brackets. Raises InputError for anything else."""
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    numbers = [whole_number(word) for word in words]
    wrong = next((word for word, number in zip(words, numbers, strict=True) if number is None), None)
    if wrong is not None or not words:
        found = "nothing" if wrong is None else f"'{wrong}'"
        raise InputError(f"--ids: found {found}, expected whole numbers", hint='for example --ids "12 7 345"')
    return [number for number in numbers if number is not None]


# --- output -----------------------------------------------------------------------------------------------------------


def _report(options: TokenizeOptions, subjects: Sequence[NamedTokenizer]) -> None:
    from tformer.workflows.tokenizing import full_document

    texts: Iterable[Named] = _texts(options)
    first = list(islice(texts, 2))
    if not first:
        raise InputError("there is no text: the input is empty")
    for subject in subjects:
        _read(subject, *first[0])  # what a subject cannot read is refused before the first line of output
    texts = chain(first, texts)
    if len(subjects) > 1:  # each reads all of them
        texts = list(texts)
    documents: list[dict[str, Any]] = []
    for subject in subjects:
        readings = (_read(subject, *named) for named in texts)
        if options.as_json:
            documents.append(full_document(subject, list(readings)))
        else:
            documents.append(_show_subject(subject, readings, alone=len(subjects) == 1, numbered=len(first) > 1))
    if options.as_json:
        emit_json({"tokenizers": documents})
    elif len(subjects) > 1 or len(first) > 1:
        _show_totals(documents)


def _read(subject: NamedTokenizer, name: str, texts: tuple[str, ...]) -> TokenizedText:
    """The reading of a text or a pair by a subject. Raises InputError for more tokens than can be shown."""
    from tformer.workflows.tokenizing import TokenizedText

    reader = subject.reader
    if reader.max_length is not None and reader.max_length <= MOST_TOKENS:
        return TokenizedText(texts, reader.encode(*texts, cut=True))
    encoded = replace(reader, max_length=MOST_TOKENS).encode(*texts, cut=True, count_cut=False)
    if encoded.num_cut:
        raise InputError(
            f"{name}: the text of {sum(map(len, texts)):,} characters has more than {MOST_TOKENS:,} tokens",
            hint="--max-length N shows N of them and counts the others",
        )
    return TokenizedText(texts, encoded)


def _show_subject(
    subject: NamedTokenizer, readings: Iterable[TokenizedText], *, alone: bool, numbered: bool
) -> dict[str, Any]:
    """Write the facts of a tokenizer and how it reads each text, and return them with the sums.

    alone: there is one tokenizer, whose tokens are shown with their ids, and its batch, if they are few. numbered: of
    several texts.
    """
    from tformer.workflows.tokenizing import Totals, described

    facts, totals = described(subject), Totals(subject.tokenizer)
    pair = f", pair {facts['pair_template']}" if facts["pair_template"] else ""
    length = f", at most {facts['max_length']:,} tokens" if facts["max_length"] else ""
    about = f"{facts['model']}, {facts['vocab_size']:,} entries, template {facts['template']}{pair}{length}"
    special = " ".join(f"{role}={one['token']}:{one['id']}" for role, one in facts["special_tokens"].items())
    emit_lines([f"{facts['path']}: {about}", f"special tokens: {special or 'none'}"])
    few: list[TokenizedText] = []  # the texts so far, while their tokens are few
    for reading in readings:
        totals.add(reading)
        few.append(reading)
        if not alone or totals.tokens > MOST_DETAILED:
            for one in few:
                _show_pieces(subject, one.document(subject.tokenizer)["tokens"])
            few.clear()
    for number, reading in enumerate(few, start=1):
        _show_reading(subject, reading, number=number if numbered else None)
    if few:
        _show_batch(subject.reader, subject.reader.batch([reading.encoded for reading in few]))
    elif alone:
        show_notes([f"more than {MOST_DETAILED} tokens: --json has the id and the offsets of each"])
    return {**facts, "totals": totals.document()}


def _show_reading(subject: NamedTokenizer, reading: TokenizedText, *, number: int | None) -> None:
    document = reading.document(subject.tokenizer)
    _show_pieces(subject, document["tokens"])
    rows = [["piece", "id", "characters", "text", "type", ""]]
    for token in document["tokens"]:
        characters = "" if token["special"] else f"{token['start']}-{token['end']}"
        kind = "special" if token["special"] else ""
        shown = [as_cell(token["piece"]), str(token["id"]), characters, token["text"].translate(TOKEN_SIGNS)]
        rows.append([visible(cell) for cell in [*shown, str(token["type"]), kind]])
    emit_lines(aligned(rows, right=("id", "type")))
    rate = document["bytes_per_token"]
    counts = f"{document['bytes']:,} bytes, {document['num_tokens']:,} tokens"
    counts += "" if rate is None else f", {rate:.2f} bytes per token"
    counts += f", {document['num_cut']:,} tokens cut" if document["num_cut"] else ""
    name = "" if number is None else f"text {number}: "
    emit_lines([f"{name}{counts}", f"decoded: {as_cell(document['decoded'])}", ""])


def _show_pieces(subject: NamedTokenizer, tokens: Sequence[dict[str, Any]]) -> None:
    """All pieces on one line: coloured on a terminal, else with bars between them."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    pieces = [visible(token["text"].translate(TOKEN_SIGNS)) for token in tokens]
    if not console.is_terminal or console.no_color:
        emit("|".join(pieces))
        return
    line, unknown = Text(), subject.tokenizer.special.unk
    for place, (token, piece) in enumerate(zip(tokens, pieces, strict=True)):
        odd = SPECIAL_COLOUR if token["special"] else UNKNOWN_COLOUR if token["id"] == unknown else None
        line.append(piece, style=odd or COLOURS[place % 2])
    console.print(line)


def _show_batch(reader: TextReader, batch: dict[str, Any]) -> None:
    rows, width = batch["input_ids"].shape
    pad = f"{reader.tokenizer.token(reader.pad_id)} (id {reader.pad_id})"
    padded = "" if batch["attention_mask"].all() else f", padded on the {reader.padding_side} with {pad}"
    emit(f"batch of {rows} x {width}{padded}")
    shown = {name: values for name, values in batch.items() if name != "token_type_ids" or values.any()}
    digits = len(str(batch["input_ids"].max(initial=0)))
    for name, values in shown.items():
        for number, row in enumerate(values.tolist()):
            emit(f"{name if number == 0 else '':15}" + " ".join(str(value).rjust(digits) for value in row))


def _show_totals(documents: Sequence[dict[str, Any]]) -> None:
    headings = ["tokenizer", "kind", "entries", "texts", "bytes", "tokens", "bytes per token", "unknown", "distinct"]
    rows = []
    for document in documents:
        sums = document["totals"]
        rate = "-" if sums["bytes_per_token"] is None else f"{sums['bytes_per_token']:.3f}"
        counts = [f"{sums[name]:,}" for name in ("texts", "bytes", "tokens")]
        rest = [rate, f"{sums['unknown']:,}", f"{sums['distinct']:,}"]
        rows.append([document["path"], document["model"], f"{document['vocab_size']:,}", *counts, *rest])
    plain = "\n".join(aligned([headings, *rows], right=headings[2:]))
    print_table(headings, rows, title="All texts, template excluded", markdown=plain, text_columns=2)
