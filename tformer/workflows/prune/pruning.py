"""Prune a trained model: choose layers and heads, measure before and after, write the smaller checkpoint.

Layers are removed first, then heads from the layers that stay. Where a run averages its weights, the averages are
pruned, for every other command uses them. Both measurements read the same data.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tformer.checkpoint.average import require_new
from tformer.cost.flops import module_flops
from tformer.interop.opening import open_checkpoint
from tformer.loading import Loaded
from tformer.model import Transformer
from tformer.nn.stack import Stack
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe
from tformer.support import files
from tformer.support.errors import InputError, Interrupted, NotFiniteError
from tformer.tasks.base import HeldOut
from tformer.workers.work import QUIET, Work
from tformer.workflows.prune.cut import (
    cut_head_weights,
    cut_heads,
    cut_layer_weights,
    cut_layers,
    rebuilt,
    redrawn_layers,
    stored_weights,
    with_model,
    write_pruned,
)
from tformer.workflows.prune.heads import HeadChoice, choose_heads, head_importance, require_prunable_heads
from tformer.workflows.prune.layers import (
    LayerChoice,
    Score,
    every_other,
    lowest_rates,
    named_layers,
    num_kept,
    num_trials,
    search_layers,
    stacks_of,
)
from tformer.workflows.prune.plan import Plan

ScoreNow = Callable[[], Score]
"""The current model's score, lower is better."""


def check_plan(loaded: Loaded, plan: Plan) -> None:
    """Raise InputError for a plan that does not fit the model, before any data is read."""
    model, section = loaded.model, loaded.recipe.model
    sides = stacks_of(model, plan.stack)
    if plan.heads is not None:
        require_prunable_heads(section, model, sides)
    if plan.cuts_layers:
        dry = replace(plan, strategy="every-other", max_trials=None) if plan.searches else plan
        choose_layers(model, section, sides, dry, score=lambda: (), work=QUIET)


def choose_layers(
    model: Transformer, section: Model, sides: tuple[str, ...], plan: Plan, *, score: ScoreNow, work: Work
) -> dict[str, LayerChoice]:
    """{stack: the layers that stay}.

    Args:
        section: the recipe's section of `model`.
        score: called by a search while `model` runs with a subset of its layers.
        work: a search reports the subsets done.

    Raises:
        InputError: the plan does not fit the stacks, or no layer would be removed.
    """
    if plan.strategy == "learned":
        _require_learned(section, sides)
    choices: dict[str, LayerChoice] = {}
    for side in sides:
        count = len(getattr(model, side).layers)
        if plan.names_layers:
            choices[side] = named_layers(count, keep=plan.kept_layers, drop=plan.dropped_layers, side=side)
            continue
        kept = num_kept(count, keep=plan.keep, rate=plan.rate, side=side)
        if plan.strategy == "search":
            choices[side] = _search(model, side, kept, choices, plan, score=score, work=work)
        elif plan.strategy == "learned":
            choices[side] = lowest_rates(getattr(model, side).layerdrop_rates(), kept)
        else:
            choices[side] = every_other(count, kept)
    if not any(choice.dropped for choice in choices.values()):
        _refuse_nothing(choices)
    return choices


def _search(
    model: Transformer,
    side: str,
    kept: int,
    chosen: Mapping[str, LayerChoice],
    plan: Plan,
    *,
    score: ScoreNow,
    work: Work,
) -> LayerChoice:
    """The best subset of one stack's layers; a stack that was searched before runs with its chosen layers."""
    stack = getattr(model, side)
    count = len(stack.layers)
    total, done = num_trials(count, kept, max_trials=plan.trials), 0

    def measure(subset: tuple[int, ...]) -> Score:
        nonlocal done
        with only_layers(stack, subset):
            found = score()
        done += 1
        work.report(done, total)
        return found

    with ExitStack() as others:
        for other, choice in chosen.items():
            others.enter_context(only_layers(getattr(model, other), choice.kept))
        return search_layers(count, kept, measure, max_trials=plan.trials)


def _require_learned(section: Model, sides: tuple[str, ...]) -> None:
    for side in sides:
        if not getattr(section, side).learns_layerdrop:
            raise InputError(
                f"--strategy learned: model.{side}.layerdrop of this model has no learned rates",
                hint="train with layerdrop: {rate: 0.2, learned: true}, or choose every-other or search",
            )


