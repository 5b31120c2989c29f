"""A byte-level tokenizer of fifteen lines, and short ways to write, open and read sources."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tformer.data.shards.corpus import TokenCorpus
from tformer.data.sources.reading import Reading
from tformer.data.sources.text import TextSource, open_sources
from tformer.support.errors import InputError

Tokenized = Callable[..., TokenCorpus]
Documents = Callable[..., list[str]]


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
    target_path: str | None = None
    prefix: str = ""
    task: str | None = None
    weight: float | None = None


@dataclass(frozen=True)
class Columns:
    text: str | int | None = None
    text2: str | int | None = None
    label: str | int | None = None
    source: str | int | None = None
    target: str | int | None = None


def open_one(path: Path | str, *, column: str | int | None = None, **reading: Any) -> TextSource:
    return open_sources([Spec(str(path))], columns=Columns(column), reading=Reading(**reading))[0]


def read_documents(source: TextSource) -> list[str]:
    documents, parts = [], []
    for piece in source.documents():
        parts.append(piece.text)
        if piece.ends_document:
            documents.append("".join(parts))
            parts = []
    assert not parts, "the last piece did not end its document"
    return documents


def ids_of(corpus: TokenCorpus) -> list[int]:
    return corpus.slice(0, len(corpus)).tolist()


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if not path.name.startswith(".")]


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob(".tmp-*"))


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pipe(monkeypatch: pytest.MonkeyPatch, content: str | bytes) -> None:
    """Standard input has this content."""
    data = content if isinstance(content, bytes) else content.encode()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def refusal(action: Callable[[], object]) -> InputError:
    with pytest.raises(InputError) as caught:
        action()
    assert "\n" not in caught.value.message and caught.value.exit_code == 2
    return caught.value
