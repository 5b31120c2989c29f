"""Ids to text, whole or streamed, never in the middle of a character; and the tokens that begin a word.

Most kinds decode by concatenation: every id stands for fixed bytes, whatever its neighbours (`PieceTable`). The others
(word, WordPiece, decoders of other libraries that trim or join) decode through the library, a window at a time.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tformer.tokenizer.options import TokenizerModel

REPLACEMENT = "\ufffd"


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map from printable characters to the 256 bytes: printable bytes map to themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def concatenating_reader(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes] | None:
    """A function from a vocabulary entry to its bytes under this decoder (its JSON); None when neighbours matter."""
    if decoder is None:
        return None
    steps: list[Mapping[str, Any]] = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        alphabet = byte_level_alphabet()

        def read_characters(token: str) -> bytes:
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode()  # an added token, written literally

        return read_characters
    if not kinds or kinds[-1] != "Fuse":
        return None
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    for step in steps[:-1]:
        if step.get("type") == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step.get("type") == "ByteFallback":
            byte_fallback = True
        else:
            return None

    def read(token: str) -> bytes:
        if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return read


class PieceTable:
    """The bytes of every id; decoding joins them. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, pieces: Sequence[bytes], special: frozenset[int]) -> None:
        self.pieces = pieces
        self.special = special

    def decode(self, ids: Iterable[int], *, skip_special: bool) -> str:
        return b"".join(self.read(i, skip_special=skip_special) for i in ids).decode("utf-8", errors="replace")

    def read(self, token_id: int, *, skip_special: bool) -> bytes:
        if not 0 <= token_id < len(self.pieces):
            raise ValueError(f"id {token_id} is outside the vocabulary of {len(self.pieces)}")
        return b"" if skip_special and token_id in self.special else self.pieces[token_id]


class PieceStream:
    """Streaming with a `PieceTable`: an incremental UTF-8 decoder withholds incomplete characters."""

    def __init__(self, table: PieceTable, *, skip_special: bool) -> None:
        self._table = table
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes: empty while a character is incomplete."""
        return self._utf8.decode(self._table.read(token_id, skip_special=self._skip_special))

    def finish(self) -> str:
        """The remaining text, with U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """Streaming with any decoder: decode the last returned ids with and without the new ones, return the difference."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []  # context: the ids of the text returned last
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this id completes: empty while a character is incomplete or the text may still change."""
        self._held.append(token_id)
        return self._show(final=False)

    def finish(self) -> str:
        return self._show(final=True)

    def _show(self, *, final: bool) -> str:
        before = self._decode(self._shown)
        text = self._decode(self._shown + self._held)
        if len(text) <= len(before) or (text.endswith(REPLACEMENT) and not final):
            return ""
        self._shown, self._held = self._held, []
        return text[len(before) :]


StreamDecoder = PieceStream | WindowStream
"""Decodes ids one by one and returns text as soon as it is final. All pieces together equal `decode` of all ids."""

STARTS_WORD: dict[TokenizerModel, Callable[[str], bool]] = {
    "wordpiece": lambda token: not token.startswith("##"),
    "byte-bpe": lambda token: token.startswith(("Ġ", "Ċ", "ĉ", "č")),
    "bpe": lambda token: token.startswith("▁"),
    "unigram": lambda token: token.startswith("▁"),
    "word": lambda token: True,
    "char": lambda token: True,
}


def word_starts(kind: TokenizerModel, tokens: Sequence[str]) -> np.ndarray:
    """bool [V], True where `tokens[id]`, the token as in the vocabulary, begins a word.

    The first word of a text has no space before it: callers begin a word after a special token too.
    """
    return np.fromiter(map(STARTS_WORD[kind], tokens), dtype=bool, count=len(tokens))
