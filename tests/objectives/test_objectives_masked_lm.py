"""Masked LM: what is hidden and how, what batches look like, and the loss on hidden positions alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tformer.build import build_model
from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.nn.heads import VocabularyHead
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives import build_objective
from tformer.objectives.base import ObjectiveContext, total_loss
from tformer.objectives.masked_lm import MaskedLm, MaskedLmOptions, choose, corrupt
from tformer.recipe.model import Model
from tformer.support.errors import InputError
from tformer.tokenizer.special import SpecialIds

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
CLS, SEP, MASK, VOCAB = 2, 3, 4, 40


def context(**options: Any) -> ObjectiveContext:
    return ObjectiveContext(**{"special_ids": SPECIAL, "seq_len": 64, "vocab_size": VOCAB, **options})


def make(options: MaskedLmOptions = MaskedLmOptions(), **more: Any) -> MaskedLm:
    objective = build_objective([options], context(**more))
    assert isinstance(objective, MaskedLm)
    return objective


def text(length: int, seed: int = 0) -> np.ndarray:
    words = np.random.default_rng(seed).integers(5, VOCAB, size=length)
    return np.array([CLS, *words, SEP])


def collate(samples: Any, seed: int = 0, options: MaskedLmOptions = MaskedLmOptions(), **more: Any) -> Batch:
    return make(options, **more).collate(samples, rng=np.random.default_rng(seed))


def originals(batch: Batch) -> torch.Tensor:
    assert batch.labels is not None and batch.input_ids is not None
    return torch.where(batch.labels != IGNORED_LABEL, batch.labels, batch.input_ids)


# --- which tokens are hidden -----------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    share=st.floats(0.01, 0.9),
    seed=st.integers(0, 99),
)
def test_every_row_hides_its_share_and_one_token_at_least(lengths: list[int], share: float, seed: int) -> None:
    samples = [Example(text(length, seed=index)) for index, length in enumerate(lengths)]
    batch = collate(samples, seed, MaskedLmOptions(mask_share=share))
    assert batch.labels is not None
    found = (batch.labels != IGNORED_LABEL).sum(dim=1).tolist()
    assert found == [max(1, int(share * length + 0.5)) for length in lengths]
    assert make().label_count(batch) == {"masked_lm": sum(found)}


@given(st.integers(0, 50), st.booleans())
def test_special_tokens_and_padding_are_never_hidden(seed: int, whole_words: bool) -> None:
    samples = [Example(text(length)) for length in (30, 4, 1)]
    options = MaskedLmOptions(mask_share=0.6, whole_words=whole_words)
    batch = collate(samples, seed, options, word_starts=np.arange(VOCAB) % 3 == 0, padding="random", pad_to="max")
    assert batch.labels is not None and batch.input_ids is not None and batch.attention_mask is not None
    hidden = batch.labels != IGNORED_LABEL
    assert not (hidden & ~batch.attention_mask).any()
    assert (batch.labels[hidden] >= 5).all()
    for row, mask, sample in zip(originals(batch), batch.attention_mask, samples, strict=True):
        assert row[mask].tolist() == sample.ids.tolist()  # what is not hidden stays, and the labels are the originals
    assert (batch.input_ids[~batch.attention_mask] == SPECIAL.pad).all()


def test_hidden_tokens_become_mask_random_or_stay_in_the_shares_given() -> None:
    batch = collate(np.stack([text(62, seed) for seed in range(400)]))
    assert batch.labels is not None and batch.input_ids is not None
    hidden = batch.labels != IGNORED_LABEL
    inputs, labels = batch.input_ids[hidden], batch.labels[hidden]
    is_mask, stays = (inputs == MASK).float().mean(), (inputs == labels).float().mean()
    assert abs(is_mask - 0.8) < 0.03
    assert abs(stays - 0.1 - 0.1 / 35) < 0.03  # a random token is the same one by chance
    replaced = inputs[(inputs != MASK) & (inputs != labels)]
    assert set(replaced.tolist()) == set(range(5, VOCAB))  # every ordinary token, no special one


@pytest.mark.parametrize(("mask_share", "random_share"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_extreme_shares(mask_share: float, random_share: float) -> None:
    batch = collate(text(62)[None], options=MaskedLmOptions(mask_token_share=mask_share, random_share=random_share))
    assert batch.labels is not None and batch.input_ids is not None
    hidden = batch.labels != IGNORED_LABEL
    assert hidden.sum() == 9
    assert (batch.input_ids[hidden] == MASK).all() == bool(mask_share)
    if mask_share == random_share == 0:
        assert torch.equal(batch.input_ids, torch.from_numpy(text(62)[None]))


@given(st.integers(0, 1000), st.floats(0.05, 0.6))
def test_whole_words_are_hidden_together(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    maskable, starts = rng.random((4, 30)) < 0.9, rng.random((4, 30)) < 0.5
    chosen = choose(maskable, starts, share, rng)
    assert not (chosen & ~maskable).any()
    assert (chosen.any(axis=1) == maskable.any(axis=1)).all()
    inside = maskable[:, 1:] & maskable[:, :-1] & ~starts[:, 1:]  # goes on with the word of the token before
    assert (chosen[:, 1:] == chosen[:, :-1])[inside].all()


def test_whole_words_hide_as_many_tokens_on_average() -> None:
    rng = np.random.default_rng(0)
    starts = rng.random((2000, 60)) < 0.6
    shares = choose(np.ones_like(starts), starts, 0.15, rng).mean(axis=1)
    assert abs(shares.mean() - 0.15) < 0.005


def test_a_word_is_hidden_when_half_of_it_fits() -> None:
    starts = np.arange(10)[None] % 2 == 0
    chosen = choose(np.ones_like(starts), starts, 0.3, np.random.default_rng(0))
    assert chosen.sum() == 4  # of the three tokens that are asked for, the last is half of a word


def test_the_first_word_after_a_special_token_needs_no_mark() -> None:
    maskable = np.array([[False, True, True, True, False, True]])
    starts = np.array([[False, False, False, True, False, False]])
    groups = {
        tuple(np.flatnonzero(choose(maskable, starts, 0.01, np.random.default_rng(seed))[0])) for seed in range(50)
    }
    assert groups == {(1, 2), (3,), (5,)}


def test_whole_words_without_word_starts_hide_single_tokens() -> None:
    options = MaskedLmOptions(whole_words=True)
    plain, words = collate(text(40)[None]), collate(text(40)[None], options=options)
    assert plain.labels is not None and words.labels is not None and torch.equal(plain.labels, words.labels)


def test_corruption_leaves_its_input_alone_and_knows_rows_without_text() -> None:
    ids = np.array([[CLS, SEP, SEP], [CLS, 7, SEP]])
    before = ids.copy()
    _, labels = corrupt(ids, ids >= 5, np.random.default_rng(0), MaskedLmOptions(), context())
    assert (ids == before).all() and labels.tolist() == [[-100] * 3, [-100, 7, -100]]


def test_never_masked_falls_back_to_the_special_ids() -> None:
    special = SpecialIds(pad=0, mask=4, sentinels=(8, 9))
    found = ObjectiveContext(special, seq_len=8, vocab_size=12).special_V
    assert np.flatnonzero(found).tolist() == [0, 4, 8, 9]
    table = np.arange(12) < 3
    assert ObjectiveContext(special, seq_len=8, never_masked=table).special_V is table


def test_a_tokenizer_without_a_mask_token_is_refused() -> None:
    with pytest.raises(InputError, match="needs a tokenizer with a mask token"):
        make(special_ids=SpecialIds(pad=0))


# --- batches ---------------------------------------------------------------------------------------------------------


def test_batches_carry_types_documents_and_pair_labels() -> None:
    samples = [
        Example(text(6), token_type_ids=np.repeat([0, 1], 4), document_ids=np.repeat([0, 1], [2, 6]), label=1),
        Example(text(1), token_type_ids=np.array([0, 0, 1]), label=0),
    ]
    batch = collate(samples, padding="left")
    assert batch.token_type_ids is not None and batch.document_ids is not None and batch.position_ids is not None
    assert batch.token_type_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0] * 7 + [1]]
    assert batch.document_ids.tolist() == [[0, 0, 1, 1, 1, 1, 1, 1], [-1] * 5 + [0] * 3]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 4, 5], [0] * 6 + [1, 2]]
    assert batch.next_sentence_label is not None and batch.next_sentence_label.tolist() == [1, 0]
    assert batch.num_tokens == 11


def test_a_narrow_array_is_padded_when_the_width_is_fixed_and_a_wide_one_refused() -> None:
    batch = collate(np.stack([text(3)]), pad_to="max")
    assert batch.input_ids is not None and batch.input_ids.shape == (1, 64)
    with pytest.raises(AssertionError, match="more than the maximum of 64"):
        collate(np.stack([text(63)]))


# --- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [True, False])
def test_the_head_sees_hidden_positions_only(transform: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, heads = {"num_layers": 1, "num_heads": 2}, [{"kind": "masked_lm", "transform": transform}]
    section = {"d_model": 8, "max_seq_len": 64, "vocab_size": VOCAB, "encoder": stack, "heads": heads}
    built, objective = build_model(Model.model_validate(section)).eval(), make()
    batch = objective.collate(np.stack([text(62, seed) for seed in range(4)]), rng=np.random.default_rng(0))
    seen: list[int] = []
    features = VocabularyHead.features
    monkeypatch.setattr(
        VocabularyHead, "features", lambda self, hidden: seen.append(len(hidden)) or features(self, hidden)
    )
    objective.loss(built, batch)
    assert seen == [4 * 9]


def test_learning_fills_the_blanks_of_a_toy_language() -> None:
    """Every sentence repeats one word, so all the others give a hidden one away."""
    torch.manual_seed(0)
    stack = {"num_layers": 2, "num_heads": 2, "feedforward": {"d_ff": 64}}
    section = {"d_model": 32, "max_seq_len": 16, "vocab_size": VOCAB, "encoder": stack}
    built = build_model(Model.model_validate({**section, "heads": [{"kind": "masked_lm"}]}))
    objective, optimizer = make(seq_len=16), torch.optim.AdamW(built.parameters(), lr=5e-3)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(80):
        rows = np.array([[CLS, *([word] * 10), SEP] for word in rng.integers(5, VOCAB, size=16)])
        loss = total_loss(objective.loss(built, objective.collate(rows, rng=rng)).terms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 1.5 < 3 < losses[0]
