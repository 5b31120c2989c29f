"""Word dropout in every objective that has it: inputs change, labels and special tokens do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.objectives.cases import Pair
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives import CausalLmOptions, build_objective
from tformer.objectives.base import ObjectiveContext
from tformer.objectives.collate import UNK_FIRST, WordDropout, drop_words
from tformer.objectives.denoising import DenoisingOptions
from tformer.objectives.masked_lm import MaskedLmOptions
from tformer.objectives.seq2seq import Seq2SeqOptions
from tformer.objectives.span_corruption import SpanCorruptionOptions
from tformer.support.errors import InputError
from tformer.tokenizer.special import DecoderTokens, SpecialIds

V, UNK, MASK, EOS = 40, 3, 4, 2
SPECIAL = SpecialIds(pad=0, bos=1, eos=EOS, unk=UNK, mask=MASK, sentinels=(39, 38, 37, 36, 35, 34, 33))
CONTEXT = ObjectiveContext(SPECIAL, seq_len=64, vocab_size=V, target=DecoderTokens(start=0, eos=EOS))
BYTES = ObjectiveContext(SpecialIds(eos=EOS), seq_len=64, vocab_size=V)
ROWS = np.random.default_rng(0).integers(5, 33, size=(50, 41))
PAIRS = [Pair(row, np.append(row[::-1], EOS)) for row in ROWS]


def collate(options: Any, context: ObjectiveContext = CONTEXT, *, training: bool = True, samples: Any = ROWS) -> Any:
    return build_objective([options], context).collate(samples, rng=np.random.default_rng(7), training=training)


def test_each_token_is_replaced_with_probability_p_by_itself() -> None:
    ids, rng = np.full((400, 100), 9), np.random.default_rng(0)
    dropped = drop_words(ids, np.zeros_like(ids, dtype=bool), 0.3, UNK, rng) == UNK
    assert dropped.mean() == pytest.approx(0.3, abs=0.01)
    assert dropped.mean(axis=0).std() < 0.05 and dropped.mean(axis=1).std() < 0.08


def test_share_zero_changes_nothing_and_draws_nothing() -> None:
    rng = np.random.default_rng(0)
    drop = WordDropout(0.0, SpecialIds(), excluded=np.zeros(0, dtype=np.int64))
    row = ROWS[0]
    assert drop(row, rng) is row and drop.rows([row], rng)[0] is row
    assert rng.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize("samples", [ROWS, [row[: 5 + i % 30] for i, row in enumerate(ROWS)]], ids=["array", "rows"])
def test_causal_lm_replaces_inputs_and_keeps_labels(samples: Any) -> None:
    still, noisy = (collate(CausalLmOptions(word_dropout=share), samples=samples) for share in (0.0, 0.3))
    assert noisy.labels.equal(still.labels)
    real = still.labels != IGNORED_LABEL
    changed = noisy.input_ids != still.input_ids
    assert (noisy.input_ids[changed] == UNK).all() and not changed[~real].any()
    assert float(changed[real].float().mean()) == pytest.approx(0.3, abs=0.05)


def test_a_vocabulary_without_a_token_to_write_takes_random_ones_but_never_special_ones() -> None:
    samples = ROWS.copy()
    samples[:, 10] = EOS
    still, noisy = (collate(CausalLmOptions(word_dropout=share), BYTES, samples=samples) for share in (0.0, 0.5))
    changed = noisy.input_ids != still.input_ids
    assert noisy.labels.equal(still.labels) and not changed[:, 10].any()
    written = noisy.input_ids[changed]
    assert len(written.unique()) > 20 and EOS not in written
    with pytest.raises(InputError, match="word_dropout needs a tokenizer"):
        WordDropout(0.1, SpecialIds(), excluded=np.zeros(0, dtype=np.int64), roles=UNK_FIRST)
    with pytest.raises(InputError, match="word_dropout needs a tokenizer"):
        build_objective([Seq2SeqOptions(word_dropout=0.1)], replace(CONTEXT, special_ids=SpecialIds(eos=EOS)))


def test_masked_lm_replaces_only_what_is_not_to_be_predicted_and_writes_no_mask() -> None:
    still, noisy = (collate(MaskedLmOptions(word_dropout=share)) for share in (0.0, 0.3))
    assert noisy.labels.equal(still.labels)
    changed = noisy.input_ids != still.input_ids
    context = still.labels == IGNORED_LABEL
    assert (noisy.input_ids[changed] == UNK).all() and not changed[~context].any()
    assert float(changed[context].float().mean()) == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("make", [SpanCorruptionOptions, DenoisingOptions, Seq2SeqOptions])
def test_pairs_lose_words_of_the_source_and_of_the_decoders_input(make: Any) -> None:
    samples = PAIRS if make is Seq2SeqOptions else ROWS
    still, noisy = (collate(make(word_dropout=share), samples=samples) for share in (0.0, 0.3))
    assert noisy.labels.equal(still.labels)
    special = np.array(SPECIAL.all)
    for name in ("input_ids", "decoder_input_ids"):
        before, after = getattr(still, name).numpy(), getattr(noisy, name).numpy()
        changed = before != after
        ordinary = ~np.isin(before, special)
        assert (after[changed] == UNK).all() and not changed[~ordinary].any()
        assert changed[ordinary].mean() == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(
    "make", [CausalLmOptions, MaskedLmOptions, SpanCorruptionOptions, DenoisingOptions, Seq2SeqOptions]
)
def test_evaluation_drops_nothing(make: Any) -> None:
    samples = PAIRS if make is Seq2SeqOptions else ROWS
    still, evaluated = (collate(make(word_dropout=p), training=False, samples=samples) for p in (0.0, 0.5))
    assert evaluated.input_ids.equal(still.input_ids) and evaluated.labels.equal(still.labels)
