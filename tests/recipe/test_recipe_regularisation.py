"""Keys of regularisation: off by default, explained, and refused where they are not defined."""

from __future__ import annotations

import pytest

from tformer.errors import InputError
from tformer.recipe import load_recipe
from tformer.recipe.explain import explain
from tformer.recipe.recipe import Recipe

R_DROP, SIMCUT = "training.consistency.kind=r_drop", "training.consistency.kind=simcut"


def recipe_of(arch: str, preset: str, *changes: str) -> Recipe:
    return load_recipe(arch=arch, preset=preset, sets=list(changes)).recipe


@pytest.mark.parametrize(
    ("arch", "preset"),
    [("gpt", "tiny"), ("bert", "tiny"), ("bert", "classify"), ("transformer", "tiny"), ("t5", "tiny")],
)
def test_every_objective_with_predictions_to_compare_takes_both_kinds(arch: str, preset: str) -> None:
    plain = recipe_of(arch, preset).training
    assert plain.consistency is None and plain.copies == 1 and not plain.average_last
    for kind in (R_DROP, SIMCUT):
        assert recipe_of(arch, preset, kind, "training.consistency.alpha=2").training.copies == 2


def test_images_take_r_drop_alone() -> None:
    assert recipe_of("vit", "tiny", R_DROP).training.copies == 2
    with pytest.raises(InputError, match=r"training.consistency.kind: found simcut, expected r_drop or null"):
        recipe_of("vit", "tiny", SIMCUT)
    with pytest.raises(InputError, match=r"training.consistency.cut: found 0.1, expected 0: it cuts off tokens"):
        recipe_of("vit", "tiny", R_DROP, "training.consistency.cut=0.1")


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


def test_replaced_token_detection_and_teachers_exclude_it() -> None:
    with pytest.raises(InputError, match=r"training.consistency: found r_drop, expected null with replaced_token"):
        recipe_of("electra", "tiny", R_DROP)
    with pytest.raises(InputError, match=r"training.consistency: found r_drop, expected null with soft targets"):
        recipe_of("gpt", "tiny", R_DROP, "teacher.path=runs/teacher")


def test_two_averages_of_the_weights_exclude_each_other() -> None:
    training = recipe_of("gpt", "tiny", "training.average_last=0.2", "training.ema_decay=null").training
    assert training.averaging == "average_last"
    with pytest.raises(InputError, match=r"training.average_last: found 0.2, expected null with training.ema_decay"):
        recipe_of("gpt", "tiny", "training.average_last=0.2", "training.ema_decay=0.9")


def test_windows_of_one_length_and_images_exclude_subword_sampling() -> None:
    assert recipe_of("bert", "pretrain", "data.subword_sampling=0.1").data.subword_sampling == 0.1
    assert recipe_of("bert", "classify", "data.subword_sampling=0.1").data.subword_sampling == 0.1
    with pytest.raises(InputError, match=r"data.subword_sampling: found 0.1, expected 0 with data.packing concat"):
        recipe_of("gpt", "tiny", "data.subword_sampling=0.1")
    with pytest.raises(
        InputError, match=r"data.subword_sampling: found 0.1, expected 0 with a model that reads images"
    ):
        recipe_of("vit", "tiny", "data.subword_sampling=0.1")


def test_r_drop_without_dropout_gives_a_note() -> None:
    off = ["model.embedding.dropout=0", "model.encoder.dropout=0", "model.heads.0.dropout=0"]
    note = "training.consistency r_drop does nothing: without dropout both passes are equal"
    for kind, changes, expected in ((R_DROP, off, True), (R_DROP, off[:2], False), (SIMCUT, off, False)):
        sets = [kind, *changes]
        assert (note in load_recipe(arch="bert", preset="classify", sets=sets).notes) is expected, sets


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.consistency.alpha=0", "training.consistency.alpha: must be greater than 0, found 0"),
        ("training.consistency.cut=1", "training.consistency.cut: must lie between 0 and 1, found 1"),
    ],
)
def test_wrong_values_are_refused(change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe_of("gpt", "tiny", SIMCUT, change)


def test_the_keys_are_explained_with_their_papers() -> None:
    papers = {paper for key in ("data.subword_sampling", "training.average_last") for paper in explain(key)[0].papers}
    assert papers == {"1910.13267", "1804.10959", "1803.05407", "2209.14981"}
    choices = explain("training.consistency")[0].choices
    assert "2106.14448" in choices["r_drop"] and "2206.02368" in choices["simcut"]
