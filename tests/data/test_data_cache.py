"""The token cache: its files, reuse, damage, interruption, concurrent writers, memory."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.fakes import ByteTokenizer, FakeSpecial, Tokenized, entries, ids_of, leftovers, open_one, pipe
from tests.quick import first_is_quick
from tformer.data.shards import token_files
from tformer.data.shards.corpus import token_corpus
from tformer.data.shards.token_files import HEADER_BYTES, DamagedShardError, ShardHeader, token_dtype
from tformer.data.sources.files import DocumentChunk
from tformer.data.sources.text import TextSource
from tformer.support import files
from tformer.support.device import default_cache_dir
from tformer.support.errors import InputError, Interrupted, StorageError
from tformer.workers.work import Work


class InMemory:
    """A source of given documents, in pieces of a given size."""

    name, notes = "memory", ()

    def __init__(self, documents: list[str], size: int = 1000) -> None:
        self.texts, self.size = documents, size

    def documents(self) -> Iterator[DocumentChunk]:
        for text in self.texts:
            for start in range(0, len(text), self.size):
                yield DocumentChunk(text[start : start + self.size], start + self.size >= len(text))

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()

    def size_bytes(self) -> int | None:
        return None


def test_one_text_has_no_end_of_text_inside_or_after(tmp_path: Path, tokenized: Tokenized) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo é\n")
    corpus = tokenized(tmp_path / "a.txt")
    assert bytes(ids_of(corpus)).decode() == "one\n\ntwo é\n"
    assert corpus.num_bytes == 12
    assert corpus.document_offsets.tolist() == [0, 12]


def test_every_one_of_several_documents_ends_with_the_eos_id(rows: Path, tokenized: Tokenized) -> None:
    corpus = tokenized(rows)
    expected: list[int] = []
    starts = []
    for number in range(50):
        starts.append(len(expected))
        expected += [*f"document {number}".encode(), 256]
    assert ids_of(corpus) == expected
    assert corpus.document_offsets.tolist() == [*starts, len(expected)]
    assert len(corpus.document_offsets) - 1 == 50
    assert corpus.num_bytes == len(expected) - 50
    without = tokenized(rows, ByteTokenizer(special=FakeSpecial(eos=None)))
    assert ids_of(without) == [number for number in expected if number != 256]


def test_opening_ids_precede_each_document(rows: Path, tokenized: Tokenized) -> None:
    corpus = tokenized(rows, ByteTokenizer(opening=(7, 8)))
    documents = [[7, 8, *f"document {number}".encode(), 256] for number in range(50)]
    assert ids_of(corpus) == list(chain.from_iterable(documents))
    assert np.diff(corpus.document_offsets).tolist() == [len(ids) for ids in documents]
    assert corpus.num_bytes == len(ids_of(tokenized(rows))) - 50


def test_another_end_of_text_for_the_same_tokenizer_is_another_entry(rows: Path, tokenized: Tokenized) -> None:
    class Same(ByteTokenizer):
        sha256 = "ab" * 32  # type: ignore[assignment]

    first, second = (tokenized(rows, Same(special=FakeSpecial(eos=eos))) for eos in (256, 0))
    assert ids_of(first).count(256) == ids_of(second).count(0) == 50


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
    patch.setattr(token_files, "SHARD_BYTES", 2 * max(8, size))
    patch.setattr("tformer.data.shards.token_files.BATCH_CHARACTERS", size)
    patch.setattr("tformer.data.shards.token_files.MARK_BYTES", 3)
    try:
        cache = tmp_path_factory.mktemp("cache")
        corpus = token_corpus(InMemory(documents, size), ByteTokenizer(), Work(cache_dir=cache))
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


def test_fingerprint_is_of_the_text_wherever_it_lies(tmp_path: Path, tokenized: Tokenized) -> None:
    for name, text in (("a.txt", "one\ntwo"), ("b.txt", "one\r\ntwo"), ("c.txt", "one\ntwo!")):
        (tmp_path / name).write_bytes(text.encode())
    first, second, third = (tokenized(tmp_path / name).fingerprint for name in ("a.txt", "b.txt", "c.txt"))
    assert first == second != third
    (tmp_path / "d.jsonl").write_text('{"text": "one\\n"}\n{"text": "two"}')
    assert tokenized(tmp_path / "d.jsonl").fingerprint != first, "document boundaries count"


def test_shard_file_has_the_stated_header(rows: Path, tmp_path: Path, tokenized: Tokenized) -> None:
    corpus = tokenized(rows)
    (entry,) = entries(tmp_path / "cache")
    data = (entry / "tokens-00000.bin").read_bytes()
    header = ShardHeader.unpack(data[:HEADER_BYTES], name="tokens-00000.bin")
    assert data.startswith(b"TFTOKENS")
    assert header.item_bytes == 2 and header.count == len(corpus)
    assert header.tokenizer.hex() == ByteTokenizer().sha256
    assert np.frombuffer(data, dtype="<u2", offset=HEADER_BYTES).tolist() == ids_of(corpus)
    assert corpus.files == (), "a small corpus is kept in memory, a large one read from its files"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tformer.data.shards.corpus.MEMORY_BYTES", 0)
        large = tokenized(rows)
    assert [file.path for file in large.files] == [entry / name for name in FILES] and ids_of(large) == ids_of(corpus)


def test_token_dtype_fits_the_vocabulary() -> None:
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32
    with pytest.raises(InputError, match=r"4,294,967,297 tokens does not fit uint32, which ends at 4,294,967,296"):
        token_dtype(2**32 + 1)


def test_vocabulary_over_every_dtype_is_refused_before_reading(tmp_path: Path, tokenized: Tokenized) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match="does not fit uint32"):
        tokenized(tmp_path / "a.txt", ByteTokenizer(vocab_size=2**32 + 1))
    assert not (tmp_path / "cache").exists()


def test_large_vocabulary_uses_wider_ids(tmp_path: Path, tokenized: Tokenized) -> None:
    (tmp_path / "a.txt").write_text("text")
    corpus = tokenized(tmp_path / "a.txt", ByteTokenizer(vocab_size=70000))
    assert corpus.shards[0].dtype == np.uint32 and bytes(ids_of(corpus)) == b"text"


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, tokenized: Tokenized) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match=r"ids from 101 to 120, its vocabulary has 100"):
        tokenized(tmp_path / "a.txt", ByteTokenizer(vocab_size=100))


def test_text_without_tokens_is_refused(tmp_path: Path, tokenized: Tokenized) -> None:
    class Silent(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [[] for _ in texts]

    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match="makes no tokens"):
        tokenized(tmp_path / "a.txt", Silent())
    assert not leftovers(tmp_path / "cache")


class Counting(ByteTokenizer):
    calls = 0

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        type(self).calls += 1
        return super().encode_batch(texts)


def test_cache_is_used_until_text_or_tokenizer_changes(rows: Path, tmp_path: Path, tokenized: Tokenized) -> None:
    Counting.calls = 0
    first = ids_of(tokenized(rows, Counting()))
    assert ids_of(tokenized(rows, Counting())) == first
    assert Counting.calls == 1
    tokenized(rows, Counting(name="other"))
    assert Counting.calls == 2
    rows.write_text('{"text": "changed"}')
    assert bytes(ids_of(tokenized(rows, Counting()))) == b"changed"
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
    rows: Path, tmp_path: Path, tokenized: Tokenized, name: str, damage: Callable[[Path], object]
) -> None:
    first = ids_of(tokenized(rows))
    (entry,) = entries(tmp_path / "cache")
    damage(entry / name)
    corpus = tokenized(rows)
    assert ids_of(corpus) == first
    assert len(corpus.notes) == 1 and "damaged" in corpus.notes[0]
    assert tokenized(rows).notes == ()
    assert not leftovers(tmp_path / "cache")


def test_header_that_lies_is_refused() -> None:
    for data in (b"", bytes(HEADER_BYTES), b"x" * HEADER_BYTES):
        with pytest.raises(DamagedShardError):
            ShardHeader.unpack(data, name="tokens-00000.bin")


def test_cache_that_cannot_be_written_falls_back_with_a_note(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where the folder should be")
    corpus = token_corpus(open_one(rows), ByteTokenizer(), Work(cache_dir=tmp_path / "blocked" / "cache"))
    assert len(corpus) > 0
    (note,) = corpus.notes
    assert "the cache cannot be written" in note
    folder = Path(note.rsplit("kept in ")[1].split(" for")[0])
    assert folder.is_dir()
    del corpus
    assert not folder.exists()


def test_a_file_with_the_name_of_a_temporary_does_not_close_the_cache(
    rows: Path, tmp_path: Path, tokenized: Tokenized
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".tmp-file-99999999").write_text("")
    assert not tokenized(rows).notes
    assert (tmp_path / "cache" / ".tmp-file-99999999").exists()


def test_read_only_cache_is_still_read(
    rows: Path, tmp_path: Path, tokenized: Tokenized, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized(rows)
    monkeypatch.setattr(files, "mkdir", lambda *_, **__: pytest.fail("nothing needs writing"))
    assert tokenized(rows).notes == ()


def test_default_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFORMER_CACHE", "/one")
    assert default_cache_dir() == Path("/one")
    monkeypatch.delenv("TFORMER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert default_cache_dir() == Path("/two/tformer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_cache_dir() == Path("/home/somebody/.cache/tformer")


def test_cache_honours_the_umask(rows: Path, tmp_path: Path, tokenized: Tokenized) -> None:
    previous = os.umask(0o022)
    try:
        tokenized(rows)
    finally:
        os.umask(previous)
    (entry,) = entries(tmp_path / "cache")
    assert stat.S_IMODE(entry.stat().st_mode) == 0o755
    assert stat.S_IMODE((entry / FILES[0]).stat().st_mode) == 0o644
    assert sorted(path.name for path in entry.iterdir()) == sorted(FILES)


def test_stop_while_tokenizing_leaves_nothing(rows: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(Interrupted, match="interrupted while tokenizing"):
        token_corpus(open_one(rows), ByteTokenizer(), work=Work(cache_dir=cache, should_stop=lambda: True))
    assert not entries(cache) and not leftovers(cache)


def test_bad_text_in_the_middle_leaves_nothing(tmp_path: Path, tokenized: Tokenized) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 500000 + b"\xff")
    with pytest.raises(InputError, match=r"a.txt:500001: invalid UTF-8 at byte 2500000"):
        tokenized(tmp_path / "a.txt")
    assert not entries(tmp_path / "cache") and not leftovers(tmp_path / "cache")


def test_full_disk_is_a_storage_error_that_names_the_bytes(rows: Path, tmp_path: Path) -> None:
    script = f"""
