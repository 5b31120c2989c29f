"""Sequence to sequence: what is shifted where, both sides' padding, word dropout, and the loss by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.objectives.cases import Pair, model_of
from tformer.data.batching.batch import Batch
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import ObjectiveContext, total_loss
from tformer.objectives.seq2seq import Seq2Seq, Seq2SeqOptions
from tformer.tokenizer.special import DecoderTokens, SpecialIds

PAD, UNK, START, END = 0, 1, 2, 3
SPECIAL = SpecialIds(pad=PAD, unk=UNK, bos=START, eos=END, mask=4)
VOCAB, SEQ_LEN = 40, 32
LENGTHS = ((5, 3), (1, 9), (12, 1), (5, 4), (20, 20))


def pair(source: int, target: int, seed: int = 0) -> Pair:
    draw = np.random.default_rng([seed, source, target])
    words = [draw.integers(5, VOCAB, size=size) for size in (source, target)]
    return Pair(np.array([START, *words[0], END]), np.array([*words[1], END]))


PAIRS = [pair(*lengths) for lengths in LENGTHS]


def make(options: Seq2SeqOptions = Seq2SeqOptions(), **more: Any) -> Seq2Seq:
    values = {"special_ids": SPECIAL, "seq_len": SEQ_LEN, "vocab_size": VOCAB, "target": DecoderTokens(START, END)}
    return Seq2Seq(options, ObjectiveContext(**{**values, **more}))


def collate(
    pairs: list[Pair], options: Seq2SeqOptions = Seq2SeqOptions(), training: bool = True, seed: int = 0, **more: Any
) -> Batch:
    return make(options, **more).collate(pairs, rng=np.random.default_rng(seed), training=training)  # type: ignore[arg-type]


def rows_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert batch.input_ids is not None and batch.decoder_input_ids is not None and batch.labels is not None
    return batch.input_ids, batch.decoder_input_ids, batch.labels


def test_the_decoder_reads_the_labels_shifted_right() -> None:
    sources, inputs, labels = rows_of(collate([PAIRS[0]]))
    assert sources.tolist() == [PAIRS[0].source.tolist()]
    assert labels.tolist() == [PAIRS[0].target.tolist()]
    assert inputs.tolist() == [[START, *PAIRS[0].target[:-1]]]


def test_a_forced_bos_is_the_first_label() -> None:
    _, inputs, labels = rows_of(collate([PAIRS[0]], target=DecoderTokens(END, END, forced_bos=START)))
    assert labels.tolist() == [[START, *PAIRS[0].target]]
    assert inputs.tolist() == [[END, START, *PAIRS[0].target[:-1]]]


def test_an_empty_target_is_its_end_alone() -> None:
    _, inputs, labels = rows_of(collate([Pair(np.array([START, 9, END]), np.array([END]))]))
    assert labels.tolist() == [[END]] and inputs.tolist() == [[START]]


def test_each_side_is_padded_on_the_right_to_a_width_of_its_own() -> None:
    batch = collate(PAIRS, padding="left")
    sources, inputs, labels = rows_of(batch)
    assert sources.shape == (5, 24) and inputs.shape == labels.shape == (5, 24)
    assert rows_of(collate(PAIRS[:2]))[0].shape == (2, 8) and rows_of(collate(PAIRS[:2]))[1].shape == (2, 16)
    assert batch.attention_mask is not None and batch.decoder_attention_mask is not None
    for row, one in enumerate(PAIRS):
        t, u = len(one.source), len(one.target)
        assert sources[row].tolist() == [*one.source, *[PAD] * (24 - t)]
        assert labels[row].tolist() == [*one.target, *[IGNORED_LABEL] * (24 - u)]
        assert (inputs[row, u:] == PAD).all()
        assert batch.attention_mask[row].tolist() == [column < t for column in range(24)]
        assert batch.decoder_attention_mask[row].tolist() == [column < u for column in range(24)]


def test_masks_are_none_where_nothing_is_padded() -> None:
    both = collate([PAIRS[0], PAIRS[0]])
    assert both.attention_mask is None and both.decoder_attention_mask is None
    one = collate([PAIRS[0], PAIRS[3]])  # as long on the source's side
    assert one.attention_mask is None and one.decoder_attention_mask is not None


def test_pad_to_max_gives_every_batch_one_shape() -> None:
    sources, inputs, labels = rows_of(collate(PAIRS[:2], pad_to="max", target_seq_len=24))
    assert sources.shape == (2, SEQ_LEN) and inputs.shape == labels.shape == (2, 24)


def test_tokens_of_both_sides_are_counted() -> None:
    assert collate(PAIRS).num_tokens == sum(len(one.source) + len(one.target) for one in PAIRS)


def test_an_empty_source_without_special_tokens_is_a_column_of_padding() -> None:
    batch = collate([Pair(np.zeros(0, dtype=np.int64), np.array([7, END]))])
    assert rows_of(batch)[0].tolist() == [[PAD]]
    assert batch.attention_mask is not None and not batch.attention_mask.any()


@pytest.mark.parametrize("lengths", [(SEQ_LEN - 1, 1), (1, 16)])
def test_pairs_longer_than_the_context_are_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="more than the maximum of"):
        collate([pair(*lengths)], target_seq_len=16)


# --- word dropout ----------------------------------------------------------------------------------------------------


def test_word_dropout_writes_what_each_vocabulary_has() -> None:
    target = SpecialIds(pad=0, bos=2, eos=3, mask=7)
    more: dict[str, Any] = {"special_ids": SpecialIds(pad=PAD, eos=END), "target_special_ids": target}
    sources, inputs, _ = rows_of(collate([pair(12, 12)], Seq2SeqOptions(word_dropout=0.99999), **more))
    assert sources[0, 1:-1].tolist() == [PAD] * 12 and inputs[0, 1:].tolist() == [7] * 12


# --- the loss --------------------------------------------------------------------------------------------------------


def test_each_side_may_have_a_vocabulary_of_its_own() -> None:
    target = SpecialIds(pad=5, bos=6, eos=7)
    pairs = [Pair(np.array([39, 38]), np.array([9, 9, 7])), Pair(np.array([30]), np.array([8, 7]))]
    batch = collate(pairs, target_special_ids=target, target=DecoderTokens(6, 7))
    assert rows_of(batch)[1].tolist()[1][:3] == [6, 8, 5]
    model = model_of("seq2seq", vocab_size=VOCAB, target_vocab_size=10)
    logits = [
        model(torch.from_numpy(one.source)[None], decoder_input_ids=torch.tensor([[6, *one.target[:-1]]])).logits[0]
        for one in pairs
    ]
    expected = F.cross_entropy(torch.cat(logits), torch.tensor([9, 9, 7, 8, 7]))
    torch.testing.assert_close(total_loss(make().loss(model, batch).terms), expected)
