"""What a person may ask of `bench attention`: kinds by name, and options of kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tformer.bench.attention_kinds import DENSE_MASKED, FULL, KINDS
from tformer.errors import InputError, did_you_mean
from tformer.nn.attention import ENCODER_ONLY, ProjectionOptions
from tformer.recipe.problems import EXPECTED
from tformer.recipe.recipe import Recipe
from tformer.recipe.yaml_text import describe, parse_value

NOT_MEASURED = frozenset(field.name for field in fields(ProjectionOptions))
"""Options of the projections around a kind, and the factor of the scores, which costs nothing."""

SECTIONS = frozenset(Recipe.model_fields)


def choose_kinds(names: Sequence[str] | None, *, causal: bool) -> tuple[list[str], list[str]]:
    """The kinds to measure, full attention first, for everything is compared with it; and what to tell.

    names: None: all. InputError for an unknown name, or one without a causal mode that was asked for by name.
    """
    notes: list[str] = []
    if names is None:
        left_out = [kind for kind in KINDS if causal and kind in ENCODER_ONLY]
        notes += [f"{kind} is left out: it has no causal mode" for kind in left_out]
        return [kind for kind in KINDS if kind not in left_out], notes
    for name in names:
        if name not in KINDS:
            raise InputError(f"--kinds: unknown kind '{name}'", hint=did_you_mean(name, KINDS))
        if causal and name in ENCODER_ONLY:
            raise InputError(f"--kinds: {name} has no causal mode", hint="leave it or --causal out")
    if FULL not in names:
        notes.append("full attention is measured too: the rest is compared with it")
    return list(dict.fromkeys([FULL, *names])), notes


def read_settings(texts: Sequence[str], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`KIND.OPTION=VALUE` for each --set, as options by kind. InputError names what is wrong with one."""
    settings: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for text in texts:
        path, equals, value = (part.strip() for part in text.partition("="))
        kind, _, option = path.partition(".")
        if not equals or not option:
            raise InputError(
                f"--set: found '{text}', expected KIND.OPTION=VALUE", hint="--set sliding_window.window=256"
            )
        if kind not in KINDS:
            raise InputError(f"--set {path}: unknown kind '{kind}'", hint=did_you_mean(kind, KINDS))
        if kind not in kinds:
            raise InputError(f"--set {path}: {kind} is not measured", hint=f"add {kind} to --kinds")
        known = [field.name for field in fields(KINDS[kind]) if field.name not in NOT_MEASURED]
        if option not in known:
            hint = did_you_mean(option, known) if known else f"{kind} has no options here"
            raise InputError(f"--set {path}: {kind} has no such option here", hint=hint)
        settings[kind][option] = parse_value(value, name=f"--set {path}")
        _check(kind, settings[kind])
    if DENSE_MASKED in kinds and "window" in settings.get("sliding_window", {}):
        settings[DENSE_MASKED].setdefault("window", settings["sliding_window"]["window"])
    return settings


def split_settings(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """--set of kinds, and of a model's recipe: those whose first word is a section of recipes."""
    of_recipe = [text for text in texts if text.partition("=")[0].partition(".")[0].strip() in SECTIONS]
    return [text for text in texts if text not in of_recipe], of_recipe


def _check(kind: str, options: Mapping[str, Any]) -> None:
    """Types and values, as a recipe would be checked."""
    try:
        TypeAdapter(KINDS[kind]).validate_python(dict(options))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where, context = ".".join([kind, *map(str, problem["loc"][:1])]), problem.get("ctx", {})
        if problem["type"] == "value_error":
            raise InputError(f"--set {where}: {context['error']}") from None
        expected = EXPECTED[problem["type"]](context) if problem["type"] in EXPECTED else problem["msg"]
        raise InputError(f"--set {where}: found {describe(problem['input'])}, expected {expected}") from None
