"""`tformer evaluate`: how good a model is. What is measured follows from what it was trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tformer.cli import column_options as columns
from tformer.cli import evaluate_options as pairs
from tformer.cli.command import examples
from tformer.cli.evaluate_families import at_length_asked, check_family, family_of
from tformer.cli.evaluate_mistakes import check_errors_file
from tformer.cli.evaluate_pairs import check_pair_options
from tformer.cli.evaluate_request import Request
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit_json
from tformer.errors import InputError
from tformer.options import check_quantize
from tformer.output_files import refuse_to_replace

DATA, MEASURE, MODEL = "Data", "What is measured", "Model and machine"

EPILOG = examples(
    "`tformer evaluate --data valid.txt`",
    "`tformer evaluate runs/gpt-tiny-1 --data valid.txt --stride 32 --checkpoint latest`",
    "`tformer evaluate runs/bert-tiny-1 --data test.tsv --errors mistakes.tsv --json`",
    "`tformer evaluate runs/transformer-tiny-1 --source test.en --target test.de --beam-size 5 --lowercase`",
    "`tformer evaluate runs/gpt-tiny-1 --score --source prompts.txt --target continuations.txt`",
)


HEADS = {"lm", "masked_lm", "replaced_token", "classifier", "regression"}


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
    text_column: columns.TextColumn = None,
    text2_column: columns.Text2Column = None,
    label_column: columns.LabelColumn = None,
    invalid_utf8: Annotated[
        str | None,
        typer.Option(
            "--invalid-utf8",
            metavar="strict|replace",
            help="An error or replaced; default: strict, for the run's own data as in training.",
            rich_help_panel=DATA,
        ),
    ] = None,
    source: pairs.Source = None,
    target: pairs.Target = None,
    source_column: pairs.SourceColumn = None,
    target_column: pairs.TargetColumn = None,
    prefix: pairs.Prefix = None,
    beam_size: pairs.BeamSize = None,
    max_new_tokens: pairs.MaxNewTokens = None,
    length_penalty: pairs.LengthPenalty = None,
    length_penalty_type: pairs.LengthPenaltyType = None,
    bleu_tokenize: pairs.BleuTokenize = None,
    lowercase: pairs.Lowercase = False,
    no_decode: pairs.NoDecode = False,
    score: pairs.Score = False,
    errors: Annotated[
        Path | None,
        typer.Option(
            "--errors",
            metavar="FILE.tsv|.jsonl",
            help="Labelled data and pairs: write what the model gets wrong, the surest mistakes first.",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            metavar="N",
            help="Windows, examples or each side of pairs of up to N tokens, also longer than in training where the "
            "positions reach that far (rope, alibi, t5_bias, shaw, sinusoidal, none). Default: as in training.",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            metavar="S",
            help="Causal models: windows overlap and move on by S tokens, for more context, slower. "
            "Default: they do not overlap.",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    pseudo_perplexity: Annotated[
        bool,
        typer.Option(
            "--pseudo-perplexity",
            help="Masked models: also mask every token alone, one forward pass each.",
            rich_help_panel=MEASURE,
        ),
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", metavar="N", help="At most so many for --pseudo-perplexity.", rich_help_panel=MEASURE
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.", rich_help_panel=MEASURE)
    ] = False,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="best|latest|step-N", help="Of the run.", rich_help_panel=MODEL)
    ] = "best",
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            help="Windows or examples at a time; the masks of a masked model depend on it.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda[:i]", rich_help_panel=MODEL)] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", metavar="auto|fp32|bf16|fp16", rich_help_panel=MODEL)
    ] = "auto",
    quantize: Annotated[
        Literal["none", "int8"],
        typer.Option(
            "--quantize",
            help="int8: 8-bit weights and inputs of every product on a CPU; weights on disk stay as trained.",
            rich_help_panel="Model and machine",
        ),
    ] = "none",
) -> None:
    """How good a model is, on the run's validation data or on --data.

    A causal language model: loss (nats per token), perplexity, bits per byte and accuracy over every token of a text,
    each predicted once. A masked one: loss and accuracy on masked tokens. A classifier: accuracy with its 95 %
    interval, F1, Matthews' correlation, calibration error, and each class; a regression: correlations and error.
    A model of pairs: loss and token accuracy on the targets, and BLEU and chrF (with signatures) and exact matches of
    what it writes itself.
    """
    request = Request(
        data=data,
        text_column=text_column,
        text2_column=text2_column,
        label_column=label_column,
        invalid_utf8=invalid_utf8,
        errors_file=errors,
        seq_len=seq_len,
        stride=stride,
        pseudo_perplexity=pseudo_perplexity,
        max_tokens=max_tokens,
        batch_size=batch_size,
        source=source,
        target=target,
        source_column=source_column,
        target_column=target_column,
        prefix=prefix,
        score=score,
        no_decode=no_decode,
        beam_size=beam_size,
        max_new_tokens=max_new_tokens,
        length_penalty=length_penalty,
        length_penalty_type=length_penalty_type,
        bleu_tokenize=bleu_tokenize,
        lowercase=lowercase,
        quantize=quantize,
    )
    _check_usage(request)
    check_quantize(quantize, precision)
    with StopFlag() as flag:
        from tformer.decoding.inference import (
            inference_dtype,
            prepare_inference,
        )
        from tformer.device import resolve_device
        from tformer.loading import load

        place = resolve_device(device)
        loaded = load(run, device=place, which=checkpoint, kinds=HEADS)
        # As in validation: activations in this format, weights in fp32 and cast on use.
        trained_in = loaded.recipe.training.precision
        loaded.model.compute_dtype = inference_dtype(precision, trained_in=trained_in, device=place)
        for note in loaded.notes:
            console.print(note, style="dim", markup=False)
        family = family_of(loaded, request)
        check_family(request, family, loaded)
        loaded = at_length_asked(loaded, request)
        if quantize != "none":
            prepare_inference(loaded.model, loaded.model.compute_dtype, quantize=quantize)
        if (of_prefix := request.note(loaded)) is not None:
            console.print(of_prefix, style="dim", markup=False)
        read = [path for spec in request.specs(loaded) for path in (spec.path, spec.target_path) if path is not None]
        refuse_to_replace(request.errors_file, read, option="--errors")
        try:
            result = family.evaluate(loaded, request, flag)
        except InputError as error:  # who reads text names the option of the other commands
            error.hint = error.hint and error.hint.replace("--errors replace", "--invalid-utf8 replace")
            raise
        if as_json:
            emit_json(result)
        else:
            family.show(result)


def _check_usage(request: Request) -> None:
    """What can be refused before anything is loaded."""
    if request.batch_size is not None and request.batch_size < 1:
        raise InputError(f"--batch-size must be at least 1, found {request.batch_size}")
    if request.seq_len is not None and request.seq_len < 1:
        raise InputError(f"--seq-len must be at least 1, found {request.seq_len}")
    if request.invalid_utf8 not in (None, "strict", "replace"):
        raise InputError(f"--invalid-utf8 must be strict or replace, found '{request.invalid_utf8}'")
    if request.max_tokens is not None and not request.pseudo_perplexity:
        raise InputError("--max-tokens bounds --pseudo-perplexity, which is not asked for")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InputError(f"--max-tokens must be at least 1, found {request.max_tokens}")
    check_pair_options(request)
    if request.errors_file is not None:
        check_errors_file(request.errors_file)
        refuse_to_replace(request.errors_file, request.inputs(), option="--errors")
