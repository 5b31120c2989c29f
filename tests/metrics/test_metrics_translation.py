"""BLEU, chrF and exact match: known values, signatures that say what was done, and clear refusals."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from tformer.errors import InputError
from tformer.metrics.translation import bleu, chrf, require_tokenizer, same_text, sequence_accuracy, tokenised_note

REFERENCES = ["The dog ran over the hill.", "A man, who is old, sleeps here!", "Two birds are in the sky."]
OUTPUTS = ["The dog ran over a hill.", "A man who is old sleeps here!", "Two birds are in the sky."]


@pytest.fixture
def fake_moses(monkeypatch):
    """Stands in for sacremoses: quotes are normalised, signs are parted from words."""
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
    found = chrf(OUTPUTS, REFERENCES)
    assert 50 < found.score < 100 and "nc:6" in found.signature
    assert "case:lc" in chrf(OUTPUTS, REFERENCES, lowercase=True).signature


def test_bleu_is_sacrebleus():
    import sacrebleu

    assert bleu(OUTPUTS, REFERENCES).score == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score


def test_lowercase_forgives_case_only_where_asked_for():
    shouted = [text.upper() for text in REFERENCES]
    assert bleu(shouted, REFERENCES).score < 50 < bleu(shouted, REFERENCES, lowercase=True).score
    assert sequence_accuracy(shouted, REFERENCES) == 0 and sequence_accuracy(shouted, REFERENCES, lowercase=True) == 1


def test_sequence_accuracy_counts_equal_texts_whatever_white_space_parts_their_words():
    assert sequence_accuracy(OUTPUTS, REFERENCES) == pytest.approx(1 / 3)
    assert same_text(" a  b\t", "a b") and not same_text("ab", "a b") and same_text("", " ")


def test_moses_is_bleu_of_normalised_tokens_and_says_so(fake_moses):
    import sacrebleu

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
    score = bleu(
        ["A man, sleeping.", "It's 3.5 m"], ["a man , sleeping .", "it's 3.5 m"], tokenize="moses", lowercase=True
    )
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


def test_tokenised_texts_are_told_of():
    tokenised = ["a dog .", "two dogs !", "a cat."]
    note = tokenised_note(REFERENCES, tokenised)
    assert note is not None and "2 of 3 references" in note
    assert tokenised_note(REFERENCES, REFERENCES) is None
    assert tokenised_note(["a dog .", "no"], ["x", "y"]) is None  # one line proves nothing


def test_sides_of_different_length_are_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="2 and 3"):
        bleu(OUTPUTS[:2], REFERENCES)
    with pytest.raises(ValueError, match="0 and 0"):
        sequence_accuracy([], [])
