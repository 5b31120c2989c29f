"""`tformer evaluate`: how well a model predicts a text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tformer.cli.common import StopFlag, console, emit, emit_json, examples, progress_reporter
from tformer.errors import InputError, NonFiniteLossError

if TYPE_CHECKING:
    from tformer.data.sources import TextSource
    from tformer.loading import Loaded

DATA, MEASURE, MODEL = "Data", "What is measured", "Model and machine"

EPILOG = examples(
    "`tformer evaluate --data valid.txt`",
    "`tformer evaluate runs/gpt-tiny-1 --data builtin:python-docs --json`",
    "`tformer evaluate runs/gpt-tiny-1 --data valid.txt --stride 32 --checkpoint latest`",
)


def evaluate(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Run, checkpoint or Hugging Face folder; default: the newest run."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="File, folder, glob, builtin:NAME or - (standard input); default: the run's validation data.",
            rich_help_panel=DATA,
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        typer.Option("--text-column", metavar="C", help="Of csv, tsv, jsonl and parquet.", rich_help_panel=DATA),
    ] = None,
    errors: Annotated[
        str, typer.Option("--errors", metavar="strict|replace", help="Invalid UTF-8.", rich_help_panel=DATA)
    ] = "strict",
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            metavar="S",
            help="Windows overlap and move on by S tokens: more context, slower. Default: they do not overlap.",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.", rich_help_panel=MEASURE)
    ] = False,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="best|latest|step-N", help="Of the run.", rich_help_panel=MODEL)
    ] = "best",
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Windows at a time; changes speed alone.", rich_help_panel=MODEL)
    ] = 32,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda[:i]", rich_help_panel=MODEL)] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", metavar="auto|fp32|bf16|fp16", rich_help_panel=MODEL)
    ] = "auto",
) -> None:
    """Loss, perplexity, bits per byte and accuracy over every token of a text.

    The loss is in nats per token, the same figure as the validation loss during training: windows of the training
    length that do not overlap, each token predicted once.
    """
    if batch_size < 1:
        raise InputError(f"--batch-size must be at least 1, found {batch_size}")
    if errors not in ("strict", "replace"):
        raise InputError(f"--errors must be strict or replace, found '{errors}'")
    with StopFlag() as flag:
        from tformer.decoding.precision import inference_dtype
        from tformer.loading import load
        from tformer.training.precision import resolve_device

        place = resolve_device(device)
        loaded = load(run, device=place, which=checkpoint, kinds={"lm"})
        # As in validation: activations in this format, weights in fp32 and cast on use.
        trained_in = loaded.recipe.training.precision
        loaded.model.compute_dtype = inference_dtype(precision, trained_in=trained_in, device=place)
        for note in loaded.notes:
            console.print(note, style="dim", markup=False)
        if loaded.model.decoder is None or loaded.model.encoder is not None:
            raise InputError(f"{loaded.path}: evaluation of a text needs a decoder-only model")
        seq_len = loaded.recipe.data.seq_len or loaded.model.max_seq_len
        if stride is not None and not 1 <= stride <= seq_len:
            raise InputError(f"--stride must be between 1 and the window of {seq_len} tokens, found {stride}")
        column = int(text_column) if text_column is not None and text_column.isdigit() else text_column
        for source in _open(loaded, data, column, errors):
            result = _evaluate(loaded, source, flag, seq_len=seq_len, stride=stride, batch_size=batch_size)
            if as_json:
                emit_json(result)
            else:
                _show(result)


def _open(loaded: Loaded, data: str | None, column: str | int | None, errors: str) -> list[TextSource]:
    """What to read: `--data`, or what the run was validated on when that is a source of its own."""
    from tformer.data.sources import open_sources
    from tformer.recipe.data import Columns, SourceSpec

    recipe = loaded.recipe.data
    specs = recipe.valid if data is None else (SourceSpec(path=data),)
    if not specs:
        raise InputError("no text to evaluate: --data is missing", hint="for example --data valid.txt")
    columns = recipe.columns if column is None else Columns(text=column)
    return open_sources(specs, columns=columns, errors="replace" if errors == "replace" else "strict")


def _evaluate(
    loaded: Loaded, source: TextSource, flag: StopFlag, *, seq_len: int, stride: int | None, batch_size: int
) -> dict[str, Any]:
    from tformer.data.cache import token_corpus
    from tformer.evaluation.lm import evaluate_lm

    with progress_reporter(f"reading {source.name}") as progress:
        corpus = token_corpus(source, loaded.tokenizer, progress=progress, should_stop=flag.should_stop)
    for note in corpus.notes:
        console.print(note, markup=False)
    with progress_reporter("evaluating") as progress:
        figures = evaluate_lm(
            loaded.model,
            corpus,
            seq_len=seq_len,
            batch_size=batch_size,
            stride=stride,
            document_mask=loaded.recipe.data.document_mask,
            progress=progress,
            should_stop=flag.should_stop,
        )
    if flag.should_stop():
        raise flag.interrupted("interrupted before the whole text was read")
    if not math.isfinite(figures["loss"]):
        raise NonFiniteLossError(
            f"the loss is {figures['loss']}", hint="the weights are damaged, or --precision fp32 is needed"
        )
    return {
        "run": str(loaded.path),
        "step": loaded.step,
        "data": source.name,
        **{name: value if math.isfinite(value) else None for name, value in figures.items()},
        "bytes": corpus.num_bytes,
        "seq_len": seq_len,
        "stride": stride or seq_len,
    }


def _show(result: dict[str, Any]) -> None:
    """One figure a line."""
    for name in ("loss", "perplexity", "bits_per_byte", "accuracy"):
        emit(f"{name} {result[name]:.4f}" if result[name] is not None else f"{name} inf")
    emit(f"tokens {result['tokens']}")
    emit(f"tokens_per_second {result['tokens_per_second']:.0f}")
