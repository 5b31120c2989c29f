"""Denoising: a text is damaged, and the target is the whole of it (BART, arXiv 1910.13461, section 2.2).

In this order, each when its option asks for it:

    sentence permutation    the sentences in random order
    token deletion          random tokens are gone, and the model has to say where
    text infilling          spans whose lengths are Poisson(span_length) each become one mask; one of length 0 is a mask
                            between two tokens. ceil(mask_share * n) of the n tokens are masked: the last span is cut
    token masking           the same with every span of length 1 (span_length 0)
    document rotation       the text begins at a random token, and goes round

Spans never overlap, and every arrangement of them is as likely as any other. There are never more of them than masked
tokens, so a text does not grow. A share of the masks is written as random tokens (replace_share).

The damage is a list of places: the source's tokens by where they stood in the text. It says how to undo itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.errors import InputError
from tformer.objectives.base import ObjectiveContext
from tformer.objectives.masked_lm import never_masked
from tformer.objectives.options import DenoisingOptions
from tformer.objectives.seq2seq import (
    DecoderLoss,
    plain_text,
    separators,
    shift_right,
    target_limit,
)

NOWHERE = -1  # the place of a mask


@dataclass(frozen=True)
class Edits:
    """What was done to a text: `places` [s] where each token of the source stood (NOWHERE: a mask, or a random token
    for one), `lost` [r] the places that the source lacks, `lost_ids` [r] the tokens there.
    """

    places: np.ndarray
    lost: np.ndarray
    lost_ids: np.ndarray


class Denoising(DecoderLoss):
    """The objective. Raises InputError for a vocabulary without a mask, or when the context leaves no room for text.

    Attributes:
        room: the most tokens of text whose source and target both fit the context.
    """

    def __init__(self, options: DenoisingOptions, context: ObjectiveContext) -> None:
        super().__init__(
            context,
            label_smoothing=options.label_smoothing,
            weight=options.weight,
            word_dropout=options.word_dropout,
        )
        self.options = options
        self.mask_id = _mask_id(options, context)
        self.ordinary = np.flatnonzero(~never_masked(context))  # random tokens; special ones would give themselves away
        self.separators_V = separators(context)
        self.prefix, self.suffix = (np.array(ids, dtype=np.int64) for ids in context.frame)
        source_room = context.seq_len - len(self.prefix) - len(self.suffix)
        max_target = target_limit(context)
        self.room = min(source_room, max_target - len(self.target.prefix))
        if self.room < 1:
            raise InputError(
                f"data.seq_len, data.target_seq_len: {context.seq_len} and {max_target} tokens leave no room for "
                f"text beside the special tokens"
            )

    def collate(
        self, samples: Sequence[Example | np.ndarray] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """Windows of text, one by one damaged with `rng`. Special tokens in them are left out, as is what comes after
        `room` tokens; where one stood, a sentence ends.
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


def _mask_id(options: DenoisingOptions, context: ObjectiveContext) -> int:
    if not options.mask_share:
        return NOWHERE
    if context.special_ids.mask is None:
        raise InputError(
            "denoising needs a tokenizer with a mask token ([MASK] or <mask>), this one has none",
            hint="train one with --template seq2seq or roberta (tokenizer.train.template)",
        )
    return context.special_ids.mask


def denoise(
    ids: np.ndarray,
    rng: np.random.Generator,
    options: DenoisingOptions,
    *,
    mask_id: int,
    ordinary: np.ndarray,
    ends: np.ndarray,
) -> tuple[np.ndarray, Edits]:
    """(source, edits) of a text [t]; the source is never longer.

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
        # Less than a billionth of a token is what shares like 0.07 of 100 exceed a whole number by.
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
    is_lost = np.ones(len(ids), dtype=bool)
    is_lost[places[places != NOWHERE]] = False
    lost = np.flatnonzero(is_lost)
    return source, Edits(places, lost, ids[lost])


def restore(source: np.ndarray, edits: Edits) -> np.ndarray:
    """The text that `denoise` made this source of."""
    known = edits.places != NOWHERE
    ids = np.empty(int(known.sum()) + len(edits.lost), dtype=source.dtype)
    ids[edits.places[known]], ids[edits.lost] = source[known], edits.lost_ids
    return ids


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
    """The places with `count` of them in spans, for each of which there is one NOWHERE."""
    if not count:
        return places
    lengths = span_lengths(count, span_length, rng)
    num_units = len(places) - count + len(lengths)  # tokens that stay, and spans, in any order
    is_span = np.zeros(num_units, dtype=bool)
    is_span[rng.permutation(num_units)[: len(lengths)]] = True
    sizes = np.ones(num_units, dtype=np.int64)
    sizes[is_span] = rng.permutation(lengths)  # the last one, which was cut, is not to stand last
    begins = np.minimum(np.cumsum(sizes) - sizes, len(places) - 1)  # a span of length 0 may stand at the very end
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
