"""Perplexity, bits per byte, BLEU and chrF."""

from __future__ import annotations

import math
import re
import sys
from types import SimpleNamespace

import pytest
import sacrebleu

from tformer.metrics.text import (
    bits_per_byte,
    bleu,
    chrf,
    perplexity,
    require_tokenizer,
    same_text,
    sequence_accuracy,
    ter,
    tokenized_note,
)
from tformer.support.errors import InputError


def test_perplexity_of_a_uniform_guess_is_the_vocabulary_size() -> None:
    assert perplexity(math.log(65)) == pytest.approx(65)
    assert perplexity(0.0) == 1.0


def test_perplexity_overflows_to_infinity() -> None:
    assert perplexity(1000.0) == math.inf
    assert perplexity(math.inf) == math.inf


def test_bits_per_byte_of_uniform_bytes_is_eight() -> None:
    assert bits_per_byte(100 * math.log(256), 100) == pytest.approx(8.0)


def test_bits_per_byte_does_not_depend_on_how_bytes_are_cut_into_tokens() -> None:
    pairs_as_tokens = 50 * math.log(256**2)
    assert bits_per_byte(pairs_as_tokens, 100) == pytest.approx(bits_per_byte(100 * math.log(256), 100))


def test_bits_per_byte_needs_bytes() -> None:
    with pytest.raises(ValueError, match="found 0"):
        bits_per_byte(1.0, 0)


REFERENCES = ["The dog ran over the hill.", "A man, who is old, sleeps here!", "Two birds are in the sky."]
OUTPUTS = ["The dog ran over a hill.", "A man who is old sleeps here!", "Two birds are in the sky."]


@pytest.fixture
def fake_moses(monkeypatch):
    """Replaces sacremoses in tests: normalizes quotes and separates punctuation from words."""
    fake = SimpleNamespace(
        __version__="9.9",
        MosesPunctNormalizer=lambda lang: SimpleNamespace(normalize=lambda text: text.replace("“", '"')),
        MosesTokenizer=lambda lang: SimpleNamespace(
            tokenize=lambda text, return_str, escape: re.sub(r"([.,!\"])", r" \1 ", text).strip()
        ),
    )
    monkeypatch.setitem(sys.modules, "sacremoses", fake)
    return fake


def test_equal_texts_have_the_highest_scores_and_signatures_name_what_was_done():
    score = bleu(REFERENCES, REFERENCES)
    assert score.score == pytest.approx(100.0) and "tok:13a" in score.signature and "case:mixed" in score.signature
    assert "case:lc" in bleu(REFERENCES, REFERENCES, lowercase=True).signature
    assert "tok:char" in bleu(["日本語です"], ["日本語です"], tokenize="char").signature
    assert {"nc:6", "nw:0"} <= set(chrf(OUTPUTS, REFERENCES).signature.split("|"))
    assert "case:lc" in chrf(OUTPUTS, REFERENCES, lowercase=True).signature


def test_bleu_and_chrf_are_those_of_sacrebleu():
    found = bleu(OUTPUTS, REFERENCES)
    assert found.score == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score
    assert f"version:{sacrebleu.__version__}" in found.signature
    assert chrf(OUTPUTS, REFERENCES).score == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score


def test_lowercase_forgives_case_only_where_asked_for():
    shouted = [text.upper() for text in REFERENCES]
    assert bleu(shouted, REFERENCES).score < 50 < bleu(shouted, REFERENCES, lowercase=True).score
    shares = [sequence_accuracy(shouted, REFERENCES, lowercase=lowercase) for lowercase in (False, True)]
    assert shares == [0, 1]


def test_sequence_accuracy_counts_equal_texts_whatever_white_space_parts_their_words():
    assert sequence_accuracy(OUTPUTS, REFERENCES) == pytest.approx(1 / 3)
    assert same_text(" a  b\t", "a b") and not same_text("ab", "a b") and same_text("", " ")


def test_moses_is_bleu_of_normalized_tokens_and_says_so(fake_moses):
    output, reference = ["“the old Dog, ran.", "a b c d e"], ['"The old dog , ran .', "a b c d e"]
    score = bleu(output, reference, tokenize="moses", lowercase=True)
    plain = ['" the old dog , ran .', "a b c d e"]
    assert score.score == pytest.approx(sacrebleu.corpus_bleu(plain, [plain], tokenize="none").score)
    assert score.signature.endswith("|moses:en|sacremoses:9.9|lc")
    assert "tok:none" in score.signature and "case:lc" in score.signature
    cased = bleu(output, reference, tokenize="moses:de")
    assert cased.score < score.score and cased.signature.endswith("|moses:de|sacremoses:9.9")


def test_moses_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(InputError, match="sacremoses") as caught:
        require_tokenizer("moses")
    assert caught.value.hint == "pip install sacremoses"


def test_real_moses_parts_signs_from_words():
    pytest.importorskip("sacremoses")
    texts, references = ["A man, sleeping.", "It's 3.5 m"], ["a man , sleeping .", "it's 3.5 m"]
    score = bleu(texts, references, tokenize="moses", lowercase=True)
    assert score.score == pytest.approx(100.0)


def test_an_unknown_tokenizer_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="'13b'") as caught:
        require_tokenizer("13b")
    assert caught.value.hint is not None and "13a" in caught.value.hint


def test_a_tokenizer_without_its_package_says_what_to_install(monkeypatch):
    def refuse(**_):
        raise RuntimeError("mecab is not there")

    monkeypatch.setattr("sacrebleu.metrics.bleu.BLEU", refuse)
    with pytest.raises(InputError, match="ja-mecab") as caught:
        require_tokenizer("ja-mecab")
    assert caught.value.hint == "pip install sacrebleu[ja]"


def test_tokenized_texts_are_told_of():
    tokenized = ["a dog .", "two dogs !", "a cat."]
    note = tokenized_note(REFERENCES, tokenized)
    assert note is not None and "2 of 3 references" in note
    assert tokenized_note(REFERENCES, REFERENCES) is None
    assert tokenized_note(["a dog .", "no"], ["x", "y"]) is None  # one line proves nothing


def test_sides_of_different_length_are_a_mistake_of_the_caller():
    for metric in (bleu, chrf, ter):
        with pytest.raises(ValueError, match="2 and 3"):
            metric(OUTPUTS[:2], REFERENCES)
    with pytest.raises(ValueError, match="0 and 0"):
        sequence_accuracy([], [])


def test_ter_is_that_of_sacrebleu() -> None:
    from sacrebleu.metrics.ter import TER

    hypotheses, references = ["the cat sat on a mat", "a b c d", ""], ["The mat the cat sat on", "c d a b", "x"]
    for lowercase in (False, True):
        found = ter(hypotheses, references, lowercase=lowercase)
        expected = TER(case_sensitive=not lowercase)
        assert found.score == expected.corpus_score(hypotheses, [references]).score
        assert found.signature == str(expected.get_signature())
    assert ter(["a b"], ["a b"]).score == 0.0
