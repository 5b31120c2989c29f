"""`tformer prune`: remove layers or attention heads from a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tformer.cli import column_options as columns
from tformer.cli import evaluate_options as pairs
from tformer.cli.command import examples
from tformer.cli.process import StopFlag
from tformer.cli.report import console, progress_reporter, report_result
from tformer.errors import InputError, did_you_mean
from tformer.evaluation.options import DataOptions

if TYPE_CHECKING:
    from tformer.workflows.prune import Plan, Pruned


STRATEGIES = ("every-other", "search", "learned")
STACKS = ("encoder", "decoder", "both")
PER_LAYER = ("even", "free")
WAYS = "--keep-layers, --drop-layers, --keep or --rate, and --heads"


def read_plan(
    *,
    out: Path | None,
    stack: str | None,
    keep_layers: str | None,
    drop_layers: str | None,
    keep: int | None,
    rate: float | None,
    strategy: str | None,
    max_trials: int | None,
    heads: str | None,
    heads_per_layer: str | None,
) -> Plan:
    """The plan. Raises InputError for options that contradict each other or are out of range."""
    if out is None:
        raise InputError("--out is missing: where shall the smaller model go?", hint="--out runs/NAME-pruned")
    ways = {"--keep-layers": keep_layers, "--drop-layers": drop_layers, "--keep": keep, "--rate": rate}
    given = [option for option, value in ways.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} exclude each other: give one way to say which layers stay")
    if not given and heads is None:
        raise InputError(f"nothing to prune: give one of {WAYS}", hint="--rate 0.5 drops every other layer")
    _require_known("--stack", stack, STACKS)
    _require_known("--strategy", strategy, STRATEGIES)
    _require_known("--heads-per-layer", heads_per_layer, PER_LAYER)
    if strategy is not None and given[:1] not in (["--keep"], ["--rate"]):
        raise InputError(f"--strategy {strategy} needs --keep N or --rate P, which say how many layers stay")
    if max_trials is not None and strategy != "search":
        raise InputError("--max-trials bounds --strategy search, which is not asked for")
    if heads_per_layer is not None and heads is None:
        raise InputError("--heads-per-layer says how --heads spreads, which is not given")
    for option, count in (("--keep", keep), ("--max-trials", max_trials)):
        if count is not None and count < 1:
            raise InputError(f"{option} must be at least 1, found {count}")
    if rate is not None and not 0 < rate < 1:
        raise InputError(f"--rate must be above 0 and below 1, found {rate:g}: the share of layers that go")

    from tformer.workflows.prune import Plan

    return Plan(
        stack=stack,
        keep_layers=_layers("--keep-layers", keep_layers),
        drop_layers=_layers("--drop-layers", drop_layers),
        keep=keep,
        rate=rate,
        strategy=strategy or "every-other",
        max_trials=max_trials or Plan.max_trials,
        heads=_heads(heads),
        heads_per_layer=heads_per_layer or "even",
    )


def _require_known(option: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise InputError(f"{option} must be {', '.join(known[:-1])} or {known[-1]}, found '{value}'",
                         hint=did_you_mean(value, known))  # fmt: skip


def _layers(option: str, text: str | None) -> tuple[int, ...] | None:
    """`0,2,4` as numbers."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.removeprefix("-").isdigit()):
            raise InputError(f"{option}: expected numbers of layers such as 0,2,4, found '{word}' in '{text}'")
    return tuple(int(word) for word in words)


def _heads(text: str | None) -> float | None:
    """A share below 1, or a whole number of heads."""
    if text is None:
        return None
    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not (0 < amount < 1 or (amount >= 1 and amount.is_integer())):
        raise InputError(f"--heads: expected a share between 0 and 1, or how many heads go, found '{text}'")
    return amount


COST = ("parameters", "flops_per_token")
LEFT_OUT = ("examples", "tokens", "bytes")  # the same before and after


def report_lines(pruned: Pruned, data: str | None) -> Iterator[str]:
    """What went, then one figure a line, before and after."""
    for side, choice in pruned.layers.items():
        found = "" if choice.method is None else f", {choice.method}, {choice.evaluations} evaluations"
        kept = f"{len(choice.kept)} of {choice.num_layers} layers stay: {', '.join(map(str, choice.kept))}"
        yield f"{side}: {kept} ({choice.strategy}{found})"
    if pruned.heads is not None:
        yield f"heads: {pruned.heads.after} of {pruned.heads.before} stay ({pruned.heads.per_layer})"
        for side, layers in pruned.heads.layers.items():
            yield f"{side} heads by layer: {', '.join(str(len(layer.self_attention)) for layer in layers)}"
    for note in pruned.notes:
        yield f"note: {note}"
    if data is not None:
        yield f"measured on {data}"
    rows = [
        (name, _cell(name, value), _cell(name, pruned.after[name]), _change(name, value, pruned.after[name]))
        for name, value in pruned.before.items()
        if name not in LEFT_OUT and name in pruned.after and isinstance(value, int | float)
    ]
    table = [("", "before", "after", ""), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    for name, before, after, change in table:
        line = f"{name:<{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}  {change:>{widths[3]}}"
        yield line.rstrip()


def document(pruned: Pruned, data: str | None) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {
        "path": str(pruned.path),
        "step": pruned.step,
        "layers": {
            side: {
                "before": choice.num_layers,
                "after": len(choice.kept),
                "kept": list(choice.kept),
                "dropped": list(choice.dropped),
                "strategy": choice.strategy,
                "method": choice.method,
                "evaluations": choice.evaluations,
            }
            for side, choice in pruned.layers.items()
        },
        "heads": _heads_document(pruned),
        "data": data,
        "metric": pruned.metric,
        "before": pruned.before,
        "after": pruned.after,
        "notes": pruned.notes,
    }


def _heads_document(pruned: Pruned) -> dict[str, Any] | None:
    """Counts, and of every layer that stays the importance of its heads and those that stay."""
    heads = pruned.heads
    if heads is None:
        return None
    stacks = {
        side: [
            {
                attention: {"importance": importance.tolist(), "kept": list(kept.of(attention))}
                for attention, importance in scores.items()
            }
            for kept, scores in zip(layers, pruned.importance[side], strict=True)
        ]
        for side, layers in heads.layers.items()
    }
    return {"before": heads.before, "after": heads.after, "per_layer": heads.per_layer, **stacks}


def _cell(name: str, value: float) -> str:
    return f"{value:,.0f}" if name in COST else f"{value:,.4f}"


def _change(name: str, before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if name in COST else f"{after - before:+.4f}"


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
    options = DataOptions(
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
    options.check()
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
        from tformer.decoding.inference import inference_dtype
        from tformer.device import resolve_device
        from tformer.loading import load
        from tformer.tasks.base import Work
        from tformer.tasks.evaluate import held_out_data
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
                work = Work(progress_reporter, flag.should_stop, lambda text: console.print(text, markup=False))
                held_out = held_out_data(loaded, options, work, max_examples=max_examples)
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
