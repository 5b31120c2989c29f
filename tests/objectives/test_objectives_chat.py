"""The objective of conversations: labels on answers, and packed samples with the loss and gradients of single ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tests.objectives.cases import WORD, context_of, make, model_of, step
from tformer.data.shards.corpus import LEARNED, Example
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives import build_objective
from tformer.objectives.chat import ChatOptions

RNG = np.random.default_rng(0)


def conversations() -> list[Example]:
    draw = np.random.default_rng(1)
    found = []
    for count in (5, 9, 3, 7):
        ids = draw.integers(WORD, 40, size=count)
        found.append(Example(ids, label=LEARNED * (np.arange(count) >= count // 2)))
    return found


def packed(examples: list[Example]) -> Example:
    documents = np.repeat(np.arange(len(examples)), [len(each) for each in examples])
    marks = np.concatenate([np.asarray(each.label) for each in examples])
    return Example(np.concatenate([each.ids for each in examples]), documents, label=marks)


def test_only_answers_have_labels() -> None:
    [example, *_] = conversations()
    batch = make("chat").collate([example], rng=RNG)
    assert batch.input_ids is not None and batch.labels is not None
    assert batch.input_ids.tolist() == [example.ids[:-1].tolist()]
    expected = np.where(np.asarray(example.label) == LEARNED, example.ids, IGNORED_LABEL)[1:]
    assert batch.labels.tolist() == [expected.tolist()]


def test_everything_but_first_ids_has_labels_without_answers_only() -> None:
    objective = build_objective([ChatOptions(answers_only=False)], context_of())
    batch = objective.collate([packed(conversations())], rng=RNG)
    assert batch.labels is not None
    [labels] = (batch.labels != IGNORED_LABEL).tolist()
    assert [place + 1 for place, known in enumerate(labels) if not known] == [5, 14, 17]


def test_packed_training_equals_unpacked_training() -> None:
    objective, model, singles = make("chat"), model_of("chat"), conversations()
    alone = objective.collate(singles, rng=RNG)
    together = objective.collate([packed(singles)], rng=RNG)
    pairs = objective.collate([packed(singles[:2]), packed(singles[2:])], rng=RNG)
    loss, gradients = step(objective, model, [alone])
    for batch in (together, pairs):
        other, found = step(objective, model, [batch])
        assert abs(other - loss) < 1e-5 and found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)


def test_conversations_without_the_mask_see_each_other() -> None:
    """The last test would pass as well if conversations had no influence on each other anyway."""
    objective, model, singles = make("chat"), model_of("chat"), conversations()
    loss, _ = step(objective, model, [objective.collate(singles, rng=RNG)])
    other, _ = step(objective, model, [objective.collate([replace(packed(singles), document_ids=None)], rng=RNG)])
    assert abs(other - loss) > 1e-3
