"""Labelled images: a folder or zip with one folder per class, or IDX files."""

from __future__ import annotations

from typing import Any

import numpy as np

from tformer.data.sources.image_files import read_image
from tformer.data.sources.images import ImageExample, ImageSet, channel_statistics, open_images, survey_images
from tformer.loading import Loaded
from tformer.objectives.base import ImageContext, ObjectiveContext
from tformer.recipe.data_defaults import ImageSurvey, Survey
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import SourceSpec
from tformer.support.errors import InputError
from tformer.tasks.base import ChosenData, GivenExample, Tokenizers, TrainingData, TrainingStart, share_of_training
from tformer.tasks.labelled import Labelled, chosen_part, labelled_training, require_its_classes, split_labelled
from tformer.tokenizer.special import SpecialIds
from tformer.workers.work import Work


class Images(Labelled):
    """Labelled images, evaluated like labelled texts."""

    description = "a model of images"
    options = frozenset({"mistakes", "predictions", "threshold", "views"})
    tokenizer_texts = "none"
    row_keys = ()

    def training_data(self, start: TrainingStart, work: Work) -> tuple[Recipe, TrainingData]:
        """Read the images. Errors: no data given, a file that is no image, an unknown label, one class only."""
        recipe = start.recipe
        data = recipe.data
        if not data.train:
            raise InputError(
                "a model of images needs images",
                hint="give --data FOLDER (a folder per class), FILE.zip of such folders, or train-images-idx3-ubyte.gz",
            )
        train = _read(recipe, data.train, data.labels, work)
        require_its_classes(recipe, train.label_names)
        [train], held_out = split_labelled([train], data)
        if data.valid:
            valid = _read(recipe, data.valid, train.label_names, work)
        else:
            [valid] = held_out
        train = share_of_training(train, recipe)
        mean, std = data.image_mean, data.image_std
        if not mean or not std:
            mean, std = channel_statistics(train)
        updates = {"labels": train.label_names, "image_mean": mean, "image_std": std}
        recipe = recipe.model_copy(update={"data": data.model_copy(update=updates)})
        assert train.labels is not None
        context = _context(recipe, np.bincount(train.labels, minlength=len(train.label_names)))
        work.note_all(train, valid)
        work.note(
            f"data: {len(train):,} training images, {len(valid):,} validation images, {len(train.label_names)} classes"
        )
        return recipe, labelled_training(recipe, train, valid, context, work)

    def survey(self, recipe: Recipe) -> Survey | None:
        images, side, channels = survey_images(recipe.data.train[0].path)
        return ImageSurvey(images, side, channels)

    def sample_of(self, recipe: Recipe, tokenizers: Tokenizers, given: GivenExample) -> tuple[Any, ObjectiveContext]:
        """An image file at the model's size, without a label."""
        given.require("image", reader=self.description)
        patches = recipe.model.patches
        assert patches is not None and given.image is not None
        image = read_image(given.image, size=patches.image_size, channels=patches.channels)
        return ImageExample(image), _context(recipe, np.ones(len(recipe.data.labels)))

    def read(self, loaded: Loaded, data: ChosenData, work: Work) -> tuple[Any, str]:
        """The images of an evaluation, and their name."""
        images = _read(loaded.recipe, data.specs, loaded.recipe.data.labels, work)
        work.note_all(images)
        return chosen_part(images, data, loaded.recipe)


def _context(recipe: Recipe, label_counts: np.ndarray) -> ObjectiveContext:
    data = recipe.data
    images = ImageContext(mean=data.image_mean, std=data.image_std, augment=data.augment)
    return ObjectiveContext(SpecialIds(), seq_len=recipe.seq_len, label_counts=label_counts, images=images)


def _read(recipe: Recipe, specs: tuple[SourceSpec, ...], labels: tuple[str, ...], work: Work) -> ImageSet:
    """The set of images that the specs name, as the model reads it. `labels`: its classes; (): the classes found."""
    if len(specs) != 1:
        raise InputError(f"--data: {len(specs)} sets of images, expected one", hint="put them into one folder")
    patches, path = recipe.model.patches, specs[0].path
    assert patches is not None
    with work.part(f"reading {path}", unit="images") as part:
        images = open_images(path, size=patches.image_size, channels=patches.channels, label_names=labels, work=part)
    images.seq_len = recipe.seq_len
    return images
