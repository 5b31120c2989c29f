"""Classification, multi-label and regression: their losses against the definitions, and their sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.data.sources.images import ImageExample
from tformer.objectives import build_objective
from tformer.objectives.base import ImageContext, Objective, ObjectiveContext, total_loss
from tformer.objectives.labelled import ClassificationOptions, MultiLabelOptions, RegressionOptions, class_weights
from tformer.support.errors import InputError
from tformer.tokenizer.special import SpecialIds

CLASSES = 3
HEAD = {"classification": "classifier", "multi_label": "classifier", "regression": "regression"}
LABELS: dict[str, Any] = {
    "classification": [0, 2, 1, 2, 0],
    "multi_label": [np.array(row) for row in ([1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1])],
    "regression": [1.5, -2.0, 0.0, 3.25, 4.0],
}
OPTIONS = {"classification": ClassificationOptions, "multi_label": MultiLabelOptions, "regression": RegressionOptions}
KINDS = sorted(OPTIONS)


def make(kind: str, counts: list[int] | None = None, **options: Any) -> Objective:
    label_counts = None if counts is None else np.array(counts)
    context = ObjectiveContext(SpecialIds(pad=0), seq_len=8, vocab_size=20, label_counts=label_counts)
    return build_objective([OPTIONS[kind](**options)], context)


def examples(kind: str) -> list[Example]:
    return [Example(np.arange(1, 3 + index), label=label) for index, label in enumerate(LABELS[kind])]


def collate(kind: str, chosen: slice = slice(None)) -> Batch:
    return make(kind).collate(examples(kind)[chosen], rng=np.random.default_rng(0))


class FakeOutput:
    """Scores that depend on the number of real tokens alone, so that batches may be cut anywhere."""

    def __init__(self, lengths: Tensor, width: int) -> None:
        table = torch.randn(9, width, generator=torch.Generator().manual_seed(1), requires_grad=True)
        self.scores = table[lengths]

    def head(self, name: str) -> Tensor:
        assert name in HEAD.values()
        return self.scores


def model_of(kind: str) -> Any:
    def forward(input_ids: Tensor, attention_mask: Tensor | None = None) -> FakeOutput:
        full = torch.full((len(input_ids),), input_ids.shape[1])
        lengths = full if attention_mask is None else attention_mask.sum(dim=1)
        return FakeOutput(lengths, 1 if kind == "regression" else CLASSES)

    return forward


def scores_of(kind: str) -> Tensor:
    return model_of(kind)(**collate(kind).model_inputs()).scores


def test_classification_is_cross_entropy() -> None:
    result = make("classification").loss(model_of("classification"), collate("classification"))
    labels, scores = torch.tensor(LABELS["classification"]), scores_of("classification")
    torch.testing.assert_close(total_loss(result.terms), F.cross_entropy(scores, labels))
    assert int(result.metrics["correct"]) == int((scores.argmax(1) == labels).sum())
    assert int(result.metrics["count"]) == result.terms["classifier"].count == 5


def test_multi_label_is_binary_cross_entropy_of_every_decision() -> None:
    result = make("multi_label").loss(model_of("multi_label"), collate("multi_label"))
    labels, scores = torch.tensor(np.stack(LABELS["multi_label"])).float(), scores_of("multi_label")
    torch.testing.assert_close(total_loss(result.terms), F.binary_cross_entropy_with_logits(scores, labels))
    assert int(result.metrics["correct"]) == int(((scores > 0) == labels.bool()).sum())
    assert result.terms["classifier"].count == 15


def test_regression_is_squared_error_of_the_raw_scores() -> None:
    result = make("regression").loss(model_of("regression"), collate("regression"))
    labels, scores = torch.tensor(LABELS["regression"]), scores_of("regression").squeeze(1)
    torch.testing.assert_close(total_loss(result.terms), F.mse_loss(scores, labels))
    torch.testing.assert_close(result.metrics["absolute_error_sum"], (scores - labels).abs().sum())


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_batch_has_the_loss_of_the_whole(kind: str) -> None:
    objective, model = make(kind), model_of(kind)
    whole = total_loss(objective.loss(model, collate(kind)).terms)
    parts = [collate(kind, slice(2)), collate(kind, slice(2, None))]
    counts = {
        name: sum(objective.label_count(part)[name] for part in parts) for name in objective.label_count(parts[0])
    }
    torch.testing.assert_close(sum(total_loss(objective.loss(model, part).terms, counts) for part in parts), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_known_before_the_forward_and_the_model_sees_no_labels(kind: str) -> None:
    batch, objective = collate(kind), make(kind)
    term = objective.loss(model_of(kind), batch).terms[HEAD[kind]]
    assert objective.label_count(batch) == {HEAD[kind]: term.count}
    assert "labels" not in batch.model_inputs()


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_is_the_terms_and_the_sum_has_a_gradient(kind: str) -> None:
    term = make(kind, weight=0.25).loss(model_of(kind), collate(kind)).terms[HEAD[kind]]
    assert term.weight == 0.25 and term.sum.requires_grad


def test_label_smoothing_reaches_the_loss_but_not_the_reported_likelihood() -> None:
    plain, smoothed = (
        make("classification", label_smoothing=eps).loss(model_of("classification"), collate("classification"))
        for eps in (0.0, 0.1)
    )
    labels, scores = torch.tensor(LABELS["classification"]), scores_of("classification")
    torch.testing.assert_close(total_loss(smoothed.terms), F.cross_entropy(scores, labels, label_smoothing=0.1))
    torch.testing.assert_close(smoothed.metrics["nll_sum"], plain.metrics["nll_sum"])


def test_class_weights_multiply_the_loss_of_each_example_and_average_to_one() -> None:
    counts = [2, 1, 2]
    objective = make("classification", counts, class_weights=(1.0, 4.0, 1.0))
    result = objective.loss(model_of("classification"), collate("classification"))
    labels = torch.tensor(LABELS["classification"])
    weights = torch.tensor([1.0, 4.0, 1.0]) / (8 / 5)
    each = F.cross_entropy(scores_of("classification"), labels, reduction="none")
    torch.testing.assert_close(total_loss(result.terms), (each * weights[labels]).mean())
    assert float(weights[labels].mean()) == pytest.approx(1.0)


def test_class_weights_with_smoothing_are_torchs() -> None:
    """Each part of the smoothed target counts with the weight of its class, not all with the label's."""
    result = make("classification", [2, 1, 2], class_weights=(1.0, 4.0, 1.0), label_smoothing=0.2).loss(
        model_of("classification"), collate("classification")
    )
    labels, weights = torch.tensor(LABELS["classification"]), torch.tensor([1.0, 4.0, 1.0]) / (8 / 5)
    expected = F.cross_entropy(
        scores_of("classification"), labels, weight=weights, label_smoothing=0.2, reduction="none"
    ).mean()
    torch.testing.assert_close(total_loss(result.terms), expected)


