"""Fuzzing of what a checkpoint is read by: manifest, trainer.json, headers of tensor files.

Each reader takes any bytes: it refuses them as a user's mistake, or what it returns keeps its promises. The examples
are inputs that once passed or crashed.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.checkpoint.conftest import save
from tformer.checkpoint.manifest import FILE_NAMES, Manifest, content_sha256, read_manifest
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.tensor_files import read_tensors
from tformer.data.batching.plan import BatchPlan, Cursor
from tformer.support.errors import InputError
from tformer.training.state import RunningSums, TrainerState

NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, 2**62, 2**63, -1, True])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(["../x", "F32", "cls", "step"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
DEEP = b'{"a":' * 200_000 + b"1" + b"}" * 200_000


def changed(valid: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A document with a few of its values at any depth changed, removed or added."""
    paths = _paths(valid)

    def apply(changes: list[tuple[tuple[str, ...], str, Any]]) -> dict[str, Any]:
        document = json.loads(json.dumps(valid))
        for path, kind, value in changes:
            place: Any = document
            for key in path[:-1]:
                place = place.get(key) if isinstance(place, dict) else None
            if isinstance(place, dict):
                if kind == "set":
                    place[path[-1]] = value
                elif kind == "remove":
                    place.pop(path[-1], None)
                else:
                    place[str(value)[:8]] = value
        return document

    change = st.tuples(st.sampled_from(paths), st.sampled_from(["set", "set", "remove", "add"]), VALUES)
    return st.lists(change, min_size=1, max_size=3).map(apply)


