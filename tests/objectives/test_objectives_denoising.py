"""Denoising: each kind of damage alone, all of them undone, what fits the context, and the loss of a tiny model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.cases import model_of, unpadded
from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.objectives.base import ObjectiveContext, total_loss
from tformer.objectives.denoising import NOWHERE, Denoising, DenoisingOptions, denoise, span_lengths
from tformer.support.errors import InputError
from tformer.tokenizer.special import DecoderTokens, SpecialIds

PAD, UNK, BOS, EOS, MASK, STOP, VOCAB, SEQ_LEN = 0, 1, 2, 3, 4, 5, 40, 32
SPECIAL = SpecialIds(pad=PAD, unk=UNK, bos=BOS, eos=EOS, mask=MASK)
ORDINARY = np.arange(STOP, VOCAB)
BART = DenoisingOptions()
NOTHING = DenoisingOptions(mask_share=0)
EVERYTHING = DenoisingOptions(
    mask_share=0.3, delete_share=0.1, replace_share=0.2, permute_sentences=True, rotate_share=0.5
)


def make(options: DenoisingOptions = BART, **more: Any) -> Denoising:
    values = {"special_ids": SPECIAL, "seq_len": SEQ_LEN, "vocab_size": VOCAB, "target": DecoderTokens(EOS, EOS, BOS)}
    ends = np.arange(VOCAB) == STOP
    return Denoising(options, ObjectiveContext(**{**values, "frame": ((BOS,), (EOS,)), "sentence_ends": ends, **more}))


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(STOP, VOCAB, size=length)


def corrupted(ids: np.ndarray, options: DenoisingOptions, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return denoise(ids, rng, options, mask_id=MASK, ordinary=ORDINARY, ends=ids == STOP)


def lost(places: np.ndarray, length: int) -> np.ndarray:
    """The places of a text that its source lacks."""
    return np.setdiff1d(np.arange(length), places)


def collate(samples: Any, seed: int = 0, options: DenoisingOptions = BART, **more: Any) -> Batch:
    return make(options, **more).collate(samples, rng=np.random.default_rng(seed))


# --- the corruption ---------------------------------------------------------------------------------------------------

options_of = st.builds(
    DenoisingOptions,
    mask_share=st.floats(0, 0.99),
    span_length=st.sampled_from([0.0, 0.2, 1.0, 3.0, 20.0]),
    replace_share=st.floats(0, 0.99),
    delete_share=st.floats(0, 0.99),
    permute_sentences=st.booleans(),
    rotate_share=st.floats(0, 0.99),
)


@given(st.integers(0, 60), st.integers(0, 10**6), options_of)
def test_the_places_say_which_tokens_the_source_has_and_no_text_grows(
    length: int, seed: int, options: DenoisingOptions
) -> None:
    ids = text(length, seed)
    source, places = corrupted(ids, options, seed)
    known = places != NOWHERE
    assert source[known].tolist() == ids[places[known]].tolist()
    assert len(source) == len(places) <= length
    assert len(set(places[known].tolist())) == known.sum()  # every token at most once


@given(st.integers(1, 60), st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 1.0, 3.0, 9.0]))
def test_infilling_masks_the_share_exactly_and_keeps_the_order(length: int, seed: int, mean: float) -> None:
    source, places = corrupted(text(length, seed), DenoisingOptions(mask_share=0.3, span_length=mean), seed)
    assert len(lost(places, length)) == -(-3 * length // 10)
    assert (np.diff(places[places != NOWHERE]) > 0).all() and (source[places == NOWHERE] == MASK).all()


def test_token_masking_writes_one_mask_for_each_token() -> None:
    ids = text(50)
    source, _ = corrupted(ids, DenoisingOptions(mask_share=0.3, span_length=0))
    assert len(source) == 50 and (source == MASK).sum() == 15
    assert (source[source != MASK] == ids[source != MASK]).all()


def test_one_mask_stands_for_a_span_and_empty_spans_are_put_in() -> None:
    gaps = []
    for seed in range(300):
        places = np.concatenate([[-1], corrupted(text(60, seed), BART, seed)[1], [60]])
        masks = np.flatnonzero(places == NOWHERE)[1:]  # the first is the border
        alone = [i for i in masks if places[i - 1] != NOWHERE or i == 1]
        gaps += [places[i + 1] - places[i - 1] - 1 for i in alone if places[i + 1] != NOWHERE]
    assert {0, 1, 2, 3, 4, 5} <= set(gaps)
    assert 2 < np.mean(gaps) < 3.2


def test_span_lengths_are_poisson() -> None:
    drawn = [span_lengths(1000, 3.0, np.random.default_rng(seed)) for seed in range(20)]
    assert all(lengths.sum() == 1000 for lengths in drawn)
    found = np.concatenate(drawn)
    assert abs(found.mean() - 3) < 0.1 and abs(found.var() - 3) < 0.25
    assert abs((found == 0).mean() - np.exp(-3)) < 0.01


@given(st.integers(1, 40), st.floats(0, 8), st.integers(0, 10**6))
def test_span_lengths_add_up_and_are_no_more_than_tokens(count: int, mean: float, seed: int) -> None:
    lengths = span_lengths(count, mean, np.random.default_rng(seed))
    assert lengths.sum() == count and len(lengths) <= count and (lengths >= 0).all()


def test_every_place_is_masked_as_often() -> None:
    shares = np.zeros(40)  # but near the ends, which fewer spans reach
    for seed in range(3000):
        shares[lost(corrupted(text(40), BART, seed)[1], 40)] += 1 / 3000
    assert np.abs(shares[5:-5] - shares[5:-5].mean()).max() < 0.04


def test_replaced_masks_are_random_ordinary_tokens() -> None:
    options = DenoisingOptions(mask_share=0.5, span_length=0, replace_share=0.4)
    found = []
    for seed in range(60):
        source, places = corrupted(text(60, seed), options, seed)
        found += source[places == NOWHERE].tolist()
    assert abs(np.mean(np.array(found) != MASK) - 0.4) < 0.05
    assert set(found) == {MASK, *ORDINARY.tolist()}


def test_deletion_leaves_no_trace() -> None:
    ids = text(50)
    source, places = corrupted(ids, DenoisingOptions(mask_share=0, delete_share=0.2))
    assert len(source) == 40 and len(lost(places, 50)) == 10
    assert source.tolist() == np.delete(ids, lost(places, 50)).tolist()


def test_sentences_change_places_whole() -> None:
    ids = np.array([7, 8, STOP, 9, STOP, STOP, 10, 11, 12, STOP, 13])
    whole = [(7, 8, STOP), (9, STOP, STOP), (10, 11, 12, STOP), (13,)]
    orders = set()
    options = DenoisingOptions(mask_share=0, permute_sentences=True)
    for seed in range(400):
        rest, order = corrupted(ids, options, seed)[0].tolist(), []
        while rest:
            order.append(next(i for i, one in enumerate(whole) if tuple(rest[: len(one)]) == one))
            rest = rest[len(whole[order[-1]]) :]
        orders.add(tuple(order))
    assert len(orders) == 24


def test_rotation_begins_anywhere_in_its_share_of_the_texts() -> None:
    ids = np.arange(10, 20)
    firsts = [corrupted(ids, DenoisingOptions(mask_share=0, rotate_share=0.5), seed)[0] for seed in range(600)]
    assert all((np.diff(np.concatenate([row, row[:1]])) % 10 == 1).all() for row in firsts)
    assert abs(np.mean([row[0] == 10 for row in firsts]) - 0.55) < 0.06
    assert {row[0] for row in firsts} == set(range(10, 20))


def test_nothing_asked_for_is_nothing_done() -> None:
    ids = text(20)
    assert corrupted(ids, NOTHING)[0].tolist() == ids.tolist()


# --- batches ---------------------------------------------------------------------------------------------------------


def test_the_target_is_the_whole_text_framed_as_its_side() -> None:
    samples = [text(length, length) for length in (30, 2, 17)]
    for (source, labels), ids in zip(unpadded(collate(samples)), samples, strict=True):
        assert source[0] == BOS and source[-1] == EOS
        assert labels == [BOS, *ids, EOS]
    batch = collate(samples, options=NOTHING)
    assert [source for source, _ in unpadded(batch)] == [[BOS, *ids, EOS] for ids in samples]
    assert batch.decoder_input_ids is not None and batch.decoder_input_ids[1, :4].tolist() == [EOS, BOS, *samples[1]]


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("options", [BART, EVERYTHING, NOTHING])
def test_very_short_windows(length: int, options: DenoisingOptions) -> None:
    for seed in range(10):
        assert unpadded(collate([text(length)], seed, options))[0][1] == [BOS, *text(length), EOS]


def test_special_tokens_of_a_window_are_left_out_and_end_sentences() -> None:
    framed = Example(np.array([BOS, 7, UNK, EOS, 8, 9, EOS]))
    options = DenoisingOptions(mask_share=0, permute_sentences=True)
    rows = [unpadded(collate([framed], seed, options))[0] for seed in range(20)]
    assert {tuple(labels) for _, labels in rows} == {(BOS, 7, UNK, 8, 9, EOS)}
    assert {tuple(source) for source, _ in rows} == {(BOS, 7, UNK, 8, 9, EOS), (BOS, 8, 9, 7, UNK, EOS)}


def test_a_window_of_special_tokens_alone_is_an_empty_text() -> None:
    assert unpadded(collate([np.array([EOS, BOS])], 0, EVERYTHING)) == [([BOS, EOS], [BOS, EOS])]


def test_a_window_of_the_whole_context_stays_within_the_model() -> None:
    model = model_of("seq2seq", vocab_size=VOCAB)  # which refuses longer inputs
    for options in (BART, EVERYTHING, NOTHING, DenoisingOptions(mask_share=0.9, span_length=0.1)):
        batch = collate(np.stack([text(SEQ_LEN, seed) for seed in range(3)]), 0, options)
        assert batch.decoder_input_ids is not None and batch.decoder_input_ids.shape[1] == SEQ_LEN
        assert torch.isfinite(total_loss(make(options).loss(model, batch).terms))
    assert make().room == SEQ_LEN - 2 and make(target_seq_len=12).room == 10


# --- the loss, and what users get wrong ------------------------------------------------------------------------------


def test_a_vocabulary_without_a_mask_is_refused_where_one_is_needed() -> None:
    special = SpecialIds(pad=PAD, bos=BOS, eos=EOS)
    with pytest.raises(InputError, match="denoising needs a tokenizer with a mask token"):
        make(special_ids=special)
    make(DenoisingOptions(mask_share=0, delete_share=0.2), special_ids=special)


@pytest.mark.parametrize("sizes", [{"seq_len": 2}, {"target_seq_len": 2}])
def test_a_context_without_room_is_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="leave no room"):
        make(**sizes)
