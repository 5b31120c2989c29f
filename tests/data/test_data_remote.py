"""Text and tables at URLs: the same documents as from files, a bounded cache, failing connections, changed content."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_RECIPE
from tests.data.fakes import ByteTokenizer, Spec, ids_of, open_one, read_documents, refusal
from tests.data.http_store import Store, serving
from tformer.data.shards.corpus import token_corpus
from tformer.data.sources import remote
from tformer.data.sources.pairs import open_pairs
from tformer.data.sources.remote import FOLDER, SCHEMES, describe
from tformer.support.errors import InputError, Interrupted
from tformer.workers.work import Work

fsspec = pytest.importorskip("fsspec")
LINES = "".join(f"line {number} of a text\n" for number in range(2000))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own; blocks of 10,000 bytes; no waiting before another try."""
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(remote, "EDGE_BYTES", 1000)
    monkeypatch.setattr(remote, "WAITS", (0.0,) * 4)
    return tmp_path / "cache"


@pytest.fixture
def store() -> Iterator[Store]:
    pytest.importorskip("aiohttp")
    with serving(Store()) as found:
        yield found


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """fsspec's file system in memory, as one more kind of store."""
    monkeypatch.setitem(SCHEMES, "memory", "fsspec")
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def blocks(cache: Path) -> list[Path]:
    return sorted((cache / FOLDER).glob("*.part")) if (cache / FOLDER).is_dir() else []


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.csv", "a.parquet"])
def test_a_url_has_the_documents_of_the_same_file(store: Store, tmp_path: Path, name: str) -> None:
    texts = [f"text {number}" for number in range(300)]
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": texts}), path)
    else:
        content = {
            ".txt": LINES, ".gz": LINES, ".jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts),
            ".csv": "\n".join(["text", *texts]),
        }[path.suffix]  # fmt: skip
        path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    store.files[name] = path.read_bytes()
    source = open_one(f"{store.url}/{name}")
    assert read_documents(source) == read_documents(open_one(path))
    assert source.name == f"{store.url}/{name}"
    if name == "a.txt":
        assert source.size_bytes() == len(LINES)


