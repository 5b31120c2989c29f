"""Span corruption: T5's example and shares, its inverse, what fits the context, and the loss of a tiny model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.cases import model_of, unpadded
from tformer.data.batching.batch import Batch
from tformer.objectives import span_corruption
from tformer.objectives.base import ObjectiveContext, total_loss
from tformer.objectives.span_corruption import (
    SpanCorruption,
    SpanCorruptionOptions,
    corrupt_spans,
    noise_mask,
    random_parts,
    span_counts,
)
from tformer.support.errors import InputError
from tformer.tokenizer.special import DecoderTokens, SpecialIds

PAD, EOS, UNK, WORDS, VOCAB, SEQ_LEN = 0, 1, 2, 40, 50, 32
SENTINELS = tuple(range(VOCAB - 1, WORDS - 1, -1))  # <extra_id_0> has the highest id
SPECIAL = SpecialIds(pad=PAD, eos=EOS, unk=UNK, sentinels=SENTINELS)
PLAIN = SpanCorruptionOptions()


def restore_spans(source: Any, target: Any, sentinels: tuple[int, ...]) -> np.ndarray:
    """The original text of a (source, target): what follows each sentinel in the target replaces it in the source."""
    source, target = np.array(source, dtype=np.int64), np.array(target, dtype=np.int64)
    places = np.flatnonzero(np.isin(target, np.asarray(sentinels)))
    spans = {int(part[0]): part[1:] for part in np.split(target, places)[1:]}
    parts = [spans.get(int(token), source[i : i + 1]) for i, token in enumerate(source)]
    return np.concatenate([source[:0], *parts])


def make(options: SpanCorruptionOptions = PLAIN, **more: Any) -> SpanCorruption:
    values = {"special_ids": SPECIAL, "seq_len": SEQ_LEN, "vocab_size": VOCAB, "target": DecoderTokens(PAD, EOS)}
    return SpanCorruption(options, ObjectiveContext(**{**values, "frame": ((), (EOS,)), **more}))


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(UNK, WORDS, size=length)


def collate(samples: Any, seed: int = 0, options: SpanCorruptionOptions = PLAIN, **more: Any) -> Batch:
    return make(options, **more).collate(samples, rng=np.random.default_rng(seed))


def corrupted(
    ids: np.ndarray, seed: int = 0, density: float = 0.15, mean: float = 3.0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return corrupt_spans(ids, rng, noise_density=density, mean_span_length=mean, sentinels=SENTINELS)


# --- the corruption --------------------------------------------------------------------------------------------------


def test_the_example_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.array(["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week"])
    hidden = np.isin(words, ["for", "inviting", "last"])
    monkeypatch.setattr(span_corruption, "span_counts", lambda *_: (3, 2))
    monkeypatch.setattr(span_corruption, "noise_mask", lambda *_: hidden)
    source, target = corrupted(np.arange(10))
    x, y, z = SENTINELS[:3]
    assert source.tolist() == [0, 1, x, 4, 5, 6, 7, y, 9]
    assert target.tolist() == [x, 2, 3, y, 8, z]


@given(st.integers(0, 90), st.integers(0, 10**6), st.floats(0.01, 0.99), st.floats(1, 10))
def test_source_and_target_give_back_the_text(length: int, seed: int, density: float, mean: float) -> None:
    ids = text(length, seed)
    source, target = corrupted(ids, seed, density, mean)
    assert restore_spans(source, target, SENTINELS).tolist() == ids.tolist()


@given(st.integers(2, 90), st.integers(0, 10**6), st.floats(0.01, 0.99), st.floats(1, 10))
def test_the_sentinels_come_in_order_and_the_first_unused_one_ends_the_target(
    length: int, seed: int, density: float, mean: float
) -> None:
    source, target = corrupted(text(length, seed), seed, density, mean)
    noise, spans = span_counts(length, density, mean, len(SENTINELS))
    assert source[source >= WORDS].tolist() == list(SENTINELS[:spans])
    assert target[target >= WORDS].tolist() == list(SENTINELS[: spans + 1])
    assert target[0] == SENTINELS[0] and target[-1] == SENTINELS[spans]
    assert len(source) == length - noise + spans and len(target) == noise + spans + 1
    assert source[0] < WORDS  # the text begins with what is kept, as in T5


@pytest.mark.parametrize(
    ("length", "density", "mean", "sentinels", "expected"),
    [
        (512, 0.15, 3.0, 100, (77, 26)),  # T5's own setting
        (568, 0.15, 3.0, 100, (85, 28)),  # whose source and eos fill 512 tokens
        (100, 0.15, 3.0, 4, (15, 3)),  # fewer sentinels: fewer, longer spans
        (10, 0.9, 1.0, 100, (9, 1)),  # every span needs a token that is kept before it
        (2, 0.15, 3.0, 100, (1, 1)),
        (2, 0.99, 3.0, 100, (1, 1)),
        (1, 0.5, 1.0, 100, (0, 0)),
        (0, 0.5, 1.0, 100, (0, 0)),
    ],
)
def test_how_many_tokens_in_how_many_spans(
    length: int, density: float, mean: float, sentinels: int, expected: tuple[int, int]
) -> None:
    assert span_counts(length, density, mean, sentinels) == expected


def test_a_mask_has_the_counts_and_alternates() -> None:
    for seed in range(50):
        mask = noise_mask(30, 9, 4, np.random.default_rng(seed))
        assert mask.sum() == 9 and not mask[0] and mask[-1]
        assert (np.diff(mask.astype(int)) == 1).sum() == 4


def test_every_division_is_as_likely_as_any_other() -> None:
    rng = np.random.default_rng(0)
    found = [tuple(random_parts(5, 3, rng)) for _ in range(6000)]
    counts = {division: found.count(division) for division in set(found)}
    assert len(counts) == 6 and all(sum(division) == 5 and min(division) >= 1 for division in counts)
    assert all(abs(count - 1000) < 150 for count in counts.values())


def test_every_token_but_the_first_is_noise_as_often() -> None:
    rng = np.random.default_rng(0)
    shares = np.mean([noise_mask(100, 15, 5, rng) for _ in range(4000)], axis=0)
    assert abs(shares[10:90].mean() - 0.15) < 0.02 and shares[10:90].std() < 0.02


# --- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_holds_the_text_and_both_sides_end() -> None:
    samples = [text(length, length) for length in (30, 3, 17)]
    for (source, labels), ids in zip(unpadded(collate(samples)), samples, strict=True):
        assert source[-1] == EOS and labels[-1] == EOS
        assert restore_spans(source[:-1], labels[:-1], SENTINELS).tolist() == ids.tolist()


@pytest.mark.parametrize("length", [1, 2])
def test_very_short_windows(length: int) -> None:
    ids = text(length)
    source, labels = unpadded(collate([ids]))[0]
    assert restore_spans(source[:-1], labels[:-1], SENTINELS).tolist() == ids.tolist()


def test_special_tokens_of_a_window_are_left_out_but_the_unknown_one() -> None:
    framed = np.array([5, UNK, 6, EOS, 7, SENTINELS[3], 8, EOS])
    source, labels = unpadded(collate([framed]))[0]
    assert restore_spans(source[:-1], labels[:-1], SENTINELS).tolist() == [5, UNK, 6, 7, 8]
    assert unpadded(collate([np.array([EOS, EOS])]))[0][1] == [SENTINELS[0], EOS]


@pytest.mark.parametrize("length", [2, 9, 30])
@pytest.mark.parametrize("mean", [1.0, 3.0])
def test_the_expected_length_of_a_target_is_what_the_decoder_reads(length: int, mean: float) -> None:
    options = SpanCorruptionOptions(mean_span_length=mean)
    batch = collate([text(length)], options=options, seq_len=64)
    assert batch.decoder_input_ids is not None
    assert SpanCorruption.target_length(float(length), 0.0, options) == batch.decoder_input_ids.shape[1]


def test_t5_fills_512_tokens_with_568_of_text() -> None:
    more: dict[str, Any] = {
        "seq_len": 512,
        "special_ids": SpecialIds(pad=0, eos=1, sentinels=tuple(range(149, 49, -1))),
    }
    objective = make(vocab_size=150, target_seq_len=114, **more)
    # t5's own helper says 114 for the target, without the last sentinel
    assert make(vocab_size=150, target_seq_len=115, **more).room == 568 and objective.room < 568


@given(st.integers(4, 64), st.integers(5, 64), st.floats(0.05, 0.95), st.floats(1, 6), st.booleans())
def test_room_is_the_most_that_fits_and_longer_windows_are_cut(
    seq_len: int, target_len: int, density: float, mean: float, forced: bool
) -> None:
    options = SpanCorruptionOptions(noise_density=density, mean_span_length=mean)
    target = DecoderTokens(PAD, EOS, forced_bos=UNK if forced else None)
    more = {"seq_len": seq_len, "target_seq_len": target_len, "target": target}
    room = make(options, **more).room
    batch = collate([text(200)], 0, options, **more)
    assert batch.input_ids is not None and batch.decoder_input_ids is not None
    assert batch.input_ids.shape[1] <= seq_len and batch.decoder_input_ids.shape[1] <= target_len
    noise, spans = span_counts(room + 1, density, mean, len(SENTINELS))
    assert room + 1 - noise + spans + 1 > seq_len or noise + spans + 2 + forced > target_len


def test_a_window_of_the_whole_context_stays_within_the_model() -> None:
    model = model_of("seq2seq", vocab_size=VOCAB)  # which refuses longer inputs
    for density, mean in ((0.15, 3.0), (0.5, 1.0), (0.95, 1.0), (0.01, 1.0)):
        options = SpanCorruptionOptions(noise_density=density, mean_span_length=mean)
        batch = collate([text(SEQ_LEN, seed) for seed in range(3)], 0, options)
        assert torch.isfinite(total_loss(make(options).loss(model, batch).terms))


# --- the loss, and what users get wrong ------------------------------------------------------------------------------


def test_a_vocabulary_without_sentinels_is_refused() -> None:
    with pytest.raises(InputError, match=r"at least 2 sentinels .* this one has 1"):
        make(special_ids=SpecialIds(pad=PAD, eos=EOS, sentinels=(9,)))


def test_two_sentinels_are_enough() -> None:
    _, labels = unpadded(collate([text(30)], special_ids=SpecialIds(pad=PAD, eos=EOS, sentinels=SENTINELS[:2])))[0]
    assert [token for token in labels if token >= WORDS] == list(SENTINELS[:2])


@pytest.mark.parametrize("sizes", [{"seq_len": 1}, {"target_seq_len": 1}])
def test_a_context_without_room_is_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="leave no room"):
        make(**sizes)
