"""Feeding a trainer text of any size: small chunks, an evenly spread share of them, and samples for the report.

Nothing here holds more than the samples and one document piece; everything is a function of the text alone, so that
training on the same text sees the same chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

CHUNK_CHARACTERS = 16_384
UNSEEN_EVERY = 50  # one chunk of so many is withheld from training, to report on unseen text
REPORT_BYTES = 1_000_000


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", errors="surrogatepass"))


def chunks(text: str) -> Iterator[str]:
    """The text in pieces of at most CHUNK_CHARACTERS, cut after white space where there is some."""
    start = 0
    while len(text) - start > CHUNK_CHARACTERS:
        end = start + CHUNK_CHARACTERS
        cut = max(text.rfind("\n", start, end), text.rfind(" ", start, end)) + 1
        end = cut if cut > start else end
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


class EvenSample:
    """An evenly spread sample of a stream of unknown length in bounded memory.

    Every stride-th text is kept; when they outgrow the limit, every other one goes and the stride doubles.
    """

    def __init__(self, limit_bytes: int = REPORT_BYTES) -> None:
        self.texts: list[str] = []
        self._size = 0
        self._limit = limit_bytes
        self._stride = 1
        self._count = 0

    def add(self, text: str) -> None:
        if self._count % self._stride == 0:
            self.texts.append(text)
            self._size += utf8_length(text)
            while self._size > self._limit and len(self.texts) > 1:
                self.texts = self.texts[::2]
                self._size = sum(utf8_length(kept) for kept in self.texts)
                self._stride *= 2
        self._count += 1


class Feed:
    """The chunks that training sees, counted and sampled on their way.

    `share` below 1 keeps that share of the bytes, evenly spread; `withhold` keeps some chunks from training.
    `check` is called for every chunk and may raise to end the feeding.
    """

    def __init__(
        self,
        documents: Callable[[], Iterator[str]],
        *,
        share: float,
        withhold: bool,
        check: Callable[[int], None],
    ) -> None:
        self._documents = documents
        self._share = share
        self._withhold = withhold
        self._check = check
        self.seen_bytes = 0
        self.used_bytes = 0
        self.blank = True
        self.ended = threading.Event()
        self.failure: Exception | None = None
        self.trained = EvenSample()
        self.unseen = EvenSample()

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._chunks()
        except Exception as error:
            self.failure = error  # the library trains on what it has before it hands this on: see train.py
            raise
        finally:
            self.ended.set()

    def _chunks(self) -> Iterator[str]:
        number = 0
        for document in self._documents():
            for chunk in chunks(document):
                self._check(self.seen_bytes)
                size = utf8_length(chunk)
                self.seen_bytes += size
                number += 1
                if self._withhold and number % UNSEEN_EVERY == 0:
                    self.unseen.add(chunk)
                elif self.used_bytes + size <= self.seen_bytes * self._share or self._share >= 1:
                    self.used_bytes += size
                    self.blank = self.blank and chunk.isspace()
                    self.trained.add(chunk)
                    yield chunk
