"""A model of a disk, to which a recorded trace is applied: what it holds after a crash at any moment.

A file has its content and the content at its last fsync; a folder has its names and those at its last fsync. After a
loss of power a disk may hold anything in between; three states stand for it: everything was kept; only what was synced
was kept; all names were kept, but of the content only what was synced (a rename that reached the disk before its data).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

Tree = dict[str, bytes | None]
"""Files with their content, folders with None, by path relative to the watched folder."""
SURVIVORS = ("everything", "synced", "names")


@dataclass(frozen=True)
class Operation:
    """One watched system call, in the order in which they were made."""

    name: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""
    failed: bool = False


def read_trace(path: Path, root: Path) -> list[Operation]:
    """The operations that the shim recorded, with paths relative to `root`."""
    raw, place = path.read_bytes(), 0
    found: list[Operation] = []
    while place < len(raw):
        end = raw.index(b"\n", place)
        name, target, other, offset, size, failed = raw[place:end].decode("utf-8", "surrogateescape").split("\t")
        place = end + 1 + int(size)
        names = [str(PurePosixPath(each).relative_to(root)) if each else "" for each in (target, other)]
        found.append(Operation(name, *names, int(offset), raw[end + 1 : place], failed == "1"))
    return found


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """A folder with everything in it; `apply` performs one operation."""

    def __init__(self, tree: Tree) -> None:
        self.root = Folder()
        for path, content in tree.items():
            if content is None:
                self._put(path, Folder())
            else:
                self._put(path, File(bytearray(content), content))
        self._settle(self.root)

    def _settle(self, folder: Folder) -> None:
        folder.synced = dict(folder.names)
        for entry in folder.names.values():
            if isinstance(entry, Folder):
                self._settle(entry)

    def _at(self, path: str) -> File | Folder | None:
        entry: File | Folder | None = self.root
        for part in PurePosixPath(path).parts:
            entry = entry.names.get(part) if isinstance(entry, Folder) else None
        return entry

    def _parent(self, path: str) -> dict[str, File | Folder]:
        parent = self._at(str(PurePosixPath(path).parent))
        return parent.names if isinstance(parent, Folder) else {}

    def _put(self, path: str, entry: File | Folder) -> None:
        self._parent(path)[PurePosixPath(path).name] = entry

    def apply(self, operation: Operation) -> None:
        path, entry = operation.path, self._at(operation.path)
        if operation.failed:
            return
        match operation.name:
            case "open" | "empty" if entry is None:
                self._put(path, File())
            case "empty" if isinstance(entry, File):
                entry.data = bytearray()
            case "write" if isinstance(entry, File):
                end = operation.offset + len(operation.data)
                entry.data.extend(bytes(max(0, end - len(entry.data))))
                entry.data[operation.offset : end] = operation.data
            case "truncate" if isinstance(entry, File):
                entry.data = entry.data[: operation.offset].ljust(operation.offset, b"\0")
            case "fsync" if isinstance(entry, File):
                entry.synced = bytes(entry.data)
            case "fsync" if isinstance(entry, Folder):
                entry.synced = dict(entry.names)
            case "mkdir":
                self._put(path, Folder())
            case "rename" if entry is not None:
                del self._parent(path)[PurePosixPath(path).name]
                self._put(operation.other, entry)
            case "unlink" | "rmdir":
                self._parent(path).pop(PurePosixPath(path).name, None)

    def survivor(self, kind: str) -> Tree:
        """What the disk holds after a crash: `everything`, only what was `synced`, or all `names` with synced data."""
        return dict(_walk(self.root, kind))


def _walk(folder: Folder, kind: str, above: str = "") -> Iterator[tuple[str, bytes | None]]:
    for name, entry in sorted((folder.synced if kind == "synced" else folder.names).items()):
        if isinstance(entry, Folder):
            yield above + name, None
            yield from _walk(entry, kind, f"{above}{name}/")
        else:
            yield above + name, bytes(entry.data) if kind == "everything" else entry.synced
