"""Reading untrusted files within bounds, and writing files and folders durably: whole or not at all.

`open_regular` never waits for a named pipe. `open_output` writes the text of a command.

Everything that tformer writes goes through this module, mostly through `write_file`, `replacing` and
`publish_directory`. Its small functions are called as attributes (`files.write(...)`), so that a test can fail or kill
at the N-th call and read back the order of writes, syncs and renames.

Files are created with mode 0666 and folders with 0777, which the umask then narrows: never `tempfile`, whose mode 0600
stays after a rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import io
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tformer.support.errors import InputError, Interrupted, RunInUseError, StorageError, cannot_write
from tformer.support.formatting import kind_of

Write = Callable[[Any], object]
"""Writes text, or bytes as they are."""
BUFFER_BYTES = 1 << 16
READER_SECONDS = 2.0  # how long a named pipe may have no reader
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PICKLE_HINT = (
    "tformer never unpickles, for a pickle can run any code: convert the weights to safetensors where you trust them"
)


def open_regular(path: Path) -> io.BufferedReader:
    """Open an existing ordinary file for reading; folders, pipes and devices are refused without blocking."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{path} is not an ordinary file")
        return open(path, "rb")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def read_bounded(path: Path, *, max_bytes: int) -> bytes:
    """The content of a file; InputError, before reading, when it is larger than `max_bytes`."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise InputError(f"{path} has {size:,} bytes, expected at most {max_bytes:,}")
        return stream.read(size)


def read_object(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file. InputError for a file larger than `max_bytes`, and as in `parse_object`."""
    return parse_object(read_bounded(path, max_bytes=max_bytes), name=str(path))


def parse_object(data: bytes, *, name: str) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises InputError for anything else, duplicate keys, half a surrogate pair, and too deep a nesting.
    """
    try:
        value = json.loads(data, object_pairs_hook=_unique)
        if b"\\ud" in data.lower():
            # Fails for half a surrogate pair; names of files that are no UTF-8 pass (PEP 383).
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
    except RecursionError:
        raise InputError(f"{name} is damaged: JSON nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{name} is damaged: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{name} is damaged: expected a JSON object, found {kind_of(value)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def looks_like_pickle(data: bytes) -> bool:
    """Whether a file begins like a pickle or like PyTorch's zip of pickles."""
    return data[:4] == b"PK\x03\x04" or (len(data) >= 2 and data[0] == 0x80 and 2 <= data[1] <= 5)


STANDARD_INPUT = "-"
"""The path that means standard input."""

RUNS = Path("runs")
"""The folder of runs."""

TEMPORARY = ".tmp-"  # prefix of unfinished files and folders; removed at the next start
LONG_NAME = 200  # bytes of a file's name; the prefix and the number of a process make it longer, to at most 255
WRITE_BYTES = 64 << 20  # Linux writes at most 2 GiB per call

_HINTS = {
    0: "free some space, or choose another folder",  # numpy gives no number when a write is cut short
    errno.ENOSPC: "free some space, or choose another folder",
    errno.EDQUOT: "the quota is used up: free some space, or choose another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "the folder may not be written: choose another",
    errno.EPERM: "the folder may not be written: choose another",
}


def mkdir(path: Path) -> None:
    os.mkdir(path)


def create(path: Path) -> int:
    """A descriptor of a new or emptied file; a symbolic link is refused."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)


def reopen(path: Path) -> int:
    """A descriptor of an existing file, for reading and writing; a symbolic link is refused."""
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW)


def open_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def write(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, in one system call when the kernel accepts that."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:WRITE_BYTES]) :]


def truncate(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)


def fsync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_file(path: Path) -> None:
    """Sync the content of a file that something else wrote."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_dir(path: Path) -> None:
    """Sync the names in a folder: a rename is on disk only after this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def unlink(path: Path) -> None:
    os.unlink(path)


def rmdir(path: Path) -> None:
    os.rmdir(path)


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user may still write to the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def has_free_inode(path: Path) -> bool:
    status = os.statvfs(path)
    return status.f_files == 0 or status.f_favail > 0  # file systems without a fixed number report 0 of 0


@contextmanager
def storage_errors(path: Path, *, bytes_needed: int | None = None) -> Iterator[None]:
    """Context manager that turns an OSError into a `StorageError` with the path and the bytes needed."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error, bytes_needed=bytes_needed) from error


