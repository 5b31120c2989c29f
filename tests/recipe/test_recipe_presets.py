"""The shipped presets: found, described, valid, with a default for every arch."""

from __future__ import annotations

from pathlib import Path

import pytest

import tformer
from tformer.recipe import DEFAULT_PRESETS, list_presets, load_recipe, preset_summary, presets

SHIPPED = [(arch, preset) for arch, names in list_presets().items() for preset in names]


@pytest.mark.parametrize(("arch", "preset"), SHIPPED)
def test_every_shipped_preset_loads_and_says_what_it_is_for(arch: str, preset: str) -> None:
    resolved = load_recipe(arch=arch, preset=preset)
    assert (resolved.recipe.arch, resolved.recipe.preset) == (arch, preset)
    assert resolved.notes == []
    assert len(preset_summary(arch, preset)) > 10


def test_every_arch_has_a_default_for_cpu_and_gpu_that_is_shipped() -> None:
    assert DEFAULT_PRESETS.keys() == list_presets().keys()
    for arch, by_device in DEFAULT_PRESETS.items():
        assert {"cpu", "cuda"} <= by_device.keys() <= {"cpu", "cuda", "builtin"}
        assert set(by_device.values()) <= set(list_presets()[arch])


def test_the_default_of_gpt_on_a_cpu_is_tiny() -> None:
    assert load_recipe(arch="gpt", device="cpu").recipe.preset == "tiny"


def test_presets_are_found_inside_an_installed_package_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "tformer"
    for folder in (package / "configs" / "gpt", package.parent / "configs" / "other"):
        folder.mkdir(parents=True)
    (package / "configs" / "gpt" / "mine.yaml").write_text("# Mine\nmodel: {decoder: {}}\n")
    monkeypatch.setattr(tformer, "__file__", str(package / "__init__.py"))
    assert presets.preset_folder() == package / "configs"
    assert list_presets() == {"gpt": ["mine"]}
    assert preset_summary("gpt", "mine") == "Mine"
