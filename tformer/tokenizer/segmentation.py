"""Random segmentations of texts that are ids already: BPE-dropout (arXiv 1910.13267), unigram sampling (1804.10959).

    BPE       A word is split into the symbols that its tokens were merged from, and merged again. At each step every
              possible merge is dropped with probability p; the first of the others, in the order of training, is done.
    unigram   A word x is segmented into pieces y with probability P(y | x) ~ (product of P(y_i))^alpha, exactly: the
              forward pass sums over all segmentations, and pieces are drawn backwards.

A word is what stands between two tokens that begin a word, are special or were added. The library's own dropout cannot
be seeded, so equal runs would differ. Ids are enough: every other token of BPE is an id without a merge, or the merge
of two ids.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from tformer.support.errors import InputError
from tformer.tokenizer.decoding import word_starts
from tformer.tokenizer.tokenizer import Tokenizer

CACHED_WORDS = 1 << 17

Draw = Callable[[], float]
"""The next number from U(0, 1)."""

Word = tuple[int, ...]


class Segmenter:
    """Draws segmentations of texts; a subclass draws the segmentation of one word.

    Args:
        tokenizer: of the ids.
        rate: p of BPE, alpha of unigram; above 0.
    """

    def __init__(self, tokenizer: Tokenizer, rate: float) -> None:
        self.rate = rate
        tokens = tokenizer.tokens
        is_whole = [not token or tokenizer.is_whole(number) for number, token in enumerate(tokens)]
        self._whole_V = np.array(is_whole, dtype=bool)
        self._begins_V = word_starts(tokenizer.kind, tokens) | self._whole_V

    def sample(self, ids: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """(new ids [m], place in `ids` of the first token of each one's word [m]); special and added tokens stay."""
        begins = self._begins_V[ids]
        begins[1:] |= self._whole_V[ids[:-1]]
        begins[:1] = True
        starts = np.flatnonzero(begins).tolist()
        tokens = ids.tolist()
        words = [self.word(tuple(tokens[start:end]), draw) for start, end in pairwise([*starts, len(tokens)])]
        flat = np.array([token for word in words for token in word], dtype=ids.dtype)
        sizes = np.array([len(word) for word in words], dtype=np.int64)
        return flat, np.repeat(np.array(starts, dtype=np.int64), sizes)

    def word(self, ids: Word, draw: Draw) -> Sequence[int]:
        """The drawn pieces of a word."""
        raise NotImplementedError


class BpeSegmenter(Segmenter):
    """Merges with dropout."""

    def __init__(self, tokenizer: Tokenizer, model: dict[str, Any], rate: float) -> None:
        super().__init__(tokenizer, rate)
        vocabulary: dict[str, int] = model["vocab"]
        prefix = model.get("continuing_subword_prefix") or ""
        self._size = tokenizer.vocab_size
        self._places: dict[tuple[int, int], int] = {}  # pair -> place of the merge * V + id of the merged token
        self._parts: dict[int, tuple[int, int]] = {}
        for place, merge in enumerate(model["merges"]):
            first, second = merge.split(" ") if isinstance(merge, str) else merge
            merged = vocabulary.get(first + second.removeprefix(prefix))
            pair = (vocabulary[first], vocabulary[second])
            if merged is not None:
                self._places[pair] = place * self._size + merged
                self._parts.setdefault(merged, pair)
        self._symbols = lru_cache(CACHED_WORDS)(self._find_symbols)

    def word(self, ids: Word, draw: Draw) -> Sequence[int]:
        if len(ids) == 1 and (ids[0] not in self._parts or self._whole_V[ids[0]]):
            return ids
        return [token for symbols in self._symbols(ids) for token in self._merged(symbols, self.rate, draw)]

    def _find_symbols(self, ids: Word) -> tuple[Word, ...]:
        """The symbols of a word, or of each of its tokens where the tokenizer separates them inside the word."""
        parts = [self._split(token) for token in ids]
        whole = tuple(symbol for part in parts for symbol in part)
        return (whole,) if tuple(self._merged(whole, 0.0, lambda: 1.0)) == ids else tuple(parts)

    def _split(self, token: int) -> Word:
        """The symbols that a token was merged from."""
        found, waiting = list[int](), [token]
        while waiting:
            token = waiting.pop()
            if token in self._parts:
                first, second = self._parts[token]
                waiting += [second, first]
            else:
                found.append(token)
        return tuple(found)

    def _merged(self, symbols: Word, rate: float, draw: Draw) -> list[int]:
        word, places = list(symbols), self._places
        while len(word) > 1:
            best = at = -1
            for number in range(len(word) - 1):
                place = places.get((word[number], word[number + 1]), -1)
                # A merge that would not be done next needs no draw.
                if place >= 0 and (best < 0 or place < best) and (not rate or draw() >= rate):
                    best, at = place, number
            if best < 0:
                break
            word[at : at + 2] = [best % self._size]
        return word


class UnigramSegmenter(Segmenter):
    """Pieces drawn by their probability to the power alpha."""

    def __init__(self, tokenizer: Tokenizer, model: dict[str, Any], rate: float) -> None:
        super().__init__(tokenizer, rate)
        unknown = model.get("unk_id")
        self._pieces = [piece for piece, _ in model["vocab"]]
        self._ids = {
            piece: (number, score * rate)
            for number, (piece, score) in enumerate(model["vocab"])
            if number != unknown
            and not self._whole_V[number]
            and not (len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"))  # a byte
        }
        self._longest = max(map(len, self._ids), default=0)
        self._lattice = lru_cache(CACHED_WORDS)(self._find_lattice)

    def word(self, ids: Word, draw: Draw) -> Sequence[int]:
        lattice = self._lattice(ids)
        if lattice is None:
            return ids
        found, end = list[int](), len(lattice)
        while end:
            sums, arcs = lattice[end - 1]
            end, token = arcs[min(bisect_left(sums, draw() * sums[-1]), len(arcs) - 1)]
            found.append(token)
        return found[::-1]

    def _find_lattice(self, ids: Word) -> list[tuple[list[float], list[tuple[int, int]]]] | None:
        """For each end of a piece: cumulative weights, and (start, id) of the pieces; None for unknown characters."""
        if any(token >= len(self._pieces) or self._pieces[token] not in self._ids for token in ids):
            return None
        text = "".join(self._pieces[token] for token in ids)
        before = [0.0]  # log of the sum over all segmentations of a beginning
        lattice = []
        for end in range(1, len(text) + 1):
            arcs, logs = list[tuple[int, int]](), list[float]()
            for start in range(max(0, end - self._longest), end):
                known = self._ids.get(text[start:end])
                if known is not None and before[start] > -math.inf:
                    arcs.append((start, known[0]))
                    logs.append(before[start] + known[1])
            largest = max(logs, default=-math.inf)
            sums = list(accumulate(math.exp(log - largest) for log in logs))
            before.append(largest + math.log(sums[-1]) if sums else -math.inf)
            lattice.append((sums, arcs))
        return lattice


def segmenter_of(tokenizer: Tokenizer, rate: float) -> Segmenter:
    """The segmenter of a tokenizer. Raises InputError for one whose texts have one segmentation only."""
    model = json.loads(tokenizer.to_json())["model"]
    kind = tokenizer.kind if tokenizer.sentencepiece is None else "SentencePiece"
    if kind in ("bpe", "byte-bpe") and model.get("merges"):
        return BpeSegmenter(tokenizer, model, rate)
    if kind == "unigram":
        return UnigramSegmenter(tokenizer, model, rate)
    raise InputError(
        f"data.subword_sampling: found {rate:g} with a {kind} tokenizer, expected 0: only bpe, byte-bpe and "
        "unigram have several segmentations of a text",
        hint="train one of these with --set tokenizer.train.model=bpe",
    )
