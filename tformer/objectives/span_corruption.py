"""Span corruption: spans of a text are cut out, and the target lists them (T5, arXiv 1910.10683, 3.1.4).

    text      Thank you for inviting me to your party last week
    source    Thank you <X> me to your party <Y> week
    target    <X> for inviting <Y> last <Z>

with the sentinels <X> = <extra_id_0>, <Y> = <extra_id_1>, ... and <Z> the first unused one (figure 2 of the paper).
As in T5's own code, of n tokens round(n * noise_density) are noise, at least 1 and at most n - 1, in
round(noise / mean_span_length) spans; noise and text are divided at random into parts of at least one token, they
alternate, and the text begins with a part that is not noise. So the lengths of source and target depend on n alone; a
single token is never noise, and a text short enough for one span loses its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.nn.options import require
from tformer.objectives.base import CheckedOptions, Objective, ObjectiveContext
from tformer.objectives.seq2seq import RestoringObjective, plain_text, shift_right
from tformer.support.errors import InputError

MIN_SENTINELS = 2  # one for a span, and one that ends the target


class SpanCorruption(RestoringObjective):
    """The objective. Raises InputError for a vocabulary without sentinels, or when the context leaves no room for text.

    `room`, the maximum tokens of a text, may be more than seq_len, because the source is shorter than the text.
    """

    special_tokens = ("sentinels",)
    predicts = "every sentinel, followed by the tokens that it replaced"

    def __init__(self, options: SpanCorruptionOptions, context: ObjectiveContext) -> None:
        self.sentinels = np.array(context.special_ids.sentinels, dtype=np.int64)
        if len(self.sentinels) < MIN_SENTINELS:
            raise InputError(
                f"span corruption needs a tokenizer with at least {MIN_SENTINELS} sentinels (<extra_id_0>, ...), "
                f"this one has {len(self.sentinels)}",
                hint="train one with --template t5 (tokenizer.train.template)",
            )
        super().__init__(options, context)

    @staticmethod
    def target_length(source: float, target: float, options: SpanCorruptionOptions) -> float:
        """Length of a target: removed tokens, their sentinels, the last sentinel and eos."""
        noise, spans = span_counts(round(source), options.noise_density, options.mean_span_length, round(source))
        return noise + spans + 2

    def collate(
        self, samples: Sequence[Example | np.ndarray] | np.ndarray, *, rng: np.random.Generator, training: bool = True
    ) -> Batch:
        """Windows of text, each corrupted with `rng`, without special tokens, cut after `room` tokens."""
        sources, shifted = [], []
        for sample in samples:
            ids = plain_text(sample, self.separators_V)[0][: self.room]
            source, target = corrupt_spans(
                ids,
                rng,
                noise_density=self.options.noise_density,
                mean_span_length=self.options.mean_span_length,
                sentinels=self.sentinels,
            )
            sources.append(np.concatenate([self.prefix, source, self.suffix]))
            shifted.append(shift_right(np.append(target, self.target.eos), self.target))
        return self.batch(sources, shifted, rng=rng, training=training)

    def _room(self, source_room: int, target_room: int) -> int:
        target_room -= 1  # the last sentinel

        def excess(length: int) -> int:
            noise, spans = span_counts(
                length, self.options.noise_density, self.options.mean_span_length, len(self.sentinels)
            )
            return max(length - noise + spans - source_room, noise + spans - target_room)

        # Both lengths grow with the text's, and together they have at least as many tokens.
        return bisect_right(range(max(1, source_room + target_room + 1)), 0, key=excess) - 1


@dataclass(frozen=True)
class SpanCorruptionOptions(CheckedOptions):
    """T5's objective: spans of the text are replaced by a sentinel each, the target lists them."""

    kind: Literal["span_corruption"] = "span_corruption"
    noise_density: float = 0.15  # share of the tokens that are removed
    mean_span_length: float = 3.0  # mean length of a removed span in tokens
    label_smoothing: float = 0.0  # share of the target spread over the vocabulary (arXiv 1512.00567)
    word_dropout: float = 0.0  # as of seq2seq
    weight: float = 1.0  # factor of this loss
    objective: ClassVar[type[Objective]] = SpanCorruption

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.noise_density < 1, f"noise_density must be between 0 and 1, found {self.noise_density}")
        require(self.mean_span_length >= 1, f"mean_span_length must be at least 1, found {self.mean_span_length}")


def span_counts(length: int, noise_density: float, mean_span_length: float, num_sentinels: int) -> tuple[int, int]:
    """(noise tokens, spans) of a text. The last sentinel ends the target, which may mean fewer, longer spans."""
    if length < 2:
        return 0, 0
    noise = min(max(round(length * noise_density), 1), length - 1)
    spans = max(round(noise / mean_span_length), 1)
    return noise, min(spans, length - noise, num_sentinels - 1)


def noise_mask(length: int, noise: int, spans: int, rng: np.random.Generator) -> np.ndarray:
    """bool [length], True in the noise spans; it begins with text and ends with noise."""
    if not spans:
        return np.zeros(length, dtype=bool)
    sizes = np.empty(2 * spans, dtype=np.int64)
    sizes[0::2], sizes[1::2] = random_parts(length - noise, spans, rng), random_parts(noise, spans, rng)
    return np.repeat(np.arange(2 * spans) % 2 == 1, sizes)


def random_parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """[parts] sizes of at least 1 with this sum, uniformly distributed."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def corrupt_spans(
    ids: np.ndarray,
    rng: np.random.Generator,
    *,
    noise_density: float,
    mean_span_length: float,
    sentinels: np.ndarray | Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """(source, target) of a text [t] without sentinels, both without eos; `sentinels`: at least two."""
    sentinels = np.asarray(sentinels, dtype=np.int64)
    noise, spans = span_counts(len(ids), noise_density, mean_span_length, len(sentinels))
    is_noise = noise_mask(len(ids), noise, spans, rng)
    begins = is_noise & ~np.append(False, is_noise)[:-1]
    number = np.maximum(np.cumsum(begins) - 1, 0)  # of the span that begins here
    source = np.where(begins, sentinels[number], ids)[~is_noise | begins]
    target = np.insert(ids[is_noise], np.flatnonzero(begins[is_noise]), sentinels[:spans])
    return source, np.append(target, sentinels[spans])
