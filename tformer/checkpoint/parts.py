"""Checkpoints written by several processes: the division of the tensors, and the exchange while they write.

Each process writes separate files of whole tensors, beside an index for each role: the layout of Hugging Face
(`model-00001-of-00004.safetensors`, `model.safetensors.index.json`). The leader makes the folder, waits for the records
of the others' files, writes index and manifest, and renames the folder. So the checkpoint appears by one rename, when
every file is synced. Records go through the store of the group, because threads that write must not use collectives.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from tformer.checkpoint.manifest import TENSOR_FILES, FileRecord, index_role, part_name
from tformer.checkpoint.tensor_files import file_bytes, tensor_chunks
from tformer.support import files
from tformer.workers.worker import LOST, LostError, Worker

PART_BYTES = 16 << 20
"""One more process writes for each multiple of this size: small checkpoints are one file of each role."""

Name = tuple[str, str]
"""(role, name of a tensor)"""


@dataclass(frozen=True)
class Division:
    """Assignment of a checkpoint's tensors to the processes that write them.

    Attributes:
        tensors: all of them; only shapes and dtypes are read here.
        writers: the rank of the process that writes each.
    """

    tensors: Mapping[Name, Tensor]
    writers: Mapping[Name, int]

    @cached_property
    def names(self) -> dict[str, dict[int, list[str]]]:
        """{role: {rank: names of the tensors that it writes}}, in the order of roles and ranks."""
        found: dict[str, dict[int, list[str]]] = {}
        for role, name in sorted(self.tensors, key=lambda key: (list(TENSOR_FILES).index(key[0]), self.writers[key])):
            found.setdefault(role, {}).setdefault(self.writers[role, name], []).append(name)
        return found

    @cached_property
    def files(self) -> dict[tuple[str, int], str]:
        """{(role, rank): file} of each process that writes tensors of a role, in the order of `names`."""
        return {
            (role, rank): TENSOR_FILES[role] if len(ranks) == 1 else part_name(role, place, len(ranks))
            for role, ranks in self.names.items()
            for place, rank in enumerate(ranks, 1)
        }

    def own(self, rank: int) -> list[Name]:
        """The tensors that a process writes."""
        return [(role, name) for role, ranks in self.names.items() for name in ranks.get(rank, ())]

    def indexes(self) -> dict[str, str]:
        """{role of an index: its JSON} of the roles with several files."""
        found = {}
        for role, ranks in self.names.items():
            if len(ranks) > 1:
                names = {name: self.files[role, rank] for rank in ranks for name in ranks[rank]}
                total = sum(self.tensors[role, name].nbytes for name in names)
                document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
                found[index_role(role)] = json.dumps(document, indent=2) + "\n"
        return found

    def total_bytes(self) -> int:
        """Size in bytes of all files with tensors."""
        return sum(
            file_bytes({name: self.tensors[role, name] for name in self.names[role][rank]}) for role, rank in self.files
        )


def divide(tensors: Mapping[Name, Tensor], *, processes: int = 1, owners: Mapping[Name, int] = {}) -> Division:
    """A division that gives each process about as many bytes.

    owners: ranks of processes that alone have a tensor, which they also write.
    """
    sizes = {key: tensor.nbytes for key, tensor in tensors.items()}
    shared = [key for key in sizes if key not in owners]
    loads = Counter(dict.fromkeys(range(min(processes, max(1, sum(sizes.values()) // PART_BYTES))), 0))
    writers = dict(owners)
    for key, rank in owners.items():
        if rank in loads:
            loads[rank] += sizes[key]
    for key in sorted(shared, key=lambda key: (-sizes[key], key)):
        writers[key] = min(loads, key=lambda rank: (loads[rank], rank))
        loads[writers[key]] += sizes[key]
    return Division(tensors, {key: writers[key] for key in tensors})


def write_files(folder: Path, division: Division, own: Mapping[Name, Tensor], *, rank: int = 0) -> Iterator[FileRecord]:
    """Write and sync the files of one process. `own` has the tensors that the division gives it."""
    for (role, writer), name in division.files.items():
        if writer == rank:
            tensors = {tensor: own[role, tensor] for tensor in division.names[role][rank]}
            yield FileRecord(name, role, *files.write_durably(folder / name, tensor_chunks(tensors)))


@dataclass(frozen=True)
class Companions:
    """The processes that write one checkpoint together.

    Args:
        number: of the checkpoint, among those that these processes write.
        division: which process writes what.
        gave_up: whether this process no longer waits for the others, of which one has ended.
    """

    worker: Worker
    number: int
    division: Division
    gave_up: Callable[[], bool]

    def gather(self, folder: Path, own: Iterable[FileRecord]) -> list[FileRecord]:
        """The records of all files with tensors: the leader's (this process's) and the others'.

        own: of this process; the iterable writes its files, after the others have begun.
        Raises LostError when another process fails. After an error the folder is removed.
        """
        self.worker.give(self._key("folder"), folder.name)
        try:
            found = {record.name: record for record in own}
            for rank in sorted(set(self.division.writers.values()) - {self.worker.rank}):
                found |= {entry["name"]: FileRecord(**entry) for entry in self._take(self._key(rank), delete=True)}
        except BaseException:
            abandoned = folder.with_name(f"{folder.name}-abandoned")
            with suppress(OSError):
                files.rename(folder, abandoned)  # first, so that the others create no further file in it
                files.remove_tree(abandoned)
            raise
        return [found[name] for name in self.division.files.values()]

    def write_part(self, parent: Path, own: Mapping[Name, Tensor]) -> None:
        """Write the files of this process, which does not lead, into the leader's folder in `parent`.

        Raises:
            StorageError: the disk is full or read-only.
            LostError: another process has failed.
        """
        folder = parent / self._take(self._key("folder"))
        try:
            records = list(write_files(folder, self.division, own, rank=self.worker.rank))
        except FileNotFoundError as error:
            raise LostError(f"the process of rank 0 has given up the checkpoint {folder}") from error
        except OSError as error:
            raise files.storage_error(folder, error) from error
        self.worker.give(self._key(self.worker.rank), [asdict(record) for record in records])

    def _take(self, key: str, *, delete: bool = False) -> Any:
        value = self.worker.take(key, self.gave_up, delete=delete)
        if value is None:
            raise LostError(LOST)
        return value

    def _key(self, what: str | int) -> str:
        return f"checkpoint/{self.number}/{what}"