def storage_error(path: Path, error: OSError, *, bytes_needed: int | None = None) -> StorageError:
    return cannot_write(path, error, bytes_needed=bytes_needed, hint=_HINTS.get(error.errno or 0))


def require_space(path: Path, bytes_needed: int) -> None:
    """Raise `StorageError` when the file system of `path` has fewer free bytes than needed, or no free inode."""
    with storage_errors(path, bytes_needed=bytes_needed):
        free = free_bytes(path)
        inodes = has_free_inode(path)
    if free < bytes_needed:
        raise StorageError(
            f"cannot write {path}: {bytes_needed:,} bytes needed, {free:,} free", hint=_HINTS[errno.ENOSPC]
        )
    if not inodes:
        raise StorageError(
            f"cannot write {path}: the file system has no free inode ({bytes_needed:,} bytes needed)",
            hint="remove some files, or choose another folder",
        )


MANIFEST = "manifest.json"
OLD = ".old-"  # prefix of a folder while another takes its place


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write and sync one new file; returns its size and SHA-256. Its name is durable after `fsync_dir`."""
    import hashlib

    size, digest = 0, hashlib.sha256()
    descriptor = create(path)
    try:
        for chunk in chunks:
            write(descriptor, chunk)
            digest.update(chunk)
            size += len(chunk)
        fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()


def write_file(path: Path, chunks: Iterable[bytes | memoryview], *, bytes_needed: int | None = None) -> None:
    """Replace a file by rename; a symbolic link is followed once, so that the link stays a link.

    A pipe or a device, such as /dev/null, is written to and never replaced.

    Raises:
        InputError: a folder has this name.
        StorageError: the disk is full or read-only; the old file is untouched and the temporary one is removed.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InputError(f"{path} is a folder, expected a file")
    with storage_errors(path, bytes_needed=bytes_needed):
        if is_stream(target):
            with open_sink(target) as stream:
                stream.writelines(chunks)
            return
        with replacing(target) as temporary:
            write_durably(temporary, chunks)


def is_stream(target: Path) -> bool:
    """Whether it is a pipe or a device, which cannot be replaced by rename."""
    return target.exists() and not target.is_file() and not target.is_dir()


def open_sink(target: Path) -> BinaryIO:
    """A pipe or device, opened for writing. Raises InputError for a named pipe that no process reads from."""
    deadline = time.monotonic() + READER_SECONDS
    while True:
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > deadline:
                raise InputError(
                    f"{target} is a named pipe that no process reads from (waited {READER_SECONDS:g} s)",
                    hint="start the reader first, or give a file",
                ) from None
        time.sleep(0.02)
    os.set_blocking(descriptor, True)
    return open(descriptor, "wb")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside `target`, to be filled and synced; it becomes `target` at the end.

    After an exception it is removed, and `target` is what it was.
    """
    temporary = temporary_beside(target)
    try:
        yield temporary
        rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            unlink(temporary)
        raise
    fsync_dir(target.parent)


def temporary_beside(target: Path) -> Path:
    """The path of this process's temporary file for `target`; removes the files of killed processes.

    The name holds the process id, so that two processes that write the same file do not mix their content.
    """
    stem = temporary_name(target) + "-"
    with contextlib.suppress(PermissionError):  # a folder may be writable and not readable
        for name in os.listdir(target.parent):
            number = name.removeprefix(stem)
            if number != name and number.isdecimal() and not _is_alive(int(number)):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    unlink(target.with_name(name))
    return target.with_name(f"{stem}{os.getpid()}")


def temporary_name(target: Path, prefix: str = TEMPORARY) -> str:
    """`<prefix><name of the target>`, with the name's hash if the name is too long for a prefix."""
    name = os.fsencode(target.name)
    if len(name) <= LONG_NAME:
        return prefix + target.name
    import hashlib

    return prefix + hashlib.sha256(name).hexdigest()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def in_blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines joined into chunks of about 1 MB."""
    block: list[bytes] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= 1 << 20:
            yield b"".join(block)
            block, size = [], 0
    yield b"".join(block)


def make_folders(folder: Path) -> None:
    """Create a folder and its parents, each synced."""
    if folder.is_dir():
        return
    if os.path.lexists(folder):
        raise InputError(f"{folder} is a file, expected a folder")
    make_folders(folder.parent)
    try:
        mkdir(folder)
    except FileExistsError:
        return
    fsync_dir(folder.parent)


def encode_text(text: str | bytes) -> bytes:
    r"""UTF-8. A byte of a file's name that is no UTF-8 becomes an escape (`\udcff`), which JSON reads back."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")