def _refuse_nothing(choices: Mapping[str, LayerChoice]) -> None:
    counts = [choice.num_layers for choice in choices.values()]
    sides = " and ".join(f"the {side} has {choice.num_layers}" for side, choice in choices.items())
    if max(counts) == 1:
        raise InputError(f"nothing can be pruned: {sides} layer, which must stay", hint="--drop-heads prunes heads")
    raise InputError(f"nothing would be removed: {sides} layers, and all would stay", hint="name fewer to keep")


Importance = dict[str, list[Mapping[str, Tensor]]]
"""{stack: [{"self_attention": [H], perhaps "cross_attention": [H]} of each layer that stays]}."""


@contextmanager
def only_layers(stack: Stack, kept: Sequence[int]) -> Iterator[None]:
    """Let a stack run with some of its layers, in evaluation."""
    blocks, positions = stack.blocks, stack.layer_positions
    stack.blocks = nn.ModuleList(blocks[layer] for layer in kept)
    if positions is not None:
        stack.layer_positions = nn.ModuleList(positions[layer] for layer in kept)
    try:
        yield
    finally:
        stack.blocks, stack.layer_positions = blocks, positions


def cost(model: Transformer, recipe: Recipe) -> dict[str, float]:
    """Parameters, and forward FLOPs per token at the training lengths."""
    source, target = recipe.seq_len, recipe.target_seq_len
    flops = sum(module_flops(model, source_length=source, target_length=target).values())
    tokens = source + (target if model.is_encoder_decoder else 0)
    return {"parameters": model.num_parameters(), "flops_per_token": flops / tokens}


