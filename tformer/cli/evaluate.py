"""`tformer evaluate`: how well a model predicts a text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tformer.cli.common import StopFlag, console, emit, emit_json, examples, progress_reporter
from tformer.errors import InputError, NonFiniteLossError

if TYPE_CHECKING:
    from tformer.data.corpus import TokenCorpus
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
        typer.Argument(metavar="RUN", help="Run or checkpoint folder; default: the newest run."),
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
        str | None,
        typer.Option(
            "--errors",
            metavar="strict|replace",
            help="Invalid UTF-8; default: strict, for the run's own data as in training.",
            rich_help_panel=DATA,
        ),
    ] = None,
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
    length that do not overlap, each token predicted once. Without --data it is taken over the run's validation data:
    several sources together, or the part of the training text that was held out.
    """
    if batch_size < 1:
        raise InputError(f"--batch-size must be at least 1, found {batch_size}")
    if errors not in (None, "strict", "replace"):
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
        corpora = _read(loaded, data, text_column, errors, flag)
        result = _evaluate(loaded, corpora, flag, seq_len=seq_len, stride=stride, batch_size=batch_size)
        if as_json:
            emit_json(result)
        else:
            _show(result)


def _read(
    loaded: Loaded, data: str | None, text_column: str | None, errors: str | None, flag: StopFlag
) -> list[tuple[str, TokenCorpus]]:
    """The tokens of `--data`, or else those that validated the run, by the name of each text."""
    from tformer.data.cache import token_corpus
    from tformer.data.corpus import split_corpus
    from tformer.data.sources import STANDARD_INPUT, open_sources
    from tformer.data.tables import parse_column
    from tformer.recipe.data import Columns, SourceSpec

    recipe = loaded.recipe.data
    specs = (SourceSpec(path=data),) if data is not None else recipe.valid or recipe.train
    if data is None and any(spec.path == STANDARD_INPUT for spec in specs):
        raise InputError(
            f"{loaded.path} was trained on standard input, which cannot be read again",
            hint="name the text to evaluate with --data",
        )
    chosen = errors or ("strict" if data is not None else recipe.errors)
    sources = open_sources(
        specs,
        columns=recipe.columns if text_column is None else Columns(text=parse_column(text_column)),
        errors="replace" if chosen == "replace" else "strict",
    )
    held_out = data is None and not recipe.valid
    corpora: list[tuple[str, TokenCorpus]] = []
    for source in sources:
        with progress_reporter(f"reading {source.name}") as progress:
            corpus = token_corpus(source, loaded.tokenizer, progress=progress, should_stop=flag.should_stop)
        for note in (*source.notes, *corpus.notes):
            console.print(note, markup=False)
        name = source.name
        if held_out:
            _, corpus = split_corpus(corpus, fraction=recipe.valid_fraction)
            name = f"the last {recipe.valid_fraction:.0%} of {source.name}"
        corpora.append((name, corpus))
    return corpora


def _evaluate(
    loaded: Loaded,
    corpora: list[tuple[str, TokenCorpus]],
    flag: StopFlag,
    *,
    seq_len: int,
    stride: int | None,
    batch_size: int,
) -> dict[str, Any]:
    from tformer.evaluation.combine import combine_validation
    from tformer.evaluation.lm import evaluate_lm, isolates_documents

    parts = []
    for name, corpus in corpora:
        with progress_reporter(f"evaluating {name}") as progress:
            part = evaluate_lm(
                loaded.model,
                corpus,
                seq_len=seq_len,
                batch_size=batch_size,
                stride=stride,
                document_mask=isolates_documents(loaded.recipe.data),
                progress=progress,
                should_stop=flag.should_stop,
            )
        if flag.should_stop():
            raise flag.interrupted("interrupted before the whole text was read")
        parts.append(part)
    figures = combine_validation(parts)
    if not math.isfinite(figures["loss"]):
        raise NonFiniteLossError(
            f"the loss is {figures['loss']}", hint="the weights are damaged, or --precision fp32 is needed"
        )
    return {
        "run": str(loaded.path),
        "step": loaded.step,
        "data": ", ".join(name for name, _ in corpora),
        **figures,
        "seq_len": seq_len,
        "stride": stride or seq_len,
    }


def _show(result: dict[str, Any]) -> None:
    """One figure a line; a perplexity beyond what a number holds is inf."""
    for name in ("loss", "perplexity", "bits_per_byte", "accuracy"):
        emit(f"{name} {result[name]:.4f}")
    emit(f"tokens {result['tokens']}")
    emit(f"tokens_per_second {result['tokens_per_second']:.0f}")
