"""Denoising: a text is corrupted, and the target is the whole text (BART, arXiv 1910.13461, section 2.2).

In this order, each only with its option:

    sentence permutation    the sentences in random order
    token deletion          random tokens are removed; the model has to find the places
    text infilling          spans of Poisson(span_length) tokens each become one mask; one of length 0 is a mask
                            between two tokens. ceil(mask_share * n) of the n tokens are masked: the last span is cut
    token masking           the same with every span of length 1 (span_length 0)
    document rotation       the text begins at a random token and continues from the start at its end

Spans never overlap, and all arrangements of them are equally likely. There are never more spans than masked tokens, so
a text does not grow. A share of the masks is written as random tokens (replace_share).

The corruption is a list of places: where each token of the source stood in the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.nn.options import require, require_probability
from tformer.objectives.base import CheckedOptions, Objective, ObjectiveContext, require_special_tokens
from tformer.objectives.seq2seq import RestoringObjective, plain_text, shift_right

NOWHERE = -1  # the place of a mask


class Denoising(RestoringObjective):
    """The objective. Raises InputError for a vocabulary without a mask, or when the context leaves no room for text."""

    special_tokens = ("mask",)
    predicts = "the whole original text"

    def __init__(self, options: DenoisingOptions, context: ObjectiveContext) -> None:
        super().__init__(options, context)
        if options.mask_share:
            require_special_tokens(options, context.special_ids)
        self.mask_id = NOWHERE if context.special_ids.mask is None else context.special_ids.mask
        self.ordinary = np.flatnonzero(~context.special_V)  # random tokens; the model would recognize special ones

    def collate(
        self, samples: Sequence[Example | np.ndarray] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """Windows of text, each corrupted with `rng`, without special tokens, cut after `room` tokens.

        A sentence ends where a special token stood.
        """
        sources, shifted = [], []
        for sample in samples:
            ids, ends = (part[: self.room] for part in plain_text(sample, self.separators_V))
            if self.context.sentence_ends is not None:
                ends = ends | self.context.sentence_ends[ids]
            source, _ = denoise(ids, rng, self.options, mask_id=self.mask_id, ordinary=self.ordinary, ends=ends)
            sources.append(np.concatenate([self.prefix, source, self.suffix]))
            shifted.append(shift_right(np.append(ids, self.target.eos), self.target))
        return self.batch(sources, shifted, rng=rng, training=training)

    def _room(self, source_room: int, target_room: int) -> int:
        return min(source_room, target_room)


@dataclass(frozen=True)
class DenoisingOptions(CheckedOptions):
    """BART's objective: the text is corrupted, the target is the whole text."""

    kind: Literal["denoising"] = "denoising"
    mask_share: float = 0.3  # share of the tokens that masked spans cover
    span_length: float = 3.0  # Poisson's lambda of text infilling; 0: single tokens are masked
    replace_share: float = 0.0  # of the masks: a random token instead
    delete_share: float = 0.0  # share of the tokens that are deleted
    permute_sentences: bool = False  # put the sentences in a random order
    rotate_share: float = 0.0  # of the examples: begin at a random token
    label_smoothing: float = 0.0  # share of the target spread over the vocabulary (arXiv 1512.00567)
    word_dropout: float = 0.0  # as of seq2seq
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = Denoising

    def __post_init__(self) -> None:
        super().__post_init__()
        require_probability(
            mask_share=self.mask_share,
            replace_share=self.replace_share,
            delete_share=self.delete_share,
            rotate_share=self.rotate_share,
        )
        require(self.span_length >= 0, f"span_length must be at least 0, found {self.span_length}")


def denoise(
    ids: np.ndarray,
    rng: np.random.Generator,
    options: DenoisingOptions,
    *,
    mask_id: int,
    ordinary: np.ndarray,
    ends: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(source, places) [s] of a text [t], s <= t.

    places: where each token of the source stood in the text; NOWHERE: a mask, or a random token instead of one.

    Args:
        ordinary: the ids that random tokens are drawn from.
        ends: bool [t], True for the tokens that end a sentence.
    """
    places = np.arange(len(ids))
    if options.permute_sentences:
        places = permute_sentences(places, ends, rng)
    if options.delete_share:
        places = delete(places, round(options.delete_share * len(ids)), rng)
    if options.mask_share:
        # Rounding lets shares such as 0.07 of 100 exceed a whole number by less than a billionth.
        num_masked = math.ceil(options.mask_share * len(ids) - 1e-9)
        places = infill(places, min(num_masked, len(places)), options.span_length, rng)
    if options.rotate_share and rng.random() < options.rotate_share and len(places):
        places = np.roll(places, -rng.integers(len(places)))
    gaps = np.flatnonzero(places == NOWHERE)
    source = ids[places]
    source[gaps] = mask_id
    if options.replace_share:
        gaps = gaps[rng.random(len(gaps)) < options.replace_share]
        source[gaps] = ordinary[rng.integers(0, len(ordinary), size=len(gaps))]
    return source, places


def permute_sentences(places: np.ndarray, ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The places [t], sentence by sentence in random order. Several ends in a row ("?!") end one sentence."""
    if not len(places):
        return places
    closes = ends & ~np.append(ends[1:], False)
    sentence = np.cumsum(closes) - closes
    rank = rng.permutation(sentence[-1] + 1)
    return places[np.argsort(rank[sentence], kind="stable")]


def delete(places: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The places without `count` random ones."""
    return places[np.sort(rng.permutation(len(places))[count:])]


def infill(places: np.ndarray, count: int, span_length: float, rng: np.random.Generator) -> np.ndarray:
    """The places with `count` of them in spans; one NOWHERE replaces each span."""
    if not count:
        return places
    lengths = span_lengths(count, span_length, rng)
    num_units = len(places) - count + len(lengths)  # remaining tokens and spans
    is_span = np.zeros(num_units, dtype=bool)
    is_span[rng.permutation(num_units)[: len(lengths)]] = True
    sizes = np.ones(num_units, dtype=np.int64)
    sizes[is_span] = rng.permutation(lengths)  # so that the last span, which was cut, is not always last
    begins = np.minimum(np.cumsum(sizes) - sizes, len(places) - 1)  # a span of length 0 may be at the very end
    return np.where(is_span, NOWHERE, places[begins])


def span_lengths(count: int, mean: float, rng: np.random.Generator) -> np.ndarray:
    """Poisson(mean) lengths with the sum `count`, at most `count` of them; mean 0: all are 1."""
    if not mean:
        return np.ones(count, dtype=np.int64)
    lengths = rng.poisson(mean, count)
    total = np.cumsum(lengths)
    if total[-1] < count:  # for means about 1 and below: too many zeros
        lengths[np.flatnonzero(lengths == 0)[: count - total[-1]]] = 1
        return lengths
    last = int(np.searchsorted(total, count))
    lengths[last] -= total[last] - count
    return lengths[: last + 1]
