"""Samples whose texts are segmented again in each epoch, for training alone (arXiv 1804.10959, 1910.13267).

The draws of a sample depend on seed, epoch and number of the sample alone, so that a resumed run and each of several
processes read the same ids. Batches are planned by the lengths of the plain segmentation, so they have some more tokens
than `training.batch_tokens`; a text that would become too long for the model keeps its plain segmentation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tformer.data.permutation import derive_key
from tformer.data.shards.corpus import Example
from tformer.data.shards.pair_tokens import PairExample
from tformer.tokenizer.segmentation import Draw, Segmenter

Read = Callable[[int, Any], Sequence[Any]]
"""(epoch, numbers of samples) -> the samples."""


class SampledSubwords:
    """Reads samples and draws the segmentation of their texts.

    Args:
        read: gives the samples.
        source: of texts, and of the sources of pairs; `target`: of their targets.
        longest: most ids of a text, and of a target.
    """

    def __init__(
        self, read: Read, *, seed: int, source: Segmenter, target: Segmenter, longest: tuple[int, int]
    ) -> None:
        self._read, self._seed, self._longest = read, seed, longest
        self._source, self._target = source, target

    def __call__(self, epoch: int, indices: Sequence[int] | np.ndarray) -> list[Any]:
        """The samples with these numbers."""
        numbers = np.asarray(indices).tolist()
        return [
            self._sampled(sample, random.Random(derive_key("subwords", self._seed, epoch, number)).random)
            for number, sample in zip(numbers, self._read(epoch, indices), strict=True)
        ]

    def _sampled(self, sample: Any, draw: Draw) -> Any:
        if isinstance(sample, PairExample):
            source, _ = self._drawn(sample.source, self._source, self._longest[0], draw)
            target, _ = self._drawn(sample.target, self._target, self._longest[1], draw)
            return replace(sample, source=source, target=target)
        example = sample if isinstance(sample, Example) else Example(sample)
        ids, places = self._drawn(example.ids, self._source, self._longest[0], draw)
        rows = {"document_ids": example.document_ids, "token_type_ids": example.token_type_ids}
        return replace(example, ids=ids, **{name: None if row is None else row[places] for name, row in rows.items()})

    @staticmethod
    def _drawn(ids: np.ndarray, segmenter: Segmenter, longest: int, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """(ids, places in the plain ids); the plain ones where the drawn ones are too many."""
        drawn, places = segmenter.sample(ids, draw)
        return (drawn, places) if len(drawn) <= max(longest, len(ids)) else (ids, np.arange(len(ids)))
