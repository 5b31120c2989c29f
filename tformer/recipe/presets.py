"""The shipped recipes: `configs/<arch>/<preset>.yaml`, beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

import tformer
from tformer.errors import InputError, did_you_mean

# What `--arch NAME` alone trains, by kind of device: on a CPU something that is done in minutes, on a GPU the family's
# smallest published size, unless that needs more memory than most GPUs have (llama's: 20 GB and more). `builtin`: where
# no data is given and the family's built-in data needs a preset of its own.
DEFAULT_PRESETS: dict[str, dict[str, str]] = {
    "gpt": {"cpu": "tiny", "cuda": "small"},
    "llama": {"cpu": "tiny", "cuda": "tiny"},
    "bert": {"cpu": "classify", "cuda": "classify"},
    "roberta": {"cpu": "tiny", "cuda": "small"},
    "electra": {"cpu": "tiny", "cuda": "small"},
    "vit": {"cpu": "mnist", "cuda": "mnist"},
    "transformer": {"cpu": "tiny", "cuda": "tiny", "builtin": "dates"},
    "t5": {"cpu": "tiny", "cuda": "small"},
    "bart": {"cpu": "tiny", "cuda": "base"},
    "longformer": {"cpu": "classify", "cuda": "classify"},
    "bigbird": {"cpu": "classify", "cuda": "classify"},
    "linformer": {"cpu": "classify", "cuda": "classify"},
    "performer": {"cpu": "classify", "cuda": "classify"},
}
SWEEPS = "sweeps"
"""The folder of the shipped plans of `tformer sweep`, beside those of the arches."""

DEFAULT_ARCH = "gpt"
DEVICE_NAMES = {"cpu": "a CPU", "cuda": "a GPU"}


def preset_folder() -> Path:
    """Where the presets are."""
    package = Path(tformer.__file__).parent
    inside, beside = package / "configs", package.parent / "configs"
    return inside if inside.is_dir() else beside


def list_presets() -> dict[str, list[str]]:
    """The names of the presets of every arch, both sorted."""
    folders = sorted(path for path in preset_folder().iterdir() if path.is_dir() and path.name != SWEEPS)
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def preset_path(arch: str, preset: str) -> Path:
    """The file of a preset. An unknown arch or preset is an `InputError` that suggests the nearest."""
    presets = list_presets()
    check_arch(arch)
    if preset in presets[arch]:
        return preset_folder() / arch / f"{preset}.yaml"
    others = [other for other, names in presets.items() if preset in names]
    elsewhere = f"{others[0]} has one: --arch {others[0]} --preset {preset}" if others else None
    raise InputError(f"unknown preset '{preset}' of {arch}", hint=elsewhere or did_you_mean(preset, presets[arch]))


def check_arch(arch: str) -> None:
    """An arch without a folder of presets is an `InputError`."""
    presets = list_presets()
    if arch not in presets:
        raise InputError(f"unknown arch '{arch}'", hint=did_you_mean(arch, presets))


def default_preset(arch: str, device: str, *, has_data: bool = True) -> tuple[str, str]:
    """The preset that an arch alone stands for, and a note that says why.

    `device`: `cpu`, `cuda`, `cuda:1`, ...; `has_data`: whether the person named data of their own.
    """
    check_arch(arch)
    kind = device.partition(":")[0]
    table = DEFAULT_PRESETS.get(arch)
    if table is None:
        known = ", ".join(list_presets()[arch])
        raise InputError(f"{arch} has no default preset, expected --preset", hint=f"known: {known}")
    preset, where = table.get(kind, table["cpu"]), f"on {DEVICE_NAMES.get(kind, kind)}"
    if not has_data and "builtin" in table:
        preset, where = table["builtin"], "with the built-in data"
    others = ", ".join(name for name in list_presets()[arch] if name != preset)
    return preset, f"preset {arch}/{preset}: the default {where}, as no --preset was given (others: {others})"


def preset_summary(arch: str, preset: str) -> str:
    """The first line of the preset's header: what it is for."""
    first = preset_path(arch, preset).read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""
