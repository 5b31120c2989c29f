"""Division of a checkpoint's tensors among processes, and the names, roles and indexes of their files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.conftest import enlist, save, split
from tformer.checkpoint import parts
from tformer.checkpoint.manifest import FORMAT, FileRecord, read_manifest
from tformer.checkpoint.parts import Companions, Name, divide, write_files
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.tensor_files import read_rows, tensor_chunks
from tformer.support.errors import InputError
from tformer.workers.worker import LostError


def tensors(*sizes: int, role: str = "weights") -> dict[Name, Tensor]:
    return {(role, f"t{number}"): torch.empty(size, device="meta") for number, size in enumerate(sizes)}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1)


def test_bytes_are_divided_evenly_and_equally_in_all_processes() -> None:
    everything = tensors(50, 40, 30, 30, 20, 20, 10) | tensors(50, 50, role="optimizer")
    division = divide(everything, processes=3)
    loads = [sum(everything[key].numel() for key in division.own(rank)) for rank in range(3)]
    assert sum(loads) == 300 and max(loads) <= 110
    assert divide(dict(reversed(everything.items())), processes=3).writers == division.writers
    assert division.total_bytes() > 4 * 300


def test_an_owner_writes_its_tensors_and_gets_fewer_of_the_others() -> None:
    division = divide(tensors(80, 30, 30, 30), processes=2, owners={("weights", "t0"): 1})
    assert division.writers[("weights", "t0")] == 1 and len(division.own(0)) == 3


@pytest.mark.parametrize(("part_bytes", "files"), [(400, 1), (200, 2), (1, 4)])
def test_processes_without_enough_bytes_write_nothing(
    monkeypatch: pytest.MonkeyPatch, part_bytes: int, files: int
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    division = divide(tensors(*[10] * 10), processes=4)
    assert len(division.files) == files
    assert len(division.indexes()) == (files > 1)
    if files == 1:
        assert division.files == {("weights", 0): "model.safetensors"}


def test_the_index_names_the_file_of_every_tensor() -> None:
    division = divide(tensors(3, 2, 1), processes=2)
    index = json.loads(division.indexes()["weights_index"])
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {"metadata": {"total_size": 24}, "weight_map": {"t0": first, "t1": second, "t2": second}}


def test_rows_are_read_without_the_others(tmp_path: Path) -> None:
    path, table = tmp_path / "x.safetensors", torch.arange(14.0).view(7, 2)
    path.write_bytes(b"".join(map(bytes, tensor_chunks({"table": table, "step": torch.tensor(3.0)}))))
    found = read_rows(path, {"table": slice(2, 5), "step": slice(None)})
    assert found["table"].equal(table[2:5]) and found["step"].equal(torch.tensor(3.0))
    assert read_rows(path, {"table": slice(7, 7)})["table"].shape == (0, 2)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match="truncated"):
        read_rows(path, {"table": slice(0, 1)})


STATE = {"a": torch.ones(2), "b": torch.zeros(2)}
RIGHT = {"a": "optimizer-00001-of-00002.safetensors", "b": "optimizer-00002-of-00002.safetensors"}


def test_the_state_of_an_optimizer_may_be_several_files(run: RunDirectory) -> None:
    path = split(save(run, 1), "optimizer", STATE)
    assert read_checkpoint(path).optimizer().keys() == {"a", "b"}
    assert read_checkpoint(path).rows("optimizer", {"b": slice(1)})["b"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({**RIGHT, "b": RIGHT["a"]}, "and the index disagree about tensor b"),
        ({**RIGHT, "b": "../x.safetensors"}, "leads outside"),
        ({**RIGHT, "b": "model.safetensors"}, "which the manifest does not"),
    ],
)
def test_a_wrong_index_of_the_optimizer_is_refused(run: RunDirectory, index: dict[str, str], message: str) -> None:
    path = split(save(run, 1), "optimizer", STATE, index)
    for read in (
        lambda: read_checkpoint(path).optimizer(),
        lambda: read_checkpoint(path).rows("optimizer", {"a": slice(None)}),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            read()


def test_a_file_of_a_part_has_the_name_of_its_role(run: RunDirectory) -> None:
    path = save(run, 1)
    (path / "ema-00001-of-00002.safetensors").write_bytes(b"")
    enlist(path, {"ema-00001-of-00002.safetensors": "generator"})
    with pytest.raises(InputError, match="which belongs to generator"):
        read_manifest(path)


def test_a_checkpoint_of_single_files_has_the_format_that_older_versions_read(run: RunDirectory) -> None:
    assert json.loads((save(run, 1) / "manifest.json").read_text())["format"] == 2 == FORMAT - 1


class Board:
    """The values that workers give each other, in one process."""

    def __init__(self, rank: int, values: dict[str, Any]) -> None:
        self.rank, self.values = rank, values

    def give(self, name: str, value: Any) -> None:
        self.values[name] = value

    def take(self, name: str, should_stop: Callable[[], bool], *, delete: bool = False) -> Any:
        return None if should_stop() else self.values.pop(name) if delete else self.values[name]


def companions(rank: int, values: dict[str, Any], *, gave_up: bool = False) -> tuple[Companions, dict[Name, Tensor]]:
    """One of two processes that write two tensors, and what it writes."""
    everything = {("weights", f"t{number}"): torch.full((3,), float(number)) for number in range(2)}
    division = divide(everything, processes=2)
    worker: Any = Board(rank, values)
    return Companions(worker, 1, division, lambda: gave_up), {key: everything[key] for key in division.own(rank)}


def test_the_leader_takes_the_records_of_the_others(tmp_path: Path) -> None:
    values: dict[str, Any] = {}
    leader, own = companions(0, values)
    other, others = companions(1, values)

    def write() -> Iterator[FileRecord]:
        other.write_part(tmp_path, others)
        yield from write_files(tmp_path / "folder", leader.division, own)

    (tmp_path / "folder").mkdir()
    records = leader.gather(tmp_path / "folder", write())
    assert [record.name for record in records] == [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    assert all((tmp_path / "folder" / record.name).stat().st_size == record.size for record in records)


def test_nothing_is_left_when_the_leader_fails_while_another_process_still_writes(tmp_path: Path) -> None:
    values: dict[str, Any] = {}
    leader, _ = companions(0, values)
    other, others = companions(1, values)
    folder = tmp_path / "folder"
    folder.mkdir()

    def full() -> Iterator[FileRecord]:
        (folder / "half").write_bytes(b"half")
        raise OSError(28, "No space left on device")
        yield

    with pytest.raises(OSError, match="No space left"):
        leader.gather(folder, full())
    with pytest.raises(LostError, match="has given up"):
        other.write_part(tmp_path, others)
    assert list(tmp_path.iterdir()) == []


def test_the_leader_gives_up_when_it_knows_that_another_process_has_ended(tmp_path: Path) -> None:
    leader, own = companions(0, {}, gave_up=True)
    (tmp_path / "folder").mkdir()
    with pytest.raises(LostError):
        leader.gather(tmp_path / "folder", write_files(tmp_path / "folder", leader.division, own))
    assert list(tmp_path.iterdir()) == []
