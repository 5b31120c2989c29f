"""The six models under every template: kind, size, special ids, and what each gives back."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, pipeline, train_tokenizer
from tformer.tokenizer.options import TemplateName, TokenizerModel
from tformer.tokenizer.pipeline import MAX_WORD_LENGTH, build_pre_tokenizer
from tformer.tokenizer.special import SpecialIds
from tformer.tokenizer.train import PROBES, probe_losslessness

MODELS = get_args(TokenizerModel)
TEMPLATES = get_args(TemplateName)
SPECIAL_TEXT = (
    "[PAD] [UNK][CLS] [SEP][MASK] [START][END] <s></s> <pad> <unk><mask> <|endoftext|><|pad|> <extra_id_0> <0x41>"
)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_with_every_template(make, model, template):
    tokenizer = make(model, template=template)
    assert tokenizer.kind == model
    if model != "char":
        assert tokenizer.vocab_size <= 500
    tokens = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
    assert len(set(tokens)) == tokenizer.vocab_size  # ids are contiguous, tokens unique
    ids = tokenizer.encode("the quick brown fox")
    assert ids and max(ids) < tokenizer.vocab_size
    assert tokenizer.decode(ids) == "the quick brown fox"
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.encode("The fox, again!") == tokenizer.encode("The fox, again!")
    assert (again.sha256, again.special, again.kind) == (tokenizer.sha256, tokenizer.special, tokenizer.kind)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("model", MODELS)
def test_special_token_text_in_data_stays_text(make, model, template):
    """Although the training text is full of it."""
    tokenizer = make(model, template=template)
    ids = tokenizer.encode(SPECIAL_TEXT) + tokenizer.encode(SPECIAL_TEXT.replace(" ", ""))
    reached = {tokenizer.token(i) for i in ids if tokenizer.is_special(i)}
    assert reached <= {"[UNK]", "<unk>"}  # an unseen character is unknown; nothing else is special
    if tokenizer.special.unk is not None and model in ("bpe", "unigram", "char"):
        seen = tokenizer.encode("[CLS] and [MASK] and <s> </s> <pad> <unk> <|endoftext|> <extra_id_0> <0x41>")
        assert not any(tokenizer.is_special(i) for i in seen)
        assert tokenizer.decode(seen).startswith("[CLS] and [MASK] and <s> </s> <pad> <unk> <|endoftext|>")


def test_special_ids_of_each_template(make):
    assert make("byte-bpe", template="gpt").special == SpecialIds(bos=0, eos=0, pad=1)
    assert make("char", template="gpt").special == SpecialIds(bos=0, eos=0, pad=1, unk=2)
    assert make("wordpiece", template="bert").special == SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    assert make("byte-bpe", template="roberta").special == SpecialIds(bos=0, cls=0, pad=1, eos=2, sep=2, unk=3, mask=4)
    assert make("bpe", template="seq2seq").special == SpecialIds(pad=0, unk=1, bos=2, eos=3, cls=4, sep=5, mask=6)
    assert make("byte-bpe", template="none").special == SpecialIds()
    assert make("word", template="none").special == SpecialIds(unk=0)


def test_sentinels_stand_at_the_end_as_in_t5(make):
    tokenizer = make("unigram", template="t5")
    assert (tokenizer.special.pad, tokenizer.special.eos, tokenizer.special.unk) == (0, 1, 2)
    assert len(tokenizer.special.sentinels) == 100
    assert tokenizer.special.sentinels[0] == tokenizer.vocab_size - 1
    assert tokenizer.token(tokenizer.special.sentinels[7]) == "<extra_id_7>"
    assert len(make("bpe", template="seq2seq", sentinels=5).special.sentinels) == 5
    assert make("bpe", template="t5", sentinels=0).special.sentinels == ()


TAGS = ("PAST", "V.PTCP", "12", "<en>", "é")


@pytest.mark.parametrize("model", MODELS)
def test_an_added_token_is_one_token_where_it_stands_alone(make, model):
    tags = TAGS[: 4 if model == "byte-bpe" else 5]
    tokenizer = make(model, template="t5", added_tokens=tags)
    tag_ids = [tokenizer.token_id(tag) for tag in tags]
    for text in ("the PAST;V.PTCP,12 <en>the", " ".join(tags), "PAST"):
        found = [token for token in tokenizer.encode(text) if token in tag_ids]
        expected = sorted((text.find(tag), number) for tag, number in zip(tags, tag_ids, strict=True) if tag in text)
        assert found == [number for _, number in expected]
    new = [number for tag, number in zip(tags, tag_ids, strict=True) if len(tag) > 2]  # the others may be entries
    assert new == sorted(new) and new[-1] < min(tokenizer.special.sentinels)
    if model != "char":
        assert tokenizer.vocab_size <= 500
    past = tokenizer.token_id("PAST")
    assert past not in tokenizer.encode("PASTE, xPAST, PAST1") and not tokenizer.is_special(past)
    assert Tokenizer.from_json(tokenizer.to_json()).encode("a PAST") == tokenizer.encode("a PAST")


@given(parts=st.lists(st.sampled_from([*TAGS[:4], "the", " ", ";", "quick", "x"]), max_size=20))
def test_added_tokens_lose_nothing(parts):
    tokenizer = _with_tags()
    text = "".join(parts)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids, spans = tokenizer.encode_spans(text)
    assert ids == tokenizer.encode(text) and "".join(text[start:end] for start, end in spans) == text


@cache
def _with_tags() -> Tokenizer:
    options = TokenizerOptions(model="byte-bpe", vocab_size=330, added_tokens=TAGS[:4])
    return train_tokenizer(lambda: iter(["the quick fox\n" * 50]), options)


def test_a_character_tokenizer_with_added_tokens_encodes_as_without_them(make):
    plain, tagged = make("char"), make("char", added_tokens=("PAST",))
    text = "It's 12 degrees at 345 Main St.; 東 they'll say"
    assert tagged.encode(text) == plain.encode(text)
    assert tagged.encode(text + " PAST") == [*plain.encode(text + " "), tagged.token_id("PAST")]


@pytest.mark.parametrize(
    ("model", "added", "words"),
    [
        ("char", " V", "found ' V', expected text without spaces"),
        ("word", "a b", "found 'a b', expected text without spaces"),
        ("char", "", "found '', expected text without spaces"),
        ("byte-bpe", "é", "found 'é', expected ASCII characters with model byte-bpe"),
        ("word", "[MASK]", r"found \[MASK\], which is a special token of template bert"),
    ],
)
def test_added_tokens_that_no_text_can_hold_are_refused(make, model, added, words):
    with pytest.raises((ValueError, InputError), match=f"added_tokens: {words}"):
        make(model, template="bert", added_tokens=(added,))


def test_a_token_of_a_byte_is_no_added_token(make):
    with pytest.raises(InputError, match="added_tokens: found <0x41>, which is a special token"):
        make("bpe", byte_fallback=True, added_tokens=("<0x41>",))


@pytest.mark.parametrize("option", [{"lowercase": True}, {"unicode": "nfkc"}, {"strip_accents": True}])
@pytest.mark.parametrize("model", MODELS)
def test_normalization_leaves_added_tokens_as_they_are(model, option):
    texts = ["the PAST ﬁ é dog É ABC\n" * 30]
    tags = ("PAST",) if model == "byte-bpe" else ("PAST", "ﬁ", "é")
    tokenizer = train_tokenizer(
        lambda: iter(texts), TokenizerOptions(model=model, vocab_size=400, added_tokens=tags, **option)
    )
    ids = tokenizer.encode("the " + " ".join(tags))
    assert [tokenizer.token_id(tag) for tag in tags] == [i for i in ids if tokenizer.token(i) in tags]


def test_marks_of_a_script_belong_to_its_words(make):
    tokenizer = make("char", added_tokens=("का",))
    assert tokenizer.token_id("का") not in tokenizer.encode("काम")
    assert tokenizer.token_id("का") in tokenizer.encode("the का dog")


def test_added_tokens_take_room_of_the_vocabulary(make):
    with pytest.raises(InputError, match="vocab_size must be at least 520") as error:
        make("byte-bpe", template="none", vocab_size=300, added_tokens=tuple(f"<{n}>" for n in range(264)))
    assert "special tokens, added tokens and sentinels take 264" in str(error.value.hint)


@pytest.mark.parametrize("pre_tokenization", ["tformer", "gpt-2"])
def test_byte_bpe_passes_every_probe(make, pre_tokenization):
    assert probe_losslessness(make("byte-bpe", pre_tokenization=pre_tokenization)) == []
    assert len(PROBES["word of 150 characters"]) == 150


def test_gpt_2s_pre_tokenization_cuts_as_its_pattern_and_a_long_word_in_training_only():
    text = "she'll say it's हिन्दी " + "ab" * 500
    steps = [build_pre_tokenizer(TokenizerOptions(pre_tokenization="gpt-2"), training=each) for each in (False, True)]
    words, trained = ([text[start:stop] for _, (start, stop) in step.pre_tokenize_str(text)] for step in steps)
    assert words == ["she", "'ll", " say", " it", "'s", " ह", "ि", "न", "्", "द", "ी", " " + "ab" * 500]
    assert max(map(len, trained)) == MAX_WORD_LENGTH and "".join(trained) == text


def test_gpt_2s_pre_tokenization_belongs_to_byte_bpe():
    with pytest.raises(ValueError, match="pre_tokenization gpt-2 needs model byte-bpe, found bpe"):
        TokenizerOptions(model="bpe", pre_tokenization="gpt-2")


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_byte_fallback_leaves_nothing_unknown(make, model):
    tokenizer = make(model, byte_fallback=True, vocab_size=600)
    assert [failure["probe"] for failure in probe_losslessness(tokenizer)] == ["lower one eighth block"]
    ids = tokenizer.encode("日本👩‍👧")
    assert tokenizer.special.unk not in ids
    assert tokenizer.decode(ids) == "日本👩‍👧"
    assert make(model).special.unk in make(model).encode("日本")


@given(text=st.text(max_size=60))
def test_byte_bpe_round_trip_of_any_text(text):
    tokenizer = _small("byte-bpe")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(max_size=60).filter(lambda text: "▁" not in text), model=st.sampled_from(["bpe", "unigram"]))
def test_byte_fallback_round_trip_of_any_text(text, model):
    tokenizer = _small(model)
    assert tokenizer.decode(tokenizer.encode(text)) == text


ALPHABET = "aé\n\t \r\x00日👩\u200d\u0301▁Ġ<>/s"


@given(text=st.text(alphabet=ALPHABET + "Z", max_size=60))
def test_char_keeps_every_character_and_equals_the_library(text):
    tokenizer = _small("char")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text.replace("Z", "")  # Z was not in the training text
    assert ids == tokenizer._rust.encode(text, add_special_tokens=False).ids  # the table equals the library


def test_char_vocabulary_is_every_character_in_order():
    tokenizer = _small("char")
    specials = ["<|endoftext|>", "<|pad|>", "<unk>"]
    assert [tokenizer.token(i) for i in range(tokenizer.vocab_size)] == specials + sorted(set(ALPHABET))
    assert tokenizer.encode("Z") == [tokenizer.special.unk]


@cache
def _small(model: str) -> Tokenizer:
    text = ALPHABET * 3 if model == "char" else "low lower lowest new newer newest wide wider 12 é\n" * 50
    options = TokenizerOptions(model=model, vocab_size=330, byte_fallback=model in ("bpe", "unigram"))
    return train_tokenizer(lambda: iter([text]), options)


def test_word_splits_at_white_space_and_punctuation(make):
    tokenizer = make("word")
    ids = tokenizer.encode("the  dog,\nlower.")
    assert [tokenizer.token(i) for i in ids] == ["the", "dog", ",", "lower", "."]
    assert tokenizer.decode(ids) == "the dog, lower."
    assert tokenizer.encode("zebra") == [tokenizer.special.unk]


def test_wordpiece_words_over_the_limit_are_unknown(make):
    tokenizer = make("wordpiece", template="bert")
    assert tokenizer.encode("x" * 101) == [tokenizer.special.unk]


def test_no_piece_is_longer_than_the_word_limit(monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_WORD_LENGTH", 8)
    options = TokenizerOptions(model="byte-bpe", vocab_size=400, template="none")
    tokenizer = train_tokenizer(lambda: iter(["a" * 1000 + " "] * 20), options)
    assert max(len(tokenizer.token(i)) for i in range(tokenizer.vocab_size)) <= 9  # a leading space does not count
    assert tokenizer.decode(tokenizer.encode("a" * 99)) == "a" * 99


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({"lowercase": True}, "HELLO Fox", "hello fox"),
        ({"unicode": "nfc"}, "cafe\u0301", "café"),
        ({"unicode": "nfkc"}, "ﬁne ²", "fine 2"),
        ({"strip_accents": True}, "café naïve", "cafe naive"),
        ({"strip_accents": True}, "한국", "한국"),
    ],
)
def test_normalization_options(make, options, text, expected):
    tokenizer = make("byte-bpe", **options)
    assert tokenizer.normalize(text) == expected
    assert tokenizer.decode(tokenizer.encode(text)) == expected
    assert probe_losslessness(tokenizer) == []  # lossless after the normalization that was asked for


@pytest.mark.parametrize("model", ["byte-bpe", "bpe", "unigram", "wordpiece", "word"])
def test_digits_are_split(make, model):
    tokenizer = make(model, digits=True)
    tokens = [tokenizer.token(i) for i in tokenizer.encode("at 345 12")]
    assert [t.strip("#▁Ġ") for t in tokens if any(c.isdigit() for c in t)] == ["3", "4", "5", "1", "2"]
    assert not any(len([c for c in tokenizer.token(i) if c.isdigit()]) > 1 for i in range(3, tokenizer.vocab_size))


@pytest.mark.parametrize("model", ["byte-bpe", "bpe", "word", "char"])
def test_training_again_gives_the_same_tokenizer(make, text, model):
    options = TokenizerOptions(model=model, vocab_size=500)
    again = train_tokenizer(lambda: iter([text]), options)
    assert again.to_json() == make(model).to_json()


def test_vocabulary_too_small_names_what_it_needs():
    with pytest.raises(InputError, match="at least 258 for model byte-bpe with template gpt, found 100"):
        train_tokenizer(lambda: iter(["text"]), TokenizerOptions(vocab_size=100))
    with pytest.raises(InputError, match="at least 104"):
        train_tokenizer(lambda: iter(["text"]), TokenizerOptions(model="bpe", template="t5", vocab_size=50))


def test_options_are_checked():
    with pytest.raises(ValueError, match="byte_fallback needs model bpe or unigram, found word"):
        TokenizerOptions(model="word", byte_fallback=True)
    with pytest.raises(ValueError, match="vocab_size must be 1 to 16,777,216, found 16777217"):
        TokenizerOptions(vocab_size=2**24 + 1)
    for name in ("vocab_size", "min_frequency", "sample_mb"):
        with pytest.raises(ValueError, match=f"{name} must be 1 to [0-9,]+, found 0"):
            replace(TokenizerOptions(), **{name: 0})
    with pytest.raises(ValueError, match="sentinels"):
        TokenizerOptions(sentinels=-1)


def test_dtype_fits_the_vocabulary(make):
    tokenizer = make("byte-bpe")
    assert tokenizer.dtype == "uint16"
    characters = [chr(c) for c in range(0x20, 0x12000) if not 0xD800 <= c <= 0xDFFF]
    large = train_tokenizer(lambda: iter(["".join(characters)]), TokenizerOptions(model="char"))
    assert large.vocab_size > 2**16
    assert large.dtype == "uint32"


def test_batches_equal_single_texts(make):
    for model in MODELS:
        tokenizer = make(model)
        texts = ["the dog", "", "a\nfox 12", "café"]
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
        assert tokenizer.decode(tokenizer.encode_batch(texts)[0]) == "the dog"
        assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_half_a_surrogate_pair_is_an_input_error(make):
    for model in ("byte-bpe", "char", "word"):
        with pytest.raises(InputError, match=r"U\+D800\) at character 1"):
            make(model).encode("a\ud800")


def test_ids_outside_the_vocabulary_are_refused(make):
    for model in ("byte-bpe", "char"):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            make(model).decode([10**6])
        with pytest.raises(ValueError):
            make(model).token(10**6)


def test_tinyshakespeare_has_nanogpts_65_characters(data_folder):
    text = (data_folder / "tinyshakespeare" / "train.txt").read_text(encoding="utf-8")
    options = TokenizerOptions(model="char", template="none")
    tokenizer = train_tokenizer(lambda: iter([text]), options)
    assert tokenizer.vocab_size == 65 + 1  # and <unk>
    assert tokenizer.decode(tokenizer.encode(text)) == text
