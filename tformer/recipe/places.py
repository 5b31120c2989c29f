"""Paths in the recipe of a run: they start from `data.folder`, the folder in which its training was started."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tformer.recipe.sections import SourceSpec
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT

KEYS = ("path", "source_path", "target_path")


def start_folder(recipe: Any) -> str | None:
    """The current folder if a recipe (as plain data) has a relative path, else the recipe's own folder."""
    return os.getcwd() if any(map(_is_relative, _paths_in(recipe))) else recipe["data"]["folder"]


def placed(recipe: Any) -> Any:
    """A recipe (as plain data) whose relative paths lead to `data.folder`, where that is not the current folder.

    What is not there, and is in the current folder, is taken from here: run and data have moved together.
    """
    data = recipe.get("data") if isinstance(recipe, dict) else None
    folder = data.get("folder") if isinstance(data, dict) else None
    return recipe if not isinstance(folder, str) or folder == os.getcwd() else _placed(recipe, folder)


def moved(specs: Iterable[SourceSpec], folder: Path) -> tuple[SourceSpec, ...]:
    """Data of a run that are below another folder now, by as much of the end of their paths as leads to something."""

    def place(path: str | None) -> str | None:
        if path is None or not _is_local(path):
            return path
        names = [name for name in Path(path).parts if name != os.sep]
        found = (os.path.join(folder, *names[number:]) for number in range(len(names)))
        return next(filter(_is_there, found), os.path.join(folder, names[-1]))

    changes = ((spec, {"path": place(spec.path), "target_path": place(spec.target_path)}) for spec in specs)
    return tuple(spec.model_copy(update=update) for spec, update in changes)


def require_there(specs: Iterable[SourceSpec], run: Path, hint: str) -> None:
    """Raise InputError for data of a run that are not where it says. hint: the option that names their place."""
    for path in _paths_in([spec.model_dump() for spec in specs]):
        if _is_local(path) and not _is_there(path):
            raise InputError(f"{path}: no such file or directory, named by the recipe of {run}", hint=hint)


def _placed(value: Any, folder: str) -> Any:
    if isinstance(value, list):
        return [_placed(each, folder) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: _placed(each, folder) for key, each in value.items()}
    for key in KEYS:
        path = value.get(key)
        path = path.removeprefix(os.path.join(folder, "")) if isinstance(path, str) else ""
        if path and _is_relative(path):
            there = os.path.join(folder, path)
            found[key] = path if _is_there(path) and not _is_there(there) else there
    return found


def _paths_in(value: Any) -> Iterator[str]:
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _paths_in(each)
    if isinstance(value, dict):
        yield from (path for key in KEYS if isinstance(path := value.get(key), str))


def _is_local(path: str) -> bool:
    """Whether it is no built-in source, URL or standard input."""
    return path != STANDARD_INPUT and not re.match(r"[\w+.-]{2,}:", path)


def _is_relative(path: str) -> bool:
    return _is_local(path) and not os.path.isabs(os.path.expanduser(path))


def _is_there(path: str) -> bool:
    """Whether it exists, or is a pattern of something that does."""
    place = os.path.expanduser(path)
    return os.path.exists(place) or any(glob.iglob(place, recursive=True))
