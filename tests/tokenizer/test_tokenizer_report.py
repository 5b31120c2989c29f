"""The report: what it counts, checked by counting again."""

from __future__ import annotations

import json

import pytest

from tformer.tokenizer import TokenizerOptions, tokenizer_report, train_with_facts
from tformer.tokenizer.report import measure


def _report(text: str, **options):
    chosen = TokenizerOptions(**options)
    trained = train_with_facts(lambda: iter(text.splitlines(keepends=True)), chosen)
    return trained.tokenizer, tokenizer_report(trained.tokenizer, options=chosen, facts=trained.facts)


@pytest.mark.parametrize("model", ["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"])
def test_the_report_has_every_figure_and_is_json(text, model):
    tokenizer, report = _report(text, model=model, vocab_size=500)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["vocab_size"] == tokenizer.vocab_size
    assert report["requested_vocab_size"] == (None if model == "char" else 500)
    assert report["sha256"] == tokenizer.sha256
    assert report["special_ids"]["<|endoftext|>"] == 0
    assert report["training"]["seen_bytes"] == len(text.encode())
    assert set(report["trained_text"]) == {
        "bytes", "tokens", "bytes_per_token", "tokens_per_word", "vocabulary_used", "unknown_rate",
        "byte_fallback_rate", "encode_mb_per_second", "round_trip_rate", "round_trip_rate_after_normalisation",
        "round_trip_failures", "tokens_per_line",
    }  # fmt: skip
    assert (report["unseen_text"] is None) == (model == "char")
    assert ("lossless" in report["round_trip"]) == (model not in ("wordpiece", "word"))


def test_figures_equal_a_recount(make):
    tokenizer = make("word")
    texts = ["the quick zebra\nthe dog", "low, low"]
    figures = measure(tokenizer, texts)
    ids = [i for text in texts for i in tokenizer.encode(text)]
    assert figures["tokens"] == len(ids) == 8
    assert figures["bytes"] == sum(len(text) for text in texts)
    assert figures["bytes_per_token"] == round(figures["bytes"] / 8, 6)
    assert figures["tokens_per_word"] == round(8 / 7, 6)
    assert figures["unknown_rate"] == round(1 / 8, 6)
    assert figures["vocabulary_used"] == round(len(set(ids)) / tokenizer.vocab_size, 6)
    assert figures["tokens_per_line"] == {"p50": 3, "p90": 3, "p95": 3, "p99": 3, "max": 3}
    assert figures["round_trip_rate"] == round(2 / 3, 6)
    assert figures["round_trip_failures"] == [{"text": "the quick zebra", "decoded": "the quick"}]


def test_byte_fallback_is_counted(make):
    figures = measure(make("bpe", byte_fallback=True, vocab_size=600), ["日"])
    assert (figures["byte_fallback_rate"], figures["unknown_rate"]) == (1.0, 0.0)
    assert measure(make("bpe"), ["日"])["unknown_rate"] == 1.0


def test_normalisation_is_told_apart_from_loss(text):
    _, report = _report(text, lowercase=True, vocab_size=500)
    assert report["trained_text"]["round_trip_rate"] < 1
    assert report["trained_text"]["round_trip_rate_after_normalisation"] == 1
    assert report["round_trip"].endswith("(after the normalisation that was asked for)")
    assert report["probe_failures"] == []


def test_a_vocabulary_below_the_request_is_reported():
    _, report = _report("a b c a b c\n" * 60, model="word", vocab_size=5000)
    assert (report["requested_vocab_size"], report["vocab_size"]) == (5000, 6)


def test_probes_that_fail_are_listed(text):
    _, report = _report(text, model="word", vocab_size=500)
    probes = {failure["probe"] for failure in report["probe_failures"]}
    assert {"double spaces", "newline", "CJK", "emoji with joiner"} <= probes
