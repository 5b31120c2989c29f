"""`tformer evaluate` for causal language models: loss, perplexity, bits per byte and accuracy over a text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tformer.cli.evaluate_request import Request, describe
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit, progress_reporter
from tformer.errors import InputError, NonFiniteLossError

if TYPE_CHECKING:
    from tformer.data.shards.corpus import TokenCorpus
    from tformer.loading import Loaded

WINDOWS_AT_A_TIME = 32


def evaluate_text(loaded: Loaded, request: Request, flag: StopFlag) -> dict[str, Any]:
    """Every token of the text once: in windows of the recipe's length, or overlapping ones with `stride`."""
    if loaded.model.decoder is None or loaded.model.encoder is not None:
        raise InputError(f"{loaded.path}: evaluation of a text needs a decoder-only model")
    seq_len, stride = loaded.recipe.seq_len, request.stride
    if stride is not None and not 1 <= stride <= seq_len:
        raise InputError(f"--stride must be between 1 and the window of {seq_len} tokens, found {stride}")
    corpora = read_corpora(loaded, request, flag)
    figures = _figures(loaded, corpora, request, flag, seq_len=seq_len)
    names = ", ".join(name for name, _ in corpora)
    return {**describe(loaded), "data": names, **figures, "seq_len": seq_len, "stride": stride or seq_len}


def read_corpora(loaded: Loaded, request: Request, flag: StopFlag) -> list[tuple[str, TokenCorpus]]:
    """The tokens of `--data`, or else those that validated the run, by the name of each text."""
    from tformer.data.shards.corpus import token_corpus
    from tformer.data.sources.text import open_sources

    recipe = loaded.recipe.data
    sources = open_sources(request.specs(loaded), columns=request.columns(loaded), errors=request.errors(loaded))
    corpora: list[tuple[str, TokenCorpus]] = []
    for source in sources:
        with progress_reporter(f"reading {source.name}") as progress:
            corpus = token_corpus(source, loaded.text_tokenizer, progress=progress, should_stop=flag.should_stop)
        for note in (*source.notes, *corpus.notes):
            console.print(note, markup=False)
        name = source.name
        if request.held_out(loaded):
            _, corpus = corpus.split(fraction=recipe.valid_fraction)
            name = f"the last {recipe.valid_fraction:.0%} of {source.name}"
        corpora.append((name, corpus))
    return corpora


def _figures(
    loaded: Loaded, corpora: list[tuple[str, TokenCorpus]], request: Request, flag: StopFlag, *, seq_len: int
) -> dict[str, Any]:
    from tformer.evaluation.lm import combine_validation, evaluate_lm, isolates_documents

    parts = []
    for name, corpus in corpora:
        with progress_reporter(f"evaluating {name}") as progress:
            part = evaluate_lm(
                loaded.model,
                corpus,
                seq_len=seq_len,
                batch_size=request.batch_size or WINDOWS_AT_A_TIME,
                stride=request.stride,
                document_mask=isolates_documents(loaded.recipe.data),
                progress=progress,
                should_stop=flag.should_stop,
            )
        if flag.should_stop():
            raise flag.interrupted("interrupted before the whole text was read")
        parts.append(part)
    figures = combine_validation(parts)
    require_finite(figures["loss"])
    return figures


def require_finite(loss: float) -> None:
    """Raise NonFiniteLossError (exit code 4) for a loss that is no number."""
    if not math.isfinite(loss):
        raise NonFiniteLossError(f"the loss is {loss}", hint="the weights are damaged, or --precision fp32 is needed")


def show_text(result: dict[str, Any]) -> None:
    """One figure a line; a perplexity beyond what a number holds is inf."""
    for name in ("loss", "perplexity", "bits_per_byte", "accuracy"):
        emit(f"{name} {result[name]:.4f}")
    emit(f"tokens {result['tokens']}")
    emit(f"tokens_per_second {result['tokens_per_second']:.0f}")
