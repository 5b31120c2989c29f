"""The plan of one task that the flags of `tformer sweep` describe."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tformer.errors import InputError
from tformer.recipe.yaml_text import Document, parse_value, parse_yaml
from tformer.workflows.sweep.plan import Plan, split_keys, validated


def plan_of_flags(
    *,
    config: Path | None,
    arch: str | None,
    preset: str | None,
    sets: Sequence[str],
    train: Sequence[str],
    vary: Sequence[str],
    evaluate: Sequence[str],
    seeds: int,
    max_steps: int | None,
) -> Plan:
    """The plan that the command's flags describe: one task. Errors: `InputError` that names the flag."""
    axes: dict[str, list[Any]] = {}
    for text in vary:
        keys, values = parse_vary(text)
        if keys in axes:
            raise InputError(f"--vary: {keys} is given twice", hint="list all its values in one --vary")
        axes[keys] = values
    task = {
        "name": "sweep",
        "config": None if config is None else str(config),
        "arch": arch,
        "preset": preset,
        "set": dict(_parse_set(text) for text in sets),
        "train": list(train),
        "vary": axes,
        "evaluate": dict(_parse_evaluate(text) for text in evaluate),
    }
    document = {"seeds": seeds, "max_steps": max_steps, "tasks": [task]}
    return validated(Document(document, {}), "", expand=False)


def parse_vary(text: str) -> tuple[str, list[Any]]:
    """`KEY=a,b` or `KEY1,KEY2=[a,b],[c,d]`: the keys, and the values as YAML reads a flow list."""
    keys, equals, values = text.partition("=")
    keys = ",".join(split_keys(keys))
    if not equals or not keys or not values.strip():
        raise InputError(
            f"--vary: found '{text}', expected KEY=value,value", hint="for example --vary model.*.norm.place=pre,post"
        )
    try:
        return keys, list(parse_yaml(f"values: [{values}]", name="--vary").value["values"])
    except InputError as error:
        raise InputError(
            f"--vary {keys}: the values '{values}' are no YAML list: {error.message}", hint=error.hint
        ) from None


def _parse_set(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set: found '{text}', expected key=value", hint="for example --set optimizer.lr=1e-3")
    return key.strip(), parse_value(value, name=f"--set {key.strip()}")


def _parse_evaluate(text: str) -> tuple[str, list[str]]:
    label, equals, flags = text.partition("=")
    if not equals or not label.strip() or label.startswith("-"):
        raise InputError(
            f"--evaluate: found '{text}', expected LABEL=flags of `tformer evaluate`",
            hint="for example --evaluate 'test=--data test.tsv'",
        )
    try:
        return label.strip(), shlex.split(flags)
    except ValueError as error:
        raise InputError(f"--evaluate {label}: {error} in '{flags}'") from None