@dataclass(frozen=True)
class Pruned:
    """The result of a pruning.

    Attributes:
        path: of the new checkpoint.
        before, after: cost of the model, and the metrics of a validation where it was measured.
        metric: the metric that counts; None: not measured.
        data: what the model was measured on; None: not measured.
    """

    path: Path
    step: int
    layers: Mapping[str, LayerChoice]
    heads: HeadChoice | None
    importance: Importance
    before: dict[str, Any]
    after: dict[str, Any]
    metric: str | None
    data: str | None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The JSON document of `--json`."""
        return {
            "path": str(self.path),
            "step": self.step,
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
                for side, choice in self.layers.items()
            },
            "heads": None if self.heads is None else self._heads_document(self.heads),
            "data": self.data,
            "metric": self.metric,
            "before": self.before,
            "after": self.after,
            "notes": self.notes,
        }

    def _heads_document(self, heads: HeadChoice) -> dict[str, Any]:
        """Counts, and for every layer that stays the importance of its heads and those that stay."""
        stacks = {
            side: [
                {
                    attention: {"importance": importance.tolist(), "kept": list(kept.of(attention))}
                    for attention, importance in scores.items()
                }
                for kept, scores in zip(layers, self.importance[side], strict=True)
            ]
            for side, layers in heads.layers.items()
        }
        return {"before": heads.before, "after": heads.after, "per_layer": heads.per_layer, **stacks}


def prune(
    loaded: Loaded,
    plan: Plan,
    out: str | Path,
    *,
    held_out: HeldOut | None = None,
    evaluate: bool = True,
    work: Work = QUIET,
) -> Pruned:
    """Write the smaller model to a folder that does not exist yet.

    Args:
        held_out: data for a search, the importance of heads and the measurements; required where `plan.needs_data` or
            `evaluate`.
        work: reports the subsets searched or the examples done.

    Raises:
        InputError: the plan does not fit the model, or `out` exists; nothing is written.
        NotFiniteError: the loss of the original model is not finite; nothing is written.
        StorageError: the disk refuses; no part of the result is left.
        Interrupted: `work` was stopped; nothing is written.
    """
    assert held_out is not None or not (plan.needs_data or evaluate)
    return _Pruning(loaded, plan, Path(out), held_out, evaluate, work).run()


@dataclass
class _Pruning:
    """State of one call of `prune`: recipe, model and weights after the cuts so far."""

    loaded: Loaded
    plan: Plan
    out: Path
    held_out: HeldOut | None
    evaluate: bool
    work: Work
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_plan(self.loaded, self.plan)
        require_new(self.out)
        files.require_writable_folder(self.out)
        self.sides = stacks_of(self.loaded.model, self.plan.stack)
        self.checkpoint = open_checkpoint(self.loaded.path)
        self.recipe, self.model = self.loaded.recipe, self.loaded.model

    def run(self) -> Pruned:
        plan = self.plan
        before = self._measure()
        layers = self._layers()
        weights = stored_weights(self.checkpoint)
        if layers:
            kept = {side: choice.kept for side, choice in layers.items()}
            weights = cut_layer_weights(weights, kept)
            self.recipe = with_model(self.recipe, cut_layers(self.recipe.model, kept))
            self.model = rebuilt(self.loaded, self.recipe, weights)
        heads, importance = None, Importance()
        if plan.head_amount is not None:
            importance = self._importance()
            heads = choose_heads(importance, amount=plan.head_amount, per_layer=plan.heads_per_layer or "even")
            weights = cut_head_weights(weights, self.model, heads.layers)
            self.recipe = with_model(self.recipe, cut_heads(self.recipe.model, heads.layers))
            self.model = rebuilt(self.loaded, self.recipe, weights)
        self._note(layers, heads)
        after = self._measure()
        pruned = {
            "layers": {side: list(choice.kept) for side, choice in layers.items()},
            "heads": None if heads is None else {"before": heads.before, "after": heads.after},
        }
        self._raise_if_stopped()
        write_pruned(self.out, self.checkpoint, self.recipe, weights, pruned=pruned)
        return Pruned(
            path=self.out,
            step=self.loaded.step,
            layers=layers,
            heads=heads,
            importance=importance,
            before=before,
            after=after,
            metric=self.held_out.metric(before) if self.evaluate and self.held_out is not None else None,
            data=None if self.held_out is None else self.held_out.name,
            notes=self.notes,
        )

    def _layers(self) -> dict[str, LayerChoice]:
        if not self.plan.cuts_layers:
            return {}
        section = self.recipe.model
        return choose_layers(self.model, section, self.sides, self.plan, score=self._score, work=self.work)

    def _score(self) -> Score:
        assert self.held_out is not None
        metrics = self.held_out.measure(self.model, replace(self.work, report=QUIET.report))
        self._raise_if_stopped()
        return self.held_out.score(metrics)

    def _measure(self) -> dict[str, Any]:
        metrics: dict[str, Any] = dict(cost(self.model, self.recipe))
        if self.evaluate and self.held_out is not None:
            metrics |= self.held_out.measure(self.model, replace(self.work, report=QUIET.report))
            self._raise_if_stopped()
            if not math.isfinite(metrics["loss"]) and self.model is self.loaded.model:
                raise NotFiniteError(f"the loss is {metrics['loss']}: the weights are damaged")
        return metrics

    def _importance(self) -> Importance:
        held_out = self.held_out
        assert held_out is not None
        found = head_importance(
            self.model,
            held_out.objective,
            held_out.samples,
            batch_size=held_out.batch_size,
            seed=self.recipe.seed,
            work=self.work,
        )
        self._raise_if_stopped()
        names = ("self_attention", "cross_attention")
        return {
            side: [
                {name: found[key] for name in names if (key := f"{side}.blocks.{layer}.{name}") in found}
                for layer in range(len(getattr(self.model, side).layers))
            ]
            for side in self.sides
        }

    def _note(self, layers: Mapping[str, LayerChoice], heads: HeadChoice | None) -> None:
        """Add remarks on the result."""
        self.notes += [f"{side}: {choice.note}" for side, choice in layers.items() if choice.note]
        for side, choice in layers.items():
            section = getattr(self.loaded.recipe.model, side)
            redrawn = redrawn_layers(section, choice.kept, path=f"model.{side}")
            if redrawn:
                named = ", ".join(map(str, redrawn))
                self.notes.append(
                    f"{side} layers {named} have new numbers and with them other random blocks (bigbird): the model "
                    "is not quite the full one with layers skipped"
                )
            if section.learns_layerdrop:
                self.notes.append(
                    f"model.{side}.layerdrop has its plain rate again: the learned rates were those of all layers"
                )
        if heads is not None and heads.note:
            self.notes.append(heads.note)
        if self.checkpoint.has("generator"):
            self.notes.append("the generator is not pruned")
        if self.plan.needs_data and self.evaluate:
            self.notes.append(
                "the choice was made on the data that is reported here: other data would measure it better"
            )

    def _raise_if_stopped(self) -> None:
        if self.work.should_stop():
            raise Interrupted("pruning interrupted, nothing written", signal_number=signal.SIGINT)
