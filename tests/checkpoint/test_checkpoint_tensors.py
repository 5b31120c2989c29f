"""safetensors files: agreement with the reference library, exact round trips, and refusal of everything damaged."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.conftest import Canary
from tformer.checkpoint.tensor_files import (
    DTYPES,
    MAX_HEADER_BYTES,
    file_bytes,
    find_tied,
    read_specs,
    read_tensors,
    tensor_chunks,
    without_aliases,
)
from tformer.support.errors import InputError

COMMON = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def to_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(bytes(chunk) for chunk in tensor_chunks(tensors))


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def craft(path: Path, entries: dict[str, Any], data: bytes, *, length: int | None = None) -> Path:
    """A safetensors file with any header one likes."""
    text = json.dumps(entries).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[Any], offsets: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(
        st.lists(st.text(min_size=1, max_size=8).filter(lambda n: n != "__metadata__"), unique=True, max_size=5)
    )
    result = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = draw(st.sampled_from(COMMON))
        result[name] = torch.randint(0, 2, shape).to(dtype)
    return result


@given(tensors=tensor_sets())
def test_bytes_equal_the_reference_implementation(tensors: dict[str, torch.Tensor]) -> None:
    data = to_bytes(tensors)
    assert data == safetensors.torch.save(tensors, metadata={"format": "pt"})
    assert len(data) == file_bytes(tensors)


@given(tensors=tensor_sets())
def test_round_trip_is_exact(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("x") / "a.safetensors"
    digest = write(path, to_bytes(tensors))
    found = read_tensors(path, sha256=digest)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_every_type_round_trips(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(24, dtype=torch.uint8).view(torch.bool if dtype == torch.bool else torch.uint8)
    tensor = tensor.view(dtype) if dtype != torch.bool else torch.tensor([True, False, True])
    digest = write(tmp_path / "a", to_bytes({"x": tensor}))
    found = read_tensors(tmp_path / "a", sha256=digest)["x"]
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_files_of_the_reference_library_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(2).to(torch.bfloat16), "scalar": torch.tensor(3)}
    safetensors.torch.save_file(tensors, tmp_path / "a")
    for name, tensor in read_tensors(tmp_path / "a", sha256=None).items():
        assert torch.equal(tensor, tensors[name])
    assert {spec.name: spec.shape for spec in read_specs(tmp_path / "a")} == {"a": (3, 4), "b": (2,), "scalar": ()}


def test_non_contiguous_tensors_are_made_contiguous(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    tensors = {"t": base.t(), "slice": base[:, ::2], "expanded": torch.randn(1, 3).expand(5, 3)}
    digest = write(tmp_path / "a", to_bytes(tensors))
    found = read_tensors(tmp_path / "a", sha256=digest)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_tied_tensors_are_found_and_stored_once() -> None:
    table = torch.randn(4, 2)
    tensors = {"embedding": table, "head": table, "view": table[:2], "other": table.clone()}
    assert find_tied(tensors) == {"head": "embedding"}
    assert list(without_aliases(tensors, {"head": "embedding"})) == ["embedding", "view", "other"]


def test_a_false_tie_is_a_bug_not_a_loss_of_weights() -> None:
    with pytest.raises(ValueError, match="values differ"):
        without_aliases({"a": torch.zeros(2), "b": torch.ones(2)}, {"b": "a"})
    with pytest.raises(ValueError, match="not among"):
        without_aliases({"b": torch.ones(2)}, {"b": "a"})


def test_reading_copies_and_never_maps(tmp_path: Path) -> None:
    path = tmp_path / "a"
    digest = write(path, to_bytes({"x": torch.ones(1000)}))
    found = read_tensors(path, sha256=digest)["x"]
    with open(path, "r+b") as stream:  # overwritten in place, as a saver over its own source would
        stream.write(b"\0" * os.path.getsize(path))
    assert torch.equal(found, torch.ones(1000))


def test_truncation_at_every_byte_names_the_file(tmp_path: Path) -> None:
    data = to_bytes({"a": torch.ones(2), "b": torch.ones(1)})
    digest = hashlib.sha256(data).hexdigest()
    path = tmp_path / "model.safetensors"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(InputError, match=r"model\.safetensors"):
            read_tensors(path, sha256=digest)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    data = bytearray(to_bytes({"a": torch.ones(2)}))
    digest = hashlib.sha256(data).hexdigest()
    path = tmp_path / "model.safetensors"
    for bit in range(0, len(data) * 8, 3):
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"model\.safetensors"):
            read_tensors(path, sha256=digest)
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    assert torch.equal(read_tensors(path, sha256=digest)["a"], torch.ones(2))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, MAX_HEADER_BYTES + 1, 10_000])
def test_a_huge_header_is_refused_without_allocating(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", None)
    path = craft(tmp_path / "m", {}, b"", length=length)
    with pytest.raises(InputError, match="header claims"):
        read_tensors(path, sha256=None)


LIES: dict[str, tuple[dict[str, Any], int]] = {
    "hole": ({"a": entry([1], [0, 4]), "b": entry([1], [8, 12])}, 12),
    "hole at the start": ({"a": entry([1], [4, 8])}, 8),
    "overlap": ({"a": entry([2], [0, 8]), "b": entry([1], [4, 8])}, 8),
    "same bytes": ({"a": entry([1], [0, 4]), "b": entry([1], [0, 4])}, 4),
    "bytes left over": ({"a": entry([1], [0, 4])}, 8),
    "beyond the end": ({"a": entry([100], [0, 400])}, 8),
    "shape larger than offsets": ({"a": entry([3], [0, 8])}, 8),
    "huge shape": ({"a": entry([1 << 40, 1 << 40], [0, 8])}, 8),
    "overflowing shape": ({"a": entry([1 << 61, 8, 2], [0, 0])}, 0),
    "negative shape": ({"a": entry([-1, -2], [0, 8])}, 8),
    "negative offset": ({"a": entry([1], [-4, 0])}, 0),
    "backward offsets": ({"a": entry([1], [4, 0])}, 4),
    "float shape": ({"a": entry([1.0], [0, 4])}, 4),
    "bool shape": ({"a": entry([True], [0, 4])}, 4),
    "three offsets": ({"a": entry([1], [0, 2, 4])}, 4),
    "many dimensions": ({"a": entry([1] * 1000, [0, 4])}, 4),
    "unknown type": ({"a": entry([1], [0, 4], "C128")}, 4),
    "type of another kind": ({"a": entry([1], [0, 4], ["F32"])}, 4),
    "another type": ({"a": entry([1], [0, 4], "F64")}, 4),
    "not an entry": ({"a": [0, 4]}, 4),
    "missing key": ({"a": {"dtype": "F32", "shape": [1]}}, 4),
}


@pytest.mark.parametrize("case", LIES)
def test_lies_about_offsets_shapes_and_types_are_refused(tmp_path: Path, case: str) -> None:
    entries, size = LIES[case]
    with pytest.raises(InputError, match=r"m\.safetensors is damaged"):
        read_tensors(craft(tmp_path / "m.safetensors", entries, bytes(size)), sha256=None)


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"nonsense",
        b"{",
        b'{"a": 1, "a": 1}',
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b"\xff{}",
        b" {}",
    ],
)
def test_header_that_is_no_plain_object_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "m"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(InputError, match="m "):
        read_tensors(path, sha256=None)


def test_a_renamed_pickle_is_refused_and_never_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(InputError, match="pickle") as caught:
        read_tensors(path, sha256=None)
    torch.save({"x": Canary(canary)}, path)
    with pytest.raises(InputError, match="pickle"):
        read_tensors(path, sha256=None)
    assert "unpickles" in (caught.value.hint or "") and not canary.exists()


def test_pipes_and_folders_are_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(InputError, match="not an ordinary file"):
            read_tensors(tmp_path / name, sha256=None)
    with pytest.raises(InputError, match="does not exist"):
        read_tensors(tmp_path / "absent", sha256=None)


def test_types_that_the_format_lacks_are_named() -> None:
    with pytest.raises(ValueError, match=r"tensor z has type torch\.complex64"):
        file_bytes({"z": torch.zeros(1, dtype=torch.complex64)})


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580])
def test_a_header_whose_length_begins_like_a_pickle_is_read(length: int, tmp_path: Path) -> None:
    path, tensors = tmp_path / "model.safetensors", {"x" * 100: torch.ones(2)}
    safetensors.torch.save_file(tensors, path)
    data = path.read_bytes()
    old = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(length.to_bytes(8, "little") + data[8:old].ljust(length) + data[old:])
    assert torch.equal(read_tensors(path, sha256=None)["x" * 100], torch.ones(2))


def test_a_pointer_of_git_lfs_is_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InputError, match="pointer of Git LFS") as caught:
        read_tensors(path, sha256=None)
    assert caught.value.hint == "git lfs pull"
