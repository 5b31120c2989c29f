"""Predicted scores do not depend on batches, padding or order; interruption leaves NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tformer.build import build_model
from tformer.data.shards.corpus import Example
from tformer.data.sources.images import ImageExample
from tformer.evaluation.predict import GivenSamples, length_sorted_batches, predict_scores
from tformer.objectives import build_objective
from tformer.objectives.base import ImageContext, ObjectiveContext
from tformer.objectives.labelled import ClassificationOptions
from tformer.recipe.model import Model
from tformer.tokenizer.special import SpecialIds
from tformer.workers.work import Work

VOCAB, SEQ_LEN = 23, 16


def texts_of(count: int, *, order: np.ndarray | None = None) -> GivenSamples:
    """Texts of 1 to SEQ_LEN tokens, the second half of each of type 1."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, VOCAB, size=rng.integers(1, SEQ_LEN + 1)) for _ in range(count)]
    rows = rows if order is None else [rows[index] for index in order]
    types = [(np.arange(len(row)) >= len(row) // 2).astype(np.int64) for row in rows]
    examples = [Example(row, token_type_ids=each) for row, each in zip(rows, types, strict=True)]
    return GivenSamples(examples, SEQ_LEN, np.array(list(map(len, rows)), dtype=np.int64))


@pytest.fixture(scope="module", params=["cls", "mean", "eos"])
def model(request):
    torch.manual_seed(0)
    section = Model(
        d_model=16,
        max_seq_len=SEQ_LEN,
        vocab_size=VOCAB,
        embedding={"token_types": 2},
        encoder={"num_layers": 2, "num_heads": 2, "positions": {"kind": "learned"}, "dropout": 0.3},
        heads=[{"kind": "classifier", "num_labels": 3, "pooling": request.param}],
        init={"std": 0.3},
    )
    return build_model(section)


def collate_with(**options: Any):
    context = ObjectiveContext(SpecialIds(pad=0), seq_len=SEQ_LEN, vocab_size=VOCAB, **options)
    return build_objective([ClassificationOptions(word_dropout=0.5)], context).collate


def test_scores_do_not_depend_on_batches_or_padding(model):
    texts, reference = texts_of(40), []
    model.eval()
    for row in texts.examples(0, range(40)):
        with torch.no_grad():
            output = model(torch.tensor(row.ids)[None], token_type_ids=torch.tensor(row.token_type_ids)[None])
        reference.append(output.head("classifier")[0].detach().numpy())
    model.train()
    for sizes in ({"batch_size": 1}, {"batch_size": 7}, {"batch_size": 64}, {"batch_tokens": 50}, {}):
        for padding in ({}, {"padding": "left"}, {"padding": "random", "pad_to": "max"}):
            scores = predict_scores(model, texts, collate_with(**padding), head="classifier", **sizes)
            assert scores.dtype == np.float32
            np.testing.assert_allclose(scores, np.stack(reference), atol=1e-5)
    assert model.training


def test_scores_come_back_in_the_order_of_the_samples(model):
    order = np.random.default_rng(1).permutation(40)
    plain = predict_scores(model, texts_of(40), collate_with(), head="classifier", batch_size=8)
    shuffled = predict_scores(model, texts_of(40, order=order), collate_with(), head="classifier", batch_size=8)
    np.testing.assert_allclose(shuffled, plain[order], atol=1e-5)


def test_batches_hold_every_sample_once_longest_first_within_their_tokens():
    texts = texts_of(100)
    batches = list(length_sorted_batches(texts, batch_tokens=60))
    assert sorted(np.concatenate(batches).tolist()) == list(range(100))
    lengths = texts.lengths[np.concatenate(batches)]
    assert (np.diff(lengths) <= 0).all()
    assert all(texts.lengths[batch].max() * len(batch) <= 60 for batch in batches)
    assert [len(batch) for batch in length_sorted_batches(texts, batch_size=30)] == [30, 30, 30, 10]


def test_a_sample_longer_than_a_batch_is_one_of_its_own():
    assert all(len(batch) == 1 for batch in length_sorted_batches(texts_of(5), batch_tokens=1))


def test_progress_counts_samples_and_interruption_leaves_nan(model):
    seen: list[tuple[int, int]] = []
    answers = iter([False, False, True])
    scores = predict_scores(
        model,
        texts_of(10),
        collate_with(),
        head="classifier",
        batch_size=4,
        work=Work(should_stop=lambda: next(answers), report=lambda done, total: seen.append((done, total))),
    )
    assert seen == [(4, 10), (8, 10)]
    assert int(np.isnan(scores).all(axis=1).sum()) == 2 and scores.shape == (10, 3)


def test_no_samples_have_no_scores(model):
    assert len(predict_scores(model, texts_of(0), collate_with(), head="classifier")) == 0


def test_images_are_scored_too():
    pixels = np.random.default_rng(0).integers(0, 256, size=(9, 1, 4, 4), dtype=np.uint8)
    pictures = GivenSamples([ImageExample(image) for image in pixels], 5)
    section = Model(
        d_model=8,
        max_seq_len=5,
        patches={"image_size": 4, "size": 2, "channels": 1},
        encoder={"num_layers": 1, "num_heads": 2, "positions": {"kind": "learned"}},
        heads=[{"kind": "classifier", "num_labels": 2}],
    )
    images = ImageContext((0.5,), (0.5,), augment=("shift",))
    collate = build_objective(
        [ClassificationOptions()], ObjectiveContext(SpecialIds(), seq_len=5, images=images)
    ).collate
    model = build_model(section)
    small, large = (
        predict_scores(model, pictures, collate, head="classifier", batch_tokens=tokens) for tokens in (10, 1000)
    )
    assert small.shape == (9, 2)
    np.testing.assert_allclose(small, large, atol=1e-5)