def write_text(path: Path, text: str) -> None:
    data = encode_text(text)
    write_file(path, [data], bytes_needed=len(data))


def publish_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `target` appear complete: filled under a temporary name, synced, renamed, synced.

    `fill` writes durable files into the folder it is given. A folder that already stands at `target` is moved to
    `.old-<name>` for the moment between two renames, from where a scan still finds it.
    Folders above it are created. Operating system errors pass through; the temporary is removed and the old folder is
    back in place. Raises RunInUseError, and touches nothing, while another process fills it.
    """
    make_folders(target.absolute().parent)
    temporary = target.with_name(temporary_name(target))
    old = target.with_name(temporary_name(target, OLD))
    with _lock_of(temporary, target):  # else a process is still filling it
        settle_replaced(target)
        remove_tree(temporary)
    try:
        mkdir(temporary)
        with _lock_of(temporary, target):
            fill(temporary)
        fsync_dir(temporary)
        if os.path.lexists(target):
            rename(target, old)
        rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            if os.path.lexists(old) and not os.path.lexists(target):
                rename(old, target)
        with contextlib.suppress(OSError):
            remove_tree(temporary)
        raise
    fsync_dir(target.parent)
    remove_tree(old)


@contextmanager
def _lock_of(folder: Path, target: Path) -> Iterator[None]:
    """Context manager that holds a folder's lock, where it exists and the file system has locks.

    Raises RunInUseError when another process holds it: that one is writing `target`.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                hint = "wait until it has finished, or choose another folder"
                raise RunInUseError(f"another process is writing {target}", hint=hint) from None
        yield


def settle_replaced(target: Path) -> None:
    """Finish an interrupted replacement: remove the old folder if the new one is in place, else restore it."""
    old = target.with_name(temporary_name(target, OLD))
    if not os.path.lexists(old):
        return
    if os.path.lexists(target):
        remove_tree(old)
    else:
        rename(old, target)
        fsync_dir(target.parent)


