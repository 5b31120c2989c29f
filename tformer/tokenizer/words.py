"""Which tokens begin a word, for masking whole words (BERT's whole-word masking, RoBERTa's `is_beginning_of_word`).

    wordpiece      all that do not continue one (##ing)
    byte-bpe       those that begin with white space: a space is spelled Ġ, a line break Ċ, a tab ĉ
    bpe, unigram   those that begin with a space, which is spelled ▁
    word, char     every token

The first word of a text has no space before it: whoever groups tokens into words begins one after a special token too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tformer.tokenizer.options import TokenizerModel

STARTS_WORD: dict[TokenizerModel, Callable[[str], bool]] = {
    "wordpiece": lambda token: not token.startswith("##"),
    "byte-bpe": lambda token: token.startswith(("Ġ", "Ċ", "ĉ", "č")),
    "bpe": lambda token: token.startswith("▁"),
    "unigram": lambda token: token.startswith("▁"),
    "word": lambda token: True,
    "char": lambda token: True,
}


def word_starts(kind: TokenizerModel, tokens: Sequence[str]) -> np.ndarray:
    """bool [V], True where `tokens[id]`, as the vocabulary spells it, begins a word."""
    return np.fromiter(map(STARTS_WORD[kind], tokens), dtype=bool, count=len(tokens))
