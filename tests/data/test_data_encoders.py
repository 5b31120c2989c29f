"""A text tokenized by several processes: the same files, resumed after a kill, one error, no process left."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.data.fakes import ByteTokenizer, entries, ids_of, leftovers, open_one, refusal
from tests.quick import first_is_quick
from tformer.data.shards import corpus, encoders, entry_writer, token_files
from tformer.data.shards.caches import clean_caches
from tformer.data.shards.corpus import token_corpus
from tformer.data.shards.encoders import encoded_batches
from tformer.data.shards.entry_writer import read_record
from tformer.data.sources.files import DocumentChunk
from tformer.support.errors import InputError, Interrupted, OutOfMemoryError, TformerError
from tformer.tokenizer import TokenizerOptions, train_tokenizer
from tformer.workers.work import Work

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 50 characters, shards of 64 tokens, a record every 200 bytes."""
    monkeypatch.setattr(token_files, "BATCH_CHARACTERS", 50)
    monkeypatch.setattr(token_files, "SHARD_BYTES", 128)
    monkeypatch.setattr(token_files, "MARK_BYTES", 30)
    monkeypatch.setattr(entry_writer, "RECORD_BYTES", 200)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of texts and rows, documents of different lengths; some have no tokens."""
    place = tmp_path / "texts"
    place.mkdir()
    lines = [f"document {number} {'é x' * (number % 7)}" for number in range(150)]
    (place / "a.txt").write_text("\n".join(lines))
    (place / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in [*lines, " ", ""]))
    (place / "c.txt").write_text("the end")
    return place


def contents(cache: Path) -> dict[str, str]:
    """SHA-256 of the files of the one entry of a cache."""
    [entry] = entries(cache)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in entry.iterdir()}


def tokenize(path: Path, cache: Path, *, workers: int | None = 1, tokenizer: object = None) -> corpus.TokenCorpus:
    found = tokenizer or ByteTokenizer(opening=(7, 8))
    return token_corpus(open_one(path), found, Work(cache_dir=cache, workers=workers))  # type: ignore[arg-type]


def children() -> list[str]:
    """The children of this process."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.mark.parametrize("workers", [2, 3, None])
def test_any_number_of_workers_writes_the_same_files(folder: Path, tmp_path: Path, workers: int | None) -> None:
    before = children()
    one = tokenize(folder, tmp_path / "one", workers=1)
    many = tokenize(folder, tmp_path / "many", workers=workers)
    assert contents(tmp_path / "one") == contents(tmp_path / "many") and len(contents(tmp_path / "one")) > 20
    assert ids_of(one) == ids_of(many) and one.fingerprint == many.fingerprint
    assert children() == before


def test_the_files_are_those_that_one_process_has_always_written(folder: Path, tmp_path: Path) -> None:
    """Ids, boundaries and marks by a plain loop over the documents."""
    found = tokenize(folder, tmp_path / "cache", workers=2)
    texts = [(folder / "a.txt").read_text()]
    texts += [json.loads(line)["text"] for line in (folder / "b.jsonl").read_text().splitlines()]
    texts = [text for text in [*texts, "the end"] if text]
    ids = [[7, 8, *text.encode(), 256] for text in texts]
    assert ids_of(found) == [token for document in ids for token in document]
    assert found.document_offsets.tolist() == [0, *np.cumsum([len(document) for document in ids]).tolist()]
    assert found.num_bytes == sum(len(text.encode()) for text in texts)
    for cut in range(1, len(found), 97):
        assert found.subset(0, cut).num_bytes + found.subset(cut, len(found)).num_bytes == found.num_bytes


def test_a_real_tokenizer_gives_the_same_ids_in_a_worker_after_its_own_threads_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "BATCH_CHARACTERS", 5000)
    text = "".join(f"line {number} of a text that has words\n" for number in range(800))
    (tmp_path / "a.txt").write_text(text)
    tokenizer = train_tokenizer(lambda: iter([text]), TokenizerOptions(model="byte-bpe", vocab_size=300))
    whole = tokenizer.encode_batch([text, text])[0]  # by the threads of the library
    found = tokenize(tmp_path / "a.txt", tmp_path / "cache", workers=2, tokenizer=tokenizer)
    assert ids_of(found) == whole
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_a_short_text_starts_no_process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was started"))
    tokenize(folder / "c.txt", tmp_path / "cache", workers=None)
    tokenize(folder / "a.txt", tmp_path / "cache", workers=1)


