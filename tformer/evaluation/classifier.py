"""A loaded classifier or regression model: scores and probabilities of texts, pairs of texts and images.

Inputs are prepared as in training (template, truncation, token types, image statistics) and batched by length; scores
are in the order of the inputs.

Shapes: N inputs, L labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np

from tformer.data.batching.mixture import Samples
from tformer.data.shards.labelled_tokens import tokenize_labelled
from tformer.data.sources.augmentation import most_views, view
from tformer.data.sources.image_files import read_image
from tformer.data.sources.images import ImageExample, ImageSet, open_images
from tformer.data.sources.tables import LabelledRow
from tformer.evaluation.predict import GivenSamples, predict_scores
from tformer.evaluation.scored import Scored, Thresholds, probabilities
from tformer.loading import Loaded
from tformer.objectives import ObjectiveOptions, build_objective
from tformer.objectives.base import ImageContext, Objective, ObjectiveContext
from tformer.objectives.labelled import LabelledObjective
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Columns
from tformer.support.errors import InputError
from tformer.tokenizer.special import SpecialIds
from tformer.workers.work import QUIET, Work

OBJECTIVES = {
    (each.objective.head.kind, each.objective.head.label_kind): each
    for each in get_args(ObjectiveOptions)
    if issubclass(each.objective, LabelledObjective)
}
"""The objective of each (kind, kind of label) of a head for labels."""

HEADS = frozenset(kind for kind, _ in OBJECTIVES)


def labelled_head(recipe: Recipe) -> tuple[str, Any]:
    """(name, kind of label) of the recipe's head for labels or scores; the kind of labels of tokens is None."""
    return next((head.kind, head.label_kind) for head in recipe.model.heads if head.kind in HEADS)


def plain_objective(loaded: Loaded) -> Objective:
    """The run's objective without options of training (class weights, smoothing, word dropout)."""
    recipe = loaded.recipe
    context = ObjectiveContext(
        special_ids=SpecialIds() if loaded.tokenizer is None else loaded.tokenizer.special,
        seq_len=recipe.seq_len,
        padding=recipe.data.padding,
        pad_to=recipe.data.pad_to,
        vocab_size=0 if loaded.tokenizer is None else loaded.tokenizer.vocab_size,
        target=None if recipe.model.decoder is None else loaded.decoder_tokens,
        images=None if recipe.model.patches is None else image_context(recipe),
    )
    return build_objective([OBJECTIVES[labelled_head(recipe)]()], context)


def image_context(recipe: Recipe) -> ImageContext:
    """How a run's images are normalized; they are not augmented."""
    return ImageContext(mean=recipe.data.image_mean, std=recipe.data.image_std)


def image_samples(recipe: Recipe, paths: Sequence[Path], *, named_in: Sequence[str] | None = None) -> Samples:
    """Image files as samples of a recipe's model, in their order.

    Raises InputError for a file that is no image, with the place that named it (`list.txt:2`) if given.
    """
    patches = recipe.model.patches
    assert patches is not None
    images = []
    for index, path in enumerate(paths):
        try:
            images.append(ImageExample(read_image(path, size=patches.image_size, channels=patches.channels)))
        except InputError as error:
            if named_in is None:
                raise
            raise InputError(f"{named_in[index]}: {error.message}", hint=error.hint) from error
    return GivenSamples(images, recipe.seq_len)


@dataclass(frozen=True)
class ImageView:
    """One view of each image, see `augmentation.view`."""

    images: Samples
    number: int
    mirrored: bool

    @property
    def seq_len(self) -> int:
        return self.images.seq_len

    @property
    def lengths(self) -> None:
        return None

    def __len__(self) -> int:
        return len(self.images)

    def examples(self, epoch: int, indices: Any, /) -> list[ImageExample]:
        found = self.images.examples(epoch, indices)
        pixels = view(np.stack([image.pixels for image in found]), self.number, mirrored=self.mirrored)
        return [replace(image, pixels=seen) for image, seen in zip(found, pixels, strict=True)]


