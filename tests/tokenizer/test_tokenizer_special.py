"""Special tokens and templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import transformers
from tokenizers import processors

from tformer.recipe.recipe import SpecialTokens, with_own_roles, with_roles
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import opening_ids

Make = Callable[..., Tokenizer]
KINDS = ("byte-bpe", "bpe", "wordpiece", "unigram", "word", "char")


@pytest.mark.parametrize("kind", KINDS)
def test_a_role_that_is_named_is_special_and_hidden(make: Make, kind: str) -> None:
    plain = make(kind, template="bert")
    the = plain.encode("dog")[0]
    named = plain.with_special(replace(plain.special, eos=the))
    assert named.special.eos == the and named.is_special(the)
    assert named.special.mask == plain.special.mask
    ids = plain.encode("The lazy dog jumps.")
    kept = [token for token in ids if token != the]
    assert named.decode(ids) == plain.decode(kept)
    assert named.decode(ids, skip_special=False) == plain.decode(ids, skip_special=False)
    stream = named.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == plain.decode(kept)


def test_the_tokenizer_that_was_there_stays_as_it_was_and_so_does_the_hash(make: Make) -> None:
    plain = make("bpe", template="gpt")
    named = plain.with_special(replace(plain.special, pad=9))
    assert plain.special.pad == 1 and not plain.is_special(9) and plain.decode([9]) != ""
    assert named.sha256 == plain.sha256 and named.to_json() == plain.to_json()
    assert named.encode("the dog") == plain.encode("the dog")


def test_what_a_recipe_names_counts(make: Make) -> None:
    plain = make("word", template="gpt")
    ids = SpecialTokens(mask=7, eos=8, decoder_start=3)
    named = with_own_roles(ids, plain)
    assert (named.special.mask, named.special.eos, named.special.bos) == (7, 8, plain.special.bos)
    assert with_own_roles(SpecialTokens(), plain) is plain


def test_of_two_vocabularies_the_ids_are_of_the_one_that_is_written(make: Make) -> None:
    source, target = make("word", template="seq2seq"), make("char", template="t5")
    first, second = with_roles(SpecialTokens(eos=6), source, target)
    assert first.special == source.special
    assert second is not None and second.special.eos == 6
    assert with_roles(SpecialTokens(eos=6), source, None)[0].special.eos == 6
    assert with_roles(SpecialTokens(eos=6), None, None) == (None, None)


def test_an_id_beyond_the_vocabulary_names_the_key(make: Make) -> None:
    plain = make("char", template="gpt")
    with pytest.raises(InputError, match=r"tokenizer\.special_ids\.mask: found 9999, expected an id of the tokenizer"):
        with_own_roles(SpecialTokens(mask=9999), plain)


@pytest.mark.parametrize("template", ["none", "gpt", "bert", "roberta", "t5", "seq2seq"])
def test_no_template_of_ours_opens_a_text(make: Make, template: str) -> None:
    assert make("bpe", template=template).opening == ()


def test_a_template_that_begins_a_text_and_does_not_end_it_opens_it(make: Make) -> None:
    def opening(single: str, *, in_sequence: bool = False) -> tuple[int, ...]:
        template = processors.TemplateProcessing(single, special_tokens=[("<a>", 3), ("<b>", 4)])
        processor = processors.Sequence([processors.ByteLevel(), template]) if in_sequence else template
        return opening_ids(json.loads(processor.__getstate__()))

    assert opening("<a> $A") == (3,)
    assert opening("<a> <b> $A") == (3, 4)
    assert opening("<a> $A", in_sequence=True) == (3,)
    assert opening("<a> $A <b>") == opening("$A <b>") == opening("$A") == ()
    assert opening_ids(None) == opening_ids({"type": "ByteLevel"}) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_that_a_text_spells_is_text_unless_asked_for(make: Make, kind: str) -> None:
    plain = make(kind, template="bert")
    reading = plain.reading_special()
    assert plain.special.mask is not None and plain.special.mask not in plain.encode("a [MASK] b")
    assert reading.encode("a [MASK] b").count(plain.special.mask) == 1
    assert plain.special.mask not in plain.encode("a [MASK] b")  # the one that was there stays as it was
    assert reading.sha256 == plain.sha256 and reading.encode("The dog") == plain.encode("The dog")


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
