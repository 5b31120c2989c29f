"""Labelled examples: padding, labels, what training changes about texts and images, weights of classes, mixtures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.data.shards.corpus import Example
from tformer.data.sources.images import ImageExample
from tformer.objectives import build_objective
from tformer.objectives.base import ImageContext, Objective, ObjectiveContext, total_loss
from tformer.objectives.collate import drop_words
from tformer.objectives.labelled import ClassificationOptions, RegressionOptions, class_weights, swap_pair
from tformer.support.errors import InputError
from tformer.tokenizer.special import DecoderTokens, SpecialIds

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
CLS, SEP, MASK, VOCAB = 2, 3, 4, 30


def context(**options: Any) -> ObjectiveContext:
    return ObjectiveContext(**{"special_ids": SPECIAL, "seq_len": 12, "vocab_size": VOCAB, **options})


def single(*words: int, label: Any = None) -> Example:
    return Example(np.array([CLS, *words, SEP]), label=label)


def pair(first: list[int], second: list[int], label: Any = None) -> Example:
    ids = np.array([CLS, *first, SEP, *second, SEP])
    return Example(ids, token_type_ids=np.repeat([0, 1], [len(first) + 2, len(second) + 1]), label=label)


def collate(samples: list[Any], *, training: bool = False, seed: int = 0, dtype: torch.dtype = torch.long, **options):
    noise = {name: options.pop(name) for name in ("word_dropout", "swap_pairs") if name in options}
    kind = ClassificationOptions if dtype == torch.long else RegressionOptions
    objective = build_objective([kind(**noise)], context(**options))
    return objective.collate(samples, rng=np.random.default_rng(seed), training=training)


@pytest.mark.parametrize("padding", ["right", "left", "random"])
@pytest.mark.parametrize("pad_to", ["longest", "max"])
def test_every_text_is_whole_where_the_mask_says(padding: str, pad_to: str) -> None:
    samples = [single(*range(5, 5 + count)) for count in (3, 1, 6)]
    batch = collate(samples, padding=padding, pad_to=pad_to)
    assert batch.input_ids.shape == (3, 12 if pad_to == "max" else 8)
    for row, mask, sample in zip(batch.input_ids, batch.attention_mask, samples, strict=True):
        assert row[mask].tolist() == sample.ids.tolist()
        assert (row[~mask] == SPECIAL.pad).all()


def test_nothing_padded_means_no_mask_and_no_types_mean_no_types() -> None:
    batch = collate([single(5, 6), single(7, 8)])
    assert batch.attention_mask is None and batch.token_type_ids is None and batch.labels is None
    assert batch.num_tokens == 8


def test_token_types_are_padded_like_the_ids_and_stand_for_singles_too() -> None:
    batch = collate([pair([5, 6], [7]), single(8)], padding="left")
    # Six tokens at most, in a width of eight.
    assert batch.token_type_ids.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1], [0] * 8]


def test_labels_are_classes_scores_or_rows() -> None:
    classes = collate([single(5, label=1), single(6, label=0)])
    assert classes.labels.tolist() == [1, 0] and classes.labels.dtype == torch.long
    scores = collate([single(5, label=1.5), single(6, label=np.float32(2))], dtype=torch.float32)
    assert scores.labels.tolist() == [1.5, 2.0] and scores.labels.dtype == torch.float32
    rows = [single(5, label=np.array([True, False])), single(6, label=np.array([True, True]))]
    assert collate(rows, dtype=torch.float32).labels.tolist() == [[1.0, 0.0], [1.0, 1.0]]


def test_a_text_longer_than_the_model_is_refused() -> None:
    with pytest.raises(AssertionError, match="13 tokens, more than the maximum of 12"):
        collate([single(*range(5, 16))])


def test_empty_texts_without_a_template_are_padding() -> None:
    batch = collate([Example(np.zeros(0, dtype=np.int64))] * 2)
    assert batch.input_ids.tolist() == [[0], [0]] and not batch.attention_mask.any()


def test_word_dropout_hides_the_asked_share_of_words_only_while_training() -> None:
    samples = [single(*range(5, 15)) for _ in range(200)]
    still, dropped = (collate(samples, training=training, word_dropout=0.3) for training in (False, True))
    assert (still.input_ids == torch.from_numpy(np.stack([sample.ids for sample in samples]))).all()
    changed = dropped.input_ids != still.input_ids
    assert (dropped.input_ids[changed] == MASK).all()
    assert not changed[:, 0].any() and not changed[:, -1].any()
    assert float(changed.float().mean()) == pytest.approx(0.3 * 10 / 12, abs=0.03)


def test_word_dropout_writes_unk_without_a_mask_and_padding_as_the_last_resort() -> None:
    for special, expected in ((SpecialIds(pad=0, unk=1), 1), (SpecialIds(pad=0), 0)):
        batch = collate([Example(np.arange(5, 15))] * 9, special_ids=special, training=True, word_dropout=0.5)
        changed = batch.input_ids != torch.arange(5, 15)
        assert changed.any() and (batch.input_ids[changed] == expected).all()
    with pytest.raises(InputError, match="word_dropout needs a tokenizer"):
        collate([single(5)], special_ids=SpecialIds(), word_dropout=0.1)


def test_drop_words_keeps_what_it_must() -> None:
    kept = np.arange(VOCAB) < 5
    ids = np.array([[2, 7, 8, 3, 0]])
    assert drop_words(ids, kept[ids], 0.999999, MASK, np.random.default_rng(0)).tolist() == [[2, 4, 4, 3, 0]]


@pytest.mark.parametrize(("first", "second"), [([5, 6, 7], [8]), ([], [8, 9]), ([5], []), ([1, 5], [1, 6])])
def test_a_swapped_pair_is_the_pair_of_the_swapped_texts(first: list[int], second: list[int]) -> None:
    swapped, expected = swap_pair(pair(first, second, label=1), SPECIAL), pair(second, first)
    assert swapped.ids.tolist() == expected.ids.tolist()
    assert swapped.token_type_ids.tolist() == expected.token_type_ids.tolist()
    assert swapped.label == 1


def test_all_separators_between_the_texts_of_a_swapped_pair_stay_there() -> None:
    example = Example(np.array([CLS, 5, SEP, SEP, 6, 7, SEP]), token_type_ids=np.repeat([0, 1], [4, 3]))
    assert swap_pair(example, SPECIAL).ids.tolist() == [CLS, 6, 7, SEP, SEP, 5, SEP]


def test_swapping_leaves_singles_and_untyped_examples_alone() -> None:
    typed = Example(np.array([CLS, 5, SEP]), token_type_ids=np.zeros(3, dtype=np.int64))
    for example in (single(5, 6), typed):
        assert swap_pair(example, SPECIAL) is example


def test_swap_pairs_turns_half_of_the_pairs_while_training() -> None:
    samples = [pair([5, 6], [7])] * 400
    straight, other = [CLS, 5, 6, SEP, 7, SEP], [CLS, 7, SEP, 5, 6, SEP]
    rows = collate(samples, training=True, swap_pairs=True).input_ids.tolist()
    assert all(row in (straight, other) for row in rows)
    assert 150 < rows.count(other) < 250
    assert collate(samples, swap_pairs=True).input_ids.tolist() == [straight] * 400


def test_one_seed_gives_one_batch() -> None:
    samples = [pair([5, 6, 7], [8, 9]), pair([5], [6])] * 5
    options = {"training": True, "word_dropout": 0.3, "swap_pairs": True, "padding": "random"}
    first, again, other = (collate(samples, seed=seed, **options).input_ids for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def images(count: int = 6) -> list[ImageExample]:
    pixels = np.random.default_rng(0).integers(0, 256, size=(count, 3, 8, 8), dtype=np.uint8)
    return [ImageExample(image, index % 2) for index, image in enumerate(pixels)]


def test_images_become_normalized_pixels() -> None:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.1, 0.3)
    batch = collate(images(), images=ImageContext(mean, std))
    raw = torch.from_numpy(np.stack([image.pixels for image in images()])).float() / 255
    expected = (raw - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    torch.testing.assert_close(batch.pixel_values, expected)
    assert batch.labels.tolist() == [0, 1] * 3 and batch.input_ids is None and batch.num_tokens == 6


def test_images_are_augmented_only_while_training() -> None:
    given = ImageContext((0.0,) * 3, (1.0,) * 3, augment=("shift", "flip"))
    plain = collate(images(), images=ImageContext((0.0,) * 3, (1.0,) * 3), training=True).pixel_values
    assert torch.equal(collate(images(), images=given).pixel_values, plain)
    varied = collate(images(), images=given, training=True).pixel_values
    assert varied.shape == plain.shape and not torch.equal(varied, plain)
    assert torch.equal(collate(images(), images=given, training=True).pixel_values, varied)


@pytest.mark.parametrize("padding", ["right", "left", "random"])
def test_a_decoder_beside_the_encoder_reads_the_same_text_behind_its_start(padding: str) -> None:
    target = DecoderTokens(start=7, eos=SEP)
    samples = [single(*range(10, 10 + count)) for count in (3, 1, 6)]
    for some in (samples, samples[:1]):
        batch = collate(some, padding=padding, target=target)
        mask = torch.ones_like(batch.input_ids).bool() if batch.attention_mask is None else batch.attention_mask
        assert batch.num_tokens == 2 * int(mask.sum())
        for row, real, sample in zip(batch.decoder_input_ids, mask, some, strict=True):
            assert row[real].tolist() == [7, *sample.ids[:-1].tolist()]


# --- weights of classes, mixtures ------------------------------------------------------------------------------------

CLASSES, LABELS = 3, [0, 2, 1, 2, 0]


class FakeOutput:
    """Random scores of each of these rows."""

    def __init__(self, rows: Tensor) -> None:
        table = torch.randn(9, CLASSES, generator=torch.Generator().manual_seed(1), requires_grad=True)
        self.scores = table[rows]

    def head(self, name: str) -> Tensor:
        assert name == "classifier"
        return self.scores


class Images:
    """Scores of images that depend on their mean pixel alone."""

    def __call__(self, pixel_values: Tensor) -> FakeOutput:
        return FakeOutput((pixel_values.mean((1, 2, 3)) * 8).long().clamp(0, 8))


def classified(counts: Any = (2, 1, 2), **options: Any) -> Objective:
    label_counts = None if counts is None else np.array(counts)
    images = ImageContext((0.0,), (1.0,))
    context = ObjectiveContext(SpecialIds(), seq_len=4, label_counts=label_counts, images=images)
    return build_objective([ClassificationOptions(**options)], context)


def grey_images() -> list[ImageExample]:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 1, 6, 6)).astype(np.uint8)
    return [ImageExample(image, label) for image, label in zip(pixels, LABELS, strict=True)]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_class_weights_multiply_the_loss_of_each_example_and_average_to_one(smoothing: float) -> None:
    """With smoothing, each part of the target counts with the weight of its class, not all with the label's."""
    objective = classified(class_weights=(1.0, 4.0, 1.0), label_smoothing=smoothing)
    batch = objective.collate(grey_images(), rng=np.random.default_rng(0))
    labels, weights = torch.tensor(LABELS), torch.tensor([1.0, 4.0, 1.0]) / (8 / 5)
    scores = Images()(batch.pixel_values).scores
    each = F.cross_entropy(scores, labels, weight=weights, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(total_loss(objective.loss(Images(), batch).terms), each.mean())
    assert float(weights[labels].mean()) == pytest.approx(1.0)
    if not smoothing:
        plain = F.cross_entropy(scores, labels, reduction="none")
        torch.testing.assert_close(each, plain * weights[labels])


def test_mixed_images_have_the_mean_of_both_losses_by_their_shares() -> None:
    options = {"label_smoothing": 0.1, "class_weights": (1.0, 4.0, 1.0)}
    objective = classified(mixup=0.8, cutmix=1.0, **options)
    batch = objective.collate(grey_images(), rng=np.random.default_rng(0))
    assert batch.labels is not None and batch.labels.dtype == torch.float32
    result = objective.loss(Images(), batch)
    scores = Images()(batch.pixel_values).scores
    weights = torch.tensor([1.0, 4.0, 1.0]) / (8 / 5)
    each = torch.stack(
        [
            F.cross_entropy(scores, torch.full((5,), label), weight=weights, label_smoothing=0.1, reduction="none")
            for label in range(CLASSES)
        ],
        dim=1,
    )
    torch.testing.assert_close(total_loss(result.terms), (batch.labels * each).sum(dim=1).mean())
    expected = sum(float(batch.labels[row, scores[row].argmax()]) for row in range(5))
    assert float(result.metrics["accuracy"].sum) == pytest.approx(expected)
    assert objective.label_count(batch) == {"classifier": 5} and result.metrics["accuracy"].count == 5


def test_whole_shares_have_the_loss_of_labels() -> None:
    objective = classified(mixup=0.8, label_smoothing=0.1)
    batch = objective.collate(grey_images(), rng=np.random.default_rng(0), training=False)
    assert batch.labels is not None and batch.labels.tolist() == LABELS
    shares = replace(batch, labels=F.one_hot(batch.labels, CLASSES).float())
    plain, mixed = objective.loss(Images(), batch), objective.loss(Images(), shares)
    torch.testing.assert_close(total_loss(plain.terms), total_loss(mixed.terms))
    for name, value in plain.metrics.items():
        torch.testing.assert_close(value.sum.float(), mixed.metrics[name].sum.float())


def test_mixtures_follow_the_generator_alone_and_need_it_in_training_only() -> None:
    objective = classified(cutmix=1.0)
    batches = [objective.collate(grey_images(), rng=np.random.default_rng(seed)) for seed in (3, 3, 4)]
    pixels = [batch.pixel_values for batch in batches]
    assert torch.equal(pixels[0], pixels[1]) and not torch.equal(pixels[0], pixels[2])
    assert objective.collates_at_random and not classified().collates_at_random


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    counts = np.array([70, 20, 10])
    weights = class_weights("balanced", counts)
    np.testing.assert_allclose(weights, counts.sum() / (3 * counts))
    assert (weights * counts).sum() / counts.sum() == pytest.approx(1.0)
    assert class_weights("none", counts) is None
    absent = class_weights("balanced", np.array([3, 0, 1]))
    assert absent.tolist() == [4 / 6, 0.0, 2.0] and not math.isinf(absent.max())


@pytest.mark.parametrize(
    ("weights", "counts", "message"),
    [
        ((1.0, 2.0), [1, 1, 1], "expected 3, one per class, found 2"),
        ((0.0, 1.0), [3, 0], "has weight 0"),
        ("balanced", None, "need the labels"),
    ],
)
def test_class_weights_that_do_not_fit_are_refused(weights: Any, counts: list[int] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        classified(counts, class_weights=weights)
