"""Objectives on the vectors of two texts: definitions, false negatives, gradient caching, Matryoshka sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.objectives.cases import CLS, LENGTHS, SEP, batch_of, context_of, model_of, samples_of, step
from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.objectives import build_objective
from tformer.objectives.contrastive import ContrastiveOptions
from tformer.objectives.similarity import SimilarityOptions


def cosines(batch: Batch, kind: str, *, width: int | None = None) -> Tensor:
    """fp64 [B, B]: of each first text with each second one."""
    with torch.no_grad():
        vectors = model_of(kind)(**batch.model_inputs()).head("embedding").double()[:, :width]
    first, second = (vectors / vectors.norm(dim=-1, keepdim=True)).chunk(2)
    return first @ second.T


def loss_of(options: Any, batch: Batch) -> float:
    result = build_objective([options], context_of()).loss(model_of(options.kind), batch)
    [term] = result.terms.values()
    assert int(term.count) == len(LENGTHS) and term.weight == options.weight
    return float(term.sum.detach()) / int(term.count)


def test_in_batch_negatives_are_the_cross_entropy_over_the_second_texts() -> None:
    batch = batch_of("contrastive")
    scores = 20 * cosines(batch, "contrastive")
    expected = -scores.log_softmax(dim=1).diagonal().mean()
    assert loss_of(ContrastiveOptions(), batch) == pytest.approx(float(expected), rel=1e-5)
    scores = 5 * cosines(batch, "contrastive")
    expected = -scores.log_softmax(dim=1).diagonal().mean()
    assert loss_of(ContrastiveOptions(scale=5.0), batch) == pytest.approx(float(expected), rel=1e-5)


def test_equal_texts_are_no_negatives() -> None:
    texts = [[9, 10], [11], [9, 10], [12, 13, 14]]
    partners = [[20], [21, 22], [23], [20]]
    both = [[Example(np.array([CLS, *ids, SEP])) for ids in side] for side in (texts, partners)]
    objective = build_objective([ContrastiveOptions()], context_of())
    batch = objective.collate(list(zip(*both, strict=True)), rng=np.random.default_rng(0))
    scores = 20 * cosines(batch, "contrastive")
    for i, j in ((0, 2), (2, 0), (0, 3), (3, 0)):  # an equal first text, an equal second text
        scores[i, j] = -torch.inf
    expected = -scores.log_softmax(dim=1).diagonal().mean()
    assert loss_of(ContrastiveOptions(), batch) == pytest.approx(float(expected), rel=1e-5)


def with_negatives() -> Batch:
    """Pairs with no, one or two negatives; one of these equals the second text of another pair."""
    samples = [(replace(first, label=None), replace(second, label=None)) for first, second in samples_of("contrastive")]
    others = [Example(np.array([CLS, *ids, SEP])) for ids in ([9, 10], [11], [12, 13])]
    more = {0: others[:2], 1: [samples[2][1]], len(samples) - 1: others[2:]}
    given = [(*pair, *more.get(number, ())) for number, pair in enumerate(samples)]
    return build_objective([ContrastiveOptions()], context_of()).collate(given, rng=np.random.default_rng(0))


def test_hard_negatives_are_further_second_texts_for_every_pair() -> None:
    batch, pairs = with_negatives(), len(LENGTHS)
    assert batch.input_ids is not None and len(batch.input_ids) == 2 * pairs + 4
    with torch.no_grad():
        vectors = model_of("contrastive")(**batch.model_inputs()).head("embedding").double()
    vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    scores = 20 * vectors[:pairs] @ vectors[pairs:].T
    scores[2, pairs + 2] = -torch.inf  # the negative of pair 1 is the second text of pair 2
    expected = -scores.log_softmax(dim=1).diagonal().mean()
    assert loss_of(ContrastiveOptions(), batch) == pytest.approx(float(expected), rel=1e-5)


def test_cosent_and_cosine_regression_are_their_formulas() -> None:
    batch = batch_of("similarity")
    assert batch.labels is not None
    found, labels = cosines(batch, "similarity").diagonal(), batch.labels.tolist()
    total = 1.0
    for i, low in enumerate(labels):
        for j, high in enumerate(labels):
            total += float(torch.exp(20 * (found[i] - found[j]))) * (low < high)
    assert loss_of(SimilarityOptions(), batch) == pytest.approx(float(np.log(total)), rel=1e-5)
    wanted = (batch.labels.double() + 3) / 6
    squares = float((found - wanted).square().mean())
    options = SimilarityOptions(loss="cosine", range=(-3.0, 3.0))
    assert loss_of(options, batch) == pytest.approx(squares, rel=1e-5)


@pytest.mark.parametrize("kind", ["contrastive", "similarity"])
@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_gradient_caching_changes_neither_loss_nor_gradients(kind: str, size: int) -> None:
    options: Any = {"contrastive": ContrastiveOptions, "similarity": SimilarityOptions}[kind]
    model = model_of(kind)
    for batch in (batch_of(kind), *([with_negatives()] if kind == "contrastive" else [])):
        found = [step(build_objective([options(chunk_size=n)], context_of()), model, [batch]) for n in (None, size)]
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-5) and found[0][1].keys() == found[1][1].keys()
        for name, gradient in found[0][1].items():
            torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-5, atol=1e-6)


def test_gradient_caching_draws_the_same_dropout_twice() -> None:
    """The gradient is that of the loss which was computed: two calls with one seed agree."""
    model, batch = model_of("contrastive", dropout=0.3).train(), batch_of("contrastive")
    objective = build_objective([ContrastiveOptions(chunk_size=2)], context_of())
    (loss, gradients), (again, others) = step(objective, model, [batch]), step(objective, model, [batch])
    assert loss == again and all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_gradient_caching_holds_the_activations_of_one_chunk() -> None:
    """Tensors that autograd keeps until backward, in numbers: the vectors and a chunk's inputs alone."""

    def kept(size: int | None) -> int:
        numbers = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal numbers
            numbers += tensor.numel()
            return tensor

        objective = build_objective([ContrastiveOptions(chunk_size=size)], context_of())
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            objective.loss(model_of("contrastive"), batch_of("contrastive", (9,) * 32))
        return numbers

    assert kept(4) < kept(None) / 20


