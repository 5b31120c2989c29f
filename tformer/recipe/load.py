"""Resolve a recipe from arch, preset, file, flags and `--set`; migrate old recipes; write recipes as YAML.

A value passes defaults < preset < data < file < flags < `--set` in a `Draft`, which is then frozen; what else a layer
changes is in `followers`. Every mistake is an `InputError` that names the place, the dotted path, what was found and
what was expected.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tformer.nn.classification_heads import ClassifierHeadOptions
from tformer.nn.heads import HEADS, HeadOptions
from tformer.objectives import OBJECTIVES
from tformer.objectives.base import Objective
from tformer.recipe.checks import contradictions, notes
from tformer.recipe.data_defaults import CHOSEN, DataChoice
from tformer.recipe.followers import LENGTHS, follow
from tformer.recipe.migrations import migrate
from tformer.recipe.overrides import DEFAULT, Draft, Origin, flag_origin
from tformer.recipe.places import placed
from tformer.recipe.presets import ChosenName, agree_with_stored, choose_base
from tformer.recipe.problems import problems_of, raise_problems, unusable_values
from tformer.recipe.recipe import Recipe
from tformer.recipe.schema import value_at
from tformer.recipe.sections import BATCH_SIZES
from tformer.recipe.yaml_text import Document, KeyPath, parse_yaml, read_yaml, to_yaml
from tformer.support.errors import InputError
from tformer.support.shipped import list_presets, preset_path
from tformer.tokenizer.options import TokenizerOptions
from tformer.tokenizer.special import ROLE_TOKENS, TEMPLATES

POOLING_KEYS = ("pooling", "pooler", "activation", "dropout")

POOLED_HEADS = tuple(kind for kind, options in HEADS.items() if hasattr(options, "pooling"))

POOLING = "model.heads.*.pooling"
"""Key of the flag --pooling: the pooling of every head that has one."""


@dataclass(frozen=True)
class Resolved:
    """A recipe with every value decided, the origin of each value by its dotted path, and notes for the user.

    Attributes:
        choices: those of the notes that name values which no layer gives: the default preset, what the data chose, and
            what `followers` set.
        preset_by_default: whether neither flags nor file name the preset.
        has_data: whether flags or file name data.
    """

    recipe: Recipe
    origins: dict[str, str]
    notes: list[str]
    choices: list[str]
    preset_by_default: bool = False
    has_data: bool = False

    @property
    def length_by_default(self) -> bool:
        """Whether no flag, `--set` or file says how long to train."""
        return self.is_free(*(f"training.{name}" for name in (*LENGTHS, "max_minutes")))

    def is_free(self, *keys: str) -> bool:
        """Whether no flag, `--set` or file gives the values at these dotted paths."""
        labels = [self.origins.get(key, DEFAULT.label) for key in keys]
        return all(label == DEFAULT.label or label.startswith("preset ") for label in labels)


def load_recipe(
    *,
    arch: str | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    by_data: DataChoice | None = None,
    base_yaml: str | None = None,
    base_name: str = "recipe.yaml",
) -> Resolved:
    """Resolve a recipe.

    Args:
        preset: may be `ARCH/NAME`.
        flags: values by dotted path (None sets null).
        sets: the texts `key=value` of `--set`.
        by_data: what data and time choose where no preset is named, above the preset and below the file.
        base_yaml: the stored recipe of a checkpoint, in place of arch and preset; messages call it `base_name`.
    """
    flags = {} if flags is None else flags
    if all(flags.get(f"training.{key}") is not None for key in BATCH_SIZES):
        raise InputError("--batch-size and --batch-tokens exclude each other, found both")
    file = None if config is None else _read_config(Path(config))
    draft, followed, base, by_default, has_data = Draft(), [], None, False, False
    # What it starts from: a checkpoint's recipe, or a preset and what the data changes in it.
    if base_yaml is not None:
        stored = _migrated(parse_yaml(base_yaml, name=base_name), base_name)
        agree_with_stored(stored.value, arch=arch, preset=preset, file=file, file_name=str(config))
        draft.merge_document(stored, label=f"file {base_name}", name=base_name)
    else:
        has_data = _names_data(flags, sets, file)
        base = choose_base(
            arch=arch,
            preset=preset,
            file=file,
            file_name=str(config),
            has_data=has_data,
        )
        by_default = base.preset is not None and base.preset.origin == DEFAULT
        by_data = by_data if by_default else None
        if by_data is not None:
            base = base._replace(preset=ChosenName(by_data.preset, DEFAULT), notes=())
        if base.preset is not None:
            name = f"preset {base.arch.name}/{base.preset.name}"
            document = _migrated(read_yaml(preset_path(base.arch.name, base.preset.name)), name)
            draft.merge_document(document, label=name, name=name, label_lines=False)
        for dotted, (value, _) in {} if by_data is None else by_data.values.items():
            draft.assign(dotted, value, CHOSEN)
    # The file, and what follows it.
    if file is not None:
        below = copy.deepcopy(draft)
        draft.merge_document(file, label=f"file {config}", name=str(config))
        followed += follow(draft, below)
    # The chosen arch and preset, whatever the preset's file contains.
    if base is not None and base.preset is not None:
        draft.assign("preset", base.preset.name, base.preset.origin)
    if base is not None and (base.preset is not None or "arch" not in draft.data):
        draft.assign("arch", base.arch.name, base.arch.origin)
    # Flags, `--set`, and what follows both.
    below = copy.deepcopy(draft)
    for dotted, value in flags.items():
        if dotted != POOLING:
            draft.assign(dotted, value, flag_origin(dotted))
    if "objectives" in flags:
        _fit_to_objectives(draft, flags)
    if POOLING in flags:
        _set_pooling(draft, flags[POOLING])
    for text in sets:
        draft.assign_text(text)
    followed += follow(draft, below)
    # Nothing changes from here on.
    recipe = _freeze(draft)
    raise_problems(list(contradictions(recipe)), lambda path: draft.origin_of(path).where)
    origins = {".".join(leaf): draft.origins.get(leaf, DEFAULT).label for leaf in leaves(recipe_to_data(recipe))}
    choices = [*(() if base is None else base.notes), *followed]
    if base is not None and by_data is not None:
        kept = {dotted for dotted in by_data.values if draft.origin_of(tuple(dotted.split("."))) == CHOSEN}
        choices.insert(0, by_data.note(base.arch.name, kept))
    return Resolved(recipe, origins, [*choices, *notes(recipe)], choices, by_default, has_data)


def recipe_from_yaml(text: str, *, name: str) -> Recipe:
    """The recipe of a checkpoint or run, of this schema or an older one; `name`: of the recipe in messages."""
    draft = Draft()
    draft.merge_document(_migrated(parse_yaml(text, name=name), name), label=f"file {name}", name=name)
    return _freeze(draft)


def recipe_to_yaml(recipe: Recipe, *, origins: Mapping[str, str] | None = None) -> str:
    """The recipe as YAML in the schema's order; reading it gives an equal recipe.

    origins: those of `Resolved`; every value then has its own line with its origin as a comment.
    """
    if origins is None:
        return to_yaml(recipe_to_data(recipe))
    return to_yaml(recipe_to_data(recipe), comment=lambda path: origins[".".join(path)])


def recipe_to_data(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain mappings, lists and scalars, keys as in YAML."""
    data: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True)
    return data


