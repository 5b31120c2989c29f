"""Templates against the conventions of `transformers`, and our file inside it."""

from __future__ import annotations

import json

import pytest
import transformers

FIRST, SECOND = "the quick fox", "low dog"


def _tokens(tokenizer, ids):
    return [tokenizer.token(i) for i in ids]


def test_bert_template_equals_transformers(make):
    tokenizer = make("wordpiece", template="bert")
    vocab = json.loads(tokenizer.to_json())["model"]["vocab"]
    reference = transformers.BertTokenizer(vocab=vocab, do_lower_case=False)
    expected = reference(FIRST, SECOND)
    assert tokenizer.encode_pair(FIRST, SECOND) == (expected["input_ids"], expected["token_type_ids"])
    assert tokenizer.encode(FIRST, template=True) == reference(FIRST)["input_ids"]
    tokens = _tokens(tokenizer, tokenizer.encode_pair("the", "dog")[0])
    assert tokens == ["[CLS]", "the", "[SEP]", "dog", "[SEP]"]
    assert tokenizer.encode_pair("the", "dog")[1] == [0, 0, 0, 1, 1]


def test_roberta_template_equals_transformers(make):
    tokenizer = make("byte-bpe", template="roberta")
    model = json.loads(tokenizer.to_json())["model"]
    reference = transformers.RobertaTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    expected = reference(FIRST, SECOND, return_token_type_ids=True)
    assert tokenizer.encode_pair(FIRST, SECOND) == (expected["input_ids"], expected["token_type_ids"])
    assert tokenizer.encode(FIRST, template=True) == reference(FIRST)["input_ids"]
    tokens = _tokens(tokenizer, tokenizer.encode_pair(FIRST, SECOND)[0])
    assert tokens[0] == "<s>" and tokens[-1] == "</s>" and tokens.count("</s>") == 3


def test_t5_template(make):
    tokenizer = make("unigram", template="t5")
    plain = tokenizer.encode(FIRST)
    eos = tokenizer.special.eos
    assert tokenizer.encode(FIRST, template=True) == [*plain, eos]
    ids, types = tokenizer.encode_pair(FIRST, SECOND)
    assert ids == [*plain, eos, *tokenizer.encode(SECOND), eos]
    assert set(types) == {0}


def test_seq2seq_template(make):
    tokenizer = make("bpe", template="seq2seq")
    special = tokenizer.special
    first, second = tokenizer.encode(FIRST), tokenizer.encode(SECOND)
    assert tokenizer.encode(FIRST, template=True) == [special.bos, *first, special.eos]
    ids, types = tokenizer.encode_pair(FIRST, SECOND)
    assert ids == [special.bos, *first, special.eos, *second, special.eos]
    assert types == [0] * (len(first) + 2) + [1] * (len(second) + 1)


@pytest.mark.parametrize("template", ["gpt", "none"])
def test_gpt_adds_nothing(make, template):
    tokenizer = make("byte-bpe", template=template)
    assert tokenizer.encode(FIRST, template=True) == tokenizer.encode(FIRST)


def test_decoding_skips_special_tokens_unless_asked(make):
    tokenizer = make("byte-bpe", template="roberta")
    ids = tokenizer.encode(FIRST, template=True)
    assert tokenizer.decode(ids) == FIRST
    assert tokenizer.decode(ids, skip_special=False) == f"<s>{FIRST}</s>"


@pytest.mark.parametrize(
    ("model", "template"),
    [
        ("byte-bpe", "gpt"),
        ("bpe", "seq2seq"),
        ("wordpiece", "bert"),
        ("unigram", "t5"),
        ("word", "bert"),
        ("char", "gpt"),
    ],
)
def test_our_file_works_inside_transformers(make, tmp_path, model, template):
    tokenizer = make(model, template=template)
    path = tokenizer.save(tmp_path / "tokenizer.json")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    for text in ("the quick fox", "  two  spaces\n", "It's 345 (again)!"):
        assert reference(text)["input_ids"] == tokenizer.encode(text, template=True)
        ids = tokenizer.encode(text)
        assert reference.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
