"""Token files that are cut or changed under a running training: one line, exit 2, a checkpoint saved.

A small corpus is read into memory, so nothing can happen to it; `MEMORY_BYTES = 0` makes one large.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import TINY_RECIPE
from tests.data.fakes import ByteTokenizer, ids_of, open_one
from tests.quick import first_is_quick
from tformer.data.shards import array_files, corpus
from tformer.data.shards.array_files import ArrayFile, BackgroundCheck
from tformer.data.shards.token_files import HEADER_BYTES, DamagedShardError
from tformer.training.loop import Trainer
from tformer.workers.work import Work

Cli = Callable[..., Any]

ENCODER = """
model:
  d_model: 16
  max_seq_len: 16
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}}
"""
BOTH = ENCODER + "  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}}\n  heads: [{kind: lm}]\n"
GENERATOR = "generator:" + ENCODER.removeprefix("\nmodel:") + "  heads: [{kind: masked_lm}]\n"
END = """
optimizer: {lr: 0.01}
training: {max_steps: 40, batch_size: 4, eval_every: 40, save_every: 40, log_every: 40,
           precision: fp32, device: cpu, threads: 1}
"""
WORDS = "tokenizer: {train: {model: word, vocab_size: 150, min_frequency: 1, template: %s}}"
TASKS = {
    "causal language model": TINY_RECIPE.replace("max_steps: 12", "max_steps: 40"),
    "packed documents": TINY_RECIPE.replace("max_steps: 12", "max_steps: 40") + "data: {packing: documents}\n",
    "masked language model": "arch: bert\n" + WORDS % "bert" + ENCODER
    + "  heads: [{kind: masked_lm}]\nobjectives: [{kind: masked_lm}]" + END,
    "replaced tokens": "arch: electra\n" + WORDS % "bert" + ENCODER
    + "  heads: [{kind: replaced_token}]\n" + GENERATOR + "objectives: [{kind: replaced_token}]" + END,
    "span corruption": "arch: t5\n" + WORDS % "t5" + BOTH + "objectives: [{kind: span_corruption}]" + END,
    "denoising": "arch: bart\n" + WORDS % "roberta" + BOTH + "objectives: [{kind: denoising}]" + END,
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def train(cli: Cli, tmp_path: Path, text_file: Path, cache: Path) -> Callable[..., Any]:
    def run(recipe: str, *flags: object) -> Any:
        (tmp_path / "recipe.yaml").write_text(recipe)
        return cli(
            "train", "--config", tmp_path / "recipe.yaml", "--data", text_file, "--out", tmp_path / "run", *flags
        )

    return run


def shards(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/tokens-*.bin"))


def at_step(number: int, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before step `number` something happens to the files."""
    step = Trainer.train_step

    def changed(self: Trainer) -> None:
        if self.state.step + 1 == number:
            action()
        step(self)

    monkeypatch.setattr(Trainer, "train_step", changed)


def wait_for_check() -> None:
    for thread in threading.enumerate():
        if thread.name == "check of token files":
            thread.join(60)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        first = file.read(1)[0]
        file.seek(HEADER_BYTES)
        file.write(bytes([first ^ 1]))


