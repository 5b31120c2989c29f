"""Laying recipes over one another: preset, then file, then flags, then `--set`, remembering where each value came from.

Mappings merge key by key; lists and everything else replace what lies below. A mapping of another `kind` replaces the
whole mapping below it, because options of one kind mean nothing to another; `--set ….kind=` alone keeps the siblings
that the new kind also has. Of two keys that exclude each other, the higher layer's wins and the other becomes null.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tformer.errors import InputError
from tformer.recipe.schema import (
    MISSING,
    default_kind,
    field_at,
    keys_of_kind,
    sections_in,
    shorthand_at,
)
from tformer.recipe.yaml_text import Document, KeyPath, describe, parse_value

EXCLUSIVE: tuple[tuple[KeyPath, KeyPath], ...] = ((("training", "batch_size"), ("training", "batch_tokens")),)
CHOSEN_BY_FLAG = {"arch": "choose it with --arch", "preset": "choose it with --preset", "schema": "it is tformer's own"}

# Flags that are not named after the last part of the key they set.
FLAG_NAMES = {
    "tokenizer.path": "--tokenizer",
    "data.train": "--data",
    "tokenizer.source_path": "--source-tokenizer",
    "tokenizer.target_path": "--target-tokenizer",
    "data.valid": "--valid",
    "data.columns.text": "--text-column",
    "data.columns.text2": "--text2-column",
    "data.columns.label": "--label-column",
    "data.columns.source": "--source-column",
    "data.columns.target": "--target-column",
    "tokenizer.separate": "--vocabulary",
    "model.tie.source_target": "--vocabulary",
    "objectives": "--objective",
    "model.heads": "--objective",
    "teacher.path": "--teacher",
    "teacher.kind": "--distil",
}


class Origin(NamedTuple):
    """Where a value came from: `label` for people who ask (`--origin`), `where` as the start of an error message."""

    label: str
    where: str


DEFAULT = Origin("default", "")
SET = Origin("--set", "--set")


def flag_origin(dotted: str) -> Origin:
    """The origin of a value that a command-line flag gave, for example `optimizer.lr` → `flag --lr`."""
    name = FLAG_NAMES.get(dotted) or "--" + dotted.rpartition(".")[2].replace("_", "-")
    return Origin(f"flag {name}", name)


class Draft:
    """A recipe in the making: plain data, and the origin of every value in it that is not a default."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.origins: dict[KeyPath, Origin] = {}

    def lay(self, layer: Mapping[str, Any], origin: Callable[[KeyPath], Origin]) -> None:
        """Put a whole layer over what is there; `origin` names the source of each of its paths."""
        self.origins[()] = origin(())
        for key, value in layer.items():
            self._put(self.data, (key,), value, origin)
        self._settle_exclusive(layer, origin)

    def lay_document(self, document: Document, *, label: str, name: str, label_lines: bool = True) -> None:
        """Put a YAML file over what is there; with `label_lines`, labels carry the line as messages do."""

        def origin(path: KeyPath) -> Origin:
            while path and path not in document.lines:
                path = path[:-1]
            where = f":{document.lines[path]}" if path else ""
            return Origin(label + where if label_lines else label, name + where)

        self.lay(document.value, origin)

    def assign(self, dotted: str, value: Any, origin: Origin) -> None:
        """Set one value by its dotted path; list positions are numbers, and one past the end appends."""
        path = tuple(dotted.split("."))
        holder = self._holder(path, origin)
        if path[-1] == "kind" and isinstance(holder, dict) and holder.get("kind") != value:
            kept = keys_of_kind(path[:-1], value, self.data)
            for key in [key for key in holder if kept and key not in kept]:
                self._forget_inside((*path[:-1], key), holder.pop(key))
                self.origins.pop((*path[:-1], key), None)
        self._put(holder, path, value, lambda _: origin)
        if len(path) <= 2:
            self._settle_exclusive({path[0]: value if len(path) == 1 else {path[1]: value}}, lambda _: origin)

    def assign_text(self, text: str) -> None:
        """One `--set key=value` of the command line."""
        dotted, equals, value = text.partition("=")
        dotted = dotted.strip()
        if not equals or not dotted:
            raise InputError(f"--set: found '{text}', expected key=value", hint="for example --set optimizer.lr=1e-3")
        if dotted in CHOSEN_BY_FLAG:
            raise InputError(f"--set: {dotted} cannot be set: {CHOSEN_BY_FLAG[dotted]}")
        self.assign(dotted, parse_value(value, name=f"--set {dotted}"), SET)

    def origin_of(self, path: KeyPath) -> Origin:
        """Where the value at `path` came from, or else what it stands in."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, DEFAULT)

    def _holder(self, path: KeyPath, origin: Origin) -> Any:
        """The mapping or list that holds the last part of `path`, made where the draft has only a default so far."""
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
                current = self._written_out(holder, here, current)
            if not isinstance(current, dict | list):
                dotted, inside = ".".join(path), ".".join(here)
                raise InputError(
                    f"{origin.where}: {dotted}: {inside} is {describe(current)}, expected a mapping or a list"
                )
            holder = current
        _check_position(holder, path, origin)
        return holder

    def _put(self, holder: Any, path: KeyPath, value: Any, origin: Callable[[KeyPath], Origin]) -> None:
        """Lay `value` over what `holder`, the draft's mapping or list at path[:-1], has at `path`."""
        current = _get(holder, path)
        if isinstance(value, Mapping):
            current = self._written_out(holder, path, current)
            if not isinstance(current, dict) or self._is_other_kind(current, value, path):
                self._forget_inside(path, current)
                current = {}
                _store(holder, path, current)
                self._name_default_kind(current, value, path)
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

    def _written_out(self, holder: Any, path: KeyPath, value: Any) -> Any:
        """The mapping that a bare value at `path` is short for, stored in its place; other values as they are."""
        if value is None or isinstance(value, dict | list):
            return value
        key = shorthand_at(path, self.data)
        if key is None:
            return value
        _store(holder, path, {key: value})
        self.origins[(*path, key)] = self.origin_of(path)
        return _get(holder, path)

    def _is_other_kind(self, current: Mapping[str, Any], value: Mapping[str, Any], path: KeyPath) -> bool:
        if "kind" not in value:
            return False
        return bool(value["kind"] != (current.get("kind") or default_kind(path, self.data)))

    def _name_default_kind(self, fresh: dict[str, Any], value: Mapping[str, Any], path: KeyPath) -> None:
        """A new mapping of a tagged union that names no kind is of the kind that the schema has by default."""
        field = field_at(path, self.data)
        if "kind" not in value and field is not None and len(sections_in(field.annotation)) > 1:
            kind = default_kind(path, self.data)
            if kind is not None:
                fresh["kind"] = kind

    def _forget_inside(self, path: KeyPath, replaced: Any) -> None:
        """Drop the origins of what stood inside a mapping or list at `path` that is replaced."""
        if isinstance(replaced, dict | list):
            for known in [known for known in self.origins if known[: len(path)] == path]:
                del self.origins[known]

    def _settle_exclusive(self, layer: Mapping[str, Any], origin: Callable[[KeyPath], Origin]) -> None:
        """Where the layer gives one of two exclusive keys and says nothing of the other, the other becomes null."""
        for pair in EXCLUSIVE:
            for given, other in (pair, pair[::-1]):
                section, key = given
                values = layer.get(section)
                if not isinstance(values, Mapping) or values.get(key) is None or other[1] in values:
                    continue
                if self._value_or_default(other) is not None:
                    self.data[section][other[1]] = None
                    self.origins[other] = origin(given)

    def _value_or_default(self, path: KeyPath) -> Any:
        holder = self.data[path[0]]
        field = field_at(path, self.data)
        return holder.get(path[1], None if field is None else field.default)


def _check_position(holder: Any, path: KeyPath, origin: Origin) -> None:
    """A list takes the positions it has, and one more."""
    if isinstance(holder, list) and not (path[-1].isdecimal() and int(path[-1]) <= len(holder)):
        raise InputError(
            f"{origin.where}: {'.'.join(path)}: found position '{path[-1]}' in a list of {len(holder)}, "
            f"expected a number from 0 to {len(holder)}"
        )


def _get(holder: Any, path: KeyPath) -> Any:
    """What a mapping or list holds at the last part of `path`; None where nothing is there yet."""
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