def test_a_wrong_file_is_refused_as_by_one_process(folder: Path, tmp_path: Path) -> None:
    (folder / "b.jsonl").write_text((folder / "b.jsonl").read_text() + "no json\n")
    errors = [refusal(lambda n=n: tokenize(folder, tmp_path / "cache", workers=n)) for n in (1, 2)]
    assert errors[0].message == errors[1].message and "b.jsonl:153" in errors[0].message
    assert not entries(tmp_path / "cache") and not leftovers(tmp_path / "cache")


def test_an_error_of_the_tokenizer_in_a_worker_is_the_error_of_the_command(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ids from 10 to 195, its vocabulary has 100 tokens"):
        tokenize(folder, tmp_path / "cache", workers=2, tokenizer=ByteTokenizer(vocab_size=100, opening=()))


class Panic(ByteTokenizer):
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        raise ValueError("panic in the library")


def test_another_failure_in_a_worker_is_raised_with_its_traceback(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ValueError: panic in the library"):
        tokenize(folder, tmp_path / "cache", workers=2, tokenizer=Panic())


class Killed(ByteTokenizer):
    """The worker that gets to row 100 is killed, as one is that takes too much memory."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if any(text.startswith("document 100") for text in texts) and os.environ.get("KILL") == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(texts)


def test_a_killed_worker_is_one_error_and_the_next_command_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILL", "worker")
    before = children()
    with pytest.raises(TformerError, match="was ended by SIGKILL") as caught:
        tokenize(folder, tmp_path / "cache", workers=2, tokenizer=Killed())
    assert "goes on where it was" in str(caught.value.hint) and children() == before
    monkeypatch.delenv("KILL")
    [unfinished] = leftovers(tmp_path / "cache")
    assert read_record(unfinished) is not None
    tokenize(folder, tmp_path / "cache", workers=2, tokenizer=Killed())
    tokenize(folder, tmp_path / "other", workers=1, tokenizer=Killed())
    assert contents(tmp_path / "cache") == contents(tmp_path / "other") and not leftovers(tmp_path / "cache")


@first_is_quick("workers", [2, 1])
def test_after_a_kill_only_what_has_no_record_is_encoded_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """SIGKILL at every record, each time of another process; the files equal those of an undisturbed one."""
    monkeypatch.setattr(entry_writer, "RECORD_BYTES", 500)
    tokenize(folder, tmp_path / "whole")
    write, cache, kills = entry_writer.write_record, tmp_path / "cache", 0

    def killed_after(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(entry_writer, "write_record", killed_after)
    while True:
        process = FORK.Process(target=tokenize, args=(folder, cache), kwargs={"workers": workers})
        process.start()
        process.join(30)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    assert kills > 5
    assert contents(cache) == contents(tmp_path / "whole") and not leftovers(cache)


def interrupted(folder: Path, cache: Path, *, after: int = 25) -> Path:
    """The directory that a text leaves which was interrupted after this number of batches."""
    polls = iter(range(after))
    with pytest.raises(Interrupted, match="interrupted while tokenizing"):
        token_corpus(
            open_one(folder),
            ByteTokenizer(opening=(7, 8)),  # type: ignore[arg-type]
            Work(cache_dir=cache, workers=1, should_stop=lambda: next(polls, None) is None),
        )
    [unfinished] = leftovers(cache)
    return unfinished


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", ["nothing", "progress", "documents.bin", "version", "cut"])
def test_an_interrupted_text_goes_on_and_a_damaged_record_or_file_begins_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    tokenize(folder, tmp_path / "whole")
    unfinished = interrupted(folder, tmp_path / "cache")
    if damage in ("progress", "documents.bin"):
        os.truncate(unfinished / damage, (unfinished / damage).stat().st_size - 40)
    elif damage == "cut":
        flip(max(unfinished.glob("tokens-*.bin")))
        os.truncate(max(unfinished.glob("tokens-*.bin")), 130)
    elif damage == "version":
        monkeypatch.setattr(entry_writer, "__version__", "99")
    encoded: list[int] = []
    encode = encoders.encode
    monkeypatch.setattr(encoders, "encode", lambda *given, **named: encoded.append(1) or encode(*given, **named))
    tokenize(folder, tmp_path / "cache")
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole") and not leftovers(tmp_path / "cache")
    chunks = token_files.safe_chunks(open_one(folder).documents())
    batches = len(list(token_files.in_batches(chunks, lambda piece: len(piece.text) + 1, task="", work=Work())))
    assert (len(encoded) < batches - 10) == (damage == "nothing")


def test_unfinished_tokens_are_kept_for_a_week_or_until_the_cache_is_cleaned(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    unfinished = interrupted(folder, cache)
    tokenize(folder / "c.txt", cache)
    assert leftovers(cache) == [unfinished]
    os.utime(unfinished / entry_writer.RECORD, (0, time.time() - 8 * 24 * 3600))
    tokenize(folder / "a.txt", cache)
    assert leftovers(cache) == []
    interrupted(folder, cache)
    clean_caches(cache)
    assert leftovers(cache) == []


class Counted(ByteTokenizer):
    """Appends a line to a file for each call."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        with open(os.environ["CALLS"], "a") as file:
            file.write("call\n")
        time.sleep(0.001)
        return super().encode_batch(texts)


def test_processes_that_need_the_same_tokens_wait_for_the_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(corpus, "WAIT_SECONDS", 0.01)
    tokenize(folder, tmp_path / "one", tokenizer=Counted())
    alone = (tmp_path / "calls").read_text().count("call")
    (tmp_path / "calls").unlink()
    processes = [
        FORK.Process(target=tokenize, args=(folder, tmp_path / "cache"), kwargs={"tokenizer": Counted()})
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "calls").read_text().count("call") == alone, "the text was encoded once"


def test_waiting_for_another_process_shows_its_progress_and_can_be_interrupted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished, polls = interrupted(folder, tmp_path / "cache"), iter(range(3))
    monkeypatch.setattr(corpus, "WAIT_SECONDS", 0.0)
    seen: list[int] = []
    held = corpus._acquired(unfinished.parent, unfinished)
    assert held is not None
    with held, pytest.raises(Interrupted, match="interrupted while waiting for another process that tokenizes"):
        token_corpus(
            open_one(folder),
            ByteTokenizer(opening=(7, 8)),  # type: ignore[arg-type]
            Work(
                cache_dir=unfinished.parent,
                should_stop=lambda: next(polls, None) is None,
                report=lambda done, total: seen.append(done),
            ),
        )
    assert len(seen) == 3 and min(seen) > 200
    assert leftovers(unfinished.parent) == [unfinished]


def _killed_by_parent(cache: Path, folder: Path, mark: Path) -> None:
    class Waiting(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            (mark / str(os.getpid())).touch()
            time.sleep(60)
            return []

    tokenize(folder, cache, workers=2, tokenizer=Waiting())


def test_workers_end_with_a_killed_parent(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "marks"
    mark.mkdir()
    process = FORK.Process(target=_killed_by_parent, args=(tmp_path / "cache", folder, mark))
    process.start()
    deadline = time.monotonic() + 30
    while len(list(mark.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    workers = [int(path.name) for path in mark.iterdir()]
    while any(_is_running(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker is left behind"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_workers_hold_a_few_batches_at_a_time() -> None:
    """The text is read no further than two batches for each worker ahead of what is written."""
    read = 0

    def batches() -> Iterator[list[DocumentChunk]]:
        nonlocal read
        for number in range(40):
            read += 1
            yield [DocumentChunk(f"text {number}", True)]

    found = encoded_batches(batches(), ByteTokenizer(), workers=2)  # type: ignore[arg-type]
    for number, (pieces, ids, lengths) in enumerate(found):
        assert bytes(ids.tolist()).decode() == pieces[0].text == f"text {number}" and lengths.tolist() == [len(ids)]
        assert read <= max(encoders.FEW_BATCHES, number + 2 * encoders.AHEAD + 1)


def test_a_system_without_room_for_a_process_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(OutOfMemoryError, match="the system starts no further process: Resource temporarily"):
        list(encoded_batches(iter([[DocumentChunk("text", True)]]), ByteTokenizer(), workers=2))  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "bound"), [(0, "least 1,"), (-1, "least 1,"), (100_000, "most ")])
def test_train_refuses_a_number_of_workers_that_no_machine_has(
    cli: Callable[..., object], text_file: Path, number: int, bound: str
) -> None:
    refused = cli("train", "--data", text_file, "--workers", number)
    assert refused.code == 2  # type: ignore[attr-defined]
    assert f"error: --workers must be at {bound}" in refused.err and f"found {number}" in refused.err  # type: ignore[attr-defined]
