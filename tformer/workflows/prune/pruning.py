"""Prune a trained model: choose layers and heads, measure before and after, write the smaller checkpoint.

Layers are removed first, then heads from the layers that stay. Where a run averages its weights, the averages are
pruned, for every other command uses them. Both measurements read the same data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
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
from tformer.support.errors import InputError, NotFiniteError
from tformer.tasks.base import HeldOut
from tformer.workers.work import QUIET, Work
from tformer.workflows.prune.cut import (
    cut_head_weights,
    cut_heads,
    cut_layer_weights,
    cut_layers,
    rebuilt,
    redrawn_layers,
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
from tformer.workflows.prune.plan import PrunePlan

MAX_TRIALS = 100
ScoreNow = Callable[[], Score]
"""The current model's score, lower is better."""


def check_plan(loaded: Loaded, plan: PrunePlan) -> None:
    """Raise InputError for a plan that does not fit the model, before any data is read."""
    model, section = loaded.model, loaded.recipe.model
    sides = stacks_of(model, plan.stack)
    for side in sides:
        if (groups := getattr(section, side).layer_groups) is not None:
            raise InputError(f"model.{side}.layer_groups is {groups}: layers that share weights cannot be pruned")
    if plan.head_amount is not None:
        require_prunable_heads(section, model, sides)
        if not plan.cuts_layers:
            layers = {side: getattr(model, side).layers for side in sides}
            equal = {
                side: [{"self_attention": torch.ones(block.self_attention.num_heads)} for block in blocks]
                for side, blocks in layers.items()
            }
            choose_heads(equal, amount=plan.head_amount, per_layer=plan.heads_per_layer or "even")
    if plan.cuts_layers:
        dry = replace(plan, strategy="every-other", max_trials=None) if plan.strategy == "search" else plan
        choose_layers(model, section, sides, dry, score=lambda: (), work=QUIET)


def choose_layers(
    model: Transformer, section: Model, sides: tuple[str, ...], plan: PrunePlan, *, score: ScoreNow, work: Work
) -> dict[str, LayerChoice]:
    """{stack: the layers that stay}.

    Args:
        section: the recipe's section of `model`.
        score: called by a search while `model` runs with a subset of its layers.
        work: a search reports the subsets done.

    Raises:
        InputError: the plan does not fit the stacks, or no layer would be removed.
    """
    for side in sides if plan.strategy == "learned" else ():
        if not getattr(section, side).learns_layerdrop:
            raise InputError(
                f"--strategy learned: model.{side}.layerdrop of this model has no learned rates",
                hint="train with layerdrop: {rate: 0.2, learned: true}, or choose every-other or search",
            )
    choices: dict[str, LayerChoice] = {}
    for side in sides:
        count = len(getattr(model, side).layers)
        if plan.keep_layers is not None or plan.drop_layers is not None:
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
        numbers = " and ".join(f"the {side} has {choice.num_layers}" for side, choice in choices.items())
        if max(choice.num_layers for choice in choices.values()) == 1:
            raise InputError(
                f"nothing can be pruned: {numbers} layer, which must stay", hint="--drop-heads prunes heads"
            )
        raise InputError(f"nothing would be removed: {numbers} layers, and all would stay", hint="name fewer to keep")
    return choices


def _search(
    model: Transformer,
    side: str,
    kept: int,
    chosen: Mapping[str, LayerChoice],
    plan: PrunePlan,
    *,
    score: ScoreNow,
    work: Work,
) -> LayerChoice:
    """The best subset of one stack's layers; a stack that was searched before runs with its chosen layers."""
    stack = getattr(model, side)
    count = len(stack.layers)
    max_trials = MAX_TRIALS if plan.max_trials is None else plan.max_trials
    total, done = num_trials(count, kept, max_trials=max_trials), 0

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
        return search_layers(count, kept, measure, max_trials=max_trials)


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
        before, after: cost of the model, with the metrics of a validation if it was measured.
        metric: the metric that counts, and data: what the model was measured on; None if it was not measured.
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
        """The JSON document of `--json`; with the importance of the heads in every layer that stays."""
        heads: dict[str, Any] | None = None
        if self.heads is not None:
            heads = {"before": self.heads.before, "after": self.heads.after, "per_layer": self.heads.per_layer}
            for side, layers in self.heads.layers.items():
                heads[side] = [
                    {
                        attention: {"importance": importance.tolist(), "kept": list(kept.of(attention))}
                        for attention, importance in scores.items()
                    }
                    for kept, scores in zip(layers, self.importance[side], strict=True)
                ]
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
            "heads": heads,
            "data": self.data,
            "metric": self.metric,
            "before": self.before,
            "after": self.after,
            "notes": self.notes,
        }


