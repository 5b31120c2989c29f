"""`bench tokenize`: text to token ids, in the pieces that `tformer train` cuts text into.

The text is a file's, or the documentation that comes with Python (`builtin:python-docs`); the vocabulary is a file's,
or trained on that text as the recipe says. All threads work on the texts of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from tformer.bench.workloads import Contender, Cost, Task, Work
from tformer.data.shards.token_files import safe_chunks
from tformer.data.sources.files import Piece
from tformer.data.sources.text import open_sources
from tformer.interop.opening import open_checkpoint
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

BATCH = 16  # pieces of at most 64K characters: the megabyte that training encodes at once


@dataclass(frozen=True)
class _Spec:
    path: str
    weight: float = 1.0


class Tokenization(Contender):
    """`Tokenizer.encode_batch`."""

    def prepare(self) -> None:
        use_threads()
        self._batches = texts_of(self.task)
        self._tokenizer = tokenizer_of(self.task)

    def run(self) -> int:
        return sum(len(ids) for texts in self._batches for ids in self._tokenizer.encode_batch(texts))


def use_threads() -> None:
    """Let the tokenizers library use as many threads as PyTorch; it reads these variables at its first batch."""
    os.environ["RAYON_NUM_THREADS"] = str(torch.get_num_threads())
    os.environ["TOKENIZERS_PARALLELISM"] = "true"


def texts_of(task: Task) -> list[list[str]]:
    """The first megabytes of the data, in batches."""
    texts = _texts(task.options["data"], int(task.options["megabytes"] * 1e6))
    return [list(texts[start : start + task.batch_size]) for start in range(0, len(texts), task.batch_size)]


def tokenizer_of(task: Task) -> Tokenizer:
    """The tokenizer of the given file or run, else one trained on the text.

    Raises InputError for what cannot be read, and for a model of images.
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
    """Raise InputError for text or a tokenizer that cannot be read; reads as much text as will be measured."""
    try:
        texts_of(task)
    except InputError as error:
        is_for_training = error.hint is not None and "data.errors" in error.hint
        raise InputError(error.message, hint="convert it to UTF-8" if is_for_training else error.hint) from None
    if task.options["tokenizer"] is not None:
        tokenizer_of(task)


def cost(task: Task, precision: str) -> Cost:
    """No products, so no ceiling applies; a step is a batch of texts."""
    batches = texts_of(task)
    return Cost(flops=0.0, bytes_read=0.0, steps=len(batches), examples=sum(map(len, batches)))


TOKENIZE = Work(
    name="tokenize",
    step="batch",
    contender=Tokenization,
    batch_sizes=(BATCH,),
    length=lambda recipe: recipe.seq_len,
    cost=cost,
    check=check,
)
