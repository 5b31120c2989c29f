"""Expected time of a training on this CPU, and the default preset that it trains in about two minutes.

    seconds = operations / rate of matrix products + elements / rate of all other work

The operations are those of `flops`; the rate of products is measured (`cpu_speed`). An element is one number of the
residual stream of one layer: norms, activations, residual sums, copies, their gradients and the optimizer take time in
proportion to them, and hardly less on a processor with faster products. Validations, checkpoints and the tokenizer
are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tformer.build import build_model
from tformer.cost.flops import example_flops
from tformer.recipe.load import load_recipe
from tformer.recipe.presets import Fit, Fitting
from tformer.recipe.recipe import Recipe
from tformer.support.device import CpuSpeed, cpu_speed
from tformer.support.formatting import amount, plural
from tformer.support.shipped import preset_hardware

SECONDS_IN_WORDS = 150  # from here on estimates are in minutes

FIRST_RUN_SECONDS = 120
"""Maximum of expected seconds of training of a default preset for which a smaller one is shipped."""


def training_work(recipe: Recipe, *, lengths: tuple[float, float] | None = None) -> tuple[float, float]:
    """(floating-point operations, elements) of one step of training.

    lengths: mean positions of an example in the encoder and in the decoder; default: the longest that the recipe has.
    """
    source, given = lengths or (recipe.seq_len, recipe.target_seq_len)
    target = max(options.objective.target_length(source, given, options) for options in recipe.objectives)
    vocabulary = recipe.model.vocab_size or recipe.tokenizer.train.vocab_size  # one number also for a joint vocabulary
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "target_vocab_size": vocabulary, "device": "meta"}
    model = build_model(recipe.model, num_labels=len(recipe.data.labels) or 2, **sizes)
    generator = None if recipe.generator is None else build_model(recipe.generator, **sizes)
    flops = example_flops(recipe, model, generator, source_length=source, target_length=target).training
    both = recipe.model.is_encoder_decoder
    by_side = {"encoder": source, "decoder": target if both else source}
    elements: float = 0  # in the residual streams of all layers, for one example
    for section in filter(None, (recipe.model, recipe.generator)):
        for side, length in by_side.items():
            if (stack := getattr(section, side)) is not None:
                elements += stack.num_layers * (stack.d_model or section.d_model) * length
    training = recipe.training
    longest = max(source, target) if both else source
    examples = training.grad_accum * (training.batch_size or max(1.0, (training.batch_tokens or 1) / longest))
    return examples * flops, examples * elements


def seconds_per_step(work: tuple[float, float], speed: CpuSpeed, precision: str) -> float:
    """Expected seconds of a step with this work (`training_work`)."""
    flops, elements = work
    return flops / speed.rate(precision) + elements / speed.elements_per_second


def expected_note(recipe: Recipe, *, first_step: int, lengths: tuple[int, int]) -> str:
    """How long the rest of a training takes on this CPU, and which machine the figures of its preset are of.

    recipe: with every `auto` resolved; lengths: as of `training_work`.
    """
    training = recipe.training
    steps = training.max_steps - first_step
    step = seconds_per_step(training_work(recipe, lengths=lengths), cpu_speed(training.threads), training.precision)
    note = f"expected on this CPU: {about(steps * step)} of training ({plural(steps, 'step')})"
    hardware = preset_hardware(recipe.arch, recipe.preset) if recipe.preset is not None else None
    return note if hardware is None else f"{note}; hardware of {recipe.arch}/{recipe.preset}'s figures: {hardware}"


def fitting(flags: Mapping[str, Any]) -> Fitting:
    """The choice among default presets for `load_recipe`; flags: `training.precision` and `training.threads` count."""
    precision, threads = flags.get("training.precision") or "auto", flags.get("training.threads")
    return lambda arch, presets: fitting_preset(arch, presets, cpu_speed(threads), str(precision))


def fitting_preset(arch: str, presets: Sequence[str], speed: CpuSpeed, precision: str) -> Fit:
    """The first preset that trains within `FIRST_RUN_SECONDS` at this speed, else the last.

    presets: from the largest to the smallest. The notes say what was chosen and why, and what other CPUs get.
    """
    recipes = {preset: load_recipe(arch=arch, preset=preset).recipe for preset in presets}
    works = {preset: training_work(recipe) for preset, recipe in recipes.items()}
    steps = {preset: recipe.training.max_steps for preset, recipe in recipes.items()}
    seconds = {preset: steps[preset] * seconds_per_step(works[preset], speed, precision) for preset in presets}
    chosen = next((preset for preset in presets if seconds[preset] <= FIRST_RUN_SECONDS), presets[-1])
    notes = [
        f"preset {arch}/{chosen}: the default on a CPU of this speed, {amount(speed.rate(precision), 'FLOP/s')} in "
        f"matrix products ({speed.source}); as shipped it trains for {about(seconds[chosen])}"
    ]
    for place, other in enumerate(presets):
        if other == chosen:
            continue
        is_larger = place < presets.index(chosen)
        bound = other if is_larger else presets[place - 1]
        # The lowest rate of products at which the steps take at most FIRST_RUN_SECONDS.
        flops, elements = works[bound]
        left = FIRST_RUN_SECONDS / steps[bound] - elements / speed.elements_per_second
        limit = flops / left if left > 0 else float("inf")
        where = f"{'from' if is_larger else 'below'} {amount(limit, 'FLOP/s')}"
        if limit == float("inf"):
            where = "with more threads"
        notes.append(f"{where} the default is {arch}/{other} ({about(seconds[other])} here): --preset {other}")
    return Fit(chosen, tuple(notes))


def about(seconds: float) -> str:
    """An estimate in words: about 40 s, about 6 min."""
    if seconds < SECONDS_IN_WORDS:
        return f"about {max(1, round(seconds / 5) * 5 if seconds >= 10 else round(seconds))} s"
    minutes = seconds / 60
    return f"about {minutes:.0f} min" if minutes < 120 else f"about {minutes / 60:.0f} h"
