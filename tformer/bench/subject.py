"""Whose sizes are measured: the recipe of a shipped preset, of a file, or of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tformer.errors import InputError
from tformer.interop.importing import open_checkpoint
from tformer.recipe import load_recipe
from tformer.recipe.needs import OBJECTIVE_NEEDS
from tformer.recipe.recipe import Recipe


def recipe_of(
    *,
    arch: str | None,
    preset: str | None,
    config: Path | None,
    run: str | None,
    sets: Sequence[str],
    device: torch.device,
    bench: str,
    usual_arch: str = "gpt",
    objective: str | None = None,
) -> tuple[Recipe, str]:
    """The recipe, and what to call it.

    Args:
        run: a run, checkpoint or Hugging Face folder, whose sizes are taken, not its weights.
        bench: the command, for messages.
        usual_arch: where nothing is named.
        objective: the kind that the recipe gets where it has another; None: its own stand.

    Raises:
        InputError: unknown names, two models at once, a model that cannot have the objective.
    """
    if run is not None:
        if any(value is not None for value in (arch, preset, config)):
            raise InputError("--run is a model already", hint="leave --arch, --preset and --config out")
        checkpoint = open_checkpoint(run)
        stored = load_recipe(
            base_yaml=checkpoint.recipe_text, base_name=str(checkpoint.path / "recipe.yaml"), sets=sets
        ).recipe
        objectives = [options.kind for options in stored.objectives]
        if objective is not None and objective not in objectives:
            raise InputError(f"--run {run}: it was trained for {objectives[0]}, expected {objective}")
        return stored, run
    named: dict[str, Any] = {
        "arch": arch or (None if config or "/" in (preset or "") else usual_arch),
        "preset": preset,
        "config": config,
        "device": device.type,
    }
    if objective is not None:
        _require_parts(load_recipe(**named).recipe, objective, bench)
    flags = {} if objective is None else {"objectives": [{"kind": objective}]}
    recipe = load_recipe(**named, sets=sets, flags=flags).recipe
    name = f"{recipe.arch}/{recipe.preset}" if recipe.preset is not None else str(config or recipe.arch)
    return recipe, " ".join([name, *sets])


def _require_parts(recipe: Recipe, objective: str, bench: str) -> None:
    """Before the objective is set, which would be blamed for what the family lacks."""
    for part in OBJECTIVE_NEEDS[objective].parts:
        if getattr(recipe.model, part) is None:
            raise InputError(
                f"bench {bench}: {recipe.arch} has no {part}, which {objective} needs", hint="use --arch bert"
            )
