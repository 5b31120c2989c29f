"""Texts as a model reads them: templates, offsets, truncation, padded batches."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.encoding import TextReader, encode_prompt
from tformer.data.shards.template import assemble, pair_template, single_template
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

KINDS = ("byte-bpe", "bpe", "wordpiece", "unigram", "word", "char")
TEMPLATES = ("none", "gpt", "bert", "roberta", "t5", "seq2seq")
TEXT = "the cat sat on the mat, and the dog sat on the log. naïve café 123\n"
TEXTS = st.text(alphabet="thecatsoml ndgï,.1\n", max_size=40)


@cache
def trained(model: str, template: str) -> Tokenizer:
    options = TokenizerOptions(model=model, template=template, vocab_size=420)  # type: ignore[arg-type]
    return train_tokenizer(lambda: iter([TEXT * 30]), options)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_offsets_are_the_characters_of_each_token(kind: str, text: str) -> None:
    tokenizer = trained(kind, "bert")
    found = TextReader.of_tokenizer(tokenizer).encode(text)
    assert list(found.ids) == tokenizer.encode(text, template=True)
    spans = [span for span in found.spans if span is not None]
    assert len(spans) == found.from_template.count(False) == len(tokenizer.encode(text))
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    assert sorted(spans) == spans
    if kind in ("byte-bpe", "char", "bpe"):  # nothing is normalized: the tokens cover the text
        assert {place for start, end in spans for place in range(start, end)} == set(range(len(text)))


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_encoders_reading_is_what_training_assembles(template: str) -> None:
    tokenizer = trained("bpe", template)
    reader = TextReader.of_encoder(tokenizer, max_length=9, truncation="head_tail")
    texts = ["the cat", "on the mat and the dog sat on the log"]
    encoded = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, encoded, strict=True):
        frame = single_template(tokenizer)
        expected = assemble([ids], frame, room=9 - frame.num_special, pairs=False, truncation="head_tail")
        found = reader.encode(text, cut=True)
        assert (list(found.ids), list(found.types)) == (expected[0].tolist(), expected[1].tolist())
        assert found.num_cut == max(0, len(ids) + frame.num_special - 9)
    frame = pair_template(tokenizer)
    expected = assemble(encoded, frame, room=9 - frame.num_special, pairs=True, truncation="head_tail")
    found = reader.encode(*texts, cut=True)
    assert (list(found.ids), list(found.types)) == (expected[0].tolist(), expected[1].tolist())
    assert set(found.parts) == {0, 1}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("text", ["the cat", ""])
def test_a_prompts_reading_is_what_generation_reads(template: str, text: str) -> None:
    tokenizer = trained("byte-bpe", template)
    assert list(TextReader.of_prompts(tokenizer).encode(text).ids) == encode_prompt(tokenizer, text)


def test_a_target_stands_between_start_and_end() -> None:
    tokenizer = trained("bpe", "seq2seq")
    bos, eos = tokenizer.special.bos, tokenizer.special.eos
    assert bos is not None and eos is not None
    found = TextReader.of_target(tokenizer, [bos], eos).encode("the dog")
    assert list(found.ids) == [bos, *tokenizer.encode("the dog"), eos]


def test_a_batch_is_padded_on_its_side_and_masked() -> None:
    tokenizer = trained("bpe", "bert")
    texts = ["the", "the cat sat on the mat"]
    for side in ("right", "left"):
        settings: dict[str, Any] = {"padding_side": side, "max_length": 12, "pad_to": "max"}
        reader = TextReader.of_encoder(tokenizer, **settings)
        encoded = [reader.encode(text) for text in texts]
        batch = reader.batch(encoded)
        assert {values.shape for values in batch.values()} == {(2, 12)}
        for row, text in enumerate(encoded):
            mask = batch["attention_mask"][row].astype(bool)
            assert batch["input_ids"][row][mask].tolist() == list(text.ids)
            assert set(batch["input_ids"][row][~mask]) <= {tokenizer.special.pad}
            assert (np.flatnonzero(mask)[0] == 0) == (side == "right")


def test_what_does_not_fit_is_one_clear_error() -> None:
    tokenizer = trained("bpe", "bert")
    with pytest.raises(InputError, match="no template for two texts"):
        TextReader.of_prompts(tokenizer).encode("a", "b")
    with pytest.raises(InputError, match="the maximum length: 2 tokens leave no room for text"):
        TextReader.of_encoder(tokenizer, max_length=2).encode("the cat", cut=True)
    with pytest.raises(InputError, match="needs a maximum length"):
        TextReader.of_tokenizer(tokenizer, pad_to="max").batch([])