class Images:
    """Scores of images that depend on their mean pixel alone."""

    def __call__(self, pixel_values: Tensor) -> FakeOutput:
        lengths = (pixel_values.mean((1, 2, 3)) * 8).long().clamp(0, 8)
        return FakeOutput(lengths, CLASSES)


def mixing(counts: tuple[int, ...] = (2, 1, 2), **options: Any) -> Objective:
    context = ObjectiveContext(
        SpecialIds(), seq_len=4, label_counts=np.array(counts), images=ImageContext((0.0,), (1.0,))
    )
    return build_objective([ClassificationOptions(**options)], context)


def images(count: int = 5) -> list[ImageExample]:
    pixels = np.random.default_rng(1).integers(0, 256, (count, 1, 6, 6)).astype(np.uint8)
    return [ImageExample(image, label) for image, label in zip(pixels, LABELS["classification"], strict=False)]


def test_mixed_images_have_the_mean_of_both_losses_by_their_shares() -> None:
    options = {"label_smoothing": 0.1, "class_weights": (1.0, 4.0, 1.0)}
    objective = mixing(mixup=0.8, cutmix=1.0, **options)
    batch = objective.collate(images(), rng=np.random.default_rng(0))
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
    torch.testing.assert_close(result.metrics["nll_sum"], -(batch.labels * scores.log_softmax(-1)).sum())
    expected = sum(float(batch.labels[row, scores[row].argmax()]) for row in range(5))
    assert float(result.metrics["correct"]) == pytest.approx(expected)
    assert objective.label_count(batch) == {"classifier": 5} and float(result.metrics["count"]) == 5


def test_whole_shares_have_the_loss_of_labels() -> None:
    objective = mixing(mixup=0.8, label_smoothing=0.1)
    batch = objective.collate(images(), rng=np.random.default_rng(0), training=False)
    assert batch.labels is not None and batch.labels.tolist() == LABELS["classification"]
    shares = replace(batch, labels=F.one_hot(batch.labels, CLASSES).float())
    plain, mixed = objective.loss(Images(), batch), objective.loss(Images(), shares)
    torch.testing.assert_close(total_loss(plain.terms), total_loss(mixed.terms))
    for name, value in plain.metrics.items():
        torch.testing.assert_close(value.float(), mixed.metrics[name].float())


def test_mixtures_follow_the_generator_alone_and_need_it_in_training_only() -> None:
    objective = mixing(cutmix=1.0)
    batches = [objective.collate(images(), rng=np.random.default_rng(seed)) for seed in (3, 3, 4)]
    pixels = [batch.pixel_values for batch in batches]
    assert torch.equal(pixels[0], pixels[1]) and not torch.equal(pixels[0], pixels[2])
    assert objective.collates_at_random and not mixing().collates_at_random


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
        make("classification", counts, class_weights=weights)


@pytest.mark.parametrize("kind", KINDS)
def test_the_real_model_speaks_the_same_contract(kind: str) -> None:
    from tformer.build import build_model
    from tformer.recipe.model import Model

    head = {"kind": HEAD[kind]} | ({"multi_label": True} if kind == "multi_label" else {})
    section = Model(d_model=8, max_seq_len=8, vocab_size=20, encoder={"num_layers": 1, "num_heads": 2}, heads=[head])
    torch.manual_seed(0)
    model = build_model(section, num_labels=CLASSES).eval()
    whole = make(kind).loss(model, collate(kind)).terms[HEAD[kind]]
    alone = sum(make(kind).loss(model, collate(kind, slice(i, i + 1))).terms[HEAD[kind]].sum for i in range(5))
    torch.testing.assert_close(whole.sum, alone, rtol=1e-5, atol=1e-5)
