"""Keys of regularization: off by default, explained, and refused where they are not defined."""

from __future__ import annotations

import pytest

from tformer.recipe import load_recipe
from tformer.recipe.explain import explain
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError


def recipe_of(arch: str, preset: str, *changes: str) -> Recipe:
    return load_recipe(arch=arch, preset=preset, sets=list(changes)).recipe


@pytest.mark.parametrize("depth", ["1", "2"])
def test_only_a_stem_of_convolutions_has_a_depth(depth: str) -> None:
    assert recipe_of("vit", "cifar", f"model.patches.stem_depth={depth}").model.patches is not None
    with pytest.raises(InputError, match=f"stem_depth is {depth}, expected 0 with stem: conv"):
        recipe_of("vit", "tiny", f"model.patches.stem_depth={depth}")


@pytest.mark.parametrize(("key", "nothing"), [("ngram", 1), ("convolution", 0)])
def test_a_model_of_images_has_no_ngrams_and_no_convolution_of_tokens(key: str, nothing: int) -> None:
    message = rf"model.embedding.{key}: found 2, expected {nothing}: the model reads images"
    with pytest.raises(InputError, match=message):
        recipe_of("vit", "tiny", f"model.embedding.{key}=2")


@pytest.mark.parametrize(
    ("arch", "preset", "change", "message"),
    [
        (
            "bert",
            "classify",
            "mixup=0.2",
            "mixup: found 0.2, expected 0.0: it changes images, and the model reads texts",
        ),
        (
            "bert",
            "classify",
            "cutmix=1",
            "cutmix: found 1.0, expected 0.0: it changes images, and the model reads texts",
        ),
        ("vit", "tiny", "word_dropout=0.1", "word_dropout: found 0.1, expected 0.0: it changes texts, and the model"),
        ("vit", "tiny", "swap_pairs=true", "swap_pairs: found true, expected false: it changes texts, and the model"),
    ],
)
def test_images_alone_are_mixed_and_words_alone_are_dropped(arch: str, preset: str, change: str, message: str) -> None:
    with pytest.raises(InputError, match=f"objectives.0.{message}"):
        recipe_of(arch, preset, f"objectives.0.{change}")


def test_windows_of_one_length_and_images_exclude_subword_sampling() -> None:
    assert recipe_of("bert", "pretrain", "data.subword_sampling=0.1").data.subword_sampling == 0.1
    assert recipe_of("bert", "classify", "data.subword_sampling=0.1").data.subword_sampling == 0.1
    with pytest.raises(InputError, match=r"data.subword_sampling: found 0.1, expected 0 with data.packing concat"):
        recipe_of("gpt", "tiny", "data.subword_sampling=0.1")
    with pytest.raises(
        InputError, match=r"data.subword_sampling: found 0.1, expected 0 with a model that reads images"
    ):
        recipe_of("vit", "tiny", "data.subword_sampling=0.1")


def test_the_key_is_explained_with_its_papers() -> None:
    assert set(explain("data.subword_sampling")[0].papers) == {"1910.13267", "1804.10959"}
