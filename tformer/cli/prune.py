"""`tformer prune`: layers and heads out of a trained model, as a checkpoint like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tformer.cli import column_options as columns
from tformer.cli import evaluate_options as pairs
from tformer.cli.common import StopFlag, console, examples, progress_reporter, report_result
from tformer.cli.evaluate_pairs import check_pair_options
from tformer.cli.evaluate_request import Request
from tformer.cli.prune_data import held_out_data
from tformer.cli.prune_plan import read_plan
from tformer.cli.prune_report import document, report_lines
from tformer.errors import InputError

LAYERS, HEADS, DATA, RESULT, MODEL = "Layers", "Heads", "Data", "Result", "Model and machine"

EPILOG = examples(
    "`tformer prune runs/gpt-char-1 --rate 0.5 --out runs/gpt-half`",
    "`tformer prune runs/bert-tiny-1 --keep 3 --strategy search --max-examples 500 --out runs/bert-3`",
    "`tformer prune runs/transformer-tiny-1 --drop-layers 1,3 --stack encoder --out runs/shallow`",
    "`tformer prune runs/bert-tiny-1 --heads 0.3 --heads-per-layer free --out runs/fewer-heads --json`",
)


def prune(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Run, checkpoint or Hugging Face folder; default: the newest run."),
    ] = None,
    keep_layers: Annotated[
        str | None,
        typer.Option("--keep-layers", metavar="0,2,4", help="These stay, numbered from 0.", rich_help_panel=LAYERS),
    ] = None,
    drop_layers: Annotated[
        str | None, typer.Option("--drop-layers", metavar="1,3", help="These go.", rich_help_panel=LAYERS)
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep", metavar="N", help="So many stay, by --strategy.", rich_help_panel=LAYERS)
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="P", help="This share goes, by --strategy.", rich_help_panel=LAYERS),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="every-other|search|learned",
            help="search: the best on the data; learned: the lowest learned LayerDrop rates. Default: every-other.",
            rich_help_panel=LAYERS,
        ),
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option(
            "--stack",
            metavar="encoder|decoder|both",
            help="Where; numbers apply to each stack. Default: the stacks that there are.",
            rich_help_panel=LAYERS,
        ),
    ] = None,
    max_trials: Annotated[
        int | None,
        typer.Option(
            "--max-trials",
            metavar="N",
            help="The most subsets that a search measures one by one; of more it takes layers away one at a time. "
            "Default: 100.",
            rich_help_panel=LAYERS,
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            "--heads",
            metavar="RATE|N",
            help="Take out this share (below 1) or so many of all attention heads, those that matter least to the "
            "loss; one a layer stays.",
            rich_help_panel=HEADS,
        ),
    ] = None,
    heads_per_layer: Annotated[
        str | None,
        typer.Option(
            "--heads-per-layer",
            metavar="even|free",
            help="even: the same number in every layer (default); free: wherever they matter least.",
            rich_help_panel=HEADS,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="What to search, weigh heads and measure on: file, folder, glob or builtin:NAME; default: the run's "
            "validation data.",
            rich_help_panel=DATA,
        ),
    ] = None,
    text_column: columns.TextColumn = None,
    text2_column: columns.Text2Column = None,
    label_column: columns.LabelColumn = None,
    source: pairs.Source = None,
    target: pairs.Target = None,
    source_column: pairs.SourceColumn = None,
    target_column: pairs.TargetColumn = None,
    max_examples: Annotated[
        int | None,
        typer.Option("--max-examples", metavar="N", help="At most so many, spread evenly.", rich_help_panel=DATA),
    ] = None,
    no_evaluate: Annotated[
        bool,
        typer.Option("--no-evaluate", help="Do not measure the model before and after.", rich_help_panel=DATA),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The new checkpoint; must not exist yet.", rich_help_panel=RESULT),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.", rich_help_panel=RESULT)
    ] = False,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="best|latest|step-N", help="Of the run.", rich_help_panel=MODEL)
    ] = "best",
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Examples at a time.", rich_help_panel=MODEL)
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda[:i]", rich_help_panel=MODEL)] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", metavar="auto|fp32|bf16|fp16", rich_help_panel=MODEL)
    ] = "auto",
) -> None:
    """Leave out layers or attention heads, and measure what that costs.

    The result is an ordinary smaller checkpoint, to be named wherever a run can be (generate, evaluate, export, train
    --init-from); it has no optimizer state, so training cannot --resume from it. Models trained with LayerDrop
    (model.<stack>.layerdrop) lose least.
    """
    request = Request(
        data=data,
        text_column=text_column,
        text2_column=text2_column,
        label_column=label_column,
        batch_size=batch_size,
        source=source,
        target=target,
        source_column=source_column,
        target_column=target_column,
    )
    for option, count in (("--max-examples", max_examples), ("--batch-size", batch_size)):
        if count is not None and count < 1:
            raise InputError(f"{option} must be at least 1, found {count}")
    check_pair_options(request)
    plan = read_plan(
        out=out,
        stack=stack,
        keep_layers=keep_layers,
        drop_layers=drop_layers,
        keep=keep,
        rate=rate,
        strategy=strategy,
        max_trials=max_trials,
        heads=heads,
        heads_per_layer=heads_per_layer,
    )
    assert out is not None
    with StopFlag() as flag:
        from tformer.checkpoint.average import require_new
        from tformer.decoding.precision import inference_dtype
        from tformer.loading import load
        from tformer.training.precision import resolve_device
        from tformer.workflows.prune import check_plan
        from tformer.workflows.prune import prune as prune_model

        require_new(out)
        place = resolve_device(device)
        loaded = load(run, device=place, which=checkpoint)
        loaded.model.compute_dtype = inference_dtype(
            precision, trained_in=loaded.recipe.training.precision, device=place
        )
        for note in loaded.notes:
            console.print(note, style="dim", markup=False)
        check_plan(loaded, plan)
        held_out = None
        if plan.needs_data or not no_evaluate:
            try:
                held_out = held_out_data(loaded, request, flag, max_examples=max_examples)
            except InputError as error:
                if not plan.needs_data:
                    error.hint = "; ".join(filter(None, (error.hint, "or prune without measuring: --no-evaluate")))
                raise
        with progress_reporter("pruning") as progress:
            made = prune_model(
                loaded,
                plan,
                out,
                held_out=held_out,
                evaluate=not no_evaluate,
                progress=progress,
                should_stop=flag.should_stop,
            )
    name = None if held_out is None else held_out.name
    report_result(report_lines(made, name), out, document(made, name) if as_json else None)
