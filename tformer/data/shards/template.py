"""Tokenised texts inside the special tokens of a tokenizer's template, truncated to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from tformer.errors import InputError
from tformer.tokenizer import Tokenizer

# Shapes: n examples, m ids of all examples together.


PROBES = ("a", "0", ".", "the", "\u4e00")  # one of them, surely, gives tokens

Truncation = Literal["head", "tail", "head_tail"]
Runs = list[tuple[np.ndarray, np.ndarray]]
"""(start, size) of a run of ids, for every example."""


@dataclass(frozen=True)
class TextTemplate:
    """Ids before the first text, between two texts (of one text: none) and after the last; each with its type.

    `second_type` is the token type of the second text: 0 where the template does not tell the texts apart (RoBERTa).
    """

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    prefix_types: tuple[int, ...]
    middle_types: tuple[int, ...]
    suffix_types: tuple[int, ...]
    second_type: int

    @property
    def num_special(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)


def single_template(tokenizer: Tokenizer) -> TextTemplate:
    """What stands around one text."""
    bare = tokenizer.encode("", template=True)
    text, probe = _probe(tokenizer)
    cut = _place(bare, tokenizer.encode(text, template=True), probe)
    prefix, suffix = bare[:cut], bare[cut:]
    if not bare:
        suffix = _end(tokenizer)
    return TextTemplate(tuple(prefix), (), tuple(suffix), (0,) * len(prefix), (), (0,) * len(suffix), second_type=0)


def pair_template(tokenizer: Tokenizer) -> TextTemplate:
    """What stands around and between two texts. Raises InputError for a template that turns their order round."""
    bare, types = tokenizer.encode_pair("", "")
    text, probe = _probe(tokenizer)
    with_first, _ = tokenizer.encode_pair(text, "")
    with_second, second_types = tokenizer.encode_pair("", text)
    first, second = _place(bare, with_first, probe), _place(bare, with_second, probe, last=True)
    if second < first:
        raise InputError("the tokenizer's template puts the second text before the first")
    prefix, middle, suffix = bare[:first], bare[first:second], bare[second:]
    types_of = [types[:first], types[first:second], types[second:]]
    second_type = second_types[second]
    if not bare:
        second_type = 1
        suffix, types_of[2] = _end(tokenizer), [1] * len(_end(tokenizer))
    if not middle:
        middle = _end(tokenizer) or tokenizer.encode("\n") or _unknown(tokenizer)
        types_of[1] = [0] * len(middle)
    before, between, after = map(tuple, types_of)
    return TextTemplate(tuple(prefix), tuple(middle), tuple(suffix), before, between, after, second_type=second_type)


def _end(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.special.eos is None else [tokenizer.special.eos]


def _unknown(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.special.unk is None else [tokenizer.special.unk]


def _probe(tokenizer: Tokenizer) -> tuple[str, list[int]]:
    for text in PROBES:
        if ids := tokenizer.encode(text):
            return text, ids
    raise InputError("the tokenizer makes no tokens of plain letters, digits or signs")


def _place(bare: list[int], filled: list[int], probe: list[int], *, last: bool = False) -> int:
    """Where the probe's ids were put into the bare template: the first place that fits, or the last."""
    places = [cut for cut in range(len(bare) + 1) if bare[:cut] + probe + bare[cut:] == filled]
    if not places:
        raise InputError("the tokenizer's template changes the text that it is put around")
    return places[-1 if last else 0]


