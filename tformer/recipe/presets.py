"""The choice of arch and preset that a recipe starts from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from tformer.recipe.overrides import DEFAULT, Origin
from tformer.recipe.recipe import Recipe
from tformer.recipe.schema import fields_of
from tformer.recipe.yaml_text import Document
from tformer.support.errors import InputError
from tformer.support.shipped import check_arch, list_presets, preset_path

DEFAULT_PRESETS = {
    "gpt": "tiny",
    "llama": "tiny",
    "bert": "classify",
    "roberta": "tiny",
    "electra": "tiny",
    "vit": "mnist",
    "transformer": "tiny",
    "t5": "tiny",
    "bart": "tiny",
    "longformer": "classify",
    "bigbird": "classify",
    "linformer": "classify",
    "performer": "classify",
}
"""The preset that `--arch NAME` alone starts from, on every device; the data and `--minutes` may change its sizes."""

BUILTIN_PRESETS = {"transformer": "dates"}
"""The same without data, where the family's built-in data needs its own."""

DEFAULT_ARCH = "gpt"


def default_preset(arch: str, *, has_data: bool = True) -> tuple[str, str]:
    """(preset of an arch without one, note about it); has_data: whether the user named data."""
    check_arch(arch)
    names = DEFAULT_PRESETS if has_data else DEFAULT_PRESETS | BUILTIN_PRESETS
    if (preset := names.get(arch)) is None:
        known = ", ".join(list_presets()[arch])
        raise InputError(f"{arch} has no default preset, expected --preset", hint=f"known: {known}")
    return preset, f"model size: preset {arch}/{preset} (--preset NAME for another)"


class ChosenName(NamedTuple):
    """The name of an arch or preset, and its origin."""

    name: str
    origin: Origin


class Base(NamedTuple):
    """The arch and preset under a recipe's own values; `notes` say what was chosen by default."""

    arch: ChosenName
    preset: ChosenName | None
    notes: tuple[str, ...] = ()


def choose_base(
    *,
    arch: str | None,
    preset: str | None,
    file: Document | None,
    file_name: str,
    has_data: bool = True,
) -> Base:
    """The arch and preset that flags and file choose, else the default ones.

    A file that names every section, as a run's `recipe.yaml` does, needs no preset: the one that it records is history.
    Any other file builds on the preset that it names; one without a model on its arch's default preset.

    Raises InputError for unknown names, and for flags that disagree with the file.
    """
    if preset is not None and "/" in preset:
        named, _, preset = preset.partition("/")
        if arch not in (None, named):
            raise InputError(f"--preset {named}/{preset} disagrees with --arch {arch}")
        arch = named
    chosen = _choice("arch", arch, file, file_name) or ChosenName(DEFAULT_ARCH, DEFAULT)
    named_preset = _choice("preset", preset, file, file_name)
    is_complete = file is not None and file.value.keys() >= fields_of(Recipe).keys()
    if is_complete and preset is None:
        return Base(chosen, None)
    with _naming(chosen.origin):
        check_arch(chosen.name)
    if named_preset is not None:
        with _naming(named_preset.origin):
            preset_path(chosen.name, named_preset.name)
        return Base(chosen, named_preset)
    if file is not None and "model" in file.value:
        return Base(chosen, None)
    name, note = default_preset(chosen.name, has_data=has_data)
    return Base(chosen, ChosenName(name, DEFAULT), (note,))


def agree_with_stored(
    stored: Mapping[str, Any], *, arch: str | None, preset: str | None, file: Document | None, file_name: str
) -> None:
    """Raise InputError for a flag or a file that names another arch or preset than a checkpoint's recipe."""
    for key, flag in (("arch", arch), ("preset", preset)):
        choice = _choice(key, flag, file, file_name)
        if choice is not None and choice.name != stored.get(key):
            place = choice.origin.where
            raise InputError(f"{place}: {key} '{choice.name}' disagrees with the checkpoint's, '{stored.get(key)}'")


def _choice(key: str, flag: str | None, file: Document | None, file_name: str) -> ChosenName | None:
    """The name given by the flag `--key` or the file's `key:`; InputError when they disagree."""
    in_file = None if file is None else file.value.get(key)
    if file is None or not isinstance(in_file, str):  # other values are refused with the rest of the file
        return None if flag is None else ChosenName(flag, Origin(f"flag --{key}", f"--{key}"))
    place = f"{file_name}:{file.lines.get((key,), 1)}"
    if flag not in (None, in_file):
        raise InputError(f"--{key} {flag} disagrees with {place}, where {key} is '{in_file}'")
    return ChosenName(in_file, Origin(f"file {place}", place))


@contextmanager
def _naming(origin: Origin) -> Iterator[None]:
    """Put the origin of a name before the message of an InputError."""
    try:
        yield
    except InputError as error:
        message = f"{origin.where}: {error.message}" if origin.where else error.message
        raise InputError(message, hint=error.hint) from None
