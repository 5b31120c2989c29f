"""Random segmentations: texts stay, plain ones without dropout, the distributions of the two papers, equal draws."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tokenizer.conftest import LINES
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.segmentation import BpeSegmenter, UnigramSegmenter, segmenter_of

KINDS = ("bpe", "byte-bpe", "unigram")
Make = Callable[..., Tokenizer]


def drawn(tokenizer: Tokenizer, text: str, rate: float, *, seed: int = 0) -> list[int]:
    ids = np.array(tokenizer.encode(text), dtype=np.int64)
    found, _ = segmenter_of(tokenizer, rate).sample(ids, random.Random(seed).random)
    return [int(token) for token in found]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["none", "bert", "t5"])
def test_every_segmentation_is_of_the_same_text(make: Make, kind: str, template: str) -> None:
    tokenizer = make(kind, template=template)
    longer = 0
    for line, seed in itertools.product(LINES, range(5)):
        found = drawn(tokenizer, line, 0.3, seed=seed)
        assert tokenizer.decode(found) == tokenizer.decode(tokenizer.encode(line))
        longer += len(found) > len(tokenizer.encode(line))
    assert longer > 10


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_stay_whole_also_where_training_learned_them(make: Make, kind: str) -> None:
    tokenizer = make(kind, added_tokens=("quick", "NEW"))
    text = "The quick NEW brown fox jumps over the quick dog"
    kept = [tokenizer.token_id("quick"), tokenizer.token_id("NEW"), tokenizer.token_id("quick")]
    longer = 0
    for seed in range(20):
        found = drawn(tokenizer, text, 0.5, seed=seed)
        assert [token for token in found if token in kept] == kept
        assert tokenizer.decode(found) == tokenizer.decode(tokenizer.encode(text))
        longer += len(found) > len(tokenizer.encode(text))
    assert longer > 10


@pytest.mark.parametrize("kind", ["bpe", "byte-bpe"])
def test_bpe_without_dropped_merges_is_the_plain_segmentation(make: Make, kind: str) -> None:
    """Each word's symbols, merged again without dropout, give its tokens: no merge is missing or in another order."""
    tokenizer = make(kind)
    segmenter = segmenter_of(tokenizer, 0.1)
    assert isinstance(segmenter, BpeSegmenter)
    for line in LINES:
        ids = np.array(tokenizer.encode(line), dtype=np.int64)
        found, places = segmenter.sample(ids, lambda: 1.0)
        assert np.array_equal(found, ids)
        assert (places[1:] >= places[:-1]).all() and places[0] == 0


@pytest.mark.parametrize("kind", ["bpe", "byte-bpe"])
def test_bpe_with_all_merges_dropped_is_the_symbols(make: Make, kind: str) -> None:
    tokenizer = make(kind)
    ids = np.array(tokenizer.encode(LINES[0]), dtype=np.int64)
    found, _ = segmenter_of(tokenizer, 0.5).sample(ids, lambda: 0.0)
    letters = LINES[0] if kind == "byte-bpe" else LINES[0].strip()
    assert len(found) >= len(letters.encode()) - 1