def leaves(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The paths of all values: scalars, empty mappings, and lists without mappings or lists inside."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, str(index)))
    else:
        yield path


def _names_data(flags: Mapping[str, Any], sets: Sequence[str], file: Document | None) -> bool:
    """Whether a flag, `--set` or the file names training data."""
    in_file = None if file is None else file.value.get("data")
    return (
        "data.train" in flags
        or any(text.startswith("data.train") for text in sets)
        or (isinstance(in_file, dict) and bool(in_file.get("train")))
    )


def _fit_to_objectives(draft: Draft, flags: Mapping[str, Any]) -> None:
    """Adapt the recipe to `--objective`: heads, special tokens, no unused generator, a metric that it has."""
    kinds = [entry.get("kind") for entry in flags["objectives"]]
    if not set(kinds) <= OBJECTIVES.keys() or not isinstance(draft.data.get("model"), dict):
        return  # validation reports what is wrong
    origin, objectives = flag_origin("objectives"), [OBJECTIVES[kind] for kind in kinds]
    heads = [head for head in draft.data["model"].get("heads", []) if isinstance(head, dict)]
    have = {(head.get("kind"), head.get("multi_label", False)) for head in heads}
    wanted = {(objective.head.kind, getattr(objective.head, "multi_label", False)) for objective in objectives}
    if not wanted <= have:
        given = {head["kind"]: head for head in heads if "kind" in head}
        decoded = draft.data["model"].get("decoder") is not None
        new = [_head_like(given, objective.head, decoded=decoded) for objective in objectives]
        draft.assign("model.heads", new, origin)
    _fit_tokenizer(draft, objectives, origin)
    if not any(objective.needs_generator for objective in objectives) and draft.data.get("generator") is not None:
        draft.assign("generator", None, origin)
    training = draft.data.get("training", {})
    metrics = {metric for objective in objectives for metric in objective.metrics}
    chosen = "training.best_metric" in flags
    if not chosen and isinstance(training, dict) and training.get("best_metric", "loss") not in metrics:
        draft.assign("training.best_metric", "loss", origin)


def _fit_tokenizer(draft: Draft, objectives: Sequence[type[Objective]], origin: Origin) -> None:
    """Give a tokenizer that will be trained the special tokens of the objectives, where no file decides."""
    needed = {role for objective in objectives for role in objective.special_tokens}
    train = ("tokenizer", "train")
    template = TEMPLATES.get(value_at((*train, "template"), draft.data) or TokenizerOptions.template)
    if template is None or value_at(("tokenizer", "path"), draft.data) is not None:
        return
    decoded = value_at(("model", "decoder"), draft.data) is not None
    values: dict[str, Any] = {}
    if "mask" in needed and not set(ROLE_TOKENS["mask"]) & set(template.tokens):
        values["template"] = "seq2seq" if decoded else "bert"
    if "sentinels" in needed and not template.sentinels:
        values["sentinels"] = TEMPLATES["t5"].sentinels
    for key, value in values.items():
        if not draft.origin_of((*train, key)).label.startswith("file "):
            draft.assign(".".join((*train, key)), value, origin)


def _set_pooling(draft: Draft, how: Any) -> None:
    """Set the pooling of every head that has one. Raises InputError where none has."""
    heads = value_at(("model", "heads"), draft.data)
    kinds = [head.get("kind") for head in heads if isinstance(head, dict)] if isinstance(heads, list) else []
    numbers = [number for number, kind in enumerate(kinds) if kind in POOLED_HEADS]
    if not numbers:
        raise InputError(
            f"--pooling: found heads of kind {', '.join(map(str, kinds)) or 'none'}, expected one of "
            f"{', '.join(POOLED_HEADS)}",
            hint="one that classifies: --objective classification",
        )
    for number in numbers:
        draft.assign(POOLING.replace("*", str(number)), how, flag_origin(POOLING))


def _head_like(given: Mapping[str, dict[str, Any]], wanted: HeadOptions, *, decoded: bool) -> dict[str, Any]:
    """The head of this kind from the recipe; or a new one, which pools like the recipe's other head for labels.

    decoded: there is a decoder, of which only the last position has read the whole text.
    """
    head: dict[str, Any] = {"kind": wanted.kind}
    if wanted.kind in given:
        head = dict(given[wanted.kind])
    elif wanted.label_kind:
        other = next((given[kind] for kind in POOLED_HEADS if kind in given), {"pooling": "eos"} if decoded else {})
        head |= {key: other[key] for key in POOLING_KEYS if key in other}
    return head | {"multi_label": wanted.multi_label} if isinstance(wanted, ClassifierHeadOptions) else head


def _read_config(path: Path) -> Document:
    if not path.exists() and path.name in list_presets().get(path.parent.name, ()):
        raise InputError(
            f"{path}: no such file", hint=f"the preset of that name: --arch {path.parent.name} --preset {path.name}"
        )
    return _migrated(read_yaml(path), str(path))


def _migrated(document: Document, name: str) -> Document:
    return document._replace(value=placed(migrate(document.value, name=name)))


def _freeze(draft: Draft) -> Recipe:
    """The recipe of a draft, validated as strictly as JSON: text is not a number, a boolean not an integer."""

    def where(path: KeyPath) -> str:
        return draft.origin_of(path).where

    raise_problems(list(unusable_values(draft.data)), where)
    try:
        return Recipe.model_validate_json(json.dumps(draft.data), strict=True)
    except ValidationError as error:
        raise_problems(problems_of(error, draft.data), where)
        raise
