"""What a recipe starts from: its arch and perhaps a preset, as flags and the file say, or by device.

A file that names every section, as `recipe.yaml` of a run does, is complete: the preset it records is history, not a
base. Any other file stands on the preset it names; one that describes no model stands on its arch's default preset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from tformer.errors import InputError
from tformer.recipe.overrides import DEFAULT, Origin
from tformer.recipe.presets import DEFAULT_ARCH, check_arch, default_preset, preset_path
from tformer.recipe.recipe import Recipe
from tformer.recipe.schema_tree import fields_of
from tformer.recipe.yaml_text import Document

T = TypeVar("T")


class Choice(NamedTuple):
    """A name, and who chose it."""

    name: str
    origin: Origin


class Base(NamedTuple):
    arch: Choice
    preset: Choice | None
    note: str | None = None  # says what was chosen where the user left it open


def choose_base(
    *,
    arch: str | None,
    preset: str | None,
    file: Document | None,
    file_name: str,
    device: str,
    has_data: bool = True,
) -> Base:
    """The arch and preset under everything else; `has_data` as for `default_preset`.

    Unknown names, and flags that disagree with the file: `InputError`.
    """
    if preset is not None and "/" in preset:
        named, _, preset = preset.partition("/")
        if arch not in (None, named):
            raise InputError(f"--preset {named}/{preset} disagrees with --arch {arch}")
        arch = named
    chosen = _choice("arch", arch, file, file_name) or Choice(DEFAULT_ARCH, DEFAULT)
    on = _choice("preset", preset, file, file_name)
    is_complete = file is not None and file.value.keys() >= fields_of(Recipe).keys()
    if is_complete and preset is None:
        return Base(chosen, None)
    _placed(chosen.origin, lambda: check_arch(chosen.name))
    if on is not None:
        _placed(on.origin, lambda: preset_path(chosen.name, on.name))
        return Base(chosen, on)
    if file is not None and "model" in file.value:
        return Base(chosen, None)
    name, note = default_preset(chosen.name, device, has_data=has_data)
    return Base(chosen, Choice(name, DEFAULT), note)


def agree_with_stored(
    stored: Mapping[str, Any], *, arch: str | None, preset: str | None, file: Document | None, file_name: str
) -> None:
    """Over a checkpoint's recipe nobody may choose another arch or preset: `InputError` for whoever does."""
    for key, flag in (("arch", arch), ("preset", preset)):
        choice = _choice(key, flag, file, file_name)
        if choice is not None and choice.name != stored.get(key):
            place = choice.origin.where
            raise InputError(f"{place}: {key} '{choice.name}' disagrees with the checkpoint's, '{stored.get(key)}'")


def _choice(key: str, flag: str | None, file: Document | None, file_name: str) -> Choice | None:
    """What the flag `--key` or the file's `key:` names; both are allowed if they agree."""
    in_file = None if file is None else file.value.get(key)
    if file is None or not isinstance(in_file, str):  # what is no text is refused with the rest of the file
        return None if flag is None else Choice(flag, Origin(f"flag --{key}", f"--{key}"))
    place = f"{file_name}:{file.lines.get((key,), 1)}"
    if flag not in (None, in_file):
        raise InputError(f"--{key} {flag} disagrees with {place}, where {key} is '{in_file}'")
    return Choice(in_file, Origin(f"file {place}", place))


def _placed(origin: Origin, look_up: Callable[[], T]) -> T:
    """Call `look_up`; an error of it says first where the name came from."""
    try:
        return look_up()
    except InputError as error:
        message = f"{origin.where}: {error.message}" if origin.where else error.message
        raise InputError(message, hint=error.hint) from None
