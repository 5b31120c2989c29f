"""Which layers of which stack stay, by the plan's strategy; a search looks at one stack at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from tformer.errors import InputError
from tformer.loading import Loaded
from tformer.model import Transformer
from tformer.recipe.model import Model
from tformer.workflows.prune.heads import require_prunable_heads
from tformer.workflows.prune.layers import LayerChoice, every_other, lowest_rates, named_layers, num_kept
from tformer.workflows.prune.plan import Plan, stacks_of
from tformer.workflows.prune.quality import only_layers
from tformer.workflows.prune.search import Score, num_trials, search_layers

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
