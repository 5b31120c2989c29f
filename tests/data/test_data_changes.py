"""Files that change while they are read: one line, exit 2, and no cache keeps what was read of them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import TINY_RECIPE
from tests.data.fakes import ByteTokenizer, Columns, Spec, entries, ids_of, leftovers, open_one, refusal, write
from tests.data.image_makers import encoded, noise_image, write_idx, write_tree, write_zip
from tformer.data.shards import encoders, entry_writer, token_files
from tformer.data.shards.caches import cache_sizes, clean_caches
from tformer.data.shards.corpus import TokenCorpus, token_corpus
from tformer.data.shards.entry_writer import read_record
from tformer.data.sources import files, image_files
from tformer.data.sources.files import FoundFile, unchanged
from tformer.data.sources.image_files import find_images, open_idx
from tformer.data.sources.images import open_images
from tformer.data.sources.labelled import open_labelled
from tformer.data.sources.pairs import open_pairs
from tformer.data.sources.rows import keep_rows
from tformer.support.errors import InputError, Interrupted
from tformer.training import embeddings
from tformer.workers.work import Work

LINES = "".join(f"line {number} of a text\n" for number in range(3000))
Change = Callable[[Path], object]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more\n")


def restore_time(path: Path, write: Callable[[], object]) -> None:
    """Write, and set the time of modification back, as `cp -p` and `rsync -a` do."""
    before = path.stat()
    write()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def rewrite_in_place(path: Path) -> None:
    """Other content of the same size, with the time set back."""
    restore_time(path, lambda: path.write_bytes(path.read_bytes().swapcase()))


def rewrite_and_restore(path: Path) -> None:
    """The content and its time are those of before again, but what was read between them may be another."""
    content = path.read_bytes()
    restore_time(path, lambda: (path.write_bytes(content.swapcase()), path.write_bytes(content)))


def replace(path: Path) -> None:
    """A new file of the same size and time under the name."""
    other = write(path.with_name("other"), path.read_bytes().swapcase())
    shutil.copystat(path, other)
    other.replace(path)


CHANGES: dict[Change, str] = {
    truncate: "size ",
    append: "size ",
    rewrite_in_place: "it was written or replaced",
    rewrite_and_restore: "it was written or replaced",
    replace: "it was written or replaced",
    lambda path: os.utime(path, (1, 1)): "it was written or replaced",
    Path.unlink: "no such file or directory",
}


def parametrized(*chosen: Change) -> pytest.MarkDecorator:
    ids = [change.__name__.strip("<>") for change in chosen]
    return pytest.mark.parametrize(("change", "words"), [(change, CHANGES[change]) for change in chosen], ids=ids)


changes = parametrized(*CHANGES)
some_changes = parametrized(truncate, rewrite_in_place)
"""For readers: `changes` with the tokenized text show that each change is found."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in small pieces, and samples are small, so that a few kilobytes are a large file."""
    for name, value in {"PIECE_BYTES": 100, "EDGE_BYTES": 400, "SAMPLES": 4, "SAMPLE_BYTES": 8}.items():
        monkeypatch.setattr(files, name, value)
    for name, value in {"BATCH_CHARACTERS": 1000, "CHUNK_CHARACTERS": 500, "CHUNK_LIMIT": 1000}.items():
        monkeypatch.setattr(token_files, name, value)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of 60 kB that was written long ago."""
    path = write(tmp_path / "text.txt", LINES)
    os.utime(path, (10**9, 10**9))
    return path


def once(action: Callable[[], object], *, after: int = 3) -> Callable[[], bool]:
    """A `should_stop` that does something at one of its calls, and never stops."""
    calls = iter(range(10**9))

    def should_stop() -> bool:
        if next(calls) == after:
            action()
        return False

    return should_stop


def tokenize(path: Path, should_stop: Callable[[], bool] = lambda: False) -> TokenCorpus:
    work = Work(cache_dir=path.parent / "cache", should_stop=should_stop)
    return token_corpus(open_one(path), ByteTokenizer(), work)  # type: ignore[arg-type]


def assert_refused(action: Callable[[], object], path: Path, words: str) -> None:
    error = refusal(action)
    assert error.message.startswith(f"{path}: ") and words in error.message
    assert words.startswith("no such") or "changed while it was read: " in error.message


@changes
def test_a_text_that_changes_while_it_is_tokenized_is_refused_and_nothing_is_cached(
    text: Path, change: Change, words: str
) -> None:
    cache, kept = text.parent / "cache", shutil.copy2(text, text.parent / "kept.txt")
    assert_refused(lambda: tokenize(text, once(lambda: change(text))), text, words)
    assert not entries(cache) and not leftovers(cache)
    shutil.copy2(kept, text)
    assert bytes(ids_of(tokenize(text))).decode() == LINES


def test_a_size_that_changes_is_named_with_both_values(text: Path) -> None:
    size = len(LINES)
    error = refusal(lambda: tokenize(text, once(lambda: truncate(text))))
    assert error.message == f"{text}: changed while it was read: size {size:,} -> {size // 2:,} bytes"
    assert error.hint == "run the command again when nothing writes to it"


def test_a_change_before_the_reading_is_found_too(text: Path) -> None:
    """The tokens are kept under the fingerprint of what the command found first."""
    source = open_one(text)
    source.fingerprint()
    rewrite_in_place(text)
    assert_refused(lambda: list(source.documents()), text, "it was written or replaced")


def test_vectors_that_are_cut_while_they_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "vectors.safetensors", "x" * 100)

    def cut(path: Path, *_: Any) -> None:
        os.truncate(path, 10)
        raise RuntimeError("shape '[3000, 32]' is invalid for input of size 47989")

    monkeypatch.setattr(embeddings, "_read_matrix", cut)
    with pytest.raises(InputError, match=r"vectors.safetensors: changed while it was read: size 100 -> 10 bytes"):
        embeddings.read_vectors(path, SimpleNamespace(vocab_size=0, tokens=[]), columns=4, work=Work())  # type: ignore[arg-type]


def test_an_unchanged_file_is_read_any_number_of_times(text: Path) -> None:
    source = open_one(text)
    assert ["".join(piece.text for piece in source.documents()) for _ in range(3)] == [LINES] * 3


def table(path: Path) -> Path:
    """Two thousand rows with two texts and a label."""
    rows = [{"text": f"text {number}", "text2": f"other {number}", "label": "xy"[number % 2]} for number in range(2000)]
    match path.name.partition(".")[2]:
        case "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
            return path
        case "jsonl" | "jsonl.gz" | "jsonl.zst":
            content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        case ending:
            lines = [list(rows[0]), *(row.values() for row in rows)]
            content = "".join(("," if ending == "csv" else "\t").join(line) + "\n" for line in lines).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    elif path.suffix == ".zst":
        content = pytest.importorskip("zstandard").compress(content)
    return write(path, content)


def text_rows(path: Path) -> Iterator[Any]:
    return open_one(path).documents()


def labelled_rows(path: Path) -> Iterator[Any]:
    return open_labelled([Spec(str(path))], columns=Columns(text="text", text2="text2", label="label"))[0].rows()


def pair_rows(path: Path) -> Iterator[Any]:
    return open_pairs([Spec(str(path))], columns=Columns(source="text", target="text2"))[0].rows()


@some_changes
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("read", [text_rows, labelled_rows, pair_rows])
def test_a_table_that_changes_while_its_rows_are_read_is_refused(
    tmp_path: Path, name: str, read: Callable[[Path], Iterator[Any]], change: Change, words: str
) -> None:
    path = table(tmp_path / name)
    os.utime(path, (10**9, 10**9))
    rows = read(path)
    next(rows)
    change(path)
    assert_refused(lambda: list(rows), path, words)


@some_changes
@pytest.mark.parametrize("side", ["a.en", "a.de"])
def test_aligned_files_of_which_one_changes_are_refused(tmp_path: Path, side: str, change: Change, words: str) -> None:
    for name in ("a.en", "a.de"):
        os.utime(write(tmp_path / name, LINES), (10**9, 10**9))
    rows = open_pairs([Spec(str(tmp_path / "a.en"), target_path=str(tmp_path / "a.de"))])[0].rows()
    next(rows)
    change(tmp_path / side)
    assert_refused(lambda: list(rows), tmp_path / side, words)


def test_what_a_change_has_damaged_is_called_a_change(tmp_path: Path) -> None:
    """A row without its keys, where the new content meets the old."""
    path = table(tmp_path / "a.jsonl")
    rows = labelled_rows(path)
    next(rows)
    with path.open("r+b") as file:
        file.seek(30_000)
        file.write(b"}" * 100)
    assert_refused(lambda: list(rows), path, "changed while it was read")
    assert refusal(lambda: list(labelled_rows(path))).message.startswith(f"{path}:531: ")


@some_changes
def test_images_in_a_folder_and_in_a_zip_that_change_are_refused(tmp_path: Path, change: Change, words: str) -> None:
    tree = {f"{label}/{number}.png": encoded(noise_image(number)) for label in "ab" for number in range(3)}
    folder, archive = write_tree(tmp_path / "set", tree), write_zip(tmp_path / "set.zip", tree)
    for path in (folder / "b" / "1.png", archive):
        os.utime(path, (10**9, 10**9))
    for found, path in ((find_images(folder, needs_label=True), folder / "b" / "1.png"),
                        (find_images(archive, needs_label=True), archive)):  # fmt: skip
        assert found.read(4) == tree["b/1.png"]
        change(path)
        assert_refused(lambda found=found: found.read(4), path, words)


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_set_of_images_that_changes_while_it_is_decoded_is_refused(
    tmp_path: Path, kind: str, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {f"{label}/{number}.png": encoded(noise_image(number)) for label in "ab" for number in range(3)}
    path = write_tree(tmp_path / "set", tree) if kind == "folder" else write_zip(tmp_path / "set.zip", tree)
    changed = path / "b" / "2.png" if kind == "folder" else path
    monkeypatch.setattr("tformer.data.sources.images.MEMORY_BYTES", 2**30 if in_memory else 0)
    if not in_memory:
        images = open_images(path, size=8, channels=3)
        images.pixels(range(6))
    decode, decoded = image_files.decode_image, []

    def changing(data: bytes, **options: Any) -> Any:
        if not decoded:
            append(changed)
        decoded.append(data)
        return decode(data, **options)

    monkeypatch.setattr(image_files, "decode_image", changing)
    read = (lambda: open_images(path, size=8, channels=3)) if in_memory else (lambda: images.pixels(range(6)))
    assert_refused(read, changed, "size ")


@some_changes
def test_an_idx_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, change: Change, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [noise_image(number, channels=1) for number in range(6)]
    path = write_idx(tmp_path / "images-idx3-ubyte", np.stack(images), np.arange(6, dtype=np.uint8) % 2)
    os.utime(path, (10**9, 10**9))
    opened, reads = files.open_input, []

    def changing(place: Path) -> Any:
        reads.append(place)
        file = opened(place)
        if reads.count(path) == 2:  # the first is of its header
            file.read(200)
            change(path)
            file.seek(0)
        return file

    monkeypatch.setattr(files, "open_input", changing)
    assert_refused(lambda: open_idx(path, needs_label=True), path, words)


# -- unfinished tokens -------------------------------------------------------------------------------------------------


@pytest.fixture
def unfinished(text: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory with a record that an interrupted command leaves."""
    monkeypatch.setattr(entry_writer, "RECORD_BYTES", 2000)
    monkeypatch.setattr(encoders, "available_cores", lambda: 2)  # more processes read ahead of what is written
    polls = iter(range(25))
    with pytest.raises(Interrupted):
        tokenize(text, lambda: next(polls, None) is None)
    [folder] = leftovers(text.parent / "cache")
    record = read_record(folder)
    assert record is not None and record.num_bytes > 10_000
    return folder


