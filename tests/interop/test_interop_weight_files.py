"""Weight files of a folder from anywhere: one or several, every claim checked, nothing outside read or unpickled."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tformer.interop.weight_files import INDEX, SINGLE, open_weights
from tformer.support.errors import InputError

TENSORS = {name: torch.full((2, 3), float(value)) for value, name in enumerate("abcd")}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def sharded(folder: Path, first: str = "ab", second: str = "cd", **index: str) -> Path:
    """Two shards with the tensors of these letters, and an index of what they hold, changed by `index`."""
    for file, names in ((FIRST, first), (SECOND, second)):
        save_file({name: TENSORS[name] for name in names}, folder / file, metadata={"format": "pt"})
    weight_map = dict.fromkeys(first, FIRST) | dict.fromkeys(second, SECOND) | index
    weight_map = {name: file for name, file in weight_map.items() if file}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": weight_map}))
    return folder


def refusal(folder: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        open_weights(folder)
    return caught.value


def test_one_file_and_several_give_the_same(tmp_path: Path) -> None:
    single, several = tmp_path / "single", tmp_path / "several"
    single.mkdir()
    several.mkdir()
    save_file(TENSORS, single / SINGLE)
    sharded(several)
    for folder in (single, several):
        files = open_weights(folder)
        assert files.specs.keys() == TENSORS.keys()
        assert sum(spec.stop - spec.start for spec in files.specs.values()) == 4 * 6 * 4
        read = files.read(["a", "c"])
        assert read.keys() == {"a", "c"} and all(torch.equal(read[name], TENSORS[name]) for name in read)
    assert open_weights(several).files["c"] == several / SECOND
    assert {path.name for path in open_weights(several).files.values()} == {FIRST, SECOND}


def test_only_the_files_that_are_wanted_are_read(tmp_path: Path) -> None:
    files = open_weights(sharded(tmp_path))
    seen: list[tuple[int, int]] = []
    files.read(["d"], file_read=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 1)]


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"only": TENSORS["a"]}, tmp_path / SINGLE)
    assert open_weights(tmp_path).specs.keys() == {"only"}


def test_links_into_a_cache_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    save_file(TENSORS, blobs / "0123")
    (folder / SINGLE).symlink_to(Path("..") / "blobs" / "0123")
    assert open_weights(folder).read("a")["a"].equal(TENSORS["a"])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / SECOND).unlink()
    message = refusal(tmp_path).message
    assert SECOND in message and "is missing" in message and "1 of 2" in message


@pytest.mark.parametrize("file", [FIRST, SECOND])
@pytest.mark.parametrize("size", [0, 7, 60, -1])
def test_a_truncated_shard_is_named(tmp_path: Path, file: str, size: int) -> None:
    path = sharded(tmp_path) / file
    path.write_bytes(path.read_bytes()[:size])
    message = refusal(tmp_path).message
    assert str(path) in message and ("truncated" in message or "damaged" in message)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"e": SECOND}, [f"{SECOND} lacks tensor e", INDEX]),
        ({"b": ""}, [f"{FIRST} holds tensor b", "does not name it"]),
        ({"b": SECOND}, ["holds tensor b", f"says {SECOND}"]),
        ({"first": "abc"}, ["tensor c"]),
    ],
    ids=["lacking", "unnamed", "elsewhere", "in two shards"],
)
def test_an_index_that_its_shards_contradict(tmp_path: Path, index: dict[str, str], words: list[str]) -> None:
    message = refusal(sharded(tmp_path, **index)).message
    assert all(word in message for word in words)


def test_a_name_twice_in_the_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}')
    assert "appears twice" in refusal(tmp_path).message


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "sub/model.safetensors", "/etc/model.safetensors", "..", "", "a\\b.safetensors", 3]
)
def test_an_index_never_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder / "sub"):
        save_file(TENSORS, place / SINGLE)
    weight_map = dict.fromkeys(TENSORS, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    error = refusal(folder)
    assert repr(name) in error.message and "expected a file of this very folder" in error.message


def test_an_index_of_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model-00001-of-00001.bin").write_bytes(b"\x80\x02")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}')
    assert ".safetensors" in refusal(tmp_path).message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": 3}'])
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    message = refusal(tmp_path).message
    assert str(tmp_path / INDEX) in message and "is damaged" in message


class Bomb:
    """A pickle that leaves a file behind when somebody opens it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.ckpt", SINGLE]
)
def test_a_pickle_is_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "opened"
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(mark)))
    error = refusal(tmp_path)
    assert name in error.message and "pickle" in error.message
    assert "safetensors" in (error.hint or "")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("tf_model.h5", "TensorFlow"),
        ("flax_model.msgpack", "Flax"),
        ("adapter_model.safetensors", "adapter"),
        ("model-q4.gguf", "GGUF"),
        ("weights.safetensors", "another name"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, name: str, word: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    error = refusal(tmp_path)
    assert name in error.message and word in error.message and error.hint


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert "has no weights" in refusal(tmp_path).message


def test_a_file_that_changes_between_header_and_reading(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE)
    files = open_weights(tmp_path)
    other: dict[str, Tensor] = {"a": torch.zeros(5)}
    save_file(other, tmp_path / SINGLE)
    with pytest.raises(InputError, match="has changed"):
        files.read(TENSORS)
