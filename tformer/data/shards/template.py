"""Tokenized texts inside the special tokens of a tokenizer's template, truncated to fit; and ragged arrays.

The ids that the template puts around one text and around two are found by encoding a probe:

    bert      [CLS] a [SEP]       [CLS] a [SEP] b [SEP]
    roberta   <s> a </s>          <s> a </s></s> b </s>
    none      a                   a \\n b

A tokenizer without a template ends a text with its end-of-text token, if it has one (pooling `eos` reads there), and
separates two texts by it, else by a line break, else by the unknown token.

Of a text that is too long, the beginning is kept ("head"), the end ("tail"), or half of each ("head_tail"; Sun et al.,
"How to fine-tune BERT for text classification", arXiv 1905.05583). Of a pair, the longer text is cut first until both
fit, as BERT does. Special tokens are never cut.
"""

# Shapes: n examples, m ids of all examples together; N rows of a ragged array, M values.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.pieces import Truncation

PROBES = ("a", "0", ".", "the", "\u4e00")  # texts of which at least one should give tokens

Runs = list[tuple[np.ndarray, np.ndarray]]
"""(start, size) of a run of ids, for every example."""


@dataclass(frozen=True)
class TextTemplate:
    """Ids before the first text, between two texts (for one text: none) and after the last; each with its type.

    `second_type` is the token type of the second text: 0 if the template has equal types for both (RoBERTa).
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


def plain_template(prefix: Sequence[int] = (), suffix: Sequence[int] = ()) -> TextTemplate:
    """A template for one text: ids before and after it, all of type 0."""
    return TextTemplate(tuple(prefix), (), tuple(suffix), (0,) * len(prefix), (), (0,) * len(suffix), second_type=0)


def own_template(tokenizer: Tokenizer) -> TextTemplate:
    """The tokenizer's own template of one text; an empty one if the tokenizer has none."""
    bare = tokenizer.encode("", template=True)
    text, probe = _probe(tokenizer)
    cut = _place(bare, tokenizer.encode(text, template=True), probe)
    return plain_template(bare[:cut], bare[cut:])


def single_template(tokenizer: Tokenizer) -> TextTemplate:
    """The special tokens around one text that an encoder or a classifier reads."""
    own = own_template(tokenizer)
    return own if own.num_special else plain_template(suffix=_end(tokenizer))


def pair_template(tokenizer: Tokenizer) -> TextTemplate:
    """The special tokens around and between two texts. Raises InputError for a template that reverses their order."""
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
        unknown = tokenizer.special.unk
        middle = _end(tokenizer) or tokenizer.encode("\n") or ([] if unknown is None else [unknown])
        types_of[1] = [0] * len(middle)
    before, between, after = map(tuple, types_of)
    return TextTemplate(tuple(prefix), tuple(middle), tuple(suffix), before, between, after, second_type=second_type)


def _end(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.special.eos is None else [tokenizer.special.eos]


def _probe(tokenizer: Tokenizer) -> tuple[str, list[int]]:
    for text in PROBES:
        if ids := tokenizer.encode(text):
            return text, ids
    raise InputError("the tokenizer makes no tokens of plain letters, digits or signs")


def _place(bare: list[int], filled: list[int], probe: list[int], *, last: bool = False) -> int:
    """The place of the probe's ids in the bare template: the first that fits, or the last."""
    places = [cut for cut in range(len(bare) + 1) if bare[:cut] + probe + bare[cut:] == filled]
    if not places:
        raise InputError("the tokenizer's template changes the text that it is put around")
    return places[-1 if last else 0]


def text_room(seq_len: int, num_special: int, *, texts: int = 1, key: str = "data.seq_len") -> int:
    """Tokens of text that fit beside the special tokens. Raises InputError for less than one for each text."""
    if seq_len - num_special < texts:
        raise InputError(
            f"{key}: {seq_len} tokens leave no room for {'text' if texts == 1 else 'two texts'} beside {num_special} "
            "special tokens",
            hint=f"set it to at least {num_special + texts}",
        )
    return seq_len - num_special


def fitting_sizes(first: np.ndarray | int, second: np.ndarray | int, room: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that are kept of two texts of these sizes: the closed form of BERT's trimming, token by token.

    The longer text is trimmed, the second if both are equal.
    """
    first_kept = np.minimum(first, np.maximum(-(-room // 2), room - second))
    return first_kept, np.minimum(second, room - first_kept)


def assemble(
    encoded: Sequence[Sequence[int]], template: TextTemplate, *, room: int, pairs: bool, truncation: Truncation
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Texts (of pairs: first, second, first, ...) inside their template: (ids [m], types [m], lengths [n], cut).

    Every example is seven runs of one pool of ids: prefix, first text in two parts, middle, second text in two parts,
    suffix; missing ones have length 0. So all are gathered at once.
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
    first_kept, second_kept = fitting_sizes(first_size, second_size, room)
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
    places = Ragged(pool, run_starts.ravel(), run_sizes.ravel()).places()
    cut = int((first_kept + second_kept < first_size + second_size).sum())
    return pool[places], types[places], lengths, cut


def head_of(kept: np.ndarray, truncation: Truncation) -> np.ndarray:
    """Number of kept tokens from the beginning of each text; the others are from its end."""
    return {"head": kept, "tail": np.zeros_like(kept), "head_tail": -(-kept // 2)}[truncation]


def _kept(start: np.ndarray, size: np.ndarray, kept: np.ndarray, truncation: Truncation) -> Runs:
    """The part of each text that is kept, as two runs (start, size)."""
    head = head_of(kept, truncation)
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
