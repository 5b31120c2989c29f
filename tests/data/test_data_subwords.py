"""Samples with segmentations drawn in each epoch: fixed by (seed, epoch, number), never too long, aligned rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tformer.data.batching.subwords import SampledSubwords
from tformer.data.shards.corpus import Example
from tformer.data.shards.pair_tokens import PairExample
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.segmentation import segmenter_of

WORDS = "the quick brown foxes were jumping over lazy dogs while others kept sleeping"


@cache
def tokenizer() -> Tokenizer:
    options = TokenizerOptions(model="bpe", vocab_size=120, template="seq2seq")
    return train_tokenizer(lambda: iter([f"{WORDS}. " * 50]), options)


def ids_of(text: str) -> np.ndarray:
    return np.array(tokenizer().encode(text), dtype=np.int64)


def sampled(samples: Sequence[Any], *, seed: int = 1, longest: int = 1000, rate: float = 0.3) -> SampledSubwords:
    segmenter = segmenter_of(tokenizer(), rate)
    return SampledSubwords(
        lambda epoch, numbers: [samples[number] for number in numbers],
        seed=seed,
        source=segmenter,
        target=segmenter,
        longest=(longest, longest),
    )


def test_draws_depend_on_seed_epoch_and_number_alone() -> None:
    """Not on the batch or the order in which samples are read: resumed runs and all processes read the same ids."""
    samples = [PairExample(ids_of(WORDS), ids_of(WORDS[::2]), task=number) for number in range(6)]
    read = sampled(samples)
    whole, parts = read(3, range(6)), [read(3, [number])[0] for number in (5, 1, 0)]
    for part, number in zip(parts, (5, 1, 0), strict=True):
        assert np.array_equal(part.source, whole[number].source) and np.array_equal(part.target, whole[number].target)
        assert part.task == number
    other_epoch, other_seed = read(4, range(6)), sampled(samples, seed=2)(3, range(6))
    for others in (other_epoch, other_seed):
        assert any(not np.array_equal(one.source, other.source) for one, other in zip(whole, others, strict=True))
    assert len({tuple(sample.source) for sample in whole}) > 1  # equal texts have draws of their own


def test_a_text_that_would_be_too_long_keeps_its_plain_segmentation() -> None:
    plain = ids_of(WORDS)
    for epoch in range(20):
        [sample] = sampled([Example(plain)], longest=len(plain), rate=0.9)(epoch, [0])
        assert len(sample.ids) <= len(plain)
    [longer] = sampled([Example(plain)], rate=0.9)(0, [0])
    assert len(longer.ids) > len(plain)


def test_labels_stay_and_token_types_follow_the_words() -> None:
    end = tokenizer().special.eos
    first, second = np.append(ids_of(WORDS), end), ids_of(f"{WORDS} again")
    types = np.repeat([0, 1], [len(first), len(second)])
    example = Example(np.concatenate([first, second]), None, types, 7)
    [found] = sampled([example], rate=0.6)(0, [0])
    assert found.label == 7 and len(found.token_type_ids) == len(found.ids) > len(example)
    for kind, ids in ((0, first), (1, second)):
        own = found.ids[found.token_type_ids == kind].tolist()
        assert tokenizer().decode(own) == tokenizer().decode(ids.tolist())


def test_the_ids_given_are_not_changed() -> None:
    plain = ids_of(WORDS)
    before = plain.copy()
    sampled([Example(plain)])(0, [0])
    assert np.array_equal(plain, before)
