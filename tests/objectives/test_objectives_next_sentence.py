"""Next sentence, beside masked LM in one forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.objectives.cases import context_of, make, model_of, pair_of_texts, samples_of
from tformer.data.shards.corpus import Example
from tformer.objectives import CausalLmOptions, build_objective
from tformer.objectives.base import Combined, total_loss
from tformer.objectives.masked_lm import MaskedLmOptions
from tformer.objectives.next_sentence import NextSentence, NextSentenceOptions
from tformer.objectives.replaced_token import ReplacedTokenOptions
from tformer.support.errors import InputError

BOTH = "masked_lm,next_sentence"
MASKED, NEXT = MaskedLmOptions(), NextSentenceOptions()


def test_two_objectives_share_one_batch_and_one_forward_pass() -> None:
    built, objective, calls = model_of(BOTH), make(BOTH), []

    def forward(**inputs: Any) -> Any:
        calls.append(set(inputs))
        return built(**inputs)

    assert isinstance(objective, Combined)
    batch = objective.collate(samples_of(BOTH), rng=np.random.default_rng(0))
    result = objective.loss(forward, batch)
    assert calls == [{"input_ids", "attention_mask", "token_type_ids"}]
    first, second = (member.options for member in objective.members)
    alone = [make("masked_lm", weight=first.weight).loss(built, batch),
             NextSentence(second, context_of()).loss(built, batch)]  # fmt: skip
    assert result.terms.keys() == {"masked_lm", "next_sentence"}
    torch.testing.assert_close(total_loss(result.terms), sum(total_loss(one.terms) for one in alone))
    assert result.metrics == {**alone[0].metrics, **alone[1].metrics}


def test_what_makes_the_batches_comes_first() -> None:
    for options in ((NEXT, MASKED), (NEXT,), (CausalLmOptions(), NEXT)):
        with pytest.raises(InputError, match="expected one objective, or masked_lm, next_sentence"):
            build_objective(options, context_of())


@pytest.mark.parametrize("options", [(MASKED, MASKED), (MASKED, ReplacedTokenOptions())])
def test_what_cannot_share_is_refused(options: Any) -> None:
    with pytest.raises(InputError, match="objectives: "):
        build_objective(options, context_of())


def test_samples_that_are_no_pairs_are_refused() -> None:
    batch = make(BOTH).collate([Example(np.array([4, 7, 5]))], rng=np.random.default_rng(0))
    assert batch.next_sentence_label is None
    with pytest.raises(ValueError, match="pairs of sentences"):
        make(BOTH).label_count(batch)


def test_both_losses_fall_together() -> None:
    """The second text repeats the first one's words, or it is a random one."""
    built, objective, rng = model_of(BOTH, layers=1), make(BOTH, mask_share=0.15, weight=1.0), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(built.parameters(), lr=5e-3)
    losses = []
    for _ in range(100):
        pairs = []
        for word in rng.integers(7, 16, size=16).tolist():
            label = int(rng.integers(2))
            pairs.append(pair_of_texts([word] * 3, [word + 10 * label] * 3, label))
        batch = objective.collate(pairs, rng=rng)
        result = objective.loss(built, batch)
        optimizer.zero_grad()
        total_loss(result.terms).backward()
        optimizer.step()
        losses.append([(term.sum / term.count).item() for term in result.terms.values()])
    assert (np.mean(losses[-5:], axis=0) < [1.5, 0.2]).all()
    assert losses[0][0] > 2.5 and losses[0][1] > 0.5
