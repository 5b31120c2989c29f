"""SentencePiece models (arXiv 1808.06226) inside a tokenizer: SentencePiece itself normalizes and cuts the texts.

A tokenizer.json of tformer holds such a model under the key `sentencepiece`, beside a vocabulary of pieces, added
tokens, a template and a decoder that the `tokenizers` library reads. A piece that the vocabulary lacks is unknown.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sentencepiece import SentencePieceProcessor

from tformer.tokenizer.options import TokenizerModel

SENTENCEPIECE = "sentencepiece"
KINDS: dict[int, TokenizerModel] = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


class SentencePieces:
    """Cuts texts into the pieces of a SentencePiece model, and at added tokens.

    Args:
        document: a tokenizer.json. Its section `sentencepiece` has `model` (base64), `codes` (a text may begin with the
            code of a language, `>>fra<<`, which is one piece: Marian), and `trims` (no spaces at the ends of decoded
            texts).
        reading_special: text that spells a special token is that token.
    """

    def __init__(self, document: dict[str, Any], *, reading_special: bool = False) -> None:
        section, added = document[SENTENCEPIECE], document["added_tokens"]
        self._document = document
        model = base64.b64decode(section["model"], validate=True)
        self._model = SentencePieceProcessor(model_proto=model)
        self.trims = bool(section.get("trims"))
        self._code = re.compile(r">>.*?<<", re.DOTALL) if section.get("codes") else None
        whole = [token for token in added if reading_special or not token["special"]]
        names = sorted((self._pattern(token) for token in whole), key=len, reverse=True)
        self._whole = re.compile("|".join(names)) if names else None
        self._content = {token["content"] for token in whole}
        self._hidden = {token["content"] for token in added} - self._content  # special tokens are no text
        self._unk = document["model"]["unk_token"]
        self._ids = {**document["model"]["vocab"], **{token["content"]: token["id"] for token in added}}
        trainer = dict(_fields(dict(_fields(model)).get(2, b"")))
        self.kind: TokenizerModel = KINDS[trainer.get(3, 1)]

    @staticmethod
    def _pattern(token: dict[str, Any]) -> str:
        """A regular expression of an added token with the spaces that it takes."""
        word = r"\b" if token["single_word"] else ""
        left, right = (r"\s*" if token[side] else "" for side in ("lstrip", "rstrip"))
        return f"{left}{word}{re.escape(token['content'])}{word}{right}"

    def reading_special(self) -> SentencePieces:
        return SentencePieces(self._document, reading_special=True)

    def normalize(self, text: str) -> str:
        return self._model.normalize(text).replace("▁", " ").strip(" ")

    def cut_all(self, texts: Sequence[str]) -> list[list[str]]:
        """The pieces of every text."""
        if self._whole is None and not (self._code and any(text.startswith(">>") for text in texts)):
            found = self._model.encode(list(texts), out_type=str)
        else:
            found = [[piece for _, part in self._parts(text) for piece in self._cut(part)] for text in texts]
        hidden = self._hidden
        return [[self._unk if p in hidden else p for p in one] if hidden & set(one) else one for one in found]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of every text, without a template: several times as fast as the library is with pieces."""
        ids, unk = self._ids, self._ids[self._unk]
        return [[ids.get(piece, unk) for piece in pieces] for pieces in self.cut_all(texts)]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The characters of every piece: the first and the one after the last."""
        found: list[tuple[int, int]] = []
        for place, part in self._parts(text):
            if len(self._cut(part)) == 1:
                found.append((place, place + len(part)))
                continue
            raw = part.encode()
            for number, piece in _fields(self._model.encode(part, out_type="serialized_proto")):
                if number == 2:
                    at = dict(_fields(piece))
                    first, last = (len(raw[: at.get(field, 0)].decode(errors="ignore")) for field in (4, 5))
                    found.append((place + first, place + last))
        return found

    def _cut(self, part: str) -> list[str]:
        """The pieces of a part: an added token or code is one."""
        name = part.strip()
        if name in self._content:
            return [name]
        return [part] if self._code and self._code.fullmatch(part) else self._model.encode(part, out_type=str)

    def _parts(self, text: str) -> Iterator[tuple[int, str]]:
        """(place, part) of a text: added tokens, a code of a language, and what stands between."""
        start = 0
        ends = [(match.start(), match.end()) for match in self._whole.finditer(text)] if self._whole else []
        for first, last in [*ends, (len(text), len(text))]:
            if self._code and (code := self._code.match(text, start, first)):
                yield start, code[0]
                start = code.end()
            if start < first:
                yield start, text[start:first]
            if first < last:
                yield first, text[first:last]
            start = last


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of every field of a message of Protocol Buffers: int, or bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
            if byte < 0x80:
                return value

    while place < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        yield key >> 3, message[place : place + size]
        place += size