def prune(
    loaded: Loaded,
    plan: PrunePlan,
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
    check_plan(loaded, plan)
    out = Path(out)
    require_new(out)
    files.require_writable_folder(out)
    checkpoint, sides = open_checkpoint(loaded.path), stacks_of(loaded.model, plan.stack)
    recipe, model = loaded.recipe, loaded.model  # after the cuts so far
    stopped = "while pruning, nothing written"

    def metrics_now(data: HeldOut) -> dict[str, Any]:
        metrics = data.measure(model, replace(work, report=QUIET.report))
        work.raise_if_stopped(stopped)
        return metrics

    def score() -> Score:
        assert held_out is not None
        return held_out.score(metrics_now(held_out))

    before: dict[str, Any] = dict(cost(model, recipe))
    if evaluate and held_out is not None:
        before |= metrics_now(held_out)
        if not math.isfinite(before["loss"]):
            raise NotFiniteError(f"the loss is {before['loss']}: the weights are damaged")
    layers: dict[str, LayerChoice] = {}
    if plan.cuts_layers:
        layers = choose_layers(model, recipe.model, sides, plan, score=score, work=work)
    weights = checkpoint.weights() | (checkpoint.ema() or {})  # tied ones are one tensor
    if layers:
        kept = {side: choice.kept for side, choice in layers.items()}
        weights = cut_layer_weights(weights, kept)
        recipe = with_model(recipe, cut_layers(recipe.model, kept))
        model = rebuilt(loaded, recipe, weights)
    heads, importance = None, Importance()
    if plan.head_amount is not None:
        assert held_out is not None
        importance = _importance_by_layer(model, held_out, sides, seed=recipe.seed, work=work)
        work.raise_if_stopped(stopped)
        heads = choose_heads(importance, amount=plan.head_amount, per_layer=plan.heads_per_layer or "even")
        weights = cut_head_weights(weights, model, heads.layers)
        recipe = with_model(recipe, cut_heads(recipe.model, heads.layers))
        model = rebuilt(loaded, recipe, weights)
    after: dict[str, Any] = dict(cost(model, recipe))
    if evaluate and held_out is not None:
        after |= metrics_now(held_out)
    pruned = {
        "layers": {side: list(choice.kept) for side, choice in layers.items()},
        "heads": None if heads is None else {"before": heads.before, "after": heads.after},
    }
    work.raise_if_stopped(stopped)
    write_pruned(out, checkpoint, recipe, weights, pruned=pruned)
    notes = list(_notes(loaded.recipe, layers, heads))
    if checkpoint.has("generator"):
        notes.append("the generator is not pruned")
    if plan.needs_data and evaluate:
        notes.append("the choice was made on the data that is reported here: other data would measure it better")
    return Pruned(
        path=out,
        step=loaded.step,
        layers=layers,
        heads=heads,
        importance=importance,
        before=before,
        after=after,
        metric=held_out.metric(before) if evaluate and held_out is not None else None,
        data=None if held_out is None else held_out.name,
        notes=notes,
    )


def _importance_by_layer(
    model: Transformer, held_out: HeldOut, sides: Sequence[str], *, seed: int, work: Work
) -> Importance:
    """The importance of all heads of these stacks; incomplete once `work` is stopped."""
    data = (held_out.objective, held_out.samples)
    found = head_importance(model, *data, batch_size=held_out.batch_size, seed=seed, work=work)
    names = ("self_attention", "cross_attention")
    return {
        side: [
            {name: found[key] for name in names if (key := f"{side}.blocks.{layer}.{name}") in found}
            for layer in range(len(getattr(model, side).layers))
        ]
        for side in sides
    }


def _notes(recipe: Recipe, layers: Mapping[str, LayerChoice], heads: HeadChoice | None) -> Iterator[str]:
    """Remarks on the choice. recipe: of the model before."""
    yield from (f"{side}: {choice.note}" for side, choice in layers.items() if choice.note)
    for side, choice in layers.items():
        section = getattr(recipe.model, side)
        if redrawn := redrawn_layers(section, choice.kept, path=f"model.{side}"):
            yield (
                f"{side} layers {', '.join(map(str, redrawn))} have new numbers and with them other random blocks "
                "(bigbird): the model is not quite the full one with layers skipped"
            )
        if section.learns_layerdrop:
            yield f"model.{side}.layerdrop has its plain rate again: the learned rates were those of all layers"
    if heads is not None and heads.note:
        yield heads.note
