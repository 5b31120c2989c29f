"""Shipped recipes, `configs/<arch>/<preset>.yaml`: their folder, names, files and summaries. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from tformer.support.errors import InputError, did_you_mean

SWEEPS = "sweeps"
"""The folder of the shipped plans of `tformer sweep`, beside the folders of presets."""


def preset_folder() -> Path:
    """The folder of the presets: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside, beside = package / "configs", package.parent / "configs"
    return inside if inside.is_dir() else beside


def list_presets() -> dict[str, list[str]]:
    """The presets of each arch, both sorted."""
    folders = sorted(path for path in preset_folder().iterdir() if path.is_dir() and path.name != SWEEPS)
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def preset_path(arch: str, preset: str) -> Path:
    """The file of a preset. Raises InputError, with the nearest name, for an unknown arch or preset."""
    presets = list_presets()
    check_arch(arch)
    if preset in presets[arch]:
        return preset_folder() / arch / f"{preset}.yaml"
    others = [other for other, names in presets.items() if preset in names]
    elsewhere = f"{others[0]} has one: --arch {others[0]} --preset {preset}" if others else None
    raise InputError(f"unknown preset '{preset}' of {arch}", hint=elsewhere or did_you_mean(preset, presets[arch]))


def check_arch(arch: str) -> None:
    """Raise InputError for an arch without a folder of presets."""
    presets = list_presets()
    if arch not in presets:
        raise InputError(f"unknown arch '{arch}'", hint=did_you_mean(arch, presets))


def preset_summary(arch: str, preset: str) -> str:
    """The first line of the preset's header."""
    first = preset_path(arch, preset).read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""
