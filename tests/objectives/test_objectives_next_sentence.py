"""Next sentence, alone and beside masked LM in one forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tformer.build import build_model
from tformer.data.shards.corpus import Example
from tformer.model import Transformer
from tformer.objectives import CausalLmOptions, build_objective
from tformer.objectives.base import Combined, Objective, ObjectiveContext, total_loss
from tformer.objectives.masked_lm import MaskedLmOptions
from tformer.objectives.next_sentence import NextSentence, NextSentenceOptions
from tformer.objectives.replaced_token import ReplacedTokenOptions
from tformer.recipe.model import Model
from tformer.support.errors import InputError
from tformer.tokenizer.special import SpecialIds

CLS, SEP, VOCAB = 2, 3, 24
CONTEXT = ObjectiveContext(SpecialIds(pad=0, unk=1, cls=CLS, sep=SEP, mask=4), seq_len=16, vocab_size=VOCAB)
MASKED, NEXT = MaskedLmOptions(), NextSentenceOptions(weight=0.5)


def make(*options: Any) -> Objective:
    return build_objective(options or (MASKED, NEXT), CONTEXT)


def pair(first: list[int], second: list[int], label: int) -> Example:
    ids = np.array([CLS, *first, SEP, *second, SEP])
    types = np.repeat([0, 1], [len(first) + 2, len(second) + 1])
    return Example(ids, token_type_ids=types, label=label)


PAIRS = [pair([5, 6, 7], [8, 9], 0), pair([10], [11, 12, 13, 14], 1), pair([15, 16], [17], 1)]


def model() -> Transformer:
    torch.manual_seed(0)
    stack = {"num_layers": 1, "num_heads": 2, "feedforward": {"d_ff": 32}}
    section = {"d_model": 16, "max_seq_len": 16, "vocab_size": VOCAB, "encoder": stack, "embedding": {"token_types": 2}}
    return build_model(Model.model_validate({**section, "heads": [{"kind": "masked_lm"}, {"kind": "next_sentence"}]}))


def test_the_loss_is_cross_entropy_over_pairs() -> None:
    built, objective = model(), NextSentence(NEXT, CONTEXT)
    batch = objective.collate(PAIRS, rng=np.random.default_rng(0))
    result = objective.loss(built, batch)
    scores = built(**batch.model_inputs()).head("next_sentence")
    labels = torch.tensor([0, 1, 1])
    torch.testing.assert_close(total_loss(result.terms), 0.5 * F.cross_entropy(scores, labels))
    assert objective.label_count(batch) == {"next_sentence": 3}
    assert result.metrics.keys() == {f"next_sentence.{name}" for name in ("nll_sum", "correct", "count")}
    assert result.metrics["next_sentence.count"] == 3
    assert result.metrics["next_sentence.correct"] == (scores.argmax(-1) == labels).sum()


def test_two_objectives_share_one_batch_and_one_forward_pass() -> None:
    built, objective, calls = model(), make(), []

    def forward(**inputs: Any) -> Any:
        calls.append(set(inputs))
        return built(**inputs)

    assert isinstance(objective, Combined)
    batch = objective.collate(PAIRS, rng=np.random.default_rng(0))
    result = objective.loss(forward, batch)
    assert calls == [{"input_ids", "attention_mask", "token_type_ids"}]
    alone = [make(MASKED).loss(built, batch), NextSentence(NEXT, CONTEXT).loss(built, batch)]
    assert result.terms.keys() == {"masked_lm", "next_sentence"}
    torch.testing.assert_close(total_loss(result.terms), sum(total_loss(one.terms) for one in alone))
    assert result.metrics == {**alone[0].metrics, **alone[1].metrics}
    assert objective.label_count(batch) == {"masked_lm": 3, "next_sentence": 3}
    assert {name: int(term.count) for name, term in result.terms.items()} == objective.label_count(batch)


def test_what_makes_the_batches_comes_first() -> None:
    for options in ((NEXT, MASKED), (NEXT,), (CausalLmOptions(), NEXT)):
        with pytest.raises(InputError, match="expected one objective, or masked_lm, next_sentence"):
            make(*options)


@pytest.mark.parametrize("options", [(MASKED, MASKED), (MASKED, ReplacedTokenOptions())])
def test_what_cannot_share_is_refused(options: Any) -> None:
    with pytest.raises(InputError, match="objectives: "):
        make(*options)


def test_samples_that_are_no_pairs_are_refused() -> None:
    batch = make().collate([Example(PAIRS[0].ids)], rng=np.random.default_rng(0))
    assert batch.next_sentence_label is None
    with pytest.raises(ValueError, match="pairs of sentences"):
        make().label_count(batch)


def test_both_losses_fall_together() -> None:
    """The second text repeats the first one's words, or it is a random one."""
    built, objective, rng = model(), make(MASKED, NextSentenceOptions()), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(built.parameters(), lr=5e-3)
    losses = []
    for _ in range(100):
        pairs = []
        for word in rng.integers(5, 14, size=16).tolist():
            label = int(rng.integers(2))
            pairs.append(pair([word] * 3, [word + 10 * label] * 3, label))
        batch = objective.collate(pairs, rng=rng)
        result = objective.loss(built, batch)
        optimizer.zero_grad()
        total_loss(result.terms).backward()
        optimizer.step()
        losses.append([(term.sum / term.count).item() for term in result.terms.values()])
    assert (np.mean(losses[-5:], axis=0) < [1.5, 0.2]).all()
    assert losses[0][0] > 2.5 and losses[0][1] > 0.5
