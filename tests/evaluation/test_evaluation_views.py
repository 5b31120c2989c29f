"""Predictions averaged over several views of an image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.interop.exports import checkpoint
from tformer.data.sources.augmentation import most_views, view
from tformer.data.sources.images import ImageExample
from tformer.evaluation.classifier import Classifier
from tformer.evaluation.predict import GivenSamples
from tformer.loading import Loaded, load
from tformer.support.errors import InputError
from tformer.workers.work import Work

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 1, 8, 8)).astype(np.uint8)


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Loaded]:
    """A model of images that was trained with these augmentations."""

    def make(augment: list[str], **head: Any) -> Loaded:
        encoder = {"num_layers": 1, "num_heads": 2, "feedforward": {"d_ff": 24}}
        patches = {"image_size": 8, "size": 4, "channels": 1, "stem": "convolutions"}
        heads = [{"kind": "classifier", "pooling": "attention", **head}]
        model = {"d_model": 16, "encoder": encoder, "patches": patches, "heads": heads}
        data = {"labels": ["dark", "light"], "image_mean": [0.5], "image_std": [0.5], "augment": augment}
        recipe = {"arch": "vit", "model": model, "data": data, "objectives": [{"kind": "classification"}]}
        checkpoint(tmp_path / "run", recipe, tokenizer=None)
        return load(tmp_path / "run")

    return make


def samples(pixels: np.ndarray = IMAGES) -> GivenSamples:
    return GivenSamples([ImageExample(image) for image in pixels], 5)


@pytest.mark.parametrize("mirrored", [True, False])
def test_the_first_view_is_the_image_and_all_differ(mirrored: bool) -> None:
    views = [view(IMAGES, number, mirrored=mirrored) for number in range(most_views(mirrored))]
    assert np.array_equal(views[0], IMAGES) and {each.shape for each in views} == {IMAGES.shape}
    assert len({each.tobytes() for each in views}) == len(views) == (10 if mirrored else 5)
    mirrors = [each for each in views if any(np.array_equal(each[..., ::-1], other) for other in views)]
    assert bool(mirrors) == mirrored


def test_the_probabilities_of_the_views_are_averaged(trained: Callable[..., Loaded]) -> None:
    loaded = trained(["shift", "flip"])
    one, many = Classifier(loaded), Classifier(loaded, views=4)
    seen: list[tuple[int, int]] = []
    found = many.probabilities(many.scores(samples(), work=Work(report=lambda *done: seen.append(done))))
    each = [one.probabilities(one.scores(samples(view(IMAGES, number, mirrored=True)))) for number in range(4)]
    np.testing.assert_allclose(found, np.mean(each, axis=0), atol=1e-6)
    assert np.abs(found - each[0]).max() > 1e-4
    assert seen[-1] == (20, 20) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_one_view_is_the_plain_answer(trained: Callable[..., Loaded]) -> None:
    loaded = trained([])
    assert np.array_equal(Classifier(loaded).scores(samples()), Classifier(loaded, views=1).scores(samples()))


def test_scores_of_probabilities_give_the_same_probabilities(trained: Callable[..., Loaded]) -> None:
    classifier = Classifier(trained([]))
    shares = np.array([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]])
    for kind in ("classes", "labels"):
        classifier.kind = kind
        scores = classifier._scores_of(shares)
        assert np.isfinite(scores).all()
        np.testing.assert_allclose(classifier.probabilities(scores), shares, atol=1e-7)


@pytest.mark.parametrize(("augment", "views"), [([], 6), (["flip"], 11), ([], 0)])
def test_more_views_than_there_are_is_an_error(augment: list[str], views: int, trained: Callable[..., Loaded]) -> None:
    most = 10 if augment else 5
    with pytest.raises(InputError, match=f"--views: found {views}, .* has 1 to {most} views"):
        Classifier(trained(augment), views=views)
