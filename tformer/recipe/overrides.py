"""Merging the layers of a recipe (preset, file, flags, `--set`), with the origin of each value.

Mappings merge key by key; lists and other values replace those of the layer below. A mapping with another `kind`
replaces the whole mapping, because the kinds have different options; `--set ….kind=` alone keeps the options that the
new kind also has, and `followers` drops those of the layers below that mean something else there. batch_size excludes
batch_tokens: the later layer wins and sets the other to null.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tformer.recipe.schema import MISSING, default_kind, field_at, fields_of, section_of_kind, sections_in, shorthand_at
from tformer.recipe.sections import BATCH_SIZES, Training
from tformer.recipe.yaml_text import MAX_DEPTH, Document, KeyPath, parse_value
from tformer.support.errors import InputError
from tformer.support.formatting import as_one_line, describe, fitted, whole_number

MAX_SHOWN = 200  # characters of a --set that is none
NOT_SETTABLE = {"arch": "choose it with --arch", "preset": "choose it with --preset", "schema": "it is tformer's own"}

# Flags that do not have the name of the last part of their key.
FLAG_NAMES = {
    "tokenizer.path": "--tokenizer",
    "data.train": "--data",
    "tokenizer.source_path": "--source-tokenizer",
    "tokenizer.target_path": "--target-tokenizer",
    "data.valid": "--valid",
    "data.columns.text": "--text-column",
    "data.columns.text2": "--text2-column",
    "data.columns.label": "--label-column",
    "data.columns.group": "--group-column",
    "data.columns.source": "--source-column",
    "data.columns.target": "--target-column",
    "training.valid_share": "--full-validation",
    "tokenizer.separate": "--vocabulary",
    "model.tie.source_target": "--vocabulary",
    "objectives": "--objective",
    "training.early_stopping.patience": "--early-stopping",
    "model.heads": "--objective",
    "teacher.path": "--teacher",
    "teacher.kind": "--distil",
    "lora.rank": "--lora",
    "lora.targets": "--lora-targets",
    "lora.weights": "--lora-weights",
    "training.parallel.kind": "--parallel",
    "embeddings.path": "--embeddings",
    "embeddings.target_path": "--target-embeddings",
}


class Origin(NamedTuple):
    """Where a value came from: `label` for `--origin`, `where` for the start of an error message."""

    label: str
    where: str


DEFAULT = Origin("default", "")
SET = Origin("--set", "--set")


def flag_origin(dotted: str) -> Origin:
    """The origin of a value that a command-line flag gave, for example `optimizer.lr` → `flag --lr`."""
    name = FLAG_NAMES.get(dotted) or "--" + dotted.rpartition(".")[2].replace("_", "-")
    return Origin(f"flag {name}", name)


def read_set(text: str) -> tuple[str, Any]:
    """The key and the value of one `--set key=value`. Raises InputError for another text."""
    dotted, equals, value = text.partition("=")
    dotted = dotted.strip()
    if not equals or not dotted or not dotted.isprintable():
        found = fitted(as_one_line(text), MAX_SHOWN)
        raise InputError(
            f"--set: found '{found}', expected key=value", hint="for example --set optimizer.weight_decay=0.1"
        )
    return dotted, parse_value(value, name=f"--set {dotted}")


class Draft:
    """An unfinished recipe: plain data, and the origin of every value that is not a default."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.origins: dict[KeyPath, Origin] = {}

    def merge_document(self, document: Document, *, label: str, name: str, label_lines: bool = True) -> None:
        """Merge a YAML file over the draft; with `label_lines`, the labels of origins contain the line."""

        def origin(path: KeyPath) -> Origin:
            while path and path not in document.lines:
                path = path[:-1]
            where = f":{document.lines[path]}" if path else ""
            return Origin(label + where if label_lines else label, name + where)

        self.origins[()] = origin(())
        for key, value in document.value.items():
            self._put(self.data, (key,), value, origin)
        self._exclude_batch_sizes(document.value.get("training"), origin)

    def assign(self, dotted: str, value: Any, origin: Origin) -> None:
        """Set one value by its dotted path; list positions are numbers, and one past the end appends."""
        path = tuple(dotted.split("."))
        holder = self._holder(path, origin)
        if path[-1] == "kind" and isinstance(holder, dict) and holder.get("kind") != value:
            section = section_of_kind(path[:-1], value, self.data)
            for key in [key for key in holder if section is not None and key not in fields_of(section)]:
                self.drop(holder, (*path[:-1], key))
        self._put(holder, path, value, lambda _: origin)
        if path[0] == "training":
            self._exclude_batch_sizes(value if len(path) == 1 else {path[1]: value}, lambda _: origin)

    def drop(self, holder: dict[str, Any], path: KeyPath) -> None:
        """Remove the value at `path` from `holder`, the mapping at path[:-1]."""
        self._forget_inside(path, holder.pop(path[-1]))
        self.origins.pop(path, None)

    def assign_text(self, text: str) -> None:
        """One `--set key=value` of the command line."""
        dotted, value = read_set(text)
        if dotted in NOT_SETTABLE:
            raise InputError(f"--set: {dotted} cannot be set: {NOT_SETTABLE[dotted]}")
        if dotted.count(".") >= MAX_DEPTH:
            raise InputError(f"--set: {dotted}: nested more than {MAX_DEPTH} levels deep")
        self.assign(dotted, value, SET)

    def origin_of(self, path: KeyPath) -> Origin:
        """The origin of the value at `path`, else of the mapping or list around it."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, DEFAULT)

    def _holder(self, path: KeyPath, origin: Origin) -> Any:
        """The mapping or list at path[:-1], created where the draft has only a default so far."""
        holder: Any = self.data
        for depth, name in enumerate(path[:-1]):
            here = path[: depth + 1]
            _check_position(holder, here, origin)
            current = _get(holder, here)
            if current is None:
                default = field_at(here, self.data)
                if default is not None and default.default is not MISSING and isinstance(default.default, list):
                    holder[name] = copy.deepcopy(default.default)
                else:
                    self._put(holder, here, {}, lambda _: origin)
                current = _get(holder, here)
            elif not isinstance(current, dict | list):
                current = self._expand_shorthand(holder, here, current)
            if not isinstance(current, dict | list):
                dotted, inside = ".".join(path), ".".join(here)
                raise InputError(
                    f"{origin.where}: {dotted}: {inside} is {describe(current)}, expected a mapping or a list"
                )
            holder = current
        _check_position(holder, path, origin)
        return holder

    def _put(self, holder: Any, path: KeyPath, value: Any, origin: Callable[[KeyPath], Origin]) -> None:
        """Merge `value` over the value at `path` in `holder`, the draft's mapping or list at path[:-1]."""
        current = _get(holder, path)
        if isinstance(value, Mapping):
            current = self._expand_shorthand(holder, path, current)
            kind = value.get("kind")
            if not isinstance(current, dict) or (
                "kind" in value and kind != (current.get("kind") or default_kind(path, self.data))
            ):
                self._forget_inside(path, current)
                current = {}
                _store(holder, path, current)
                field = field_at(path, self.data)
                if "kind" not in value and field is not None and len(sections_in(field.annotation)) > 1:
                    default = default_kind(path, self.data)
                    current |= {} if default is None else {"kind": default}
                self.origins[path] = origin(path)
            for key, item in value.items():
                self._put(current, (*path, str(key)), item, origin)
            return
        self._forget_inside(path, current)
        self.origins[path] = origin(path)
        if isinstance(value, list | tuple):
            items: list[Any] = []
            _store(holder, path, items)
            for index, item in enumerate(value):
                self._put(items, (*path, str(index)), item, origin)
        else:
            _store(holder, path, value)

    def _expand_shorthand(self, holder: Any, path: KeyPath, value: Any) -> Any:
        """Replace a plain value at `path` by the mapping that it stands for, if any; returns the value there."""
        if value is None or isinstance(value, dict | list):
            return value
        key = shorthand_at(path, self.data)
        if key is None:
            return value
        _store(holder, path, {key: value})
        self.origins[(*path, key)] = self.origin_of(path)
        return _get(holder, path)

    def _forget_inside(self, path: KeyPath, replaced: Any) -> None:
        """Drop the origins of the values inside a mapping or list at `path` that is replaced."""
        if isinstance(replaced, dict | list):
            for known in [known for known in self.origins if known[: len(path)] == path]:
                del self.origins[known]

    def _exclude_batch_sizes(self, values: Any, origin: Callable[[KeyPath], Origin]) -> None:
        """Set batch_size or batch_tokens to null if a layer's `values` of `training` give only the other one."""
        if not isinstance(values, Mapping):
            return
        for given, other in (BATCH_SIZES, BATCH_SIZES[::-1]):
            if values.get(given) is None or other in values:
                continue
            default, above = fields_of(Training)[other].default, origin(("training", given))
            of_one_layer = self.origins.get(("training", other)) == above == SET
            if self.data["training"].get(other, default) is not None and not of_one_layer:
                self.data["training"][other] = None
                self.origins["training", other] = above


def _check_position(holder: Any, path: KeyPath, origin: Origin) -> None:
    """Raise InputError for a list position other than an existing one or the next."""
    if isinstance(holder, list):
        number = whole_number(path[-1])
        if number is None or number > len(holder):
            raise InputError(
                f"{origin.where}: {'.'.join(path)}: found position '{path[-1]}' in a list of {len(holder)}, "
                f"expected a number from 0 to {len(holder)}"
            )


def _get(holder: Any, path: KeyPath) -> Any:
    """The value of a mapping or list at the last part of `path`; None where there is none."""
    if isinstance(holder, dict):
        return holder.get(path[-1])
    return holder[int(path[-1])] if int(path[-1]) < len(holder) else None


def _store(holder: Any, path: KeyPath, value: Any) -> None:
    if isinstance(holder, dict):
        holder[path[-1]] = value
    elif int(path[-1]) == len(holder):
        holder.append(value)
    else:
        holder[int(path[-1])] = value
