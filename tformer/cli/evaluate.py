"""`tformer evaluate`: how good a model is. What is measured follows from what it was trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tformer.cli import column_options as columns
from tformer.cli import evaluate_options as pairs
from tformer.cli.options import (
    Quantize,
    check_quantize,
)
from tformer.cli.report import (
    StopFlag,
    console,
    emit,
    emit_json,
    examples,
    progress_reporter,
    refuse_to_replace,
)
from tformer.evaluation.options import EvaluationOptions

DATA, MEASURE, MODEL = "Data", "What is measured", "Model and machine"

EPILOG = examples(
    "`tformer evaluate --data valid.txt`",
    "`tformer evaluate runs/gpt-tiny-1 --data valid.txt --stride 32 --checkpoint latest`",
    "`tformer evaluate runs/bert-tiny-1 --data test.tsv --errors mistakes.tsv --json`",
    "`tformer evaluate runs/transformer-tiny-1 --source test.en --target test.de --beam-size 5 --lowercase`",
    "`tformer evaluate runs/gpt-tiny-1 --score --source prompts.txt --target continuations.txt`",
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
    quantize: Quantize = "none",
) -> None:
    """How good a model is, on the run's validation data or on --data.

    A causal language model: loss (nats per token), perplexity, bits per byte and accuracy over every token of a text,
    each predicted once. A masked one: loss and accuracy on masked tokens. A classifier: accuracy with its 95 %
    interval, F1, Matthews' correlation, calibration error, and each class; a regression: correlations and error.
    A model of pairs: loss and token accuracy on the targets, and BLEU and chrF (with signatures) and exact matches of
    what it writes itself.
    """
    options = EvaluationOptions(
        run=run,
        data=data,
        text_column=text_column,
        text2_column=text2_column,
        label_column=label_column,
        invalid_utf8=invalid_utf8,  # type: ignore[arg-type]
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
        checkpoint=checkpoint,
        device=device,
        precision=precision,
        quantize=quantize,
    )
    options.check()
    check_quantize(quantize, precision)
    named = [path for path in (data, source, target) if path is not None]
    refuse_to_replace(errors, named, option="--errors")
    with StopFlag() as flag:
        from tformer.tasks.base import Work
        from tformer.tasks.evaluate import evaluate as evaluate_model

        work = Work(progress_reporter, flag.should_stop, lambda text: console.print(text, markup=False))
        task, report = evaluate_model(
            options, work, check_inputs=lambda paths: refuse_to_replace(errors, paths, option="--errors")
        )
    if as_json:
        emit_json(report)
    else:
        for line in task.lines(report):
            emit(line)
