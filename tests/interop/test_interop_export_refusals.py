"""What `export_checkpoint` refuses, and that a refused, failed or interrupted export leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.interop.exports import GPT, checkpoint, letters, nothing_but, random_weights
from tformer.checkpoint.read import Checkpoint
from tformer.interop.exporting import Tokenizers, export_checkpoint
from tformer.support import files
from tformer.support.errors import InputError, Interrupted, StorageError
from tformer.workers.work import Work


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_exists_is_never_replaced(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    {"folder": out.mkdir, "file": out.touch, "link": lambda: out.symlink_to("nowhere")}[kind]()
    with pytest.raises(InputError, match="exists already"):
        export_checkpoint(checkpoint(tmp_path / "run"), out)
    assert nothing_but(tmp_path, "run", "out")


@pytest.mark.parametrize("rows", [1, -1])
def test_a_table_whose_rows_are_not_the_vocabulary_is_refused(tmp_path: Path, rows: int) -> None:
    """Padding of the vocabulary, which exists in computation alone, never reaches a file."""
    weights = random_weights(GPT, Tokenizers(letters("gpt"), None))
    table = weights["embedding.weight"]
    padded = torch.cat([table, torch.zeros(rows, 16)]) if rows > 0 else table[:rows]
    weights |= dict.fromkeys(("embedding.weight", "heads.lm.weight"), padded)
    with pytest.raises(InputError, match=r"another shape embedding\.weight \[\d+, 16\] \(expected \[\d+, 16\]\)"):
        export_checkpoint(checkpoint(tmp_path / "run", weights=weights), tmp_path / "out")
    assert nothing_but(tmp_path, "run")


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_weights_of_another_recipe_are_refused(tmp_path: Path, change: str) -> None:
    weights = random_weights(GPT, Tokenizers(letters("gpt"), None))
    if change == "missing":
        del weights["decoder.final_norm.bias"]
    else:
        weights["decoder.final_norm.gain"] = torch.ones(1)
    with pytest.raises(InputError, match=rf"recipe and weights disagree: {change} decoder\.final_norm"):
        export_checkpoint(checkpoint(tmp_path / "run", weights=weights), tmp_path / "out")


def test_what_no_class_computes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    decoder = {**GPT["model"]["decoder"], "norm": {"kind": "batchnorm"}}
    recipe = {**GPT, "model": {**GPT["model"], "decoder": decoder}}
    with pytest.raises(InputError, match=r"model\.decoder\.norm\.kind: batchnorm"):
        export_checkpoint(checkpoint(tmp_path / "run", recipe), tmp_path / "deep" / "out")
    assert nothing_but(tmp_path, "run")


def test_learned_layerdrop_rates_stay_behind(tmp_path: Path) -> None:
    decoder = {**GPT["model"]["decoder"], "layerdrop": {"rate": 0.2, "learned": True}}
    recipe = {**GPT, "model": {**GPT["model"], "decoder": decoder}}
    report = export_checkpoint(checkpoint(tmp_path / "run", recipe), tmp_path / "out")
    plain = export_checkpoint(checkpoint(tmp_path / "plain"), tmp_path / "plain-out")
    assert (report.num_tensors, report.class_name) == (plain.num_tensors, "GPT2LMHeadModel")


def test_a_folder_appears_below_folders_that_do_not_exist(tmp_path: Path) -> None:
    export_checkpoint(checkpoint(tmp_path / "run"), tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / "config.json").is_file()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Checkpoint]:
    yield checkpoint(tmp_path / "run")
    assert nothing_but(tmp_path, "run"), "a failed export leaves nothing"


@pytest.mark.parametrize("after", [0, 3, 20])
def test_a_stop_between_tensors_leaves_nothing(opened: Checkpoint, tmp_path: Path, after: int) -> None:
    polls = iter([False] * after + [True] * 100)
    with pytest.raises(Interrupted, match="nothing written"):
        export_checkpoint(opened, tmp_path / "out", work=Work(should_stop=lambda: next(polls)))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["^C", "full disk"]
)
def test_a_write_that_fails_leaves_nothing(
    opened: Checkpoint, tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, write = 0, files.write

    def failing(descriptor: int, data: bytes) -> None:
        nonlocal count
        count += 1
        if count > 6:
            raise error
        write(descriptor, data)

    monkeypatch.setattr(files, "write", failing)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StorageError):
        export_checkpoint(opened, tmp_path / "out")


def test_the_bytes_needed_are_asked_for_before_writing(
    opened: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match=r"[\d,]+ bytes needed, 1,000 free"):
        export_checkpoint(opened, tmp_path / "out")