def remove_tree(path: Path) -> None:
    """Remove a file or folder if it exists; links are unlinked, never followed; a manifest is removed first.

    Without its manifest a checkpoint does not exist, so a removal cut short leaves no half checkpoint behind.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        unlink(path)
        return
    manifest = path / MANIFEST
    if os.path.lexists(manifest):
        unlink(manifest)
        fsync_dir(path)  # synced before any other file is removed
    for name in sorted(os.listdir(path)):
        remove_tree(path / name)
    rmdir(path)


def require_writable_folder(target: Path) -> None:
    """Create and remove a temporary file in `target`, or in the nearest folder above it that exists.

    Raises:
        StorageError: read-only, full, or without permission.
        InputError: a file stands where a folder would have to be.
    """
    folder = _nearest(target)
    if not folder.is_dir():
        raise InputError(f"{folder} is a file, expected a folder")
    with storage_errors(target):
        probe = temporary_beside(folder / "probe")
        try:
            descriptor = create(probe)
            try:
                write(descriptor, b"probe")
                fsync(descriptor)
            finally:
                os.close(descriptor)
            unlink(probe)
        except BaseException:
            with contextlib.suppress(OSError):
                unlink(probe)
            raise


def require_room(target: Path, bytes_needed: int) -> None:
    """Raise `StorageError` unless the file system of `target` has `bytes_needed` bytes free."""
    require_space(_nearest(target), bytes_needed)


def _nearest(target: Path) -> Path:
    """The target itself, or the nearest folder above it that exists."""
    folder = target.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder


@contextmanager
def open_output(path: Path | None) -> Iterator[Write]:
    """A function that writes text, to a file also bytes, to standard output (None) or to a file.

    The file appears, synced, by a rename when the work is done; after an interrupt it holds what was done until then,
    after an error it is what it was before. Raises what `require_writable` does; StorageError when the disk refuses.
    """
    if path is None:
        yield _write_out
        return
    target = require_writable(path)
    if is_stream(target):
        with open_sink(target) as stream:
            yield lambda text: stream.write(encode_text(text))
        return
    output = _OutputFile(path, target)
    try:
        try:
            yield output.write
        except Interrupted:
            output.publish()
            raise
        output.publish()
    finally:
        output.discard()


class _OutputFile:
    """Text for a file, buffered and written under a temporary name until `publish`. Errors: StorageError."""

    def __init__(self, path: Path, target: Path) -> None:
        self._path, self._target = path, target
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._published = False
        with storage_errors(path):
            self._temporary = temporary_beside(target)
            self._descriptor = create(self._temporary)

    def write(self, text: str | bytes) -> None:
        self._pending.append(encode_text(text))
        self._pending_bytes += len(self._pending[-1])
        if self._pending_bytes >= BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        data = b"".join(self._pending)
        self._pending, self._pending_bytes = [], 0
        with storage_errors(self._path, bytes_needed=len(data)):
            write(self._descriptor, data)

    def publish(self) -> None:
        """Sync the file and give it its name."""
        self._flush()
        with storage_errors(self._path):
            fsync(self._descriptor)
            rename(self._temporary, self._target)
            self._published = True
            fsync_dir(self._target.parent)

    def discard(self) -> None:
        """Close the file, and remove what was not published."""
        os.close(self._descriptor)
        if not self._published:
            with contextlib.suppress(OSError):
                unlink(self._temporary)


def require_writable(path: Path, *, option: str = "--output") -> Path:
    """Check that `path` can be written, by a file beside its target; returns the target (links are followed).

    Raises InputError for a directory or a place that does not exist, StorageError when the system refuses the file.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InputError(f"{option} '{path}' is a directory, expected a file")
    if not target.parent.is_dir():
        raise InputError(f"{option} '{path}': the directory '{target.parent}' does not exist")
    if not is_stream(target):
        with storage_errors(path):
            trial = temporary_beside(target)
            os.close(create(trial))
            unlink(trial)
    return target


def _write_out(text: str) -> None:
    for start in range(0, len(text), 1 << 20):  # a long text is not encoded as a whole
        sys.stdout.write(text[start : start + (1 << 20)])
    sys.stdout.flush()


def refuse_to_replace(output: Path | None, inputs: Iterable[str | Path], *, option: str = "--output") -> None:
    """Raise InputError if the output file is also an input, under any name.

    Args:
        output: None: nothing is written.
        inputs: files, folders, patterns, or `-` for standard input, which may come from a file too.
    """
    if output is None or not output.is_file():
        return
    for name in map(str, inputs):
        if _reads(name, output):
            raise InputError(
                f"{option} {output} would replace what is read{'' if name == str(output) else f': {name}'}",
                hint="write to another file",
            )


def _reads(name: str, file: Path) -> bool:
    """Whether the input of this name includes the file."""
    if name == "-":
        with contextlib.suppress(OSError):  # a standard input that is no file
            return os.path.samestat(os.fstat(sys.stdin.fileno()), file.stat())
        return False
    place = os.path.expanduser(name)
    if os.path.isdir(place):
        return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(place))
    places = [place] if os.path.exists(place) else glob.glob(place, recursive=True)
    return any(os.path.samefile(path, file) for path in places if os.path.exists(path))