def test_bpe_dropout_has_the_probabilities_of_the_paper() -> None:
    """Of `abc` with the merges ab, abc: abc needs both; a bc does not exist; ab c only if the second is dropped."""
    tokenizer = _bpe({"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, ["a b", "ab c"])
    p, total, draw = 0.3, 20000, random.Random(0).random
    segmenter = segmenter_of(tokenizer, p)
    counts = Counter(tuple(segmenter.sample(np.array([4]), draw)[0].tolist()) for _ in range(total))
    expected = {(4,): (1 - p) ** 2, (3, 2): (1 - p) * p, (0, 1, 2): p}
    assert counts.keys() == expected.keys()
    for pieces, share in expected.items():
        assert counts[pieces] / total == pytest.approx(share, abs=0.015)


def test_the_first_merge_that_is_left_is_done() -> None:
    """Of `abc` with the merges bc, ab: bc comes first, ab only where bc was dropped."""
    tokenizer = _bpe({"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4}, ["b c", "a b"])
    p, total, draw = 0.3, 20000, random.Random(0).random
    segmenter = segmenter_of(tokenizer, p)
    counts = Counter(tuple(segmenter.sample(np.array([0, 3]), draw)[0].tolist()) for _ in range(total))
    expected = {(0, 3): 1 - p, (4, 2): p * (1 - p), (0, 1, 2): p * p}
    assert counts.keys() == expected.keys()
    for pieces, share in expected.items():
        assert counts[pieces] / total == pytest.approx(share, abs=0.015)


def test_unigram_sampling_has_the_probabilities_of_the_paper() -> None:
    """P(y | x) ~ (product of P(y_i))^alpha over all segmentations of the word."""
    scores = {"\u2581": -3.0, "\u2581a": -2.0, "a": -1.5, "b": -2.5, "ab": -2.2, "\u2581ab": -4.0}
    tokenizer, alpha = _unigram(scores), 0.4
    pieces = list(scores)
    expected = {
        parts: math.exp(alpha * sum(scores[part] for part in parts))
        for count in (1, 2, 3)
        for parts in itertools.product(pieces, repeat=count)
        if "".join(parts) == "\u2581ab"
    }
    assert len(expected) == 4
    segmenter, draw, total = segmenter_of(tokenizer, alpha), random.Random(0).random, 20000
    assert isinstance(segmenter, UnigramSegmenter)
    ids = np.array([tokenizer.token_id("\u2581ab")])
    counts = Counter(tuple(tokenizer.token(int(i)) for i in segmenter.sample(ids, draw)[0]) for _ in range(total))
    assert counts.keys() == expected.keys()
    for parts, weight in expected.items():
        assert counts[parts] / total == pytest.approx(weight / sum(expected.values()), abs=0.015)


@pytest.mark.parametrize("kind", KINDS)
def test_special_and_unknown_tokens_stay(make: Make, kind: str) -> None:
    tokenizer = make(kind, template="bert")
    ids = np.array(tokenizer.encode("the lazy dog", template=True), dtype=np.int64)
    special = list(tokenizer.special.all)
    draw = random.Random(0).random
    found, places = max(
        (segmenter_of(tokenizer, 0.5).sample(ids, draw) for _ in range(20)), key=lambda each: len(each[0])
    )
    assert [i for i in found.tolist() if i in special] == [i for i in ids.tolist() if i in special]
    assert found[0] == ids[0] and found[-1] == ids[-1] and len(found) > len(ids)
    assert places[0] == 0 and places[-1] == len(ids) - 1
    unknown = tokenizer.special.unk
    assert unknown is not None
    assert unknown in segmenter_of(tokenizer, 0.9).sample(np.array([unknown]), random.Random(0).random)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_stay_no_tokens(make: Make, kind: str) -> None:
    found, places = segmenter_of(make(kind), 0.3).sample(np.array([], dtype=np.int64), random.Random(0).random)
    assert len(found) == len(places) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_give_equal_segmentations_and_others_give_others(make: Make, kind: str) -> None:
    tokenizer = make(kind)
    text = "".join(LINES)
    assert drawn(tokenizer, text, 0.2) == drawn(tokenizer, text, 0.2) != drawn(tokenizer, text, 0.2, seed=1)


@pytest.mark.parametrize("kind", ["wordpiece", "word", "char"])
def test_a_tokenizer_with_one_segmentation_of_a_text_is_refused(make: Make, kind: str) -> None:
    with pytest.raises(InputError, match=f"data.subword_sampling: found 0.1 with a {kind} tokenizer"):
        segmenter_of(make(kind), 0.1)


def _bpe(vocabulary: dict[str, int], merges: list[str]) -> Tokenizer:
    return _tokenizer({"type": "BPE", "vocab": vocabulary, "merges": merges})


def _unigram(scores: dict[str, float]) -> Tokenizer:
    vocabulary = [["<unk>", 0.0], *([piece, score] for piece, score in scores.items())]
    return _tokenizer({"type": "Unigram", "unk_id": 0, "vocab": vocabulary})


def _tokenizer(model: dict[str, Any]) -> Tokenizer:
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    return Tokenizer.from_json(json.dumps({"version": "1.0", "pre_tokenizer": metaspace, "model": model}))
