"""`tformer evaluate` for models of pairs: the loss on given targets, and BLEU, chrF and exact match of own outputs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.cli.evaluate_request import Request, describe
from tformer.cli.evaluate_text import require_finite
from tformer.cli.report import StopFlag, console, emit, progress_reporter
from tformer.errors import InputError
from tformer.formatting import as_cell

if TYPE_CHECKING:
    from tformer.data.shards.pair_tokens import PairTokens
    from tformer.data.sources.pairs import PairSource
    from tformer.evaluation.translation import Outputs
    from tformer.loading import Loaded

BATCH_TOKENS = 4096  # of a side, when the loss is measured
BATCH_SENTENCES = 32  # decoded at a time
DECODING = {  # options that mean nothing when nothing is decoded
    "beam_size": "--beam-size",
    "max_new_tokens": "--max-new-tokens",
    "length_penalty": "--length-penalty",
    "length_penalty_type": "--length-penalty-type",
    "bleu_tokenize": "--bleu-tokenize",
    "lowercase": "--lowercase",
    "errors_file": "--errors",
}
SIGNED = ("bleu", "chrf")


def check_pair_options(request: Request) -> None:
    """What can be refused before anything is loaded. Raises InputError."""
    if (request.source is None) != (request.target is None):
        given, missing = ("--source", "--target") if request.target is None else ("--target", "--source")
        raise InputError(f"{given} without {missing}", hint="two aligned files: --source FILE --target FILE")
    if request.source is not None and request.data is not None:
        raise InputError("--data and --source exclude each other", hint="--data is one table with both sides")
    if request.score and request.no_decode:
        raise InputError("--score and --no-decode exclude each other")
    for option, flag in DECODING.items() if request.score or request.no_decode else ():
        if getattr(request, option) not in (None, False):
            raise InputError(f"{flag} has no meaning with {'--score' if request.score else '--no-decode'}")
    if request.bleu_tokenize is not None:
        from tformer.metrics.text import require_tokenizer

        require_tokenizer(request.bleu_tokenize)


def evaluate_pairs(loaded: Loaded, request: Request, flag: StopFlag) -> dict[str, Any]:
    """The figures of every pair; with `--score` the log-probability of each."""
    translator = None if request.score or request.no_decode else _translator(loaded, request)
    pairs, name = read_pairs(loaded, request, flag)
    if not len(pairs):
        raise InputError(f"{name}: no pairs to evaluate")
    beginning = {**describe(loaded), "data": name}
    if request.score:
        return beginning | _scores(loaded, pairs, request, flag)
    result = beginning | _loss(loaded, pairs, request, flag)
    if translator is not None:
        result |= _decoded(loaded, translator, pairs, request, flag)
    return result


def show_pairs(result: dict[str, Any]) -> None:
    """One figure a line, BLEU and chrF with their signatures; of `--score` one log-probability a line."""
    if "scores" in result:
        for score in result["scores"]:
            emit(f"{score['logprob']:.6f}")
        return
    for name in ("loss", "perplexity", "accuracy", "sequence_accuracy", "bleu", "chrf"):
        if name in result:
            emit(f"{name} {result[name]:.4f}" + (f" {result[f'{name}_signature']}" if name in SIGNED else ""))
        for task in (key for key in result if key.startswith(f"{name}.")):  # of several tasks
            emit(f"{task} {result[task]:.4f}")
    emit(f"examples {result['examples']}")


def _translator(loaded: Loaded, request: Request) -> Any:
    """Made before the data is read: its settings may be wrong."""
    from tformer.decoding.loaded import translator_of
    from tformer.decoding.settings import fitting_beam_settings

    settings = fitting_beam_settings(
        loaded.recipe.generation,
        beam_size=request.beam_size,
        max_new_tokens=_most_new_tokens(loaded, request),
        length_penalty=request.length_penalty,
        length_penalty_type=request.length_penalty_type,
        eos_id=loaded.decoder_tokens.eos,
    )
    return translator_of(loaded, settings=settings)


def _most_new_tokens(loaded: Loaded, request: Request) -> int | None:
    """As asked; of targets of another length than in training at least that many; None: the recipe's."""
    if request.max_new_tokens is not None or request.seq_len is None:
        return request.max_new_tokens
    return max(request.seq_len, loaded.recipe.generation.max_new_tokens)


def read_pairs(loaded: Loaded, request: Request, flag: StopFlag) -> tuple[PairTokens, str]:
    """What is evaluated, and its name. Of `--score` no target may be cut: raises InputError for one too long."""
    from tformer.data.shards.pair_tokens import (
        join_pairs,
        split_pairs,
    )
    from tformer.evaluation.paired import paired_tokens

    data, held_out = loaded.recipe.data, request.held_out(loaded)
    parts = []
    sources = _open(loaded, request)
    for source in sources:
        with progress_reporter(f"tokenising {source.name}") as progress:
            pairs = paired_tokens(
                loaded.recipe,
                source,
                (loaded.text_tokenizer, loaded.target_tokenizer),
                keep_all=not held_out,  # what is held out depends on what training kept
                whole=request.score,
                progress=progress,
                should_stop=flag.should_stop,
            )
        for note in (*source.notes, *pairs.notes):
            console.print(note, markup=False)
        parts.append(pairs.subset(split_pairs(pairs, fraction=data.valid_fraction)[1]) if held_out else pairs)
    name = ", ".join(source.name for source in sources)
    return join_pairs(parts), f"{data.valid_fraction:.0%} of {name}, held out" if held_out else name


