"""Saving and reading checkpoints: exact round trips, pointers, pruning, and refusal of what is damaged or foreign."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.conftest import TOKENIZER, save, steps, tree, weights_at
from tformer.checkpoint import catalog
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.resolve import newest_checkpoint, resolve_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.save import CheckpointContents, write_checkpoint
from tformer.checkpoint.tensor_files import read_specs
from tformer.support.errors import InputError
from tformer.tokenizer.tokenizer import canonical_sha256


def test_save_then_load_is_the_identity(run: RunDirectory) -> None:
    optimizer = {"exp_avg/a": torch.randn(3).to(torch.bfloat16), "step": torch.tensor(7)}
    ema = {"embedding.weight": torch.randn(3, 2), "norm.gain": torch.randn(2)}
    trainer = {"step": 5, "best": float("inf"), "cursor": {"epoch": 1}, "nested": [1, None, "ä"]}
    path = save(run, 5, optimizer=optimizer, ema=ema, trainer=trainer, score=1.25, generator={"g": torch.ones(1)})
    found = read_checkpoint(path)
    assert found.step == 5 and found.trainer == trainer and found.tokenizer_json == TOKENIZER
    assert found.recipe_text == "# step 5\nmodel: {}\n" and found.manifest.score == 1.25 and found.notes == []
    for expected, read in (
        (weights_at(5), found.weights()), (optimizer, found.optimizer()), (found.generator(), {"g": torch.ones(1)}),
    ):  # fmt: skip
        assert expected is not None and expected.keys() == read.keys()
        assert all(torch.equal(expected[name], read[name]) for name in read)
    averages = found.ema()
    assert averages is not None and torch.equal(averages["heads.lm.weight"], ema["embedding.weight"])


def test_tied_tensors_are_stored_once_and_named(run: RunDirectory) -> None:
    path = save(run, 1)
    assert [spec.name for spec in read_specs(path / "model.safetensors")] == ["embedding.weight", "norm.gain"]
    assert json.loads((path / "manifest.json").read_text())["tied"] == {"heads.lm.weight": "embedding.weight"}
    weights = read_checkpoint(path).weights()
    assert weights["heads.lm.weight"] is weights["embedding.weight"]
    found = read_checkpoint(save(run, 2, tied=None)).tied  # found by shared memory
    assert found == {"heads.lm.weight": "embedding.weight"}


def test_the_layout_on_disk(run: RunDirectory) -> None:
    path = save(run, 1000)
    assert path == run.checkpoints_path / "step-00001000"
    assert sorted(os.listdir(path)) == [
        "manifest.json", "model.safetensors", "optimizer.safetensors", "recipe.yaml", "tokenizer.json", "trainer.json",
    ]  # fmt: skip
    manifest = json.loads((path / "manifest.json").read_text())
    record = manifest["files"]["model.safetensors"]
    data = (path / "model.safetensors").read_bytes()
    assert record == {"role": "weights", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert manifest["format"] == 2 and manifest["tokenizer_sha256"] == canonical_sha256(TOKENIZER)
    assert (run.checkpoints_path / "latest").read_text() == "step-00001000\n"


def test_equal_weights_give_equal_bytes(run: RunDirectory) -> None:
    first, second = save(run, 1), save(run, 2, weights=weights_at(1))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_a_checkpoint_directory_alone_is_enough(run: RunDirectory, tmp_path: Path) -> None:
    shutil.copytree(save(run, 3), tmp_path / "alone")
    assert read_checkpoint(resolve_checkpoint(tmp_path / "alone")).step == 3


def test_write_checkpoint_outside_a_run(tmp_path: Path) -> None:
    for step in (1, 2):  # the second replaces the first
        write_checkpoint(
            tmp_path / "out",
            step,
            CheckpointContents(
                weights=weights_at(step),
                recipe_yaml="",
                tokenizer_json="{}",
                trainer={},
            ),
        )
    assert os.listdir(tmp_path) == ["out"] and read_checkpoint(tmp_path / "out").step == 2


def test_wrapped_names_are_a_bug(run: RunDirectory) -> None:
    for name in ("_orig_mod.a", "module.a", "decoder._orig_mod.a"):
        with pytest.raises(ValueError, match="wrapper"):
            save(run, 1, weights={name: torch.ones(1)}, tied={})


def test_keeps_the_last_k_and_the_best(run: RunDirectory) -> None:
    for step, score in enumerate([3.0, 1.0, 2.0, 2.5, 2.2, float("nan"), None], start=1):
        save(run, step, score=score, keep_last=2)
    assert steps(run) == [2, 6, 7]
    assert (run.checkpoints_path / "best").read_text() == "step-00000002\n"
    assert (run.checkpoints_path / "latest").read_text() == "step-00000007\n"
    save(run, 8, score=0.5, keep_last=2)
    assert steps(run) == [7, 8] and run.best() == run.latest()


def test_of_equal_scores_the_lower_loss_is_best(run: RunDirectory) -> None:
    """A checkpoint that does not say its loss, as those of earlier versions, comes after one that does."""
    for step, (score, loss) in enumerate([(0.0, None), (0.0, 3.0), (-1.0, 9.0), (-1.0, 2.0), (-1.0, 4.0)], start=1):
        save(run, step, score=score, loss=loss, keep_last=9)
    bests = [catalog.best(run.checkpoints()[:count]) for count in range(1, 6)]
    assert [best and best.step for best in bests] == [1, 2, 3, 4, 4]
    assert (run.checkpoints_path / "best").read_text() == "step-00000004\n"


def test_numbers_of_numpy_in_a_checkpoint_are_written_as_pythons(run: RunDirectory) -> None:
    number: Any = np.float32
    path = save(run, 1, score=number(1.5), loss=number("nan"), trainer={"step": np.int64(1), "is": np.bool_(True)})
    found = read_checkpoint(path)
    assert (found.manifest.score, found.manifest.loss, found.trainer) == (1.5, None, {"step": 1, "is": True})
    run.write_environment({"count": np.int64(3)})
    run.append_metrics({"step": np.int64(1), "final": np.bool_(True), "loss": torch.tensor(2.0)})
    assert run.environment() == {"count": 3} and list(run.metrics()) == [{"step": 1, "final": True, "loss": 2.0}]


def test_of_equal_scores_the_earlier_is_best(run: RunDirectory) -> None:
    for step in (1, 2, 3):
        save(run, step, score=1.0, keep_last=1)
    assert steps(run) == [1, 3]


def test_without_scores_best_is_latest(run: RunDirectory) -> None:
    save(run, 1)
    path = save(run, 2)
    assert run.best() == path == run.latest()


@pytest.mark.parametrize("content", [None, "step-00000009\n", "step-00000001\n", "../../etc", "\0\xff" * 500, ""])
def test_pointers_are_rebuilt_by_scan_when_missing_or_wrong(run: RunDirectory, content: str | None) -> None:
    save(run, 1, score=2.0)
    save(run, 2, score=1.0)
    for name in ("latest", "best"):
        pointer = run.checkpoints_path / name
        if content is None:
            pointer.unlink()
        else:
            pointer.write_text(content)
    assert run.latest() == run.best() == run.checkpoints_path / "step-00000002"
    run.sweep_temporaries()
    for name in ("latest", "best"):
        assert (run.checkpoints_path / name).read_text() == "step-00000002\n"


def test_a_linked_pointer_is_replaced_not_written_through(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (run.checkpoints_path / "latest").symlink_to(tmp_path / "precious")
    save(run, 1)
    assert (tmp_path / "precious").read_text() == "mine"
    assert (run.checkpoints_path / "latest").read_text() == "step-00000001\n"


def test_order_is_by_step_whatever_the_clock_says(run: RunDirectory) -> None:
    for step in (9, 10, 100_000_001):  # the last has more digits than the names are padded to
        os.utime(save(run, step, keep_last=9) / "manifest.json", (2_000_000_000 - step, 2_000_000_000 - step))
    assert steps(run) == [9, 10, 100_000_001] and run.latest() == run.checkpoints_path / "step-100000001"


def test_pruning_unlinks_a_link_and_nothing_behind_it(run: RunDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    os.rename(save(run, 1), elsewhere)
    (run.checkpoints_path / "step-00000001").symlink_to(elsewhere)
    before = tree(elsewhere)
    assert steps(run) == [1]
    for step in (2, 3):
        save(run, step, keep_last=1)
    assert steps(run) == [3] and tree(elsewhere) == before
    assert not os.path.lexists(run.checkpoints_path / "step-00000001")


def test_pruning_unlinks_links_inside_a_checkpoint(run: RunDirectory, tmp_path: Path) -> None:
    path = save(run, 1)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_text("x")
    (path / "link").symlink_to(tmp_path / "kept")
    save(run, 2, keep_last=1)
    assert steps(run) == [2] and (tmp_path / "kept" / "a").read_text() == "x"


def test_saving_the_same_step_again_replaces_it(run: RunDirectory) -> None:
    save(run, 1, score=1.0)
    path = save(run, 1, trainer={"again": True}, score=2.0)
    assert read_checkpoint(path).trainer == {"again": True} and sorted(os.listdir(run.checkpoints_path)) == [
        "best", "latest", "step-00000001",
    ]  # fmt: skip


def test_every_name_of_a_checkpoint(run: RunDirectory) -> None:
    first, second = save(run, 1, score=1.0), save(run, 20, score=2.0)
    folder = run.checkpoints_path
    assert resolve_checkpoint(run.path) == resolve_checkpoint(folder) == resolve_checkpoint(folder / "best") == first
    assert resolve_checkpoint(run.path, "latest") == resolve_checkpoint(folder / "latest", "best") == second
    assert resolve_checkpoint(second, "best") == second
    for which in ("step-20", "step-00000020", "20"):
        assert resolve_checkpoint(run.path, which) == second
    with pytest.raises(InputError, match="no checkpoint 'step-3'") as caught:
        resolve_checkpoint(run.path, "step-3")
    assert "step-00000020" in (caught.value.hint or "")


def test_absent_paths_suggest_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    RunDirectory.create(arch="gpt", preset="tiny", runs_dir=runs).close()
    for word, hint in (("gpt-tiny-1", "did you mean"), ("gpt-tny", "gpt-tiny-1"), ("zzz", "known: gpt-tiny-1")):
        with pytest.raises(InputError, match="does not exist") as caught:
            resolve_checkpoint(tmp_path / word, runs_dir=runs)
        assert hint in (caught.value.hint or "")
    with pytest.raises(InputError) as caught:
        resolve_checkpoint(tmp_path / "x", runs_dir=tmp_path / "none")
    assert "train a model first" in (caught.value.hint or "")


def test_what_is_not_a_run_says_so(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="neither a run"):
        resolve_checkpoint(tmp_path / "folder")
    (tmp_path / "folder" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="Hugging Face") as caught:
        resolve_checkpoint(tmp_path / "folder")
    assert "tformer import" in (caught.value.hint or "")
    with pytest.raises(InputError, match="no checkpoint yet"):
        resolve_checkpoint(run.path)
    with pytest.raises(InputError, match="is a file") as caught:
        resolve_checkpoint(save(run, 1) / "model.safetensors")
    assert "step-00000001" in (caught.value.hint or "")


def test_the_newest_run_with_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run") as caught:
        newest_checkpoint(tmp_path)
    assert "tformer train" in (caught.value.hint or "")
    made = [RunDirectory.create(arch="a", preset="b", runs_dir=tmp_path) for _ in range(3)]
    with pytest.raises(InputError, match=r"has a checkpoint yet \(a-b-1, a-b-2, a-b-3\)"):
        newest_checkpoint(tmp_path)
    for time, run in ((200, made[0]), (100, made[1])):
        os.utime(save(run, 1) / "manifest.json", (time, time))
    assert newest_checkpoint(tmp_path).parents[1] == made[0].path
    assert newest_checkpoint(tmp_path, usable=lambda path: "a-b-2" in str(path)).parents[1] == made[1].path
    with pytest.raises(InputError, match="suits this command"):
        newest_checkpoint(tmp_path, usable=lambda path: False)