def test_matryoshka_sizes_are_vectors_too() -> None:
    batch = batch_of("contrastive")
    losses = [
        float(-(20 * cosines(batch, "contrastive", width=width)).log_softmax(dim=1).diagonal().mean())
        for width in (None, 8, 4)
    ]
    assert loss_of(ContrastiveOptions(sizes=(8, 4)), batch) == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize("kind", ["contrastive", "similarity"])
def test_padding_counts_nowhere(kind: str) -> None:
    options: Any = {"contrastive": ContrastiveOptions, "similarity": SimilarityOptions}[kind]()
    batch = batch_of(kind)
    assert batch.attention_mask is not None and batch.input_ids is not None
    expected = loss_of(options, batch)
    for other in (batch_of(kind, pad_to="max"), batch_of(kind, padding="left")):
        assert loss_of(options, other) == pytest.approx(expected, rel=1e-5)


def test_each_text_is_read_alone_and_scores_are_labels() -> None:
    samples, batch = samples_of("similarity"), batch_of("similarity")
    assert batch.input_ids is not None and batch.attention_mask is not None and batch.labels is not None
    rows = [ids[real].tolist() for ids, real in zip(batch.input_ids, batch.attention_mask, strict=True)]
    assert rows == [sample[side].ids.tolist() for side in (0, 1) for sample in samples]
    assert batch.labels.tolist() == pytest.approx([first.label for first, _ in samples])
    objective = build_objective([SimilarityOptions()], context_of())
    assert objective.label_count(batch) == {"embedding": len(LENGTHS)}
    unlabelled = [tuple(replace(side, label=None) for side in sample) for sample in samples]
    assert objective.collate(unlabelled, rng=np.random.default_rng(0)).labels is None


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        (ContrastiveOptions, {"scale": 0.0}, "scale must be greater than 0, found 0"),
        (ContrastiveOptions, {"chunk_size": 0}, "chunk_size must be greater than 0, found 0"),
        (ContrastiveOptions, {"sizes": (8, 0)}, r"sizes must be positive, found \(8, 0\)"),
        (SimilarityOptions, {"weight": 0.0}, "weight must be greater than 0"),
        (SimilarityOptions, {"range": (5.0, 1.0)}, "range must be two numbers, the lower first"),
    ],
)
def test_options_refuse_what_makes_no_sense(options: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(**values)
