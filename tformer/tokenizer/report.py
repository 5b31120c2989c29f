"""Report on a trained tokenizer: compression, coverage, round trips; the document of `train-tokenizer --json`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tformer.tokenizer.options import TokenizerOptions
from tformer.tokenizer.pipeline import BYTE_TOKENS
from tformer.tokenizer.special import TEMPLATES
from tformer.tokenizer.tokenizer import Tokenizer
from tformer.tokenizer.train import TrainingFacts, probe_losslessness, utf8_length

SHOWN_FAILURES = 3
PERCENTILES = (50, 90, 95, 99, 100)

ROUND_TRIP = {
    "byte-bpe": "lossless",
    "bpe": "lossless except for characters outside the vocabulary and the letter ▁",
    "unigram": "lossless except for characters outside the vocabulary and the letter ▁",
    "wordpiece": "lossy: white space, control characters and unknown words are lost",
    "word": "lossy: white space is guessed, unknown words are lost",
    "char": "lossless for the characters of the training text",
}


def tokenizer_report(tokenizer: Tokenizer, *, options: TokenizerOptions, facts: TrainingFacts) -> dict[str, Any]:
    """The report as JSON data. Rates lie between 0 and 1; sizes are UTF-8 bytes; times are seconds."""
    round_trip = ROUND_TRIP[options.model]
    if tokenizer.normalize("\u00c5 A\u0301 \ufb01") != "\u00c5 A\u0301 \ufb01" and options.model != "wordpiece":
        round_trip += " (after the normalization)"
    template, sentinels = TEMPLATES[options.template], tokenizer.special.sentinels
    names = [*template.tokens, template.unk]
    special_ids = {name: i for name in names if (i := tokenizer.token_id(name)) is not None}
    for number in sorted({0, len(sentinels) - 1}) if sentinels else ():  # the first and the last
        special_ids[f"<extra_id_{number}>"] = sentinels[number]
    return {
        "model": options.model,
        "template": options.template,
        "requested_vocab_size": None if options.model == "char" else options.vocab_size,
        "vocab_size": tokenizer.vocab_size,
        "id_dtype": str(tokenizer.dtype),
        "special_ids": special_ids,
        "training": {
            "seen_bytes": facts.seen_bytes,
            "used_bytes": facts.used_bytes,
            "sampled": facts.sampled,
            "sample_limit_bytes": facts.sample_limit_bytes,
            "seconds": round(facts.seconds, 3),
        },
        "trained_text": measure(tokenizer, facts.trained_sample),
        "unseen_text": measure(tokenizer, facts.unseen_sample) if facts.unseen_sample else None,
        "round_trip": round_trip,
        "probe_failures": probe_losslessness(tokenizer),
        "sha256": tokenizer.sha256,
    }


def measure(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, Any]:
    """Compression, coverage, round trips and lengths over sample texts (at least one token in all)."""
    started = time.perf_counter()
    encoded = [np.array(ids, dtype=np.int64) for ids in tokenizer.encode_batch(texts)]
    seconds = time.perf_counter() - started
    ids = np.concatenate(encoded)
    num_bytes = sum(utf8_length(text) for text in texts)
    num_words = sum(len(text.split()) for text in texts)
    byte_ids = [i for token in BYTE_TOKENS if (i := tokenizer.token_id(token)) is not None]
    lines = [line for text in texts for line in text.split("\n") if line]
    encoded_lines = tokenizer.encode_batch(lines)
    decoded = map(tokenizer.decode, encoded_lines)
    failures = [(line, text) for line, text in zip(lines, decoded, strict=True) if line != text]
    normalized = [line for line, text in failures if tokenizer.normalize(line) != text]
    lengths = [len(ids) for ids in encoded_lines] or [0]
    return {
        "bytes": num_bytes,
        "tokens": len(ids),
        "bytes_per_token": _ratio(num_bytes, len(ids)),
        "tokens_per_word": _ratio(len(ids), num_words),
        "vocabulary_used": _ratio(len(np.unique(ids)), tokenizer.vocab_size),
        "unknown_rate": _share(ids, [] if tokenizer.special.unk is None else [tokenizer.special.unk]),
        "byte_fallback_rate": _share(ids, byte_ids),
        "encode_mb_per_second": _ratio(num_bytes / 1e6, seconds),
        "round_trip_rate": _ratio(len(lines) - len(failures), len(lines)),
        "round_trip_rate_after_normalization": _ratio(len(lines) - len(normalized), len(lines)),
        "round_trip_failures": [
            {"text": line[:200], "decoded": text[:200]} for line, text in failures[:SHOWN_FAILURES]
        ],
        "tokens_per_line": {
            f"p{p}" if p < 100 else "max": int(np.percentile(lengths, p, method="higher")) for p in PERCENTILES
        },
    }


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole else None


def _share(ids: np.ndarray, wanted: Sequence[int]) -> float | None:
    return _ratio(int(np.isin(ids, wanted).sum()), len(ids))
