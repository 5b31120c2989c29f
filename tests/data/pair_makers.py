"""Small pair sources: specs, files, rows in memory, and tokenizers of a few words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.data.fakes import Columns, Spec
from tformer.data.shards.pair_tokens import PairTokens, tokenize_pairs
from tformer.data.sources.pairs import PairSource, open_pairs
from tformer.data.sources.tables import PairRow
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

WORDS = ["the", "cat", "sat", "on", "a", "mat"]


def open_one(
    path: Path | str,
    target: Path | str | None = None,
    *,
    source_column: str | int | None = None,
    target_column: str | int | None = None,
    options: Mapping[str, Any] = {},
    **spec: Any,
) -> PairSource:
    """options: of `open_pairs`."""
    columns = Columns(source=source_column, target=target_column)
    [source] = open_pairs(
        [Spec(str(path), None if target is None else str(target), **spec)], columns=columns, **options
    )
    return source


def read(*args: Any, **options: Any) -> list[tuple[str, str]]:
    return [(row.source, row.target) for row in open_one(*args, **options).rows()]


@dataclass(frozen=True)
class Rows:
    """A source that is a list, of pairs or of labelled rows."""

    items: tuple[Any, ...]
    name: str = "a.tsv"

    def rows(self) -> Iterator[Any]:
        yield from self.items

    def fingerprint(self) -> str:
        return repr(self.items)

    def size_bytes(self) -> int | None:
        return sum(len(row.source) + len(row.target) + 2 for row in self.items)


def rows_of(pairs: Sequence[tuple[str, str]], *, task: str = "", name: str = "a.tsv") -> Rows:
    return Rows(tuple(PairRow(a, b, f"{name}:{n}", task) for n, (a, b) in enumerate(pairs, 1)), name)


@cache
def words(template: str = "seq2seq") -> Tokenizer:
    options = TokenizerOptions(model="word", vocab_size=200, template=template)  # type: ignore[arg-type]
    return train_tokenizer(lambda: iter([" ".join(WORDS * 9)]), options)


def tokenize(
    rows: Rows | Sequence[Rows],
    *,
    template: str = "seq2seq",
    seq_len: int = 16,
    target_seq_len: int = 16,
    **options: Any,
) -> PairTokens:
    tokenizer = words(template)
    eos = tokenizer.special.eos
    return tokenize_pairs(
        [rows] if isinstance(rows, Rows) else rows,
        tokenizer,
        tokenizer,
        seq_len=seq_len,
        target_seq_len=target_seq_len,
        eos=0 if eos is None else eos,
        **options,
    )
