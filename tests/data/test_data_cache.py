"""Token shards: what is written, cached, rebuilt and cleaned up."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.cache_cases import Tokenised, entries, ids_of, leftovers
from tests.data.fakes import ByteTokenizer, FakeSpecial, open_one
from tformer.cache_dir import default_cache_dir
from tformer.data import shards
from tformer.data.cache import token_corpus
from tformer.data.shards import HEADER_BYTES, DamagedShardError, ShardHeader, token_dtype
from tformer.data.text import Piece
from tformer.errors import InputError


class InMemory:
    """A source of given documents, in pieces of a given size."""

    name, notes = "memory", ()

    def __init__(self, documents: list[str], size: int = 1000) -> None:
        self.texts, self.size = documents, size

    def documents(self) -> Iterator[Piece]:
        for text in self.texts:
            for start in range(0, len(text), self.size):
                yield Piece(text[start : start + self.size], start + self.size >= len(text))

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()

    def size_bytes(self) -> int | None:
        return None


def test_one_text_has_no_end_of_text_inside_or_after(tmp_path: Path, tokenised: Tokenised) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo é\n")
    corpus = tokenised(tmp_path / "a.txt")
    assert bytes(ids_of(corpus)).decode() == "one\n\ntwo é\n"
    assert corpus.num_bytes == 12
    assert corpus.document_offsets.tolist() == [0, 12]


def test_every_one_of_several_documents_ends_with_the_eos_id(rows: Path, tokenised: Tokenised) -> None:
    corpus = tokenised(rows)
    expected: list[int] = []
    starts = []
    for number in range(50):
        starts.append(len(expected))
        expected += [*f"document {number}".encode(), 256]
    assert ids_of(corpus) == expected
    assert corpus.document_offsets.tolist() == [*starts, len(expected)]
    assert corpus.num_documents == 50
    assert corpus.num_bytes == len(expected) - 50
    without = tokenised(rows, ByteTokenizer(special=FakeSpecial(eos=None)))
    assert ids_of(without) == [number for number in expected if number != 256]


def test_what_opens_a_text_stands_before_each_document(rows: Path, tokenised: Tokenised) -> None:
    corpus = tokenised(rows, ByteTokenizer(opening=(7, 8)))
    documents = [[7, 8, *f"document {number}".encode(), 256] for number in range(50)]
    assert ids_of(corpus) == list(chain.from_iterable(documents))
    assert np.diff(corpus.document_offsets).tolist() == [len(ids) for ids in documents]
    assert corpus.num_bytes == len(ids_of(tokenised(rows))) - 50


def test_another_end_of_text_for_the_same_tokenizer_is_another_entry(rows: Path, tokenised: Tokenised) -> None:
    class Same(ByteTokenizer):
        sha256 = "ab" * 32  # type: ignore[assignment]

    first, second = (tokenised(rows, Same(special=FakeSpecial(eos=eos))) for eos in (256, 0))
    assert ids_of(first).count(256) == ids_of(second).count(0) == 50


@settings(max_examples=40)
@given(
    documents=st.lists(st.text("ab \né", min_size=1, max_size=40), min_size=1, max_size=8).filter(
        lambda documents: any(not text.isspace() for text in documents)
    ),
    size=st.integers(1, 50),
)
def test_tokens_do_not_depend_on_pieces_or_shards(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], size: int
) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(shards, "SHARD_BYTES", 2 * max(8, size))
    patch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of tiny shards
    patch.setattr("tformer.data.tokenise.BATCH_CHARACTERS", size)
    patch.setattr("tformer.data.tokenise.MARK_BYTES", 3)
    try:
        cache = tmp_path_factory.mktemp("cache")
        corpus = token_corpus(InMemory(documents, size), ByteTokenizer(), cache_dir=cache)
    finally:
        patch.undo()
    expected = [[*text.encode()] + ([256] if len(documents) > 1 else []) for text in documents]
    assert ids_of(corpus) == list(chain.from_iterable(expected))
    assert np.diff(corpus.document_offsets).tolist() == [len(ids) for ids in expected]
    assert corpus.num_bytes == sum(len(text.encode()) for text in documents)
    middle = int(corpus.document_offsets[len(documents) // 2])
    if 0 < middle < len(corpus):
        before = sum(len(text.encode()) for text in documents[: len(documents) // 2])
        assert corpus.subset(0, middle).num_bytes == before


def test_fingerprint_is_of_the_text_wherever_it_lies(tmp_path: Path, tokenised: Tokenised) -> None:
    for name, text in (("a.txt", "one\ntwo"), ("b.txt", "one\r\ntwo"), ("c.txt", "one\ntwo!")):
        (tmp_path / name).write_bytes(text.encode())
    first, second, third = (tokenised(tmp_path / name).fingerprint for name in ("a.txt", "b.txt", "c.txt"))
    assert first == second != third
    (tmp_path / "d.jsonl").write_text('{"text": "one\\n"}\n{"text": "two"}')
    assert tokenised(tmp_path / "d.jsonl").fingerprint != first, "document boundaries count"


def test_shard_file_has_the_stated_header(rows: Path, tmp_path: Path, tokenised: Tokenised) -> None:
    corpus = tokenised(rows)
    (entry,) = entries(tmp_path / "cache")
    data = (entry / "tokens-00000.bin").read_bytes()
    header = ShardHeader.unpack(data[:HEADER_BYTES])
    assert data.startswith(b"TFTOKENS")
    assert header.item_bytes == 2 and header.count == len(corpus)
    assert header.tokenizer.hex() == ByteTokenizer().sha256
    assert np.frombuffer(data, dtype="<u2", offset=HEADER_BYTES).tolist() == ids_of(corpus)
    assert isinstance(corpus.shards[0], np.memmap) and isinstance(corpus.document_offsets, np.memmap)


def test_token_dtype_fits_the_vocabulary() -> None:
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32
    with pytest.raises(InputError, match=r"65,537 tokens does not fit uint16, which ends at 65,536"):
        token_dtype(65537, requested="uint16")


def test_vocabulary_over_every_dtype_is_refused_before_reading(tmp_path: Path, tokenised: Tokenised) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match="does not fit uint32"):
        tokenised(tmp_path / "a.txt", ByteTokenizer(vocab_size=2**32 + 1))
    assert not (tmp_path / "cache").exists()


def test_large_vocabulary_uses_wider_ids(tmp_path: Path, tokenised: Tokenised) -> None:
    (tmp_path / "a.txt").write_text("text")
    corpus = tokenised(tmp_path / "a.txt", ByteTokenizer(vocab_size=70000))
    assert corpus.shards[0].dtype == np.uint32 and bytes(ids_of(corpus)) == b"text"


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, tokenised: Tokenised) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match=r"ids from 101 to 120, its vocabulary has 100"):
        tokenised(tmp_path / "a.txt", ByteTokenizer(vocab_size=100))


def test_text_without_tokens_is_refused(tmp_path: Path, tokenised: Tokenised) -> None:
    class Silent(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [[] for _ in texts]

    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match="makes no tokens"):
        tokenised(tmp_path / "a.txt", Silent())
    assert not leftovers(tmp_path / "cache")


class Counting(ByteTokenizer):
    calls = 0

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        type(self).calls += 1
        return super().encode_batch(texts)


def test_cache_is_used_until_text_or_tokenizer_changes(rows: Path, tmp_path: Path, tokenised: Tokenised) -> None:
    Counting.calls = 0
    first = ids_of(tokenised(rows, Counting()))
    assert ids_of(tokenised(rows, Counting())) == first
    assert Counting.calls == 1
    tokenised(rows, Counting(name="other"))
    assert Counting.calls == 2
    rows.write_text('{"text": "changed"}')
    assert bytes(ids_of(tokenised(rows, Counting()))) == b"changed"
    assert Counting.calls == 3
    assert len(entries(tmp_path / "cache")) == 3


FILES = ("tokens-00000.bin", "documents.bin", "marks.bin")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(bytes(data))


def flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[90] ^= 4
    path.write_bytes(bytes(data))


def newer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 99
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncate, flip, flip_header, newer, Path.unlink, lambda path: os.truncate(path, 0)])
def test_damaged_cache_is_rebuilt(
    rows: Path, tmp_path: Path, tokenised: Tokenised, name: str, damage: Callable[[Path], object]
) -> None:
    first = ids_of(tokenised(rows))
    (entry,) = entries(tmp_path / "cache")
    damage(entry / name)
    corpus = tokenised(rows)
    assert ids_of(corpus) == first
    assert len(corpus.notes) == 1 and "damaged" in corpus.notes[0]
    assert tokenised(rows).notes == ()
    assert not leftovers(tmp_path / "cache")


def test_header_that_lies_is_refused() -> None:
    for data in (b"", bytes(HEADER_BYTES), b"x" * HEADER_BYTES):
        with pytest.raises(DamagedShardError):
            ShardHeader.unpack(data)


def test_cache_that_cannot_be_written_falls_back_with_a_note(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where the folder should be")
    corpus = token_corpus(open_one(rows), ByteTokenizer(), cache_dir=tmp_path / "blocked" / "cache")
    assert len(corpus) > 0
    (note,) = corpus.notes
    assert "the cache cannot be written" in note
    folder = Path(note.rsplit("kept in ")[1].split(" for")[0])
    assert folder.is_dir()
    del corpus
    assert not folder.exists()


def test_read_only_cache_still_serves_what_it_has(
    rows: Path, tmp_path: Path, tokenised: Tokenised, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised(rows)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("nothing needs writing"))
    assert tokenised(rows).notes == ()


def test_default_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFORMER_CACHE", "/one")
    assert default_cache_dir() == Path("/one")
    monkeypatch.delenv("TFORMER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert default_cache_dir() == Path("/two/tformer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_cache_dir() == Path("/home/somebody/.cache/tformer")


def test_cache_honours_the_umask(rows: Path, tmp_path: Path, tokenised: Tokenised) -> None:
    previous = os.umask(0o022)
    try:
        tokenised(rows)
    finally:
        os.umask(previous)
    (entry,) = entries(tmp_path / "cache")
    assert stat.S_IMODE(entry.stat().st_mode) == 0o755
    assert stat.S_IMODE((entry / FILES[0]).stat().st_mode) == 0o644
    assert sorted(path.name for path in entry.iterdir()) == sorted(FILES)
