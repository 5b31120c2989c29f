"""`tformer train-tokenizer`: text in, tokenizer.json and a report on it out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from tformer.cli.command import examples
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit, emit_json, progress_reporter
from tformer.errors import InputError, Interrupted, StorageError, did_you_mean
from tformer.tokenizer.options import TemplateName, TokenizerModel, TokenizerOptions, UnicodeForm

if TYPE_CHECKING:
    from rich.table import Table

    from tformer.data.sources.text import TextSource

EPILOG = examples(
    "`tformer train-tokenizer corpus.txt --vocab-size 8000`",
    "`tformer train-tokenizer books/ --model wordpiece --template bert --lowercase --out bert.json`",
    "`tformer train-tokenizer notes.txt.gz --model unigram --template t5 --byte-fallback --json`",
)

MODEL, TEXT, TRAINING, OUTPUT = "Model", "Text", "Training", "Output"
DEFAULTS = TokenizerOptions()


def train_tokenizer(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT", help="Files, folders, globs, builtin:NAME or `-`. Nothing given: built-in text."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help=", ".join(get_args(TokenizerModel)), rich_help_panel=MODEL)] = (
        DEFAULTS.model
    ),
    vocab_size: Annotated[
        int, typer.Option(help="Entries, special tokens included; char keeps every character.", rich_help_panel=MODEL)
    ] = DEFAULTS.vocab_size,
    template: Annotated[
        str,
        typer.Option(
            help=f"Special tokens and their places: {', '.join(get_args(TemplateName))}", rich_help_panel=MODEL
        ),
    ] = DEFAULTS.template,
    sentinels: Annotated[
        int | None, typer.Option(help="<extra_id_N> tokens (default: t5 100, others 0).", rich_help_panel=MODEL)
    ] = None,
    byte_fallback: Annotated[
        bool, typer.Option("--byte-fallback", help="bpe, unigram: unseen characters as bytes.", rich_help_panel=MODEL)
    ] = False,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Lower-case the text.", rich_help_panel=TEXT)] = False,
    strip_accents: Annotated[
        bool, typer.Option("--strip-accents", help="Remove accents.", rich_help_panel=TEXT)
    ] = False,
    unicode: Annotated[
        str, typer.Option(help=f"Unicode form: {', '.join(get_args(UnicodeForm))}", rich_help_panel=TEXT)
    ] = DEFAULTS.unicode,
    digits: Annotated[
        bool, typer.Option("--digits", help="Split numbers into single digits.", rich_help_panel=TEXT)
    ] = False,
    errors: Annotated[
        str, typer.Option(help="Invalid UTF-8: strict (an error) or replace.", rich_help_panel=TEXT)
    ] = "strict",
    text_column: Annotated[
        str | None, typer.Option(help="Column of csv, tsv, jsonl or parquet.", rich_help_panel=TEXT)
    ] = None,
    min_frequency: Annotated[
        int, typer.Option(help="Rarer pairs and words get no entry.", rich_help_panel=TRAINING)
    ] = DEFAULTS.min_frequency,
    max_word_length: Annotated[
        int, typer.Option(help="Longest word in characters; longer ones are cut.", rich_help_panel=TRAINING)
    ] = DEFAULTS.max_word_length,
    sample_mb: Annotated[
        int | None,
        typer.Option(
            help="Train on an evenly spread sample of so many MB (default: unigram 64, char all, others 256).",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.", rich_help_panel=OUTPUT)] = Path("tokenizer.json"),
    force: Annotated[
        bool, typer.Option("--force", help="Replace a different file that is already there.", rich_help_panel=OUTPUT)
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="The report as one JSON document on stdout.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Train a tokenizer on your own text and report what it does to it."""
    _check_choice("--errors", errors, ("strict", "replace"))
    _check_choice("--model", model, get_args(TokenizerModel))
    _check_choice("--template", template, get_args(TemplateName))
    _check_choice("--unicode", unicode, get_args(UnicodeForm))
    try:
        options = TokenizerOptions(
            model=model,  # type: ignore[arg-type]
            vocab_size=vocab_size,
            template=template,  # type: ignore[arg-type]
            unicode=unicode,  # type: ignore[arg-type]
            lowercase=lowercase,
            strip_accents=strip_accents,
            digits=digits,
            byte_fallback=byte_fallback,
            min_frequency=min_frequency,
            max_word_length=max_word_length,
            sentinels=sentinels,
            sample_mb=sample_mb,
        )
    except ValueError as error:
        raise InputError(f"--{str(error).replace('_', '-', str(error).split(' ')[0].count('_'))}") from error
    _check_output(out, options, force=force)

    from tformer.data.sources.columns import parse_column
    from tformer.data.sources.text import open_sources
    from tformer.tokenizer.report import tokenizer_report
    from tformer.tokenizer.train import train_with_facts

    with StopFlag() as stop:
        sources = open_sources(
            [_Spec(path) for path in inputs or []],
            columns=SimpleNamespace(text=parse_column(text_column)),
            errors=errors,  # type: ignore[arg-type]
        )
        for source in sources:
            console.print(f"reading {source.name}", markup=False)
            for note in source.notes:
                console.print(note, markup=False)
        try:
            with progress_reporter("training the tokenizer") as progress:
                trained = train_with_facts(
                    lambda: _texts(sources),
                    options,
                    size_bytes=_total_size(sources),
                    progress=progress,
                    should_stop=stop.should_stop,
                )
        except Interrupted as error:
            raise stop.interrupted(error.message) from error
        trained.tokenizer.save(out, force=force)
        report = tokenizer_report(trained.tokenizer, options=options, facts=trained.facts)
    if json_:
        emit_json({"path": str(out), "sources": [source.name for source in sources], **report})
        return
    console.print(_table(report))
    for line in _remarks(report):
        console.print(line, markup=False)
    emit(str(out))