def _open(loaded: Loaded, request: Request) -> list[PairSource]:
    """The run's own data with its columns; of named data those only where a table has them."""
    from tformer.data.sources.pairs import open_pairs
    from tformer.data.sources.tables import parse_column
    from tformer.recipe.sections import Columns

    specs, columns, errors = request.specs(loaded), request.columns(loaded), request.errors(loaded)
    if not request.reads_files:
        return open_pairs(specs, columns=columns, errors=errors)
    asked = Columns(source=parse_column(request.source_column), target=parse_column(request.target_column))
    return open_pairs(specs, columns=asked, preferred=columns, errors=errors)


def _loss(loaded: Loaded, pairs: PairTokens, request: Request, flag: StopFlag) -> dict[str, Any]:
    from tformer.evaluation.translation import evaluate_pairs as measure
    from tformer.objectives import build_objective
    from tformer.training.tokenizers import decoder_context

    context = decoder_context(loaded.recipe, loaded.text_tokenizer, loaded.own_target_tokenizer)
    with progress_reporter("reading the pairs") as progress:
        figures = measure(
            loaded.model,
            build_objective(loaded.recipe.objectives, context),
            pairs,
            batch_tokens=BATCH_TOKENS,
            batch_size=request.batch_size,
            seed=loaded.recipe.seed,
            should_stop=flag.should_stop,
            progress=progress,
        )
    _stop_here(flag)
    require_finite(figures["loss"])
    return figures


def _decoded(loaded: Loaded, translator: Any, pairs: PairTokens, request: Request, flag: StopFlag) -> dict[str, Any]:
    from tformer.decoding.inference import prepare_inference
    from tformer.evaluation.translation import output_metrics, translate_pairs
    from tformer.metrics.text import tokenised_note

    if request.quantize == "none":  # else that is done
        prepare_inference(loaded.model, loaded.model.compute_dtype)
    began = time.perf_counter()
    with progress_reporter("decoding") as progress:
        outputs = translate_pairs(
            translator,
            pairs,
            batch_size=request.batch_size or BATCH_SENTENCES,
            should_stop=flag.should_stop,
            progress=progress,
        )
    _stop_here(flag)
    seconds = time.perf_counter() - began
    if translator.cut:
        further = "--seq-len N reads further where the positions allow it"
        console.print(
            f"{translator.cut:,} sources are longer than the model reads and were cut; {further}", markup=False
        )
    tokenize = request.bleu_tokenize or "13a"
    note = tokenised_note(outputs.texts, outputs.references)
    if note is not None and tokenize != "none":
        console.print(note, markup=False)
    figures = output_metrics(outputs, pairs, tokenize=tokenize, lowercase=request.lowercase)
    if request.errors_file is not None:
        written = _write_errors(request.errors_file, outputs, lowercase=request.lowercase)
        console.print(f"{request.errors_file}: {written:,} pairs", markup=False)
    return {**figures, "sentences_per_second": len(pairs) / seconds}


def _scores(loaded: Loaded, pairs: PairTokens, request: Request, flag: StopFlag) -> dict[str, Any]:
    from tformer.evaluation.translation import score_pairs
    from tformer.metrics import perplexity

    with progress_reporter("scoring") as progress:
        scores = score_pairs(
            loaded.model,
            pairs,
            start_ids=loaded.decoder_tokens.prefix,
            vocab_size=loaded.target_tokenizer.vocab_size,
            batch_tokens=BATCH_TOKENS,
            should_stop=flag.should_stop,
            progress=progress,
        )
    _stop_here(flag)
    total, tokens = sum(score.logprob for score in scores), sum(len(score.logprobs) for score in scores)
    require_finite(-total)
    return {
        "scores": [{"logprob": score.logprob, "tokens": len(score.logprobs)} for score in scores],
        "logprob": total,
        "tokens": tokens,
        "perplexity": perplexity(-total / tokens),
    }


def _write_errors(path: Path, outputs: Outputs, *, lowercase: bool) -> int:
    """The pairs whose output is not the reference, the surest first. The file appears whole."""
    from tformer.decoding.output import open_output
    from tformer.evaluation.translation import wrong_outputs

    wrong = wrong_outputs(outputs, lowercase=lowercase)
    lines = _json_lines if path.suffix.lower() == ".jsonl" else _table_lines
    with open_output(path) as write:
        for line in lines(outputs, wrong):
            write(line + "\n")
    return len(wrong)


def _json_lines(outputs: Outputs, wrong: list[int]) -> Iterator[str]:
    for index in wrong:
        document = {
            "source": outputs.sources[index],
            "reference": outputs.references[index],
            "output": outputs.translations[index].text,
            "score": outputs.translations[index].score,
        }
        yield json.dumps(document, ensure_ascii=False, allow_nan=False)


def _table_lines(outputs: Outputs, wrong: list[int]) -> Iterator[str]:
    yield "source\treference\toutput\tscore"
    for index in wrong:
        texts = (outputs.sources[index], outputs.references[index], outputs.translations[index].text)
        yield "\t".join([*map(as_cell, texts), f"{outputs.translations[index].score:.4f}"])


def _stop_here(flag: StopFlag) -> None:
    if flag.should_stop():
        raise flag.interrupted("interrupted before every pair was read")