class Classifier:
    """A loaded model with a head for labels or a score."""

    def __init__(self, loaded: Loaded, *, batch_size: int | None = None, views: int = 1, work: Work = QUIET) -> None:
        """`batch_size` inputs at a time, None: as many as fit by length; `work` is polled before each batch.

        views: of images, average the probabilities of this number of views. Mirror images are among them if the
        model was trained on them (`flip` in `data.augment`). Raises InputError for more than there are, and for texts.
        """
        self._loaded, self._batch_size = loaded, batch_size
        self._work = work
        self._collate = plain_objective(loaded).collate
        self._head, self.kind = labelled_head(loaded.recipe)
        self.path: Path = loaded.path
        self.columns: Columns = loaded.recipe.data.columns
        self.reads_images = loaded.recipe.model.patches is not None
        # None: an imported model may have been trained on single texts or on pairs
        self.reads_pairs = None if loaded.imported else self.columns.text2 is not None
        self.labels: tuple[str, ...] = loaded.recipe.data.labels
        self.label_separator = loaded.recipe.data.label_separator
        self.seq_len = loaded.recipe.seq_len
        self.mirrored = "flip" in loaded.recipe.data.augment
        self.views, most = views, most_views(self.mirrored)
        if views > 1 and not self.reads_images:
            raise InputError(f"--views: {self.path} classifies texts, expected a model of images")
        if not 1 <= views <= most:
            reason = "" if self.mirrored else ": it was trained without mirror images (flip in data.augment)"
            raise InputError(f"--views: found {views}, {self.path} has 1 to {most} views{reason}")
        self.truncated = 0  # number of texts so far that were longer than seq_len

    @cached_property
    def thresholds(self) -> Thresholds | None:
        """The thresholds stored with the checkpoint. Raises InputError for a damaged file."""
        return Thresholds.load(self.path, self.kind, self.labels)

    def classify(self, texts: Sequence[tuple[str, str | None]]) -> np.ndarray:
        """fp32 [N, L] scores (before softmax or sigmoid) of texts, or of pairs, in their order."""
        recipe = self._loaded.recipe
        tokens = tokenize_labelled(
            [GivenRows([LabelledRow(text, text2, None, "") for text, text2 in texts])],
            self._loaded.text_tokenizer,
            seq_len=recipe.seq_len,
            index=None,
            numeric=False,
            truncation=recipe.data.truncation,
            token_types=recipe.model.embedding.token_types > 1,
        )
        self.truncated += tokens.truncated
        return self.scores(tokens)

    def classify_images(self, paths: Sequence[Path], *, named_in: Sequence[str] | None = None) -> np.ndarray:
        """fp32 [N, L] scores of image files, in their order; see `image_samples`."""
        return self.scores(image_samples(self._loaded.recipe, paths, named_in=named_in))

    def open_image_set(self, path: str) -> ImageSet:
        """The images of a folder, zip or IDX file, without labels. Raises InputError for a file that is no image."""
        patches = self._loaded.recipe.model.patches
        assert patches is not None
        images = open_images(
            path, size=patches.image_size, channels=patches.channels, needs_label=False, work=self._work
        )
        images.seq_len = self._loaded.recipe.seq_len
        return images

    def scores(self, samples: Samples, work: Work | None = None) -> np.ndarray:
        """fp32 [N, L] scores of tokenized texts or images. With several views, averages the probabilities of an image.

        work: reports the inputs done; its workers divide the batches, and all get all scores. None: the classifier's.
        """
        work = work or self._work
        if self.views == 1:
            return self._scores(samples, work)
        total_NL: Any = 0.0
        for number in range(self.views):
            piece = work.piece(number * len(samples), self.views * len(samples))
            total_NL = total_NL + self.probabilities(self._scores(ImageView(samples, number, self.mirrored), piece))
        return self._scores_of(total_NL / self.views)

    def _scores_of(self, probabilities_NL: np.ndarray) -> np.ndarray:
        """fp32 scores that `probabilities` turns into these."""
        if self.kind == "score":
            return probabilities_NL.astype(np.float32)
        with np.errstate(divide="ignore"):
            scores_NL = np.log(probabilities_NL)
            if self.kind == "labels":
                scores_NL = scores_NL - np.log1p(-probabilities_NL)
        limits = np.finfo(np.float32)
        return np.clip(scores_NL, limits.min, limits.max).astype(np.float32)

    def _scores(self, samples: Samples, work: Work) -> np.ndarray:
        model, collate = self._loaded.model, self._collate
        return predict_scores(model, samples, collate, head=self._head, batch_size=self._batch_size, work=work)

    def probabilities(self, scores_NL: np.ndarray) -> np.ndarray:
        """`scored.probabilities` of the model's kind."""
        return probabilities(self.kind, scores_NL)

    def scored(self, samples: Any, work: Work | None = None) -> Scored:
        """Labelled samples with their `scores`; without thresholds."""
        return Scored(self.kind, self.labels, np.asarray(samples.labels), self.scores(samples, work))


@dataclass(frozen=True)
class GivenRows:
    """Rows in memory as a source of rows."""

    given: Sequence[Any]
    name: str = "the given texts"
    key: str = ""  # changes with the rows

    def rows(self) -> Iterator[Any]:
        return iter(self.given)

    def fingerprint(self) -> str:
        return self.name + self.key

    def size_bytes(self) -> int | None:
        return None
