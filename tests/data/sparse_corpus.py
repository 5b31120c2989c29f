"""A corpus of 10^12 tokens in sparse files, which take no room: a text of 4 TB and the cache entry of its tokens."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.data.fakes import open_one
from tformer.data.shards.corpus import entry_key
from tformer.data.shards.token_files import HEADER_BYTES, SHARD_BYTES, ArrayWriter, ShardHeader, shard_path
from tformer.tokenizer import Tokenizer

TOKENS = 10**12
TEXT_BYTES = 4 * 10**12
SHARD_TOKENS = SHARD_BYTES // 2


@dataclass(frozen=True)
class SparseCorpus:
    """The text, and the folder of its tokens in a cache. All tokens are 0 but for those that `plant` writes."""

    text: Path
    entry: Path

    def plant(self, place: int, ids: list[int]) -> None:
        """Write ids from this token of the corpus on."""
        for number, token in enumerate(ids, start=place):
            with shard_path(self.entry, number // SHARD_TOKENS).open("r+b") as file:
                file.seek(HEADER_BYTES + 2 * (number % SHARD_TOKENS))
                file.write(token.to_bytes(2, "little"))


def make_sparse_corpus(folder: Path, cache: Path, tokenizer: Tokenizer) -> SparseCorpus:
    """Write the files; skips the test where the file system has no sparse files of this size."""
    text = folder / "text.txt"
    with text.open("wb") as file:
        try:
            file.truncate(TEXT_BYTES)
        except OSError as error:
            pytest.skip(f"no sparse file of 4 TB here: {error}")
    if text.stat().st_blocks > 1000:
        pytest.skip("no sparse files here")
    entry = cache / entry_key(open_one(text), tokenizer)  # type: ignore[arg-type]
    entry.mkdir(parents=True)
    digest, number = bytes.fromhex(tokenizer.sha256), 0
    full = _zeros_checksum(SHARD_BYTES)
    for number, start in enumerate(range(0, TOKENS, SHARD_TOKENS)):
        count = min(SHARD_TOKENS, TOKENS - start)
        checksum = full if count == SHARD_TOKENS else _zeros_checksum(2 * count)
        header = ShardHeader(item_bytes=2, tokenizer=digest, number=number, count=count, checksum=checksum)
        descriptor = os.open(shard_path(entry, number), os.O_WRONLY | os.O_CREAT, 0o666)
        os.write(descriptor, header.pack())
        os.ftruncate(descriptor, HEADER_BYTES + 2 * count)
        os.close(descriptor)
    _write(entry / "marks.bin", [0, 0, TOKENS, TEXT_BYTES], digest)
    facts = {"tokens": TOKENS, "num_bytes": TEXT_BYTES, "shard_tokens": SHARD_TOKENS}
    _write(entry / "documents.bin", [0, TOKENS], digest, text=b"t" * 32, vocab_size=tokenizer.vocab_size, **facts)
    return SparseCorpus(text, entry)


def _zeros_checksum(size: int) -> int:
    checksum, zeros = 0, bytes(1 << 20)
    for start in range(0, size, len(zeros)):
        checksum = zlib.crc32(zeros[: size - start], checksum)
    return checksum


def _write(path: Path, values: list[int], digest: bytes, **facts: object) -> None:
    writer = ArrayWriter(path, np.dtype("int64"))
    writer.append(np.array(values))
    writer.finish(tokenizer=digest, **facts)