@some_changes
def test_unfinished_tokens_go_with_a_text_that_changes_while_the_next_command_goes_on(
    text: Path, unfinished: Path, change: Change, words: str
) -> None:
    kept = shutil.copy2(text, text.parent / "kept.txt")
    assert_refused(lambda: tokenize(text, once(lambda: change(text), after=30)), text, words)
    assert not unfinished.exists() and not entries(text.parent / "cache")
    shutil.copy2(kept, text)
    assert bytes(ids_of(tokenize(text))).decode() == LINES


@pytest.mark.parametrize("place", [5000, 50_000], ids=["in what was done", "in the rest"])
def test_unfinished_tokens_of_another_text_are_not_used_even_if_no_sample_shows_it(
    text: Path, unfinished: Path, place: int
) -> None:
    before = open_one(text).fingerprint()
    changed = f"{LINES[:place]}???{LINES[place + 3 :]}"
    restore_time(text, lambda: text.write_text(changed))
    assert open_one(text).fingerprint() == before
    assert bytes(ids_of(tokenize(text))).decode() == changed and not unfinished.exists()


# -- caches ------------------------------------------------------------------------------------------------------------


def test_a_text_whose_middle_changed_and_whose_time_was_set_back_is_tokenized_again(text: Path) -> None:
    tokenize(text)
    middle = 400 + (len(LINES) - 800) // 2
    changed = f"{LINES[:middle]}?{LINES[middle + 1 :]}"
    restore_time(text, lambda: text.write_text(changed))
    assert bytes(ids_of(tokenize(text))).decode() == changed


