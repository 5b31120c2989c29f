"""`tformer prune`: remove layers or attention heads from a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import progress_reporter, report_result, show_notes
from tformer.evaluation.options import EvaluationDataOptions
from tformer.support.bounds import Positive
from tformer.support.errors import InputError
from tformer.support.options import DATA, Checkpoint, Device, Json, NewFolder, Panel, Precision, Run
from tformer.support.rules import Checked, exclude, required
from tformer.workflows.prune.plan import PrunePlan

if TYPE_CHECKING:
    from tformer.workflows.prune.pruning import Pruned

RESULT = Panel("Result")
COST = ("parameters", "flops_per_token")
LEFT_OUT = ("examples", "tokens", "bytes")  # equal before and after


def report_lines(pruned: Pruned) -> Iterator[str]:
    """Text lines: what was removed, then each metric before and after."""
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
    if pruned.data is not None:
        yield f"measured on {pruned.data}"
    table = [("", "before", "after", "")]
    for name, value in pruned.before.items():
        if name in LEFT_OUT or name not in pruned.after or not isinstance(value, int | float):
            continue
        later = pruned.after[name]
        if name in COST:
            table.append((name, f"{value:,.0f}", f"{later:,.0f}", f"{later / value - 1:+.1%}"))
        else:
            table.append((name, f"{value:,.4f}", f"{later:,.4f}", f"{later - value:+.4f}"))
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    for name, before, after, change in table:
        line = f"{name:<{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}  {change:>{widths[3]}}"
        yield line.rstrip()


EPILOG = examples(
    "`tformer prune runs/gpt-char-1 --rate 0.5 --out runs/gpt-half`",
    "`tformer prune --keep 3 --strategy search --max-examples 500 --out runs/bert-3`",
    "`tformer prune --drop-layers 1,3 --stack encoder --out runs/shallow`",
    "`tformer prune runs/bert-tiny-1 --drop-heads 0.3 --heads-per-layer free --out runs/fewer-heads --json`",
)


UNREAD = exclude("--no-evaluate", (EvaluationDataOptions, "--max-examples"), hint="nothing is measured on data")
"""A rule of plans that choose without data."""


@dataclass(frozen=True)
class PruneOptions(Checked):
    """The options of `tformer prune`."""

    RULES = (required("--out", hint="--out runs/NAME-pruned"),)

    run: Run = None
    plan: PrunePlan = field(default_factory=PrunePlan)
    data: EvaluationDataOptions = field(default_factory=EvaluationDataOptions)
    max_examples: Annotated[
        Positive | None,
        DATA("--max-examples", metavar="N", help="Maximum number of examples to measure on, evenly spread."),
    ] = None
    no_evaluate: Annotated[bool, DATA("--no-evaluate", help="Do not measure the model before and after.")] = False
    out: Annotated[NewFolder, RESULT] = None
    as_json: Annotated[Json, RESULT] = False
    checkpoint: Checkpoint = "best"
    device: Device = "auto"
    precision: Precision = "auto"

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        super().check()
        self.data.check()
        self.plan.check()
        if not self.plan.needs_data and (fault := UNREAD.fault(self)) is not None:
            raise InputError(fault, hint=UNREAD.hint)


@takes_options
def prune(options: PruneOptions) -> None:
    """Remove layers or attention heads, and measure the change.

    The result is an ordinary smaller checkpoint, for every command that takes a run (generate, evaluate, export, train
    --init-from); it has no optimizer state, so training cannot --resume from it. Models trained with LayerDrop
    (`model.<stack>.layerdrop`) lose the least accuracy. The model is searched and measured on --data, by default on the
    run's validation data.
    """
    assert options.out is not None  # the rules require it
    with StopFlag() as flag:
        from tformer.checkpoint.average import require_new
        from tformer.decoding.inference import inference_dtype
        from tformer.loading import load
        from tformer.support.device import resolve_device
        from tformer.tasks.evaluate import held_out_data
        from tformer.workers.work import Work
        from tformer.workflows.prune.pruning import check_plan
        from tformer.workflows.prune.pruning import prune as prune_model

        require_new(options.out)
        device = resolve_device(options.device)
        loaded = load(options.run, device=device, which=options.checkpoint)
        loaded.model.compute_dtype = inference_dtype(
            options.precision, trained_in=loaded.recipe.training.precision, device=device
        )
        show_notes(loaded.notes, dim=True)
        check_plan(loaded, options.plan)
        held_out, work = None, Work(progress_reporter, flag.should_stop, lambda text: show_notes([text]))
        if options.plan.needs_data or not options.no_evaluate:
            try:
                held_out = held_out_data(loaded, options.data, work, max_examples=options.max_examples)
            except InputError as error:
                if not options.plan.needs_data:
                    error.hint = "; ".join(filter(None, (error.hint, "or prune without measuring: --no-evaluate")))
                raise
        with work.part("pruning", unit="measurements") as part:
            pruned = prune_model(
                loaded,
                options.plan,
                options.out,
                held_out=held_out,
                evaluate=not options.no_evaluate,
                work=part,
            )
    report_result(report_lines(pruned), options.out, pruned.to_json() if options.as_json else None)
