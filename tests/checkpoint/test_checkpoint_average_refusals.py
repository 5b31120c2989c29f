"""What averaging refuses, and what interruptions and faults leave behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.averages import RECIPE, TARGET_TOKENIZER, keep, random_weights
from tests.checkpoint.conftest import TOKENIZER, Disk, Killed, rewrite_manifest, tree
from tformer.checkpoint.average import average_checkpoints
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.support.errors import InputError, Interrupted, NotFiniteError, StorageError, TformerError
from tformer.workers.work import Work


def refused(message: str, paths: list[Path], out: Path, *, kind: type[TformerError] = InputError) -> TformerError:
    before = sorted(out.parent.iterdir())
    with pytest.raises(kind, match=message) as caught:
        average_checkpoints(paths, out)
    assert "\n" not in caught.value.message and sorted(out.parent.iterdir()) == before
    return caught.value


def test_naming_a_checkpoint_twice_is_an_error(run: RunDirectory, tmp_path: Path) -> None:
    first, second = keep(run, 1), keep(run, 2)
    refused("step-00000001 is named twice", [first, second, first], tmp_path / "out")
    (tmp_path / "link").symlink_to(first)
    refused(r"link is named twice \(also as .*step-00000001\)", [first, tmp_path / "link"], tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dropout: 0.1", "dropout: 0.3", r"model\.decoder\.dropout is 0\.3, in .*step-00000001 it is 0\.1"),
        ("num_heads: 2", "num_heads: 4", r"model\.decoder\.num_heads is 4"),
        ("[no, yes]", "[yes, no]", r"data\.labels is \['yes', 'no'\]"),
        ("data:", "generator: {d_model: 8, encoder: {num_layers: 1, num_heads: 2}}\ndata:", "generator is "),
    ],
)
def test_another_model_is_named(run: RunDirectory, tmp_path: Path, old: str, new: str, message: str) -> None:
    paths = [keep(run, 1), keep(run, 2, recipe_yaml=RECIPE.replace(old, new))]
    refused(r"step-00000002/recipe\.yaml: " + message, paths, tmp_path / "out")


def test_another_seed_is_no_hindrance(run: RunDirectory, tmp_path: Path) -> None:
    average_checkpoints([keep(run, 1), keep(run, 2, recipe_yaml=RECIPE.replace("seed: 1", "seed: 2"))], tmp_path / "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer_json": TARGET_TOKENIZER},
            r"step-00000002/tokenizer\.json is not the tokenizer of .*step-00000001",
        ),
        ({"tokenizer_json": None}, r"tokenizer\.json is not the tokenizer .* is missing, expected"),
        ({"target_tokenizer_json": TARGET_TOKENIZER}, "step-00000002 has 2 vocabularies, expected as in .*: 1"),
    ],
)
def test_another_tokenizer_is_named(run: RunDirectory, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refused(message, [keep(run, 1), keep(run, 2, **changes)], tmp_path / "out")


def test_another_target_tokenizer_is_named(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, 1, target_tokenizer_json=TARGET_TOKENIZER), keep(run, 2, target_tokenizer_json=TOKENIZER)]
    refused(r"step-00000002/tokenizer\.target\.json is not the tokenizer of", paths, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.gain": torch.ones(5)}, r"norm\.gain is float32 \[5\], in .*step-00000001 it is float32 \[4\]"),
        ({"norm.gain": torch.ones(4).to(torch.bfloat16)}, r"norm\.gain is bfloat16 \[4\]"),
        ({"more": torch.ones(1)}, r"step-00000001 has no tensor more among its weights, .*step-00000002 has"),
        ({"table": torch.arange(4) + 1}, "step-00000002: weights tensor table .* whole numbers"),
    ],
)
def test_other_tensors_are_named(run: RunDirectory, tmp_path: Path, change: dict[str, Tensor], message: str) -> None:
    paths = [keep(run, 1), keep(run, 2, weights=random_weights(2) | change)]
    refused(message, paths, tmp_path / "out")


def test_weights_that_are_not_finite_are_named(run: RunDirectory, tmp_path: Path) -> None:
    change = {"norm.gain": torch.tensor([1.0, float("nan"), 1.0, 1.0])}
    paths = [keep(run, 1), keep(run, 2, weights=random_weights(2) | change)]
    message = "step-00000002: 1 of 6 weights tensors hold NaN"
    assert refused(message, paths, tmp_path / "out", kind=NotFiniteError).exit_code == 4


def test_other_ties_are_named(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    rewrite_manifest(paths[1], lambda content: content.update(tied={}))
    refused(r"tensor heads\.lm\.weight is not tied as it is in", paths, tmp_path / "out")


def test_a_damaged_checkpoint_is_named(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    data = bytearray((paths[1] / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (paths[1] / "model.safetensors").write_bytes(data)
    refused(r"step-00000002/model\.safetensors is damaged: its sha256", paths, tmp_path / "out")


def test_what_stands_at_out_stays(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    for name, make in (("folder", Path.mkdir), ("file", Path.touch), ("gone", lambda p: p.symlink_to("nowhere"))):
        make(tmp_path / name)
        refused(f"{name} exists already", paths, tmp_path / name)
    refused("step-00000001 exists already", paths, paths[0])
    refused("lies among the checkpoints of a run", paths, run.checkpoints_path / "average")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file, expected a folder"):
        average_checkpoints(paths, tmp_path / "file" / "average")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("mode", ["kill", "kill_after", "enospc", "eio", "full"])
def test_a_fault_at_every_call_leaves_a_whole_checkpoint_or_none(
    run: RunDirectory, tmp_path: Path, disk: Disk, mode: str
) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    before = tree(run.path)
    folder = tmp_path / "averages"
    folder.mkdir()
    for call in range(1, 60):
        out = folder / "average"
        disk.arm(call, mode)
        try:
            average_checkpoints(paths, out)
        except (Killed, StorageError):
            if mode not in ("kill", "kill_after"):  # a process that is killed cannot tidy up: its next run does
                assert [path.name for path in folder.iterdir()] in ([], ["average"])
        finished = not disk.hit
        disk.arm(0, "none")
        assert tree(run.path) == before
        if out.exists():
            assert set(read_checkpoint(out).weights()) == set(random_weights(1))
            for path in out.iterdir():
                path.unlink()
            out.rmdir()
        average_checkpoints(paths, out)
        assert [path.name for path in folder.iterdir() if "probe" not in path.name] == ["average"]
        for path in (*out.iterdir(), *folder.glob(".tmp-probe*")):
            path.unlink()
        out.rmdir()
        if finished:
            assert call > 12
            return
    raise AssertionError("never finished")


def test_too_little_room_is_refused_before_reading(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    monkeypatch.setattr("tformer.support.files.free_bytes", lambda path: 100)
    with pytest.raises(StorageError, match=r"[\d,]+ bytes needed, 100 free"):
        average_checkpoints(paths, tmp_path / "average", work=Work(report=lambda *_: pytest.fail("was read")))
    assert not (tmp_path / "average").exists()


def test_an_interrupt_writes_nothing(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    with pytest.raises(Interrupted):
        average_checkpoints(paths, tmp_path / "average", work=Work(should_stop=lambda: True))
    assert os.listdir(tmp_path) == ["run"]
