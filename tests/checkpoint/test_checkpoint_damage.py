"""Damaged, foreign and dangerous files in a checkpoint's place: refused in words, and nothing is run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.conftest import TOKENIZER, Canary, enlist, rewrite_manifest, save, split, steps, weights_at
from tformer.checkpoint import tensor_files
from tformer.checkpoint.manifest import FORMAT
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.resolve import resolve_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.tensor_files import tensor_chunks
from tformer.support.errors import InputError, NotFiniteError


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.safetensors", "recipe.yaml", "tokenizer.json", "trainer.json", "manifest.json"],
)
def test_truncation_anywhere_names_the_file(run: RunDirectory, name: str) -> None:
    path = save(run, 1)
    data = (path / name).read_bytes()
    for size in range(0, len(data) - 1, 7):
        (path / name).write_bytes(data[:size])
        with pytest.raises(InputError, match=name):
            read_checkpoint(path)


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"".join(tensor_chunks({"a": torch.zeros(9), "large": torch.zeros(1_000_000)})))
    read_header = tensor_files.read_header

    def read_and_cut(*arguments: Any, **named: Any) -> Any:
        found = read_header(*arguments, **named)
        os.truncate(path, path.stat().st_size - 5)
        return found

    monkeypatch.setattr(tensor_files, "read_header", read_and_cut)
    with pytest.raises(InputError, match=r"model\.safetensors is truncated: it ends inside tensor large"):
        tensor_files.read_tensors(path, sha256=None)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "recipe.yaml", "trainer.json"])
def test_one_flipped_bit_is_a_sha256_mismatch(run: RunDirectory, name: str) -> None:
    path = save(run, 1)
    data = bytearray((path / name).read_bytes())
    data[-4 if name.endswith("safetensors") else 3] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(InputError, match=f"{name} is damaged: its sha256"):
        found = read_checkpoint(path)
        found.weights()
        found.optimizer()
    if name.endswith("safetensors"):
        read_checkpoint(path, verify=False).weights()


def test_another_tokenizer_is_named_as_such(run: RunDirectory) -> None:
    path = save(run, 1)
    (path / "tokenizer.json").write_text(TOKENIZER.replace("char", "word"))
    with pytest.raises(InputError, match="not the tokenizer this model was trained with"):
        read_checkpoint(path)


def test_damage_suggests_the_other_checkpoints(run: RunDirectory) -> None:
    save(run, 1)
    path = save(run, 2)
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"model\.safetensors is truncated") as caught:
        read_checkpoint(path)
    assert caught.value.exit_code == 2 and "step-00000001" in (caught.value.hint or "")
    (path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors is missing"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["trainer.json", "model.safetensors", "optimizer.safetensors"])
def test_a_damaged_latest_checkpoint_tells_how_to_go_on(run: RunDirectory, name: str) -> None:
    before, last = save(run, 1), save(run, 2)
    for damaged in (last, before):
        (damaged / name).write_bytes(b"x" * (damaged / name).stat().st_size)

    def hint(path: Path) -> str:
        with pytest.raises(InputError) as caught:
            found = read_checkpoint(path)
            found.weights()
            found.optimizer()
        return caught.value.hint or ""

    assert f"remove {last}, then: tformer train --resume --out {run.path}" in hint(last)
    assert "to go on from step-00000001" in hint(last)
    assert "remove" not in hint(before) and "step-00000002" in hint(before)  # --resume does not read that one
    shutil.rmtree(last)
    assert f"to go on from the start, remove {before}" in hint(before)


def test_a_folder_without_a_manifest_is_no_checkpoint(run: RunDirectory, tmp_path: Path) -> None:
    path = save(run, 1)
    (path / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"no manifest\.json"):
        read_checkpoint(path)
    with pytest.raises(InputError, match="not a checkpoint folder"):
        read_checkpoint(tmp_path / "absent")
    assert run.latest() is None


def test_a_newer_format_says_upgrade(run: RunDirectory) -> None:
    path = save(run, 1)
    rewrite_manifest(path, lambda content: content.update(format=FORMAT + 1, files="something else"))
    with pytest.raises(InputError, match="newer tformer") as caught:
        read_checkpoint(path)
    assert "upgrade" in (caught.value.hint or "")


BAD_MANIFESTS: dict[str, dict[str, Any]] = {
    "no format": {"format": None},
    "a boolean format": {"format": True},
    "negative step": {"step": -1},
    "files is a list": {"files": []},
    "files is empty": {"files": {}},
    "sizes are text": {"files": {"a": {"role": "weights", "size": "1", "sha256": ""}}},
    "tied is text": {"tied": "x"},
    "score is text": {"score": "low"},
    "score too large for a float": {"score": 10**400},
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_a_malformed_manifest_is_named(run: RunDirectory, case: str) -> None:
    path = save(run, 1)
    rewrite_manifest(path, lambda content: content.update(BAD_MANIFESTS[case]))
    with pytest.raises(InputError, match=r"manifest\.json is damaged"):
        read_checkpoint(path)
    assert steps(run) == [1]


def test_a_manifest_with_one_changed_digit_is_refused(run: RunDirectory) -> None:
    path = save(run, 1)
    manifest = path / "manifest.json"
    text = manifest.read_text()
    for number, character in enumerate(text):
        if character.isdigit():
            manifest.write_text(text[:number] + str((int(character) + 1) % 10) + text[number + 1 :])
            with pytest.raises(InputError, match=r"manifest\.json is damaged|newer tformer"):
                read_checkpoint(path)


def test_a_manifest_without_its_hash_is_refused_and_one_of_format_1_is_read(run: RunDirectory) -> None:
    path = save(run, 1)
    content = json.loads((path / "manifest.json").read_text())
    content.pop("sha256")
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="the key 'sha256' is missing"):
        read_checkpoint(path)
    (path / "manifest.json").write_text(json.dumps(content | {"format": 1}))
    assert read_checkpoint(path).step == 1


@pytest.mark.parametrize("name", ["manifest.json", "trainer.json"])
def test_deeply_nested_json_is_bounded(run: RunDirectory, name: str) -> None:
    path = save(run, 1)
    data = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    (path / name).write_bytes(data)
    if name != "manifest.json":
        digest = hashlib.sha256(data).hexdigest()
        rewrite_manifest(path, lambda content: content["files"][name].update(size=len(data), sha256=digest))
    with pytest.raises(InputError, match=f"{name} is damaged: JSON nested too deeply"):
        read_checkpoint(path)


def test_an_oversized_text_is_refused(run: RunDirectory) -> None:
    path = save(run, 1)
    with open(path / "recipe.yaml", "ab") as stream:
        stream.truncate(1 << 34)  # sparse
    rewrite_manifest(path, lambda content: content["files"]["recipe.yaml"].update(size=1 << 34))
    with pytest.raises(InputError, match=r"recipe\.yaml has 17,179,869,184 bytes, expected at most"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "..", "a/b", "a\\b", "", "a\0b"])
def test_a_manifest_that_leads_outside_is_refused(run: RunDirectory, name: str) -> None:
    path = save(run, 1)
    rewrite_manifest(path, lambda c: c["files"].update({name: {"role": "weights", "size": 1, "sha256": ""}}))
    with pytest.raises(InputError, match="leads outside"):
        read_checkpoint(path)


def test_missing_optimizer_state_is_fatal_when_asked_for(run: RunDirectory) -> None:
    found = read_checkpoint(save(run, 1, optimizer=None))
    assert not found.has("optimizer") and found.ema() is None and found.generator() is None
    with pytest.raises(InputError, match="no optimizer state") as caught:
        found.optimizer()
    assert "--init-from" in (caught.value.hint or "")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_refused(run: RunDirectory, value: float, dtype: torch.dtype) -> None:
    weights = {"a": torch.ones(3).to(dtype), "b": torch.tensor([1.0, value]).to(dtype), "c": torch.tensor([1])}
    found = read_checkpoint(save(run, 1, weights=weights, tied={}))
    with pytest.raises(NotFiniteError, match=r"step-00000001: 1 of 3 weights tensors hold NaN or infinity \(b\)"):
        found.weights()


def split_weights(path: Path, index: Any = None) -> Path:
    return split(path, "weights", {k: v for k, v in weights_at(1).items() if k != "heads.lm.weight"}, index)


def test_an_index_of_several_files_is_read(run: RunDirectory) -> None:
    found = read_checkpoint(split_weights(save(run, 1)))
    weights = found.weights()
    assert weights.keys() == weights_at(1).keys() and found.specs("weights").keys() == {"embedding.weight", "norm.gain"}
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_at(1).items())


BAD_INDEXES: dict[str, tuple[Any, str]] = {
    "leaves the folder": ({"embedding.weight": "../model.safetensors"}, "leads outside"),
    "absolute": ({"embedding.weight": "/etc/passwd"}, "leads outside"),
    "unknown file": ({"embedding.weight": "other.safetensors"}, "which the manifest does not"),
    "no map": ([], "no weight_map"),
    "names a tensor too few": ({"norm.gain": "model-00002-of-00002.safetensors"}, "disagree about tensor embedding"),
    "names a tensor too many": (
        {
            "embedding.weight": "model-00001-of-00002.safetensors",
            "norm.gain": "model-00002-of-00002.safetensors",
            "x": "model-00001-of-00002.safetensors",
        },
        "disagree about tensor x",
    ),
    "a number for a file": (
        {"embedding.weight": "model-00001-of-00002.safetensors", "norm.gain": 7},
        "names the file 7",
    ),
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_a_bad_index_is_refused(run: RunDirectory, case: str) -> None:
    weight_map, message = BAD_INDEXES[case]
    path = split_weights(save(run, 1), weight_map)
    with pytest.raises(InputError, match=message):
        read_checkpoint(path).weights()


def test_a_tensor_in_two_files_is_refused(run: RunDirectory) -> None:
    path = save(run, 1)
    shutil.copy(path / "model.safetensors", path / "more.safetensors")
    enlist(path, {"more.safetensors": "weights"})
    with pytest.raises(InputError, match=r"holds tensor embedding\.weight, which another file"):
        read_checkpoint(path).weights()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "checkpoint.ckpt"])
def test_pickles_are_refused_and_nothing_runs(tmp_path: Path, name: str) -> None:
    folder, canary = tmp_path / "model", tmp_path / "canary"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    for path in (folder, folder / name):
        for open_it in (read_checkpoint, resolve_checkpoint):
            with pytest.raises(InputError, match="pickle") as caught:
                open_it(path)
            assert "convert" in (caught.value.hint or "")
    assert not canary.exists()
