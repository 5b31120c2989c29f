"""Labelled images as material: a folder or zip with a folder per class, or IDX files."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np

from tformer.data.sources.images import (
    ImageSet,
    channel_statistics,
    open_images,
)
from tformer.errors import InputError
from tformer.evaluation.reports import evaluate_labelled
from tformer.objectives.base import ImageContext, Objective, ObjectiveContext
from tformer.recipe.recipe import Recipe
from tformer.tokenizer.special import SpecialIds
from tformer.training.material import Material, ShouldStop, Sources


def image_material(sources: Sources) -> Material:
    """Read the images. Errors: no data given, a file that is no image, an unknown label, one class only."""
    recipe = sources.recipe
    if not recipe.data.train:
        raise InputError(
            "a model of images needs images",
            hint="give --data FOLDER (a folder per class), FILE.zip of such folders, or train-images-idx3-ubyte.gz",
        )
    patches = recipe.model.patches
    assert patches is not None

    def read(path: str, names: tuple[str, ...]) -> ImageSet:
        with sources.progress(f"reading {path}") as report:
            return open_images(
                path,
                size=patches.image_size,
                channels=patches.channels,
                label_names=names,
                progress=report,
                should_stop=sources.should_stop,
            )

    train = _only(recipe.data.train, read, recipe.data.labels)
    if recipe.data.valid:
        held_out = _only(recipe.data.valid, read, train.label_names)
    else:
        train, held_out = _hold_out(recipe, train)
    data = recipe.data
    mean, std = data.image_mean, data.image_std
    if not mean or not std:
        mean, std = channel_statistics(train)
    data = data.model_copy(update={"labels": train.label_names, "image_mean": mean, "image_std": std})
    recipe = recipe.model_copy(update={"data": data})
    train.seq_len = held_out.seq_len = (patches.image_size // patches.size) ** 2 + patches.cls
    assert train.labels is not None
    context = ObjectiveContext(
        special_ids=SpecialIds(),
        seq_len=train.seq_len,
        label_counts=np.bincount(train.labels, minlength=len(train.label_names)),
        images=ImageContext(mean=mean, std=std, augment=data.augment),
    )
    return Material(
        recipe=recipe,
        tokenizer=None,
        samples=train,
        validate=functools.partial(_validate, recipe, held_out),
        context=context,
        fingerprint=hashlib.sha256(f"{train.fingerprint} {held_out.fingerprint}".encode()).hexdigest(),
        notes=(
            *dict.fromkeys((*train.notes, *held_out.notes)),
            f"data: {len(train):,} training images, {len(held_out):,} validation images, "
            f"{len(train.label_names)} classes",
        ),
        tokens_per_sample=train.seq_len,
    )


def _only(specs: tuple[Any, ...], read: Any, names: tuple[str, ...]) -> ImageSet:
    if len(specs) > 1:
        raise InputError(f"--data: {len(specs)} sets of images, expected one", hint="put them into one folder")
    images: ImageSet = read(specs[0].path, names)
    return images


def _hold_out(recipe: Recipe, images: ImageSet) -> tuple[ImageSet, ImageSet]:
    return images.split(fraction=recipe.data.valid_fraction, how=recipe.data.valid_split)


def _validate(
    recipe: Recipe, held_out: ImageSet, model: Any, objective: Objective, should_stop: ShouldStop
) -> dict[str, Any] | None:
    values = evaluate_labelled(model, objective, held_out, recipe, should_stop=should_stop)
    return None if should_stop() else values
