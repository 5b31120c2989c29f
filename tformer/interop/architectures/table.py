"""The keys of config.json as a table: each row is read into the model section and written back from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from tformer.build import resolve_sizes
from tformer.interop.architectures.parts import ACTIVATIONS, activation_name, size_by_any_name, stack_of
from tformer.interop.config import MAX_SIZE, Config
from tformer.recipe.model import Model
from tformer.recipe.sections import MAX_LAYERS

Section = dict[str, Any]


@dataclass(frozen=True)
class ConfigKey:
    """A value of the model section and its key in config.json.

    keys: the names that the key may have, separated by spaces; "": no key states the value.
    paths: the dotted places that have the value, separated by spaces; the first one is written.
    default: the value if the key is missing, or a function that computes it from the section read so far. Its type is
        the key's: int (or a function) for a size, float, bool, str for the name of an activation.
    written: the name to write; "": the first.
    values: value in config.json -> value of the section, where they differ; {}: they are the same.
    """

    keys: str
    paths: str
    default: int | float | bool | str | Callable[[Section], int]
    written: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)

    def value(self, config: Config, section: Section) -> Any:
        """The value in a config, or the default."""
        if isinstance(self.default, bool | float):
            found = config.take(self.keys, default=self.default, kind=type(self.default))
            return self.values.get(found, found)
        if isinstance(self.default, str):
            return config.choose(self.keys, ACTIVATIONS, default=self.default)
        default = self.default(section) if callable(self.default) else self.default
        most = MAX_LAYERS if self.paths.endswith("num_layers") else MAX_SIZE  # lists of layers follow
        return size_by_any_name(config, *self.keys.split(), default=default, most=most)

    def to_write(self, model: Model) -> Any:
        """The value of a model under its key in config.json."""
        path = self.paths.split()[0]
        side, _, rest = path.partition(".")
        if side not in ("encoder", "decoder"):
            return attrgetter(path)(model)
        stack = stack_of(model, side)
        if rest == "feedforward.d_ff":
            return stack.feedforward.hidden_size(stack.d_model or model.d_model)
        if rest in ("head_dim", "num_kv_heads"):
            return getattr(resolve_sizes(model, side), rest)
        if rest == "layerdrop":
            return stack.layerdrop_rate
        found = attrgetter(rest)(stack)
        if self.values:  # the nearest for a value that this architecture lacks
            return next((key for key, value in self.values.items() if value == found), next(iter(self.values)))
        if not isinstance(self.default, str):
            return found
        return self.default if ACTIVATIONS[self.default] == found else activation_name(found)


@dataclass(frozen=True)
class ConfigTable:
    """The keys of config.json and their places in the model section, for one architecture.

    rows: keys whose values differ from model to model.
    fixed: dotted path -> the value in every model of this architecture.
    expected: key -> the value of every config that is read, and of a missing key; a tuple holds several such values.
    ignored: keys that change nothing.
    written: keys that are written besides the rows.
    """

    rows: Sequence[ConfigKey]
    fixed: Mapping[str, Any]
    expected: Mapping[str, Any] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    written: Mapping[str, Any] = field(default_factory=dict)

    def defaulting(self, **defaults: Any) -> ConfigTable:
        """The table with other default values for the rows whose (first) keys are named."""
        rows = [replace(row, default=defaults.get(row.keys.partition(" ")[0], row.default)) for row in self.rows]
        return replace(self, rows=rows)

    def read(self, config: Config, class_name: str = "") -> Section:
        """The model section of a config; the same for every class."""
        for key, values in self.expected.items():
            config.expect(key, *(values if isinstance(values, tuple) else (values,)))
        config.ignore(*self.ignored)
        section: Section = {}
        for path, value in self.fixed.items():
            put(section, path, deepcopy(value))
        for row in self.rows:
            value = row.value(config, section)
            for path in row.paths.split():
                put(section, path, value)
        return section

    def write(self, model: Model, class_name: str = "") -> dict[str, Any]:
        """The keys of config.json for a model; the same for every class."""
        rows = {row.written or row.keys.split()[0]: row.to_write(model) for row in self.rows if row.keys}
        return rows | dict(self.written)


def put(section: Section, path: str, value: Any) -> None:
    """Set the value at a dotted path of a model section."""
    *parents, last = path.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[last] = value


def both_stacks(path: str) -> str:
    """The paths of an option of both stacks."""
    return f"encoder.{path} decoder.{path}"