def _paths(document: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in document.items():
        found += [(*path, key), *(_paths(value, (*path, key)) if isinstance(value, dict) else [])]
    return found


MANIFEST: dict[str, Any] = {
    "format": 2,
    "tformer": "0.1",
    "step": 4,
    "score": 1.5,
    "tokenizer_sha256": "ab",
    "tied": {"heads.lm.weight": "embedding.weight"},
    "files": {
        FILE_NAMES[role]: {"role": role, "size": 7, "sha256": "0" * 64}
        for role in ("weights", "recipe", "trainer", "ema")
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def read_as_manifest(folder: Path, data: bytes) -> Manifest | None:
    (folder / "manifest.json").write_bytes(data)
    try:
        return read_manifest(folder)
    except InputError as error:
        assert "\n" not in error.message
        return None


@example(content=MANIFEST | {"score": 10**400})
@example(content=MANIFEST | {"format": True})
@example(content=MANIFEST | {"step": 10**400})
@example(content=MANIFEST | {"tied": [["a", "b"]]})
@example(content=MANIFEST | {"files": {"ema.safetensors": {"role": "weights", "size": 7, "sha256": ""}}})
@example(content=MANIFEST | {"files": {"../x": {"role": "weights", "size": 7, "sha256": ""}}})
@example(content=MANIFEST | {"target_tokenizer_sha256": "ab"})
@given(content=changed(MANIFEST))
def test_any_manifest_is_refused_or_keeps_its_promises(folder: Path, content: dict[str, Any]) -> None:
    data = json.dumps(content | {"sha256": content_sha256(content)}).encode()
    found = read_as_manifest(folder, data)
    if found is None:
        return
    assert type(found.step) is int and 0 <= found.step < 1 << 62
    assert found.score is None or math.isfinite(found.score)
    assert {"weights", "recipe", "trainer"} <= {record.role for record in found.files}
    for record in found.files:
        assert Path(record.name).name == record.name and record.size >= 0
        assert record.role == "weights" or list(FILE_NAMES.values()).count(record.name) == 1 or "source" in record.name
    assert read_as_manifest(folder, found.to_json().encode()) == found


@example(data=DEEP)
@example(data=b'{"format": 2, "format": 2}')
@example(data=b"\xff\xfe")
@example(data=b"9" * 5000)
@given(data=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_a_manifest_are_refused(folder: Path, data: bytes) -> None:
    assert read_as_manifest(folder, data) is None


STATE = TrainerState(
    step=7,
    tokens=512,
    cursor={"epoch": 1, "window": 0, "batch": 3},
    best_score=1.5,
    best_step=4,
    schedule={"best": None, "bad_count": 2, "scale": 0.25},
    scaler={"scale": 4096.0, "finite_steps": 9},
    sums=RunningSums(loss=3.5, steps=2, grad_norm=0.5, terms={"mlm": 3.0}),
    global_batch=[8, None],
).to_json()


@example(document=STATE | {"cursor": None})
@example(document=STATE | {"cursor": {}})
@example(document=STATE | {"cursor": {"epoch": 10**9, "window": 0, "batch": 0}})
@example(document=STATE | {"step": -1})
@example(document=STATE | {"step": 10**400})
@example(document=STATE | {"scaler": {"scale": math.nan, "finite_steps": 0}})
@example(document=STATE | {"sums": None})
@example(document=STATE | {"global_batch": ["8", None]})
@given(document=changed(STATE))
def test_any_trainer_state_is_refused_or_comes_back_equal(document: dict[str, Any]) -> None:
    try:
        state = TrainerState.from_json(document)
    except InputError as error:
        assert error.message.startswith("trainer.json is damaged: ") and "\n" not in error.message
        return
    assert 0 <= state.step < 1 << 62 and (state.cursor or not state.step)
    assert state.cursor.get("epoch", 0) <= state.step
    assert json.dumps(TrainerState.from_json(state.to_json()).to_json()) == json.dumps(state.to_json())


@example(plan=BatchPlan(seed=0, num_samples=20, batch_size=4), place=(0, 5, 0))
@example(plan=BatchPlan(seed=0, num_samples=20, batch_size=4), place=(0, 0, 10**15))
@example(plan=BatchPlan(seed=0, lengths=torch.ones(20).int().numpy(), batch_tokens=4), place=(0, 0, 10**15))
@example(plan=BatchPlan(seed=0, lengths=torch.ones(20).int().numpy(), batch_size=4, sort_window=8), place=(3, 10**9, 1))
@given(
    plan=st.sampled_from(
        [
            BatchPlan(seed=1, num_samples=21, batch_size=4),
            BatchPlan(seed=1, lengths=torch.arange(1, 22).numpy(), batch_size=4, sort_window=8),
            BatchPlan(seed=1, lengths=torch.arange(1, 22).numpy(), batch_tokens=40, sort_window=8),
        ]
    ),
    place=st.tuples(*[st.integers(0, 8) | st.integers(0, 2**61)] * 3),
)
def test_any_saved_data_position_is_refused_or_has_a_batch(plan: BatchPlan, place: tuple[int, int, int]) -> None:
    cursor = Cursor(*place)
    try:
        found = plan.resumed(cursor)
    except InputError as error:
        assert "lie beyond the epoch" in error.message
        return
    assert found.epoch == cursor.epoch and plan.canonical(found) == found and plan.global_batch(found)


TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.int32), "c": torch.zeros(0, 4)}
HEADER: dict[str, Any] = json.loads(safetensors.torch.save(TENSORS)[8:].split(b"}}", 1)[0] + b"}}")


def read_as_tensors(folder: Path, data: bytes) -> dict[str, torch.Tensor] | None:
    (folder / "x.safetensors").write_bytes(data)
    try:
        return read_tensors(folder / "x.safetensors", sha256=None)
    except InputError as error:
        assert "x.safetensors" in error.message and "\n" not in error.message
        return None


@example(header=HEADER | {"a": {"dtype": "F32", "shape": [1 << 61, 8, 2], "data_offsets": [0, 0]}}, extra=0)
@example(header=HEADER | {"a": {"dtype": "F32", "shape": [True, 6], "data_offsets": [0, 24]}}, extra=0)
@example(header=HEADER | {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [-4, 20]}}, extra=0)
@example(header=HEADER | {"a": {"dtype": ["F32"], "shape": [2, 3], "data_offsets": [0, 24]}}, extra=0)
@example(header=HEADER | {"__metadata__": 1}, extra=0)
@given(header=changed(HEADER), extra=st.sampled_from([0, 0, 4, -4]))
def test_any_header_is_refused_or_agrees_with_the_reference_library(
    folder: Path, header: dict[str, Any], extra: int
) -> None:
    text, size = json.dumps(header).encode(), 32 + extra
    data = struct.pack("<Q", len(text)) + text + bytes(range(size))
    found = read_as_tensors(folder, data)
    if found is None:
        return
    assert sum(tensor.numel() * tensor.element_size() for tensor in found.values()) == size
    try:
        expected = safetensors.torch.load(data)
    except Exception:  # the reference checks the metadata too
        return
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
        assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == bytes(
            expected[name].reshape(-1).view(torch.uint8).numpy()
        )


@example(length=2**63, text=b"{}")
@example(length=2**64 - 1, text=b"")
@example(length=100_000_001, text=b"{}")
@example(length=len(DEEP), text=DEEP)
@example(length=2, text=b"[]")
@given(length=st.integers(0, 2**64 - 1) | st.integers(0, 40), text=st.binary(max_size=40))
def test_any_bytes_as_a_tensor_file_are_refused_or_empty(folder: Path, length: int, text: bytes) -> None:
    assert read_as_tensors(folder, struct.pack("<Q", length) + text) in (None, {})


def test_the_documents_that_are_changed_are_valid(folder: Path, run: RunDirectory) -> None:
    """The fuzzers start from what is accepted."""
    assert read_as_manifest(folder, json.dumps(MANIFEST | {"sha256": content_sha256(MANIFEST)}).encode()) is not None
    assert TrainerState.from_json(STATE).to_json() == STATE
    data = safetensors.torch.save(TENSORS)
    assert json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]]) == HEADER
    assert read_as_tensors(folder, data) is not None
    assert read_manifest(save(run, 1)).step == 1