def assemble(
    encoded: Sequence[Sequence[int]], template: TextTemplate, *, room: int, pairs: bool, truncation: Truncation
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Texts (of pairs: first, second, first, ...) inside their template: (ids [m], types [m], lengths [n], cut).

    Every example is seven runs of one pool of ids: prefix, first text in two parts, middle, second text in two parts,
    suffix; what is not there has length 0. So all are gathered at once.
    """
    special = (*template.prefix, *template.middle, *template.suffix)
    special_types = (*template.prefix_types, *template.middle_types, *template.suffix_types)
    sizes = np.array([len(text) for text in encoded], dtype=np.int64)
    flat = np.fromiter(chain.from_iterable(encoded), dtype=np.int64, count=int(sizes.sum()))
    pool = np.concatenate([np.array(special, dtype=np.int64), flat])
    starts = len(special) + np.cumsum(sizes) - sizes
    step = 2 if pairs else 1
    first, first_size = starts[::step], sizes[::step]
    second, second_size = (starts[1::2], sizes[1::2]) if pairs else (first, np.zeros_like(first_size))
    # BERT trims the longer one token by token, the second when they are equal: in closed form.
    first_kept = np.minimum(first_size, np.maximum(-(-room // 2), room - second_size))
    second_kept = np.minimum(second_size, room - first_kept)
    types = np.zeros(len(pool), dtype=np.int64)
    types[: len(special)] = special_types
    if pairs:
        types[len(special) :] = np.repeat(np.arange(len(sizes)) % 2 * template.second_type, sizes)
    zeros = np.zeros_like(first)
    ends = np.cumsum([0, len(template.prefix), len(template.middle), len(template.suffix)])
    frame = [(zeros + ends[part], zeros + ends[part + 1] - ends[part]) for part in range(3)]
    runs = [
        frame[0],
        *_kept(first, first_size, first_kept, truncation),
        frame[1],
        *_kept(second, second_size, second_kept, truncation),
        frame[2],
    ]
    run_starts = np.stack([start for start, _ in runs], axis=1)
    run_sizes = np.stack([size for _, size in runs], axis=1)
    lengths = run_sizes.sum(axis=1)
    run_starts, run_sizes = run_starts.ravel(), run_sizes.ravel()
    places = np.arange(run_sizes.sum()) + np.repeat(run_starts - (np.cumsum(run_sizes) - run_sizes), run_sizes)
    cut = int((first_kept + second_kept < first_size + second_size).sum())
    return pool[places], types[places], lengths, cut


def _kept(start: np.ndarray, size: np.ndarray, kept: np.ndarray, truncation: Truncation) -> Runs:
    """The part of each text that stays, as two runs (start, size)."""
    if truncation == "head":
        head = kept
    elif truncation == "tail":
        head = np.zeros_like(kept)
    else:
        head = -(-kept // 2)
    return [(start, head), (start + size - (kept - head), kept - head)]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one flat array, of ids or of UTF-8 bytes.

    Row n is `values[starts[n] : starts[n] + lengths[n]]`.
    """

    values: np.ndarray  # [M]
    starts: np.ndarray  # int64 [N]
    lengths: np.ndarray  # int64 [N]

    @classmethod
    def join(cls, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Ragged:
        """From (values, lengths) of consecutive rows; at least one part."""
        values, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return cls(values, np.cumsum(lengths) - lengths, lengths)

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, in order, without values that belong to no row."""
        return cls.join([(part.values[part.places()], part.lengths) for part in parts])

    def places(self) -> np.ndarray:
        """int64 [M]: the places of the values, row after row."""
        before = np.cumsum(self.lengths) - self.lengths
        return np.repeat(self.starts - before, self.lengths) + np.arange(int(self.lengths.sum()))

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, index: int) -> np.ndarray:
        start = int(self.starts[index])
        return self.values[start : start + int(self.lengths[index])]

    def text(self, index: int) -> str:
        """The row as text, for bytes."""
        return self.row(index).tobytes().decode("utf-8")

    def subset(self, indices: np.ndarray) -> Ragged:
        """Some of the rows, in this order; their values are shared, not copied."""
        return Ragged(self.values, self.starts[indices], self.lengths[indices])


def texts_as_bytes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(values uint8 [M], lengths int64 [N]) for `Ragged.join`."""
    encoded = [text.encode("utf-8") for text in texts]
    lengths = np.array([len(text) for text in encoded], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), lengths
