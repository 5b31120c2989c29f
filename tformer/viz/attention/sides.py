"""The tokens along one axis of an attention matrix: how each reads, whether it is special, where words begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tformer.tokenizer import Tokenizer
from tformer.tokenizer.words import word_starts

SPELLED_OUT = ("wordpiece", "word", "char")  # their tokens read as the vocabulary spells them
CONTINUES = "##"


@dataclass(frozen=True)
class Side:
    """One sequence of tokens.

    Attributes:
        name: "encoder" or "decoder".
        tokens: each as it reads, spaces included; of an image "CLS" and "row,column" of each patch.
        special: whether a token comes from a template.
        starts: whether a token begins a word; special ones stand alone.
        text_of: how many texts come before this token's (1: it belongs to the second of a pair).
        written_from: tokens from this one on were written by the model; None: all were given.
    """

    name: str
    tokens: tuple[str, ...]
    special: tuple[bool, ...]
    starts: tuple[bool, ...]
    text_of: tuple[int, ...] = ()
    written_from: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def words(self) -> list[tuple[int, int, str]]:
        """(first token, token after the last, how it reads) of each word; each special token is one of its own."""
        edges = [0]
        for place in range(1, len(self)):
            alone = self.special[place] or self.special[place - 1]
            if alone or self.starts[place]:
                edges.append(place)
        edges.append(len(self))
        return [(start, stop, _joined(self.tokens[start:stop])) for start, stop in pairwise(edges)]


def side_of(
    name: str,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    text_of: Sequence[int] = (),
    special: Sequence[bool] | None = None,
    written_from: int | None = None,
) -> Side:
    """The side that these ids make. `special`: None: those that are special tokens of the vocabulary."""
    marks = [tokenizer.is_special(token) for token in ids] if special is None else list(special)
    tokens = tuple(token_text(tokenizer, token) for token in ids)
    spelled = [tokenizer.token(token) for token in ids]
    if tokenizer.kind == "char":
        starts = [token.isspace() for token in spelled]  # a space belongs to the word after it
    else:
        starts = word_starts(tokenizer.kind, spelled).tolist()
    return Side(name, tokens, tuple(marks), tuple(starts), tuple(text_of), written_from)


def image_side(*, rows: int, columns: int, has_cls: bool) -> Side:
    """The patches of an image, row by row, behind the class token if there is one."""
    patches = [f"{row},{column}" for row in range(rows) for column in range(columns)]
    tokens = (["CLS"] if has_cls else []) + patches
    special = np.arange(len(tokens)) < has_cls
    return Side("encoder", tuple(tokens), tuple(special.tolist()), (True,) * len(tokens))


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """How a token reads: its space in front if it has one; as the vocabulary spells it where it is half a character."""
    spelled = tokenizer.token(token)
    if tokenizer.kind in SPELLED_OUT or tokenizer.is_special(token):
        return spelled
    text = tokenizer.decode([token], skip_special=False)
    if spelled.startswith("▁") and not text.startswith(" "):
        text = " " + text  # a decoder that drops the first space of a text
    return text if text and "\N{REPLACEMENT CHARACTER}" not in text else spelled


def _joined(tokens: Sequence[str]) -> str:
    return tokens[0] + "".join(token.removeprefix(CONTINUES) for token in tokens[1:]) if tokens else ""
