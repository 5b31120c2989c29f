"""Prune a trained model: choose layers and heads, measure before and after, write the smaller checkpoint."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tformer.checkpoint import files
from tformer.checkpoint.average import require_new
from tformer.errors import InputError, Interrupted, NonFiniteLossError
from tformer.interop.importing import open_checkpoint
from tformer.loading import Loaded
from tformer.model import Transformer
from tformer.recipe.model import Model
from tformer.tasks.base import HeldOut
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
    Plan,
    Score,
    every_other,
    lowest_rates,
    named_layers,
    num_kept,
    num_trials,
    search_layers,
    stacks_of,
)
from tformer.workflows.prune.quality import cost, only_layers

ScoreNow = Callable[[], Score]
"""The score of the model as it is at the moment, lower is better."""

Progress = Callable[..., None]


def check_plan(loaded: Loaded, plan: Plan) -> None:
    """Raises InputError for a plan that does not fit the model: all that can be refused before any data is read."""
    model, section = loaded.model, loaded.recipe.model
    sides = stacks_of(model, plan.stack)
    if plan.heads is not None:
        require_prunable_heads(section, model, sides)
    if plan.cuts_layers:
        dry = replace(plan, strategy="every-other") if plan.searches else plan
        choose_layers(model, section, sides, dry, score=lambda: (), progress=lambda *_: None)


def choose_layers(
    model: Transformer, section: Model, sides: tuple[str, ...], plan: Plan, *, score: ScoreNow, progress: Progress
) -> dict[str, LayerChoice]:
    """{stack: the layers that stay}.

    Args:
        section: the recipe's, of `model`.
        score: for a search; the layers that a subset lacks are left out of `model` meanwhile.
        progress: called with (subsets done, all) by a search.

    Raises:
        InputError: the plan does not fit the stacks, or nothing would go.
    """
    if plan.strategy == "learned" and not plan.names_layers:
        _require_learned(section, sides)
    choices: dict[str, LayerChoice] = {}
    for side in sides:
        count = len(getattr(model, side).layers)
        if plan.names_layers:
            choices[side] = named_layers(count, keep=plan.keep_layers, drop=plan.drop_layers, side=side)
            continue
        kept = num_kept(count, keep=plan.keep, rate=plan.rate, side=side)
        if plan.strategy == "search":
            choices[side] = _search(model, side, kept, choices, plan, score=score, progress=progress)
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
    progress: Progress,
) -> LayerChoice:
    """The other stack is as it was or, once searched, as it will be."""
    stack = getattr(model, side)
    count = len(stack.layers)
    total, done = num_trials(count, kept, max_trials=plan.max_trials), 0

    def measure(subset: tuple[int, ...]) -> Score:
        nonlocal done
        with only_layers(stack, subset):
            found = score()
        done += 1
        progress(done, total)
        return found

    with ExitStack() as others:
        for other, choice in chosen.items():
            others.enter_context(only_layers(getattr(model, other), choice.kept))
        return search_layers(count, kept, measure, max_trials=plan.max_trials)


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
        raise InputError(f"nothing can be pruned: of layers {sides}, and one must stay", hint="--heads prunes heads")
    raise InputError(f"nothing would go: of layers {sides}, and all would stay", hint="name fewer to keep")


Importance = dict[str, list[Mapping[str, Tensor]]]
"""{stack: [{"self_attention": [H], perhaps "cross_attention": [H]} of each layer that stays]}."""


@dataclass(frozen=True)
class Pruned:
    """What became of a model that was pruned and written to `path`.

    `before` and `after`: its cost, and the figures of a validation where it was measured, by `metric` above all.
    """

    path: Path
    step: int
    layers: Mapping[str, LayerChoice]
    heads: HeadChoice | None
    importance: Importance
    before: dict[str, Any]
    after: dict[str, Any]
    metric: str | None
    notes: list[str] = field(default_factory=list)


def prune(
    loaded: Loaded,
    plan: Plan,
    out: str | Path,
    *,
    held_out: HeldOut | None = None,
    evaluate: bool = True,
    progress: Progress = lambda *_: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Pruned:
    """Writes the smaller model to a folder that does not exist yet.

    Args:
        loaded: the model, on any device.
        held_out: what to search, weigh heads and measure on; needed where `plan.needs_data` or `evaluate`.
        progress: called with (subsets searched or examples weighed, all).

    Raises:
        InputError: the plan does not fit the model, `out` exists; nothing is written.
        NonFiniteLossError: the loss of the model as it was is no number; nothing is written.
        StorageError: the disk refuses; no part of the result is left.
        Interrupted: `should_stop` said so; nothing is written.
    """
    assert held_out is not None or not (plan.needs_data or evaluate)
    return _Pruning(loaded, plan, Path(out), held_out, evaluate, progress, should_stop).run()


class _Pruning:
    """One call of `prune`: recipe, model and weights as they become smaller."""

    def __init__(
        self,
        loaded: Loaded,
        plan: Plan,
        out: Path,
        held_out: HeldOut | None,
        evaluate: bool,
        progress: Progress,
        should_stop: Callable[[], bool],
    ) -> None:
        check_plan(loaded, plan)
        require_new(out)
        files.require_writable(out)
        self.loaded, self.plan, self.out, self.held_out = loaded, plan, out, held_out
        self.evaluate, self.progress, self.should_stop = evaluate, progress, should_stop
        self.sides = stacks_of(loaded.model, plan.stack)
        self.checkpoint = open_checkpoint(loaded.path)
        self.recipe, self.model = loaded.recipe, loaded.model
        self.notes: list[str] = []

    def run(self) -> Pruned:
        plan = self.plan
        before = self._measured()
        layers = self._layers()
        weights = stored_weights(self.checkpoint)
        if layers:
            kept = {side: choice.kept for side, choice in layers.items()}
            weights = cut_layer_weights(weights, kept)
            self.recipe = with_model(self.recipe, cut_layers(self.recipe.model, kept))
            self.model = rebuilt(self.loaded, self.recipe, weights)
        heads, importance = None, Importance()
        if plan.heads is not None:
            importance = self._importance()
            heads = choose_heads(importance, amount=plan.heads, per_layer=plan.heads_per_layer)
            weights = cut_head_weights(weights, self.model, heads.layers)
            self.recipe = with_model(self.recipe, cut_heads(self.recipe.model, heads.layers))
            self.model = rebuilt(self.loaded, self.recipe, weights)
        self._note(layers, heads)
        after = self._measured()
        pruned = {
            "layers": {side: list(choice.kept) for side, choice in layers.items()},
            "heads": None if heads is None else {"before": heads.before, "after": heads.after},
        }
        self._stop_here()
        write_pruned(self.out, self.checkpoint, self.recipe, weights, pruned=pruned)
        metric = self.held_out.metric(before) if self.evaluate and self.held_out is not None else None
        return Pruned(self.out, self.loaded.step, layers, heads, importance, before, after, metric, self.notes)

    def _layers(self) -> dict[str, LayerChoice]:
        if not self.plan.cuts_layers:
            return {}
        section = self.recipe.model
        return choose_layers(self.model, section, self.sides, self.plan, score=self._score, progress=self.progress)

    def _score(self) -> Score:
        assert self.held_out is not None
        figures = self.held_out.measure(self.model, self.should_stop)
        self._stop_here()
        return self.held_out.score(figures)

    def _measured(self) -> dict[str, Any]:
        figures: dict[str, Any] = dict(cost(self.model, self.recipe))
        if self.evaluate and self.held_out is not None:
            figures |= self.held_out.measure(self.model, self.should_stop)
            self._stop_here()
            if not math.isfinite(figures["loss"]) and self.model is self.loaded.model:
                raise NonFiniteLossError(f"the loss is {figures['loss']}: the weights are damaged")
        return figures

    def _importance(self) -> Importance:
        held_out = self.held_out
        assert held_out is not None
        found = head_importance(
            self.model,
            held_out.objective,
            held_out.samples,
            batch_size=held_out.batch_size,
            seed=self.recipe.seed,
            should_stop=self.should_stop,
            progress=self.progress,
        )
        self._stop_here()
        names = ("self_attention", "cross_attention")
        return {
            side: [
                {name: found[key] for name in names if (key := f"{side}.blocks.{layer}.{name}") in found}
                for layer in range(len(getattr(self.model, side).layers))
            ]
            for side in self.sides
        }

    def _note(self, layers: Mapping[str, LayerChoice], heads: HeadChoice | None) -> None:
        """What a person should know of the result."""
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
                    f"model.{side}.layerdrop is its plain rate again: the learned ones were of all layers"
                )
        if heads is not None and heads.note:
            self.notes.append(heads.note)
        if self.checkpoint.has("generator"):
            self.notes.append("the generator stays as it was")
        if self.plan.needs_data and self.evaluate:
            self.notes.append("what goes was chosen on the data that the figures come from: other data tells more")

    def _stop_here(self) -> None:
        if self.should_stop():
            raise Interrupted("pruning interrupted, nothing written", signal_number=signal.SIGINT)