import resource, signal
from tests.data.fakes import ByteTokenizer, open_one
from pathlib import Path
from tformer.data.shards.corpus import token_corpus
from tformer.support.errors import StorageError
from tformer.workers.work import Work
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
try:
    token_corpus(open_one({str(rows)!r}), ByteTokenizer(), Work(cache_dir=Path({str(tmp_path / "cache")!r})))
except StorageError as error:
    print(error.exit_code, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("3 ") and "bytes needed" in done.stdout
    assert not entries(tmp_path / "cache") and not leftovers(tmp_path / "cache")


def test_full_disk_while_spooling_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr("tempfile.TemporaryFile", Full)
    pipe(monkeypatch, b"text")
    with pytest.raises(StorageError, match="No space left on device after 0 bytes"):
        open_one("-")


class Slow(ByteTokenizer):
    """Writes a few tokens, then says that it has, and waits to be killed."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if any("document 49" in text for text in texts):
            Path(os.environ["SLOW_MARK"]).touch()
            time.sleep(60)
        return super().encode_batch(texts)


def _tokenize_slowly(rows: Path, cache: Path) -> None:
    import tformer.data.shards.token_files

    tformer.data.shards.token_files.BATCH_CHARACTERS = 20
    token_corpus(open_one(rows), Slow(), Work(cache_dir=cache))


def test_kill_while_tokenizing_leaves_temporaries_that_the_next_start_sweeps(
    rows: Path, tmp_path: Path, tokenized: Tokenized, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, mark = tmp_path / "cache", tmp_path / "mark"
    monkeypatch.setenv("SLOW_MARK", str(mark))
    process = multiprocessing.get_context("fork").Process(target=_tokenize_slowly, args=(rows, cache))
    process.start()
    while not mark.exists():
        assert process.is_alive()
        time.sleep(0.01)
    (busy,) = leftovers(cache)
    (tmp_path / "other.txt").write_text("other text")
    tokenized(tmp_path / "other.txt")
    assert leftovers(cache) == [busy], "a directory that is being filled is not swept"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (busy / "tokens-00000.bin").stat().st_size > HEADER_BYTES
    assert len(tokenized(rows)) > 0
    assert not leftovers(cache)


def _tokenize_and_report(rows: Path, cache: Path, results: multiprocessing.Queue) -> None:
    corpus = token_corpus(open_one(rows), ByteTokenizer(), Work(cache_dir=cache))
    results.put((ids_of(corpus), corpus.notes))


def test_writers_at_the_same_time_agree(rows: Path, tmp_path: Path, tokenized: Tokenized) -> None:
    cache = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_tokenize_and_report, args=(rows, cache, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    expected = ids_of(tokenized(rows))
    assert found == [(expected, ())] * 4
    assert len(entries(cache)) == 1 and not leftovers(cache)


@first_is_quick("kind", ["lines", "one line in gzip"])
def test_memory_does_not_grow_with_the_text(tmp_path: Path, kind: str) -> None:
    """60 MB of text raise the resident size by well under 200 MB: lines, and one endless line highly compressed."""
    path = tmp_path / ("big.txt.gz" if kind.endswith("gzip") else "big.txt")
    script = f"""
import gzip, resource
from tests.data.fakes import ByteTokenizer, open_one
from pathlib import Path
from tformer.workers.work import Work
from tformer.data.shards.corpus import token_corpus
class Fast(ByteTokenizer):  # a thirtieth of the tokens, so that lists of numbers do not take the test's time
    def encode_batch(self, texts):
        return [list(text.encode()[::30]) for text in texts]
line = b"the quick brown fox jumps over " + {b" " if kind.startswith("one line") else chr(10).encode()!r}
with {"gzip.open" if kind.endswith("gzip") else "open"}({str(path)!r}, "wb") as file:
    for _ in range(60):
        file.write(line * ((1 << 20) // len(line)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus = token_corpus(open_one({str(path)!r}), Fast(), Work(cache_dir=Path({str(tmp_path / "cache")!r})))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(corpus.num_bytes, grown // 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    num_bytes, grown_mb = map(int, done.stdout.split())
    assert num_bytes > 60e6
    assert grown_mb < 200


def test_progress_counts_bytes_of_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some words\n" * 300000)
    calls: list[tuple[int, int | None]] = []
    source: TextSource = open_one(path)
    token_corpus(source, ByteTokenizer(), work=Work(cache_dir=tmp_path, report=lambda *call: calls.append(call)))
    assert len(calls) >= 3
    assert calls[-1] == (3300000, 3300000)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
