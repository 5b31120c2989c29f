"""A corpus of 10^12 tokens costs no more memory, files or reading than a small one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import TINY_RECIPE
from tests.data.fakes import ByteTokenizer, ids_of, open_one
from tests.data.sparse_corpus import SHARD_TOKENS, TOKENS, SparseCorpus, make_sparse_corpus
from tformer.data.batching.plan import BatchPlan, Cursor
from tformer.data.batching.windows import LmWindows, MaskedWindows, document_ids
from tformer.data.shards import array_files, corpus
from tformer.data.shards.corpus import TokenCorpus, token_corpus
from tformer.data.shards.token_files import DamagedShardError
from tformer.data.sources import files as sources
from tformer.data.sources import text
from tformer.tasks.tokenizers import Texts
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.workers.work import Work

LENGTH = 512
WORDS = "one two three four five six seven eight nine ten\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(lambda: iter([WORDS]), TokenizerOptions(model="char", min_frequency=1))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[SparseCorpus]:
    folder = tmp_path_factory.mktemp("sparse")
    yield make_sparse_corpus(folder, folder / "cache", tokenizer)
    shutil.rmtree(folder)


class Reads:
    """Bytes that are read by their position in a file."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        pread, preadv = os.pread, os.preadv
        patch.setattr(os, "pread", lambda *call: self._counted(pread(*call)))
        patch.setattr(os, "preadv", lambda *call: self._counted(preadv(*call)))

    def _counted(self, result: Any) -> Any:
        self.bytes += result if isinstance(result, int) else len(result)
        return result


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def huge(sparse: SparseCorpus, tokenizer: Tokenizer) -> TokenCorpus:
    return token_corpus(open_one(sparse.text), tokenizer, Work(cache_dir=sparse.entry.parent))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_opening_reads_headers_only_and_keeps_few_files_open(
    sparse: SparseCorpus, tokenizer: Tokenizer, reads: Reads
) -> None:
    open_before, resident = len(os.listdir("/proc/self/fd")), _resident_bytes()
    found = token_corpus(open_one(sparse.text), tokenizer, Work(cache_dir=sparse.entry.parent))
    assert len(found) == TOKENS and len(found.shards) == -(-TOKENS // SHARD_TOKENS) > 14_000
    assert reads.bytes < 4 << 20
    assert len(os.listdir("/proc/self/fd")) - open_before <= array_files.KEPT_BELOW
    assert _resident_bytes() - resident < 100 << 20


@pytest.mark.parametrize("kind", [LmWindows, MaskedWindows])
def test_windows_everywhere_hold_their_own_tokens_and_nothing_else_is_read(
    kind: type[LmWindows | MaskedWindows], sparse: SparseCorpus, huge: TokenCorpus, reads: Reads
) -> None:
    windows = kind(huge, LENGTH, seed=3)
    chosen = np.array([0, 5, len(windows) // 2, 7000 * SHARD_TOKENS // LENGTH, len(windows) - 1])
    for epoch in range(2):
        starts = windows._concat_starts(epoch, chosen)
        for number, start in enumerate(starts.tolist()):
            sparse.plant(start, [number + 1, 9])
        found = windows.windows(epoch, chosen)
        assert found[:, :2].tolist() == [[1, 9], [2, 9], [3, 9], [4, 9], [5, 9]]
        for start in starts.tolist():
            sparse.plant(start, [0, 0])
    assert reads.bytes < 2 * len(chosen) * 4 * (LENGTH + 1) * 2


def test_a_plan_draws_every_sample_once_in_constant_memory_and_resumes_anywhere(huge: TokenCorpus) -> None:
    windows = LmWindows(huge, LENGTH, seed=3)
    plan = BatchPlan(seed=3, num_samples=len(windows), lengths=LENGTH, batch_size=64)
    batches = plan.batches_per_epoch()
    assert batches == -(-len(windows) // 64) > 3 * 10**7
    places = [*range(50), *range(batches // 2, batches // 2 + 50), *range(batches - 50, batches)]
    drawn = [sample for batch in places for sample in plan.global_batch(Cursor(0, 0, batch))]
    assert len(set(drawn)) == len(drawn), "without replacement"
    assert min(drawn) >= 0 and max(drawn) < len(windows) and max(drawn) > 0.95 * len(windows)
    assert plan.next(Cursor(0, 0, batches - 1)) == Cursor(1, 0, 0)
    again = BatchPlan(seed=3, num_samples=len(windows), lengths=LENGTH, batch_size=64)
    assert again.global_batch(again.resumed(Cursor(0, 0, batches // 2))) == plan.global_batch(
        Cursor(0, 0, batches // 2)
    )


class Documents(Sequence[int]):
    """Where 10^9 documents of 1000 tokens begin; counts how many of these places are looked at."""

    looked_at = 0

    def __len__(self) -> int:
        return TOKENS // 1000 + 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            places = range(len(self))[index]
            self.looked_at += len(places)
            return np.array(places, dtype=np.int64) * 1000
        self.looked_at += 1
        return range(len(self))[index] * 1000


def test_a_split_and_the_documents_of_a_window_look_at_a_few_of_10_9_documents() -> None:
    documents = Documents()
    whole = TokenCorpus("huge", (), SHARD_TOKENS, documents, (), 0, TOKENS, fingerprint="")  # type: ignore[arg-type]
    train, valid = whole.split(fraction=0.123456)
    assert len(train) % 1000 == 0 and abs(len(valid) / TOKENS - 0.123456) < 1e-6
    numbers = document_ids(valid, 123_456_789, 2500)
    assert numbers.tolist() == [(456_789 + place) // 1000 - 456 for place in range(2500)]
    assert documents.looked_at < 300


def test_document_numbers_of_a_part_count_from_its_first_document() -> None:
    whole = TokenCorpus.from_ids(range(30), documents=[0, 10, 20])
    for part in (whole, whole.subset(0, 12), whole.subset(5, 25), whole.subset(10, 30), whole.subset(12, 18)):
        places = np.arange(len(part))
        expected = np.searchsorted(part.document_offsets, places, side="right")
        assert part.document_numbers(places).tolist() == expected.tolist()
        assert part.document_numbers(places[-2:].reshape(2, 1)).tolist() == expected[-2:].reshape(2, 1).tolist()


@pytest.fixture
def reopened(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> TokenCorpus:
    """A corpus of files none of which stays open."""
    monkeypatch.setattr(corpus, "MEMORY_BYTES", 0)
    monkeypatch.setattr(array_files, "KEPT_BELOW", 0)
    return token_corpus(open_one(rows), ByteTokenizer(), Work(cache_dir=tmp_path / "cache"))


def test_a_file_that_is_opened_for_every_read_gives_the_same_tokens(reopened: TokenCorpus, rows: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    lines = [f"document {number}" for number in range(50)]
    assert ids_of(reopened) == [token for line in lines for token in (*line.encode(), 256)]
    assert reopened.num_bytes == sum(map(len, lines)) and len(reopened.document_offsets) == 51
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("change", ["another header", "missing"])
def test_a_file_that_is_replaced_between_two_reads_is_an_error(reopened: TokenCorpus, change: str) -> None:
    path = reopened.files[0].path
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    assert len(ids_of(reopened)) == len(reopened), "a new file of the same tokens is read on"
    path.unlink()
    if change == "another header":
        path.write_bytes(reopened.files[1].path.read_bytes())
    with pytest.raises(DamagedShardError, match=r"was replaced by another|cannot read .*No such file"):
        ids_of(reopened)


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[Path]]]:
    """A folder of 70 files that changed long ago, and the list of files whose content a fingerprint reads."""
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(text, "SETTLED_NS", -(10**9))
    read: list[Path] = []
    fingerprint = sources.file_fingerprint
    monkeypatch.setattr(
        sources, "file_fingerprint", lambda path, *found: read.append(path) or fingerprint(path, *found)
    )
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(70):
        (folder / f"{number}.txt").write_text(f"text {number}")
    yield folder, read


def test_the_fingerprint_of_many_files_is_remembered_until_one_of_them_changes(many: tuple[Path, list[Path]]) -> None:
    folder, read = many
    first = open_one(folder).fingerprint()
    assert len(read) == 70
    assert open_one(folder).fingerprint() == first and len(read) == 70
    assert first in Texts.of([open_one(folder)], lambda: iter(()), part="text").fingerprint and len(read) == 70
    assert open_one(folder, errors="replace").fingerprint() != first and len(read) == 140
    changed = folder / "7.txt"
    times = changed.stat()
    changed.write_text("Text 7")
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert open_one(folder).fingerprint() != first and len(read) == 210


@pytest.mark.parametrize("why", ["one has just changed", "they are few", "the cache cannot be written", "damage"])
def test_the_fingerprint_of_files_is_made_again_where_it_cannot_be_remembered(
    why: str, many: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = many
    if why == "one has just changed":
        monkeypatch.setattr(text, "SETTLED_NS", 3600 * 10**9)
    elif why == "they are few":
        monkeypatch.setattr(text, "MANY_FILES", 71)
    elif why == "the cache cannot be written":
        (tmp_path / "cache").write_text("a file where the folder should be")
    first = open_one(folder).fingerprint()
    for memo in (tmp_path / "cache").glob("fingerprints/*"):
        memo.write_text("damaged")
    assert open_one(folder).fingerprint() == first and len(read) == 140


@pytest.fixture
def command(sparse: SparseCorpus, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A training on the sparse corpus."""
    monkeypatch.setenv("TFORMER_CACHE", str(sparse.entry.parent))
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "valid.txt").write_text(WORDS * 40)
    (tmp_path / "recipe.yaml").write_text(TINY_RECIPE)
    words = ["--config", "recipe.yaml", "--tokenizer", "tokenizer.json", "--valid", "valid.txt"]
    words = [str(tmp_path / word) if "." in word else word for word in words]
    return ["train", *words, "--data", str(sparse.text)]


@pytest.mark.slow
def test_a_training_on_10_12_tokens_starts_reads_its_windows_and_resumes(
    command: list[str], cli: Callable[..., Any], tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its quick twin is `test_a_plan_draws_every_sample_once_in_constant_memory_and_resumes_anywhere`."""
    monkeypatch.setattr(array_files, "VERIFY_PAUSE", 3600.0)  # the check in the background reads one piece
    monkeypatch.setattr(array_files, "KEPT_BELOW", 0)  # a training is never garbage: see `gc.freeze` in its loop
    whole = cli(*command, "--max-steps", 4, "--out", tmp_path / "whole")
    assert whole.code == 0, whole.err
    assert "1,000,000,000,000 training tokens" in whole.err
    assert reads.bytes < 16 << 20
    assert cli(*command, "--max-steps", 2, "--out", tmp_path / "part").code == 0
    assert cli("train", "--resume", "--max-steps", 4, "--out", tmp_path / "part").code == 0
    losses = [_losses(tmp_path / name) for name in ("whole", "part")]
    assert losses[0] == losses[1] and len(losses[0]) >= 1


def _losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["split"] == "train" and record["step"] == 4]


MEASURED = """
import atexit, runpy, sys
from tformer.support.processes import peak_resident_bytes
from tformer.workers.work import Work
atexit.register(lambda: print("peak", peak_resident_bytes()))
sys.argv = ["tformer", *sys.argv[1:]]
runpy.run_module("tformer", run_name="__main__")
"""
"""Runs tformer, and prints the largest resident set of the process at its end.

The child says it, as `ru_maxrss` of a child counts what its parent held when it started it."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone states the peak of a process since its start")
def test_a_training_on_10_12_tokens_needs_less_than_600_mb(command: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-c", MEASURED, *command, "--max-steps", "2", "--out", str(tmp_path / "run")]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    name, peak = ended.stdout.splitlines()[-1].split()
    assert name == "peak" and int(peak) < 600e6