def key_of_version_1(path: Path) -> str:
    """The name of a text's entry as version 0.1.0 gave it."""
    size, time = path.stat().st_size, path.stat().st_mtime_ns
    content, edge = path.read_bytes(), files.EDGE_BYTES
    digest = hashlib.sha256(f"{size}:".encode() + content[:edge])
    digest.update(f":{time}:".encode() + content[-edge:] if size > 2 * edge else content[edge:])
    source = hashlib.sha256(f".txt:None:strict:{digest.hexdigest()}\n".encode()).hexdigest()
    parts = (1, source, ByteTokenizer().sha256, 256, ())
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()[:32]


@pytest.mark.parametrize("content", ["a short text", LINES])
def test_an_entry_of_version_1_is_not_trusted_and_is_removed_with_the_cache(text: Path, content: str) -> None:
    """It may hold half of the text."""
    cache, half = text.parent / "cache", write(text.parent / "half.txt", "half")
    text.write_text(content)
    tokenize(half)
    [entry] = entries(cache)
    entry.rename(cache / key_of_version_1(text))
    assert bytes(ids_of(tokenize(text))).decode() == content
    assert cache_sizes(cache)["tokens"].entries == 2
    clean_caches(cache)
    assert not entries(cache)


def test_a_file_of_version_1_under_a_new_name_is_refused(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize(text)
    [entry] = entries(text.parent / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(token_files, "VERSION", 1)
        tokenize(text)
    [old] = [path for path in entries(text.parent / "cache") if path != entry]
    shutil.rmtree(entry)
    old.rename(entry)
    corpus = tokenize(text)
    assert "version 1, expected" in corpus.notes[0] and bytes(ids_of(corpus)).decode() == LINES


def test_the_fingerprint_of_a_file_reads_a_fixed_number_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    path = write(tmp_path / "a.txt", "")
    os.truncate(path, 1 << 40)
    before = Path("/proc/self/io").read_text().split()[1]
    open_one(path).fingerprint()
    assert int(Path("/proc/self/io").read_text().split()[1]) - int(before) < 5 << 20


def test_the_same_rows_do_not_replace_a_file_that_another_training_reads(tmp_path: Path) -> None:
    def keep() -> Path:
        return keep_rows([("one", "x"), ("two", "y")], tmp_path, keys=[("text", "label")], name="data")

    first = FoundFile(keep())
    with unchanged(first):
        assert keep() == first.path
    truncate(first.path)  # by something else
    assert keep().stat().st_size == first.facts.size  # type: ignore[union-attr]


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def change_while_decoded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`change_while_decoded(action)`: the action is run when a text has been read in part, for the first time."""

    def prepare(action: Callable[[], object]) -> None:
        decode, done = files.decode_text, []

        def changing(chunks: Iterator[bytes], **options: Any) -> Iterator[str]:
            for number, text in enumerate(decode(chunks, **options)):
                yield text
                if number == 5 and not done:
                    done.append(action())

        for module in ("tformer.data.sources.files", "tformer.decoding.lines"):
            monkeypatch.setattr(f"{module}.decode_text", changing)

    return prepare


@some_changes
def test_train_tokenizer_on_a_text_that_changes_ends_with_2_and_writes_nothing(
    text: Path, cli: Any, change_while_decoded: Callable[..., None], change: Change, words: str
) -> None:
    out = text.parent / "tokenizer.json"
    change_while_decoded(lambda: change(text))
    outcome = cli("train-tokenizer", text, "--vocab-size", 300, "--out", out)
    assert outcome.code == 2 and f"{text}: " in outcome.err and words in " ".join(outcome.err.split())
    assert not out.exists()


@pytest.mark.parametrize("kind", ["text", "labelled", "pairs"])
def test_no_tokenizer_of_a_training_whose_data_changes_is_cached(
    tmp_path: Path, kind: str, change_while_decoded: Callable[..., None]
) -> None:
    from tformer.recipe import load_recipe
    from tformer.tasks.base import TrainingStart
    from tformer.tasks.table import task_of
    from tformer.tasks.tokenizers import CACHE
    from tformer.workers.work import Work

    path = table(tmp_path / "a.tsv")
    arch, preset, columns = {
        "text": ("gpt", "tiny", {"text": "text"}),
        "labelled": ("bert", "classify", {"text": "text", "text2": "text2", "label": "label"}),
        "pairs": ("transformer", "tiny", {"source": "text", "target": "text2"}),
    }[kind]
    flags = {"data.train": [{"path": str(path)}], "tokenizer.train.vocab_size": 300}
    flags |= {f"data.columns.{role}": name for role, name in columns.items()}
    recipe = load_recipe(arch=arch, preset=preset, flags=flags).recipe

    def training_data() -> object:
        return task_of(recipe).training_data(TrainingStart(recipe=recipe), Work(cache_dir=tmp_path / "cache"))

    change_while_decoded(lambda: path.write_bytes(path.read_bytes() + b"text\tother\tx\n"))
    assert_refused(training_data, path, "size ")
    assert not (tmp_path / "cache" / CACHE).exists()
    training_data()
    assert len(list((tmp_path / "cache" / CACHE).iterdir())) == 1


@some_changes
def test_lines_of_a_file_that_changes_are_refused(
    text: Path, change_while_decoded: Callable[..., None], change: Change, words: str
) -> None:
    from tformer.decoding.lines import line_blocks

    change_while_decoded(lambda: change(text))
    assert_refused(lambda: list(line_blocks(str(text), errors="strict", size=10)), text, words)


@pytest.mark.slow
def test_a_command_on_a_text_that_is_cut_meanwhile_ends_with_2_and_the_next_has_all_tokens(
    tmp_path: Path, cli_process: Any
) -> None:
    """A text, then a pipe: the command has found the text when it opens the pipe, which waits for this test.

    Its quick twin is `test_unfinished_tokens_go_with_a_text_that_changes_while_the_next_command_goes_on`.
    """
    text, pipe, cache = write(tmp_path / "text.txt", LINES), tmp_path / "pipe", tmp_path / "cache"
    kept = shutil.copy2(text, tmp_path / "kept.txt")
    os.mkfifo(pipe)
    write(tmp_path / "tiny.yaml", TINY_RECIPE)

    def train(change: Callable[[], object]) -> tuple[int, str]:
        words = ("train", "--config", "tiny.yaml", "--data", text, "--data", pipe, "--max-steps", 1, "--json")
        process = cli_process(*words, "--out", tmp_path / "run", cwd=tmp_path, TFORMER_CACHE=str(cache))
        with pipe.open("w") as file:
            change()
            file.write("words of the pipe\n" * 100)
        _, err = process.communicate(timeout=100)
        return process.returncode, err

    code, err = train(lambda: truncate(text))
    assert code == 2 and f"size {len(LINES):,} -> {len(LINES) // 2:,} bytes" in " ".join(err.split())
    assert "Traceback" not in err and not (tmp_path / "run").exists()
    assert [path for path in cache.rglob("*") if path.suffix in (".bin", ".json") and path.parent.name != "speed"] == []
    shutil.copy2(kept, text)
    code, err = train(lambda: None)
    found = re.search(r"data: ([\d,]+) training tokens, ([\d,]+) validation tokens", err)
    assert code == 0 and found is not None, err
    assert sum(int(number.replace(",", "")) for number in found.groups()) == len(LINES) + 1800
