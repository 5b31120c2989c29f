"""`tformer train-tokenizer`: text in, tokenizer.json and a report out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit, emit_json, progress_reporter, show_notes
from tformer.support.errors import InputError, Interrupted
from tformer.support.files import require_writable
from tformer.support.options import Delimiter, Encoding, Errors, Json, Panel, Quotes, TextColumn, argument
from tformer.tokenizer.options import TEXT, TokenizerOptions

if TYPE_CHECKING:
    from rich.table import Table

EPILOG = examples(
    "`tformer train-tokenizer corpus.txt --vocab-size 8000`",
    "`tformer train-tokenizer books/ --model wordpiece --template bert --lowercase`",
    "`tformer train-tokenizer notes.txt.gz --model unigram --template t5 --json`",
)

OUTPUT = Panel("Output")


@dataclass(frozen=True)
class TrainTokenizerOptions:
    """The options of `tformer train-tokenizer`."""

    inputs: Annotated[
        tuple[str, ...],
        argument("INPUT", help="Files, folders, globs, builtin:NAME or `-` (standard input).", default="built-in text"),
    ] = ()
    tokenizer: TokenizerOptions = field(default_factory=TokenizerOptions)
    invalid_utf8: Annotated[Errors, TEXT("--invalid-utf8", help="Invalid UTF-8: an error, or replaced by U+FFFD.")] = (
        "strict"
    )
    text_column: Annotated[TextColumn, TEXT] = None
    encoding: Annotated[Encoding, TEXT] = None
    delimiter: Annotated[Delimiter, TEXT] = None
    quotes: Annotated[Quotes, TEXT] = None
    out: Annotated[Path, OUTPUT("--out", help="The file to write.")] = Path("tokenizer.json")
    force: Annotated[bool, OUTPUT("--force", help="Replace an existing, different file.")] = False
    as_json: Annotated[Json, OUTPUT] = False


@takes_options
def train_tokenizer(options: TrainTokenizerOptions) -> None:
    """Train a tokenizer on your text and report how it encodes it."""
    out = options.out
    if out.is_dir():
        raise InputError(f"--out {out} is a directory, expected a file", hint=f"try {out / 'tokenizer.json'}")
    require_writable(out, option="--out")
    if out.exists() and not options.force and not _may_be_same(out, options.tokenizer):
        raise InputError(f"--out {out} already exists and is a different file", hint="--force replaces it")

    from tformer.data.sources.columns import parse_column
    from tformer.data.sources.files import total_bytes
    from tformer.data.sources.reading import Reading
    from tformer.data.sources.text import open_sources
    from tformer.tokenizer.report import tokenizer_report
    from tformer.tokenizer.train import train_with_facts
    from tformer.workers.work import Work

    with StopFlag() as stop:
        sources = open_sources(
            [SimpleNamespace(path=path, weight=1.0) for path in options.inputs],
            columns=SimpleNamespace(text=parse_column(options.text_column)),
            reading=Reading(options.invalid_utf8, options.encoding, options.delimiter, quotes=options.quotes),
        )
        for source in sources:
            show_notes((f"reading {source.name}", *source.notes))
        try:
            with Work(progress_reporter, stop.should_stop).part("training the tokenizer", unit="B") as part:
                tokenizer, facts = train_with_facts(
                    lambda: (piece.text for source in sources for piece in source.documents()),
                    options.tokenizer,
                    size_bytes=total_bytes(sources),
                    work=part,
                )
        except Interrupted as error:
            raise stop.interrupted(error.message) from error
        tokenizer.save(options.out, force=options.force)
        report = tokenizer_report(tokenizer, options=options.tokenizer, facts=facts)
    if options.as_json:
        emit_json({"path": str(options.out), "sources": [source.name for source in sources], **report})
        return
    console.print(_table(report))
    show_notes(_remarks(report))
    emit(str(options.out))


def _may_be_same(out: Path, options: TokenizerOptions) -> bool:
    """Whether training with these options may write the existing file again unchanged."""
    from tformer.tokenizer.tokenizer import Tokenizer

    try:
        there = Tokenizer.load(out)
    except InputError:
        return False
    fits = there.kind == "char" or there.vocab_size <= options.vocab_size
    return there.kind == options.model and fits and all(there.token_id(t) is not None for t in options.added_tokens)


FIGURES = {
    "bytes": "{:,}",
    "tokens": "{:,}",
    "bytes_per_token": "{:.3f}",
    "tokens_per_word": "{:.3f}",
    "vocabulary_used": "{:.1%}",
    "unknown_rate": "{:.3%}",
    "byte_fallback_rate": "{:.3%}",
    "round_trip_rate": "{:.2%}",
    "round_trip_rate_after_normalization": "{:.2%}",
    "encode_mb_per_second": "{:.1f}",
}


def _table(report: dict[str, Any]) -> Table:
    from rich.table import Table

    size = f"{report['vocab_size']:,} entries"
    if report["requested_vocab_size"] not in (None, report["vocab_size"]):
        size += f" ({report['requested_vocab_size']:,} requested)"
    table = Table(title=f"{report['model']}, template {report['template']}: {size}", title_justify="left")
    table.add_column("")
    table.add_column("training text", justify="right")
    table.add_column("unseen text", justify="right")
    trained, unseen = report["trained_text"], report["unseen_text"] or {}
    for name, form in FIGURES.items():
        cells = [form.format(side[name]) if side.get(name) is not None else "-" for side in (trained, unseen)]
        table.add_row(name.replace("_", " "), *cells)
    for name in trained["tokens_per_line"]:
        cells = [str(side["tokens_per_line"][name]) if side else "-" for side in (trained, unseen)]
        table.add_row(f"tokens per line, {name}", *cells)
    return table


def _remarks(report: dict[str, Any]) -> Iterator[str]:
    training = report["training"]
    share = ""
    if training["sampled"]:
        share = (
            f", an evenly spread sample: {report['model']} trains on at most {training['sample_limit_bytes']:,} bytes"
        )
    used, seen = training["used_bytes"], training["seen_bytes"]
    yield f"trained on {used:,} of {seen:,} bytes in {training['seconds']:.1f} s{share}"
    yield "special tokens: " + " ".join(f"{token}={i}" for token, i in report["special_ids"].items())
    yield f"round trip: {report['round_trip']}"
    if report["probe_failures"]:
        yield "probes that are not restored: " + ", ".join(failure["probe"] for failure in report["probe_failures"])
    for failure in report["trained_text"]["round_trip_failures"]:
        yield f"  {failure['text']!r} is decoded as {failure['decoded']!r}"
    yield f"sha256 {report['sha256']}"
