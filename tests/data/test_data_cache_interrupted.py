"""The token cache under interruption, full disks, kills and several writers at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.cache_cases import Tokenised, entries, ids_of, leftovers
from tests.data.fakes import ByteTokenizer, open_one
from tformer.data.cache import token_corpus
from tformer.data.shards import HEADER_BYTES
from tformer.data.sources import TextSource
from tformer.errors import InputError, Interrupted, StorageError


def test_stop_while_tokenising_leaves_nothing(rows: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(Interrupted, match="interrupted while tokenising"):
        token_corpus(open_one(rows), ByteTokenizer(), cache_dir=cache, should_stop=lambda: True)
    assert not entries(cache) and not leftovers(cache)


def test_bad_text_in_the_middle_leaves_nothing(tmp_path: Path, tokenised: Tokenised) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 500000 + b"\xff")
    with pytest.raises(InputError, match=r"a.txt:500001: invalid UTF-8 at byte 2500000"):
        tokenised(tmp_path / "a.txt")
    assert not entries(tmp_path / "cache") and not leftovers(tmp_path / "cache")


def test_full_disk_is_a_storage_error_that_names_the_bytes(rows: Path, tmp_path: Path) -> None:
    script = f"""
import resource, signal, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from tests.data.fakes import ByteTokenizer, open_one
from tformer.data.cache import token_corpus
from tformer.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
try:
    token_corpus(open_one({str(rows)!r}), ByteTokenizer(), cache_dir={str(tmp_path / "cache")!r})
except StorageError as error:
    print(error.exit_code, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("3 ") and "bytes needed" in done.stdout
    assert not entries(tmp_path / "cache") and not leftovers(tmp_path / "cache")


def test_full_disk_while_spooling_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    from types import SimpleNamespace

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr("tempfile.TemporaryFile", Full)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"text")))
    with pytest.raises(StorageError, match="No space left on device after 0 bytes"):
        open_one("-")


class Slow(ByteTokenizer):
    """Writes a few tokens, then says that it has, and waits to be killed."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if any("document 49" in text for text in texts):
            Path(os.environ["SLOW_MARK"]).touch()
            time.sleep(60)
        return super().encode_batch(texts)


def _tokenise_slowly(rows: Path, cache: Path) -> None:
    import tformer.data.tokenise

    tformer.data.tokenise.BATCH_CHARACTERS = 20
    token_corpus(open_one(rows), Slow(), cache_dir=cache)


def test_kill_while_tokenising_leaves_temporaries_that_the_next_start_sweeps(
    rows: Path, tmp_path: Path, tokenised: Tokenised, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, mark = tmp_path / "cache", tmp_path / "mark"
    monkeypatch.setenv("SLOW_MARK", str(mark))
    process = multiprocessing.get_context("fork").Process(target=_tokenise_slowly, args=(rows, cache))
    process.start()
    while not mark.exists():
        assert process.is_alive()
        time.sleep(0.01)
    (busy,) = leftovers(cache)
    (tmp_path / "other.txt").write_text("other text")
    tokenised(tmp_path / "other.txt")
    assert leftovers(cache) == [busy], "a directory that is being filled is not swept"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (busy / "tokens-00000.bin").stat().st_size > HEADER_BYTES
    assert len(tokenised(rows)) > 0
    assert not leftovers(cache)


def _tokenise_and_report(rows: Path, cache: Path, results: multiprocessing.Queue) -> None:
    corpus = token_corpus(open_one(rows), ByteTokenizer(), cache_dir=cache)
    results.put((ids_of(corpus), corpus.notes))


def test_writers_at_the_same_time_agree(rows: Path, tmp_path: Path, tokenised: Tokenised) -> None:
    cache = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_tokenise_and_report, args=(rows, cache, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    expected = ids_of(tokenised(rows))
    assert found == [(expected, ())] * 4
    assert len(entries(cache)) == 1 and not leftovers(cache)


@pytest.mark.parametrize("kind", ["lines", "one line", "gzip"])
def test_memory_does_not_grow_with_the_text(tmp_path: Path, kind: str) -> None:
    """60 MB of text raise the resident size by well under 200 MB: lines, one endless line, and highly compressed."""
    path = tmp_path / ("big.txt.gz" if kind == "gzip" else "big.txt")
    script = f"""
import gzip, resource, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
import numpy as np
from tests.data.fakes import ByteTokenizer, open_one
from tformer.data.cache import token_corpus
class Fast(ByteTokenizer):  # a thirtieth of the tokens, so that lists of numbers do not take the test's time
    def encode_batch(self, texts):
        return [list(text.encode()[::30]) for text in texts]
line = b"the quick brown fox jumps over " + {b" " if kind == "one line" else chr(10).encode()!r}
with {"gzip.open" if kind == "gzip" else "open"}({str(path)!r}, "wb") as file:
    for _ in range(60):
        file.write(line * ((1 << 20) // len(line)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus = token_corpus(open_one({str(path)!r}), Fast(), cache_dir={str(tmp_path / "cache")!r})
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
    token_corpus(source, ByteTokenizer(), cache_dir=tmp_path, progress=lambda *call: calls.append(call))
    assert len(calls) >= 3
    assert calls[-1] == (3300000, 3300000)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