@dataclass(frozen=True)
class _Spec:
    path: str
    weight: float = 1.0


def _texts(sources: Iterable[TextSource]) -> Iterator[str]:
    return (piece.text for source in sources for piece in source.documents())


def _total_size(sources: Iterable[TextSource]) -> int | None:
    sizes = [source.size_bytes() for source in sources]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{flag}: unknown value '{value}'", hint=did_you_mean(value, choices))


def _check_output(out: Path, options: TokenizerOptions, *, force: bool) -> None:
    """Refuse before the training what would be refused after it."""
    if out.is_dir():
        raise InputError(f"--out {out} is a directory, expected a file", hint=f"try {out / 'tokenizer.json'}")
    folder = next(parent for parent in Path(os.path.realpath(out)).parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"--out {out}: cannot write into {folder}", hint="choose a folder that can be written")
    if out.exists() and not force and not _may_be_the_same(out, options):
        raise InputError(f"--out {out} already exists and is a different file", hint="--force replaces it")


def _may_be_the_same(out: Path, options: TokenizerOptions) -> bool:
    """Training again with the same text and options writes the same file: that is no overwriting."""
    from tformer.tokenizer.tokenizer import Tokenizer

    try:
        there = Tokenizer.load(out)
    except InputError:
        return False
    return there.kind == options.model and (there.kind == "char" or there.vocab_size <= options.vocab_size)


FIGURES = {
    "bytes": "{:,}",
    "tokens": "{:,}",
    "bytes_per_token": "{:.3f}",
    "tokens_per_word": "{:.3f}",
    "vocabulary_used": "{:.1%}",
    "unknown_rate": "{:.3%}",
    "byte_fallback_rate": "{:.3%}",
    "round_trip_rate": "{:.2%}",
    "round_trip_rate_after_normalisation": "{:.2%}",
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
        yield "probes that do not come back: " + ", ".join(failure["probe"] for failure in report["probe_failures"])
    for failure in report["trained_text"]["round_trip_failures"]:
        yield f"  {failure['text']!r} came back as {failure['decoded']!r}"
    yield f"sha256 {report['sha256']}"