@first_is_quick("task", TASKS)
def test_a_shard_that_is_cut_ends_the_training_with_one_line_and_a_checkpoint_that_resumes(
    task: str, train: Callable[..., Any], cli: Cli, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MEMORY_BYTES", 0)
    with monkeypatch.context() as patch:
        at_step(4, lambda: [os.truncate(path, HEADER_BYTES) for path in shards(cache)], patch)
        ended = train(TASKS[task])
    assert ended.code == 2, ended.err
    [error, hint] = [line for line in ended.err.splitlines() if line.startswith(("error:", "hint:"))]
    assert "tokens-00000.bin are damaged: it was cut to 128 bytes, expected" in error
    assert hint.startswith("hint: saved at step 3, continue with: tformer train --resume --out ")
    assert cli("inspect", tmp_path / "run", "--verify").code == 0
    resumed = cli("train", "--resume", "--out", tmp_path / "run", "--max-steps", 6)
    assert resumed.code == 0, resumed.err


def test_a_changed_byte_of_a_large_corpus_is_found_while_it_trains(
    train: Callable[..., Any], cli: Cli, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of a large corpus are not hashed at the start; the changed id is a valid one."""
    monkeypatch.setattr(corpus, "MEMORY_BYTES", 0)
    assert train(TINY_RECIPE, "--max-steps", 1).code == 0
    flip(shards(cache)[0])
    with monkeypatch.context() as patch:
        at_step(4, wait_for_check, patch)
        ended = train(TINY_RECIPE, "--resume", "--max-steps", 1000)
    assert ended.code == 2, ended.err
    assert "are damaged: its checksum is " in ended.err
    assert re.search("hint: saved at step [1-4], continue with", ended.err)
    assert "Traceback" not in ended.err
    resumed = train(TINY_RECIPE, "--resume", "--max-steps", 6)
    assert resumed.code == 0, "the damaged file was removed, so that the text is tokenized again"
    assert not [thread for thread in threading.enumerate() if thread.name == "check of token files"]


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 0), Path.unlink])
def test_a_small_corpus_is_in_memory_and_trains_on_whatever_happens_to_its_file(
    damage: Callable[[Path], object], train: Callable[..., Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(4, lambda: [damage(path) for path in shards(cache)], monkeypatch)
    assert train(TINY_RECIPE).code == 0


def test_the_check_reads_every_file_once(rows_corpus: corpus.TokenCorpus) -> None:
    with BackgroundCheck(rows_corpus.files) as check:
        check._thread.join(20)
        check.raise_if_damaged()
        flip(rows_corpus.files[0].path)
    with BackgroundCheck(rows_corpus.files) as check:
        check._thread.join(20)
        with pytest.raises(DamagedShardError, match=r"tokens-00000.bin are damaged: its checksum is [0-9a-f]{8}"):
            check.raise_if_damaged()
    assert not rows_corpus.files[0].path.exists(), "the text is tokenized again by the next command"


def test_the_check_of_a_large_corpus_stops_at_once(
    rows_corpus: corpus.TokenCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_files, "VERIFY_CHUNK", 1)
    monkeypatch.setattr(array_files, "VERIFY_PAUSE", 3600.0)  # a byte an hour
    began = time.monotonic()
    with BackgroundCheck(rows_corpus.files):
        time.sleep(0.05)
    assert time.monotonic() - began < 5


def test_a_corpus_replaced_by_a_rename_or_removed_is_read_on_as_it_was(rows_corpus: corpus.TokenCorpus) -> None:
    before, path = ids_of(rows_corpus), rows_corpus.files[0].path
    (path.parent / "other").write_bytes(b"other")
    os.replace(path.parent / "other", path)
    assert ids_of(rows_corpus) == before
    os.truncate(path, 0)
    path.unlink()
    with BackgroundCheck(rows_corpus.files) as check:
        check.raise_if_damaged()
    assert ids_of(rows_corpus) == before


@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents.bin", "marks.bin"])
def test_each_file_of_a_corpus_that_is_cut_while_it_is_read_is_an_error(
    rows_corpus: corpus.TokenCorpus, name: str
) -> None:
    files = (*rows_corpus.shards, rows_corpus.all_documents, rows_corpus.byte_counts)
    [file] = [file for file in files if isinstance(file, ArrayFile) and file.path.name == name]
    os.truncate(file.path, HEADER_BYTES + 1)
    with pytest.raises(DamagedShardError, match=f"{name} are damaged: it was cut to 129 bytes, expected [0-9,]+"):
        file[:]


def test_an_id_outside_the_vocabulary_is_an_error_where_it_is_read(rows_corpus: corpus.TokenCorpus) -> None:
    path = rows_corpus.files[0].path
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"\xff\xff")
    with pytest.raises(DamagedShardError, match="it holds the id 65535, expected ids below 257"):
        rows_corpus.slice(0, 4)


def test_gather_equals_slices_for_any_starts(rows_corpus: corpus.TokenCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_files, "GATHERED_TOGETHER", 7)
    draw = np.random.default_rng(0)
    for length in (1, 5):
        starts = draw.integers(0, len(rows_corpus) - length + 1, 100)
        rows = rows_corpus.gather(starts, length)
        assert all(
            (row == rows_corpus.slice(start, start + length)).all() for start, row in zip(starts, rows, strict=True)
        )
    assert rows_corpus.gather(np.array([], dtype=np.int64), 3).shape == (0, 3)


@pytest.fixture
def rows_corpus(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> corpus.TokenCorpus:
    """A corpus that is read from its files."""
    monkeypatch.setattr(corpus, "MEMORY_BYTES", 0)
    return corpus.token_corpus(open_one(rows), ByteTokenizer(), Work(cache_dir=tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "document {number}"}}\n' for number in range(50)))
    return path
