"""`bench tokenize`: text to token ids, in the pieces that `tformer train` cuts text into."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from tformer.bench.workloads import (
    OURS,
    Cost,
    Task,
    Work,
)
from tformer.data.shards.token_files import safe_chunks
from tformer.data.sources.files import Piece
from tformer.data.sources.text import open_sources
from tformer.errors import InputError
from tformer.interop.importing import open_checkpoint
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

BATCH = 16  # pieces of 64K characters at most: the megabyte that training encodes at once


@dataclass(frozen=True)
class _Spec:
    path: str
    weight: float = 1.0


class Tokenizing:
    """`Tokenizer.encode_batch`."""

    name = OURS

    def __init__(self, task: Task, precision: str) -> None:
        self.task, self.precision = task, precision

    def prepare(self) -> None:
        use_threads()
        self._batches = texts_of(self.task)
        self._tokenizer = tokenizer_of(self.task)

    def run(self) -> int:
        return sum(len(ids) for texts in self._batches for ids in self._tokenizer.encode_batch(texts))


def use_threads() -> None:
    """The tokenizers library makes its threads once, as many as PyTorch has, at its first batch."""
    os.environ["RAYON_NUM_THREADS"] = str(torch.get_num_threads())
    os.environ["TOKENIZERS_PARALLELISM"] = "true"


def texts_of(task: Task) -> list[list[str]]:
    """The first megabytes of the data, in batches."""
    texts = _texts(task.options["data"], int(task.options["megabytes"] * 1e6))
    return [list(texts[start : start + task.batch_size]) for start in range(0, len(texts), task.batch_size)]


def tokenizer_of(task: Task) -> Tokenizer:
    """The one that was given, as a file or a run, or one that was trained on the text.

    Raises InputError for what cannot be read, and for a run without text.
    """
    given = task.options["tokenizer"]
    if given is not None and Path(given).is_file():
        return Tokenizer.load(given)
    if given is not None:
        checkpoint = open_checkpoint(given)
        if checkpoint.tokenizer_json is None:
            raise InputError(f"{given}: a model of images has no tokenizer")
        return Tokenizer.from_json(checkpoint.tokenizer_json, name=f"{given}: tokenizer.json")
    options = asdict(task.recipe.tokenizer.train)
    return _trained(tuple(options.items()), task.options["data"], int(task.options["megabytes"] * 1e6))


@cache
def _trained(options: tuple[tuple[str, object], ...], data: str | None, most_bytes: int) -> Tokenizer:
    texts = _texts(data, most_bytes)
    return train_tokenizer(lambda: iter(texts), TokenizerOptions(**dict(options)))  # type: ignore[arg-type]


@cache
def _texts(data: str | None, most_bytes: int) -> tuple[str, ...]:
    sources = open_sources([] if data is None else [_Spec(data)])
    return tuple(_first(safe_chunks(piece for source in sources for piece in source.documents()), most_bytes))


def _first(pieces: Iterable[Piece], most_bytes: int) -> Iterable[str]:
    size = 0
    for piece in pieces:
        yield piece.text
        size += len(piece.text.encode())
        if size >= most_bytes:
            return


def check(task: Task) -> None:
    """Raise InputError for text or a vocabulary that cannot be read: the text is, as far as it will be measured."""
    try:
        texts_of(task)
    except InputError as error:
        other = error.hint is not None and "data.errors" in error.hint  # which is an option of training
        raise InputError(error.message, hint="convert it to UTF-8" if other else error.hint) from None
    if task.options["tokenizer"] is not None:
        tokenizer_of(task)


def cost(task: Task, precision: str) -> Cost:
    """Nothing is multiplied, so that no ceiling applies; a step is a batch of texts."""
    batches = texts_of(task)
    return Cost(flops=0.0, bytes_read=0.0, steps=len(batches), examples=sum(map(len, batches)))


TOKENIZE = Work("tokenize", "batch", Tokenizing, (BATCH,), lambda recipe: recipe.seq_len, cost, check=check)
