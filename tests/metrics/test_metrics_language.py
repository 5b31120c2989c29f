"""Perplexity, bits per byte, BLEU, chrF and the cost of a token."""

from __future__ import annotations

import math

import pytest
import sacrebleu

from tformer.metrics import (
    attention_flops,
    bits_per_byte,
    bleu,
    chrf,
    flops_per_token,
    forward_flops_per_token,
    perplexity,
)


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


HYPOTHESES = ["the cat sat on the mat .", "hello world , how are you"]
REFERENCES = ["the cat is on the mat .", "hello world , how do you do"]


def test_bleu_is_sacrebleus_with_its_signature() -> None:
    result = bleu(HYPOTHESES, REFERENCES)
    assert result.score == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score)
    assert "tok:13a" in result.signature and f"version:{sacrebleu.__version__}" in result.signature
    assert bleu(REFERENCES, REFERENCES).score == pytest.approx(100)


def test_bleu_names_what_was_asked_for() -> None:
    assert "case:lc" in bleu(HYPOTHESES, REFERENCES, lowercase=True).signature
    assert "tok:char" in bleu(HYPOTHESES, REFERENCES, tokenize="char").signature


def test_chrf_is_sacrebleus_with_its_signature() -> None:
    result = chrf(HYPOTHESES, REFERENCES)
    assert result.score == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    assert "nw:0" in result.signature and "nw:2" in chrf(HYPOTHESES, REFERENCES, word_order=2).signature


@pytest.mark.parametrize("metric", [bleu, chrf])
def test_translation_metrics_need_one_reference_each(metric: object) -> None:
    with pytest.raises(ValueError, match="found 2 and 1"):
        metric(HYPOTHESES, REFERENCES[:1])  # type: ignore[operator]


def test_flops_are_nanogpts_formula() -> None:
    n, layers, width, length = 123_000_000, 12, 768, 1024
    assert flops_per_token(n, layers, width, length) == 6 * n + 12 * layers * width * length


def test_causal_flops_count_the_visible_keys_only() -> None:
    n, layers, width, length = 1000, 2, 8, 16
    visible = sum(query + 1 for query in range(length)) / length
    assert flops_per_token(n, layers, width, length, causal=True) == 6 * n + 12 * layers * width * visible


def test_training_costs_three_forward_passes() -> None:
    assert flops_per_token(1000, 2, 8, 16) == 3 * forward_flops_per_token(1000, 2, 8, 16)


def test_attention_of_equal_layers_is_the_formula_to_the_bit_and_of_others_a_sum() -> None:
    layers, width, length = 7, 96, 100 / 3
    assert attention_flops([(width, length)] * layers) == forward_flops_per_token(0, layers, width, length)
    assert attention_flops([(8, 100), (8, 10), (16, 10)]) == 4 * (8 * 100 + 8 * 10 + 16 * 10)
    assert attention_flops([]) == 0
