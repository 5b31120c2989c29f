"""What the tests of the token cache share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tformer.data.corpus import TokenCorpus

Tokenised = Callable[..., TokenCorpus]


def ids_of(corpus: TokenCorpus) -> list[int]:
    return corpus.slice(0, len(corpus)).tolist()


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if not path.name.startswith(".")]


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob(".tmp-*"))