def test_blocks_are_read_once_and_stay_within_the_bound(
    store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.files["a.txt"] = LINES.encode()
    url = f"{store.url}/a.txt"
    assert read_documents(open_one(url)) == [LINES] and store.sent == len(LINES)
    assert read_documents(open_one(url)) == [LINES] and store.sent == len(LINES), "from the cache"
    assert len(blocks(cache)) == -(-len(LINES) // 10_000)
    monkeypatch.setenv(remote.CACHE_BYTES_VARIABLE, "25000")
    store.files["b.txt"] = LINES[::-1].encode()
    assert read_documents(open_one(f"{store.url}/b.txt")) == [LINES[::-1]]
    assert sum(path.stat().st_size for path in blocks(cache)) <= 25_010
    monkeypatch.setenv(remote.CACHE_BYTES_VARIABLE, "many")
    store.files["c.txt"] = b"text"
    assert (
        "must be a number of bytes, found 'many'"
        in refusal(lambda: read_documents(open_one(f"{store.url}/c.txt"))).message
    )


@pytest.mark.parametrize("damage", ["a changed byte", "cut", "a cache that cannot be written"])
def test_a_damaged_or_missing_cache_costs_only_another_reading(store: Store, cache: Path, damage: str) -> None:
    store.files["a.txt"] = LINES.encode()
    if damage.startswith("a cache"):
        cache.parent.mkdir(exist_ok=True)
        cache.write_text("a file where the folder should be")
    source = open_one(f"{store.url}/a.txt")
    assert read_documents(source) == [LINES]
    for path in blocks(cache):
        data = path.read_bytes()
        path.write_bytes(data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    assert read_documents(source) == [LINES] and store.sent == 2 * len(LINES)


def test_a_cut_connection_is_tried_again_and_then_refused_in_one_line(store: Store) -> None:
    store.files["a.txt"] = LINES.encode()
    store.cuts = 3
    source = open_one(f"{store.url}/a.txt")
    assert read_documents(source) == [LINES] and store.cuts == 0
    store.files["b.txt"] = LINES.encode()
    source = open_one(f"{store.url}/b.txt")
    store.cuts = 100
    error = refusal(lambda: read_documents(source))
    assert error.message.startswith(f"{store.url}/b.txt: cannot be read: ") and error.hint == "tried 5 times"


@pytest.mark.parametrize(
    ("statuses", "message", "hint"),
    [
        ([], "no such file", None),
        ([403, 403], "cannot be read: 403", None),
        ([500] * 10, "cannot be read: 500", "tried 5 times"),
    ],
)
def test_what_a_server_refuses_is_one_line(store: Store, statuses: list[int], message: str, hint: str | None) -> None:
    if statuses:
        store.files["a.txt"] = b"text"
    store.statuses = statuses
    error = refusal(lambda: open_one(f"{store.url}/a.txt"))
    assert error.message.startswith(f"{store.url}/a.txt: {message}") and error.hint == hint


def test_a_server_that_is_not_there_is_one_line() -> None:
    pytest.importorskip("aiohttp")
    with serving(Store()) as store:
        url = f"{store.url}/a.txt"
    error = refusal(lambda: open_one(url))
    assert error.message.startswith(f"{url}: cannot be read: ") and error.hint == "tried 5 times"


def test_a_server_that_sends_whole_files_only_is_refused(store: Store) -> None:
    store.files["a.txt"], store.ranges = LINES.encode(), False
    error = refusal(lambda: read_documents(open_one(f"{store.url}/a.txt")))
    assert error.message == f"{store.url}/a.txt: the server does not send parts of this file"


@pytest.mark.parametrize("tags", [True, False])
def test_changed_content_has_another_fingerprint_and_is_noticed_while_it_is_read(store: Store, tags: bool) -> None:
    store.files["a.txt"], store.tags = LINES.encode(), tags
    first = open_one(f"{store.url}/a.txt")
    assert open_one(f"{store.url}/a.txt").fingerprint() == first.fingerprint()
    store.files["a.txt"] = LINES.replace("line 1999", "LINE 1999").encode()
    assert open_one(f"{store.url}/a.txt").fingerprint() != first.fingerprint()
    error = refusal(lambda: read_documents(first))
    assert error.message == f"{store.url}/a.txt: changed while it was read"


def test_tokens_of_a_url_are_cached_until_its_content_changes(store: Store, cache: Path) -> None:
    def tokens() -> str:
        corpus = token_corpus(open_one(f"{store.url}/a.txt"), ByteTokenizer(), Work(cache_dir=cache))
        return bytes(ids_of(corpus)).decode()

    store.files["a.txt"] = LINES.encode()
    assert tokens() == LINES and store.sent == len(LINES)
    for path in blocks(cache):
        path.unlink()
    assert tokens() == LINES and store.sent == len(LINES), "the token files are used"
    store.files["a.txt"] = b"other text"
    assert tokens() == "other text"


def test_an_interruption_ends_the_waiting_for_a_connection(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise Interrupted("interrupted", signal_number=2)

    store.files["a.txt"], store.statuses = b"text", [500] * 10
    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(Interrupted):
        open_one(f"{store.url}/a.txt")


def test_folders_and_patterns_of_a_store_are_read_as_those_of_a_disk(memory: Any, tmp_path: Path) -> None:
    for name, text in {
        "d/b.txt": "bee", "d/a.jsonl": '{"text": "a"}\n{"text": "row"}', "d/e/c.md": "sea", "d/x.bin": "no",
        "d/.hidden.txt": "no",
    }.items():  # fmt: skip
        memory.pipe_file(f"/{name}", text.encode())
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for place in ("d", "d/*.txt", "d/**/*.md", "d/b.txt"):
        assert read_documents(open_one(f"memory://{place}")) == read_documents(open_one(tmp_path / place)), place
    assert refusal(lambda: open_one("memory://d/*.csv")).message.startswith("memory://d/*.csv: no text in this folder")
    assert refusal(lambda: open_one("memory://nothing")).message == "memory://nothing: no such file"
    memory.pipe_file("/empty.txt", b"")
    assert refusal(lambda: open_one("memory://empty.txt")).message == "memory://empty.txt: is empty"
    before = open_one("memory://d").fingerprint()
    memory.pipe_file("/d/b.txt", b"BEE")
    assert open_one("memory://d").fingerprint() != before


def test_pairs_are_read_from_urls(memory: Any) -> None:
    memory.pipe_file("/a.en", b"one\ntwo\n")
    memory.pipe_file("/a.de", b"eins\nzwei\n")
    [source] = open_pairs([Spec("memory://a.en", target_path="memory://a.de")])
    assert [(row.source, row.target) for row in source.rows()] == [("one", "eins"), ("two", "zwei")]


def test_unknown_schemes_and_missing_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(lambda: open_one("ftp://host/a.txt"))
    assert error.message == "ftp://host/a.txt: unknown kind of URL 'ftp://'" and "s3://, gs://" in str(error.hint)
    monkeypatch.setitem(SCHEMES, "s3", "a_package_that_is_not_there")
    error = refusal(lambda: open_one("s3://bucket/a.txt"))
    assert "needs the package a_package_that_is_not_there" in error.message
    assert error.hint == "install it with: pip install 'tformer[remote]'"


def test_images_at_urls_are_refused() -> None:
    from tformer.data.sources.images import open_images

    with pytest.raises(InputError, match="images are read from files and folders of this machine"):
        open_images("https://host/images.zip", size=8, channels=1)  # type: ignore[arg-type]


def test_without_a_url_nothing_of_a_network_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    script = f"""
import sys
from tests.data.fakes import open_one, read_documents
assert read_documents(open_one({str(tmp_path / "a.txt")!r})) == ["text"]
print([name for name in ("fsspec", "aiohttp", "http", "ssl", "torch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_train_reads_a_url_and_resumes_from_it(store: Store, cli: Any, tmp_path: Path) -> None:
    store.files["a.txt"] = LINES[:5000].encode()
    (tmp_path / "tiny.yaml").write_text(TINY_RECIPE)
    words = ("train", "--config", tmp_path / "tiny.yaml", "--data", f"{store.url}/a.txt", "--out", tmp_path / "run")
    assert cli(*words, "--max-steps", 2).code == 0
    assert cli("train", "--resume", "--out", tmp_path / "run", "--max-steps", 3).code == 0
    assert cli("evaluate", tmp_path / "run", "--data", f"{store.url}/a.txt").code == 0
    store.files["a.txt"] = LINES[:6000].encode()
    changed = cli("train", "--resume", "--out", tmp_path / "run", "--max-steps", 4)
    assert changed.code == 2 and "data has changed since this run began" in changed.err


def test_a_file_is_named_by_the_last_part_of_its_path(store: Store) -> None:
    store.files["folder/a.jsonl.gz?version=1.2"] = b"x"
    found = describe(f"{store.url}/folder/a.jsonl.gz?version=1.2")
    assert (found.name, found.stem, found.suffix) == ("a.jsonl.gz", "a.jsonl", ".gz") and found.size == 1
