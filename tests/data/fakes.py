"""A tokenizer of fifteen lines (each UTF-8 byte is its id, 256 ends a document), and short ways to read a source."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tformer.data.sources import TextSource, open_sources


@dataclass(frozen=True)
class FakeSpecial:
    eos: int | None = 256


@dataclass(frozen=True)
class ByteTokenizer:
    special: FakeSpecial = FakeSpecial()
    vocab_size: int = 257
    name: str = "bytes"
    opening: tuple[int, ...] = ()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(number for number in ids if number < 256).decode("utf-8", "replace")


@dataclass(frozen=True)
class Spec:
    path: str
    weight: float = 1.0


@dataclass(frozen=True)
class FakeColumns:
    text: str | int | None = None


def open_one(path: Path | str, *, column: str | int | None = None, errors: str = "strict") -> TextSource:
    return open_sources([Spec(str(path))], columns=FakeColumns(column), errors=errors)[0]  # type: ignore[arg-type]


def read_documents(source: TextSource) -> list[str]:
    documents, parts = [], []
    for piece in source.documents():
        parts.append(piece.text)
        if piece.ends_document:
            documents.append("".join(parts))
            parts = []
    assert not parts, "the last piece did not end its document"
    return documents
