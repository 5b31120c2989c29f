"""Reading of files, folders and streams: the paths of the data section, their bytes and text, in bounded memory.

Bytes are plain, gzip (.gz) or Zstandard (.zst). Text is UTF-8, or of another encoding that is named, or found in a
table (`Reading`). It comes in pieces of at most `PIECE_BYTES`, so that a file of one endless line streams like any
other. CRLF becomes LF, CR alone is text; a byte order mark at the start is dropped; NUL is kept. Errors name the file,
and the line or the byte.

A file that changes while it is read is refused (`unchanged`), so that no cache keeps what was read of it.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import hashlib
import importlib
import os
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, Protocol

from tformer.data.sources.reading import Reading, find_delimiter, find_encoding
from tformer.data.sources.remote import RemoteFile, find, is_url
from tformer.support.errors import InputError, StorageError
from tformer.support.file_kinds import HEAD_BYTES, kind_of
from tformer.support.files import STANDARD_INPUT
from tformer.support.options import Errors

PIECE_BYTES = 1 << 20
EDGE_BYTES = 1 << 20  # of each end of a file, for its fingerprint
SAMPLES = 64  # blocks between these ends, evenly spread
SAMPLE_BYTES = 1 << 15  # of each
HEAD_LINES = 400  # in which the separator of csv is found
MAX_ROW_CHARACTERS = 1 << 26  # of jsonl, csv and tsv, where a row is parsed whole
UTF_16_HINT = "it looks like UTF-16: read it with --encoding utf-16"

FilePath = Path | RemoteFile

DELIMITED = (".csv", ".tsv")
SHEETS = (".xlsx", ".ods")
PACKED = (".parquet", *SHEETS)
UTF8 = (".jsonl", ".ndjson", *PACKED)  # or no text


# -- text --------------------------------------------------------------------------------------------------------------


class DocumentChunk(NamedTuple):
    """A part of a document, and whether the document ends with it."""

    text: str
    ends_document: bool


def decode_text(
    chunks: Iterator[bytes], *, name: str, errors: Errors, encoding: str = "utf-8", accepts: Collection[str] = ()
) -> Iterator[str]:
    """The text of a byte stream in pieces.

    Args:
        encoding: its name in Python.
        accepts: keys of the kinds of file (`file_kinds`) that the reader knows.

    Raises InputError, for a known kind of file that is no text, and if "strict" with line and byte for what is no
    character.
    """
    head = next(chunks, b"")
    if (kind := kind_of(head, format_ending(Path(name)))) is not None and kind.key not in accepts:
        raise InputError(f"{name}: found {kind.name}, expected text", hint=kind.hint)
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    chunks = chain((head,), chunks)
    lines_before, bytes_read, carried = 0, 0, ""
    at_start, final = True, False
    while not final:
        chunk = next(chunks, b"")
        final = not chunk
        bytes_read += len(chunk)
        try:
            text = carried + decoder.decode(chunk, final)
        except UnicodeDecodeError as error:  # its object holds bytes of the chunk before, too
            line, byte = error.object[: error.start].count(b"\n"), bytes_read - len(error.object) + error.start
            hint = "name its encoding with --encoding, or accept replacement characters with --invalid-utf8 replace"
            raise InputError(
                f"{name}:{lines_before + line + 1}: invalid {'UTF-8' if encoding == 'utf-8' else encoding} at byte "
                f"{byte} (0x{error.object[error.start]:02x}: {error.reason})",
                hint=UTF_16_HINT if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else hint,
            ) from None
        if at_start and text:
            text, at_start = text.removeprefix("\ufeff"), False
        carried = "\r" if text.endswith("\r") and not final else ""  # the next chunk may begin with its newline
        text = text.removesuffix(carried).replace("\r\n", "\n")  # a carriage return alone is text
        if text:
            lines_before += text.count("\n")
            yield text


def split_lines(pieces: Iterator[str], *, name: str) -> Iterator[str]:
    """Lines with their newline (the last may have none). Raises InputError for more than `MAX_ROW_CHARACTERS`."""
    parts: list[str] = []
    length, number = 0, 1
    for piece in pieces:
        lines = piece.split("\n")
        for line in lines[:-1]:
            parts += (line, "\n")
            yield _joined(parts)
            length, number = 0, number + 1
        parts.append(lines[-1])
        length += len(lines[-1])
        if length > MAX_ROW_CHARACTERS:
            raise InputError(
                f"{name}:{number}: a row has more than {MAX_ROW_CHARACTERS:,} characters",
                hint="text without rows belongs in a .txt file, which may have lines of any length",
            )
    if length:
        yield "".join(parts)


def _joined(parts: list[str]) -> str:
    """The text of these parts, which are let go: a long line is not held twice."""
    text = "".join(parts)
    parts.clear()
    return text


def cut_pieces(text: str) -> Iterator[DocumentChunk]:
    """One whole document in pieces."""
    for start in range(0, len(text), PIECE_BYTES):
        yield DocumentChunk(text[start : start + PIECE_BYTES], start + PIECE_BYTES >= len(text))


def end_last(texts: Iterator[str]) -> Iterator[DocumentChunk]:
    """A stream of text as the pieces of one document."""
    previous: str | None = None
    for text in texts:
        if previous is not None:
            yield DocumentChunk(previous, False)
        previous = text
    if previous is not None:
        yield DocumentChunk(previous, True)


# -- bytes -------------------------------------------------------------------------------------------------------------


PACKAGES = {
    ".zst": ("zstandard", "zstd"),
    ".parquet": ("pyarrow.parquet", "parquet"),
    **dict.fromkeys(SHEETS, ("python_calamine", "excel")),
}
"""The module that reads an ending, and the extra of tformer that installs it."""
COMPRESSIONS = {".gz": 1 << 14, ".zst": 1 << 10}
"""Input bytes of one call of each decompressor: 1 KB of zstd can unfold to 32 MB, of gzip to 1 MB."""


def _decompressor(ending: str) -> Any:
    """An object with `decompress`, `eof` and `unused_data`, for one member of a file."""
    if ending == ".gz":
        return zlib.decompressobj(wbits=31)
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


def compression_of(path: FilePath) -> str | None:
    ending = path.suffix.lower()
    return ending if ending in COMPRESSIONS else None


def format_ending(path: FilePath) -> str:
    """The ending that names the format: `.jsonl` of `a.jsonl.gz`."""
    return (Path(path.stem) if compression_of(path) else path).suffix.lower()


def require_packages(path: FilePath) -> None:
    """Raise InputError if the package that reads this file's compression or format is not installed."""
    for ending in (path.suffix.lower(), format_ending(path)):
        if ending not in PACKAGES:
            continue
        module, extra = PACKAGES[ending]
        try:
            importlib.import_module(module)
        except ImportError:
            raise InputError(
                f"{path}: reading {ending} needs the package {module.partition('.')[0]}",
                hint=f"install it with: pip install 'tformer[{extra}]'",
            ) from None


def open_input(path: FilePath) -> IO[bytes]:
    """The file, opened for reading. Raises InputError with the reason if that fails."""
    if isinstance(path, RemoteFile):
        return path.open()
    try:
        return open(path, "rb")
    except OSError as error:
        raise unreadable(path, error) from error


def size_of(path: FilePath) -> int:
    """The bytes of an existing file."""
    return path.size if isinstance(path, RemoteFile) else path.stat().st_size


def unreadable(path: Path | str, error: OSError) -> InputError:
    """The error for a file or folder that the operating system does not let us read."""
    return InputError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}")


def read_bytes(path: FilePath, found: FoundFile | None = None) -> Iterator[bytes]:
    """The content of a file, decompressed by its ending, in chunks of about `PIECE_BYTES`.

    found: the file as it must still be. Without it, the file is read as it is now.
    """
    is_remote = isinstance(path, RemoteFile)  # it looks for changes by itself
    with open_input(path) as file, contextlib.nullcontext() if is_remote else unchanged(found or FoundFile(path)):
        ending = compression_of(path)
        if ending is None:
            yield from iter(lambda: file.read(PIECE_BYTES), b"")
        else:
            require_packages(path)
            yield from _decompress(file, str(path), ending)


def _decompress(file: IO[bytes], name: str, ending: str) -> Iterator[bytes]:
    step = COMPRESSIONS[ending]
    decoder, waiting = _decompressor(ending), b""
    at_start, member = True, 0  # of a member, and its first byte: a file of several members is one text
    ready: list[bytes] = []
    ready_bytes = 0
    while data := waiting or file.read(step):
        try:
            output = decoder.decompress(data)
        except Exception as error:  # zlib.error and zstandard.ZstdError have no common base
            # A wrong byte may look right for some thousand bytes, or until the checksum of the whole member.
            before = 0 if "check" in str(error) else file.tell() - len(data) - step
            place = f"between bytes {max(member, before)} and {file.tell()}"
            raise InputError(f"{name}: damaged {ending} data {place}: {error}") from error
        waiting, at_start = b"", False
        if decoder.eof:
            waiting = decoder.unused_data.lstrip(b"\0")
            # Tapes and block devices pad with zeros, with which no compressed member starts.
            while not waiting and (data := file.read(step)):
                waiting = data.lstrip(b"\0")
            decoder, at_start, member = _decompressor(ending), True, file.tell() - len(waiting)
        ready.append(output)
        ready_bytes += len(output)
        if ready_bytes >= PIECE_BYTES:
            data = b"".join(ready)
            yield from (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
            ready, ready_bytes = [], 0
    if not at_start:
        raise InputError(f"{name}: damaged {ending} data: it ends at byte {file.tell()}, before its content does")
    if ready_bytes:
        yield b"".join(ready)


# -- changes -----------------------------------------------------------------------------------------------------------


def file_fingerprint(path: FilePath) -> tuple[str, str]:
    """(sha256 of the content, sha256 of samples).

    A small file is hashed whole, with its size, and has no samples (""). For a large one, the first hash is of its
    size, time of change and both ends, the second of blocks between these ends: they show a change whose time was set
    back.
    """
    if isinstance(path, RemoteFile):
        return path.fingerprint(), ""
    with open_input(path) as file:
        status = os.fstat(file.fileno())
        digest = hashlib.sha256(f"{status.st_size}:".encode())
        digest.update(file.read(EDGE_BYTES))
        inside = status.st_size - 2 * EDGE_BYTES
        if inside <= 0:
            digest.update(file.read(EDGE_BYTES))
            return digest.hexdigest(), ""
        samples = hashlib.sha256()
        for number in range(SAMPLES):
            file.seek(EDGE_BYTES + inside * number // SAMPLES)
            samples.update(file.read(SAMPLE_BYTES))
        digest.update(f":{status.st_mtime_ns}:".encode())
        file.seek(status.st_size - EDGE_BYTES)
        digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest(), samples.hexdigest()


class FileStat(NamedTuple):
    """Size, times and inode of a file. `changed_ns` (ctime) moves with every change, and no program sets it back."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int


def facts_of(path: FilePath) -> FileStat | None:
    """The facts of a file; None of pipes, devices and remote files. Raises InputError for one that is not there."""
    if isinstance(path, RemoteFile):
        return None
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    is_file = stat.S_ISREG(status.st_mode)
    return FileStat(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino) if is_file else None


class FoundFile:
    """A file as it was found: its facts, and its content when it was first sampled."""

    __slots__ = ("_content", "facts", "path")

    def __init__(self, path: FilePath) -> None:
        self.path, self.facts = path, facts_of(path)
        self._content: tuple[str, str] | None = None

    def read(self) -> Iterator[bytes]:
        return read_bytes(self.path, self)

    def content(self) -> tuple[str, str]:
        """`file_fingerprint` of the file when this was first called."""
        self._content = self._content or file_fingerprint(self.path)
        return self._content

    def require_unchanged(self) -> None:
        """Raise InputError if size, times or inode have changed since the file was found."""
        if isinstance(self.path, RemoteFile):
            self.path.require_unchanged()
            return
        facts, found = facts_of(self.path), self.facts
        if facts == found:
            return
        change = "it was written or replaced"
        if facts and found and facts.size != found.size:
            change = f"size {found.size:,} -> {facts.size:,} bytes"
        hint = "run the command again when nothing writes to it"
        raise InputError(f"{self.path}: changed while it was read: {change}", hint=hint)


@contextlib.contextmanager
def unchanged(*files: FoundFile | Spool) -> Iterator[None]:
    """Raises InputError, at the end or in place of another error, for a file that is not as it was found."""
    try:
        yield
    except Exception:  # what is wrong may follow from the change
        for file in files:
            file.require_unchanged()
        raise
    for file in files:
        file.require_unchanged()


class Spool:
    """Standard input or a pipe, copied to an unnamed temporary file so that it can be read again."""

    path: ClassVar[None] = None

    def __init__(self, stream: IO[bytes]) -> None:
        digest = hashlib.sha256()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the spool)
        self.size = 0
        try:
            for chunk in iter(lambda: stream.read(PIECE_BYTES), b""):
                digest.update(chunk)
                self._file.write(chunk)
                self.size += len(chunk)
            self._file.flush()
        except OSError as error:
            # The buffer still holds what could not be written, and closing would fail on it again.
            with contextlib.suppress(OSError):
                self._file.close()
            raise StorageError(
                f"{tempfile.gettempdir()}: cannot keep standard input there: {error.strerror} "
                f"after {self.size:,} bytes",
                hint="set TMPDIR to a folder with more room, or give a file",
            ) from error
        self.fingerprint = digest.hexdigest()

    def content(self) -> tuple[str, str]:
        return self.fingerprint, ""

    def require_unchanged(self) -> None: ...

    def read(self) -> Iterator[bytes]:
        """The content from its beginning; several readers are independent."""
        offset = 0
        while chunk := os.pread(self._file.fileno(), PIECE_BYTES, offset):
            yield chunk
            offset += len(chunk)


@dataclass(frozen=True)
class Content:
    """The text of one file or of one spooled stream; it can be read any number of times.

    is_table: it is csv or tsv, or may be: its encoding is found. accepts: as of `decode_text`.
    """

    name: str
    origin: FoundFile | Spool
    reading: Reading
    is_table: bool = False
    accepts: Collection[str] = ()

    @property
    def errors(self) -> Errors:
        return self.reading.errors

    @cached_property
    def encoding(self) -> str:
        """The name of its encoding in Python. Where invalid UTF-8 is replaced, it is UTF-8 unless named otherwise."""
        if self.reading.encoding is not None:
            return codecs.lookup(self.reading.encoding).name
        is_found = self.is_table and self.errors == "strict"
        return find_encoding(self.origin.read()) if is_found else "utf-8"

    @cached_property
    def delimiter(self) -> str:
        """The separator of the cells of csv."""
        if self.reading.separator is not None:
            return self.reading.separator
        lines, room = list[str](), PIECE_BYTES
        for line in split_lines(self.texts(), name=self.name):
            lines.append(line[:room])
            room -= len(line)
            if len(lines) >= HEAD_LINES or room <= 0:
                break
        return find_delimiter(lines)

    @property
    def decoding(self) -> str:
        """Error handling and encoding, for fingerprints."""
        return self.errors if self.encoding == "utf-8" else f"{self.errors}:{self.encoding}"

    @property
    def path(self) -> FilePath | None:
        return self.origin.path

    @property
    def file(self) -> FilePath:
        assert self.path is not None, "this format is read from files only"
        return self.path

    def texts(self) -> Iterator[str]:
        chunks = self.origin.read()
        return decode_text(chunks, name=self.name, errors=self.errors, encoding=self.encoding, accepts=self.accepts)

    def fingerprint(self) -> str:
        return self.origin.content()[0]

    def samples(self) -> str:
        return self.origin.content()[1]

    def size_bytes(self) -> int | None:
        """Bytes of text; None if compression hides the number."""
        if isinstance(self.origin, Spool):
            return self.origin.size
        plain = compression_of(self.file) is None and format_ending(self.file) not in PACKED
        return size_of(self.file) if plain else None


# -- paths of the data section -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The files of a path in a fixed order, or one spooled stream; `notes` name skipped files."""

    name: str
    paths: tuple[FilePath, ...] = ()
    spool: Spool | None = None
    notes: tuple[str, ...] = ()

    def contents(self, reading: Reading, *, are_tables: bool = False, accepts: Collection[str] = ()) -> list[Content]:
        """The files or the stream.

        are_tables: also those whose ending says nothing, as far as they are text. accepts: as of `decode_text`.
        """
        if self.spool is not None:
            return [Content(self.name, self.spool, reading, are_tables, accepts)]
        tables = {path: are_tables and format_ending(path) not in UTF8 for path in self.paths}
        return [
            Content(str(path), FoundFile(path), reading, is_table or format_ending(path) in DELIMITED, accepts)
            for path, is_table in tables.items()
        ]


def locate(path: str, *, is_known: Callable[[FilePath], bool], known: str) -> Found:
    """The files behind a path, a pattern, a URL or `-`. A folder gives every file with an ending that `is_known`.

    The hint lists these endings as `known`. Raises InputError for a missing or empty file, a folder or pattern without
    text, a device, and a format whose package is not installed.
    """
    if path == STANDARD_INPUT:
        return _spooled("standard input", sys.stdin.buffer)
    if is_url(path):
        found = find(path, is_known)
        if not found:
            raise InputError(f"{path}: no text in this folder, or of this pattern", hint=f"known endings: {known}")
        return Found(path, _checked(found, path))
    place = expanded(path)
    if place.is_dir():
        return _find_in_folder(place, is_known, known)
    if not place.exists() and glob.has_magic(path):
        matches = sorted(Path(match) for match in glob.glob(str(place), recursive=True) if os.path.isfile(match))
        if not matches:
            raise InputError(f"{path}: no file matches this pattern")
        return Found(path, _checked(matches, path))
    try:
        mode = place.stat().st_mode
    except OSError as error:
        hint = None if place.is_absolute() else f"looked in {Path.cwd()}"
        raise InputError(f"{place}: {(error.strerror or str(error)).lower()}", hint=hint) from None
    if stat.S_ISFIFO(mode):
        with open_input(place) as pipe:
            return _spooled(path, pipe)
    if not stat.S_ISREG(mode):
        raise InputError(f"{place}: expected a file, a folder or a pipe, found a device or socket")
    return Found(path, _checked([place], path))


def expanded(path: str | Path) -> Path:
    """The path with ~ expanded; an unknown user name stays as written."""
    return Path(os.path.expanduser(path))


def _spooled(name: str, stream: IO[bytes]) -> Found:
    spool = Spool(stream)
    if spool.size == 0:
        raise InputError(f"{name}: is empty", hint="give a file or a pipe with text in it")
    return Found(name, spool=spool)


def _checked(paths: Sequence[FilePath], name: str) -> tuple[FilePath, ...]:
    """The paths, if every file opens, the packages they need are installed, and not all are empty."""
    size = 0
    for path in paths:
        require_packages(path)
        with open_input(path):  # a remote file is not read yet
            size += size_of(path)
    if size == 0:
        raise InputError(f"{name}: is empty", hint="give a file with text in it")
    return tuple(paths)


def _find_in_folder(folder: Path, is_known: Callable[[FilePath], bool], known: str) -> Found:
    """Every file below with a known ending, sorted by path, without hidden and binary ones."""
    paths: list[Path] = []
    skipped: list[Path] = []
    for place, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            path = Path(place, name)
            if name.startswith(".") or not is_known(path):
                continue
            (paths if _is_readable_text(path) else skipped).append(path)
    if not paths:
        unread = f" ({len(skipped)} files with a known ending cannot be read as text)" if skipped else ""
        raise InputError(
            f"{folder}: no text in this folder{unread}",
            hint=f"known endings: {known}; also with .gz or .zst",
        )
    notes = (f"{folder}: skipped {len(skipped)} unreadable or binary files, {skipped[0]} first",) if skipped else ()
    paths.sort(key=lambda path: path.relative_to(folder).as_posix())
    return Found(str(folder), _checked(paths, str(folder)), notes=notes)


def _is_readable_text(path: Path) -> bool:
    """Whether a file opens and is not binary content (NUL and invalid UTF-8) under the name of a text."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    if compression_of(path) is not None or format_ending(path) == ".parquet" or b"\0" not in head:
        return True
    try:
        codecs.utf_8_decode(head, "strict", False)  # not final: the last character may be cut
    except UnicodeDecodeError:
        return False
    return True


# -- sources -----------------------------------------------------------------------------------------------------------


class SourceFields(Protocol):
    """The fields of an entry of `data.train` or `data.valid` that this module reads."""

    @property
    def path(self) -> str: ...
    @property
    def weight(self) -> float | None: ...
    @property
    def target_path(self) -> str | None: ...
    @property
    def prefix(self) -> str: ...
    @property
    def task(self) -> str | None: ...


class SourcePart(Protocol):
    """One file of a source, two aligned files, or a built-in source."""

    @property
    def contents(self) -> tuple[Content, ...]: ...
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened entry of the data section, which can be read any number of times.

    Attributes:
        weight: its share of a mixture, as given.
        notes: for the user: skipped files, guessed columns.
    """

    name: str
    parts: tuple[SourcePart, ...]
    weight: float | None = None
    notes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Changes when the content may have changed: the key of cached tokens, and compared by a resumed run."""
        digest = hashlib.sha256(self._settings().encode())
        for part in self.parts:
            digest.update(f"{part.fingerprint()}\n".encode())
        return digest.hexdigest()

    def _items(self, method: str) -> Iterator[Any]:
        """Items of this method of every part. Raises InputError if a file changed since the source was opened."""
        for part in self.parts:
            with unchanged(*(content.origin for content in part.contents)):
                yield from getattr(part, method)()

    def bad_rows(self) -> Iterator[tuple[str, Any, InputError]]:
        """(place, what was read, error) of every row that cannot be used, where such rows are left out."""
        for part in self.parts:
            if any(content.reading.drops for content in part.contents) and hasattr(part, "bad_rows"):
                yield from part.bad_rows()

    def samples(self) -> str:
        """What the fingerprint leaves out: "+" and a sha256 of the samples of its large files; "" without any.

        Runs record it behind the fingerprint of their data, because the fingerprint of version 0.1.0 lacks it.
        """
        found = [content.samples() for part in self.parts for content in part.contents]
        return f"+{hashlib.sha256(' '.join(found).encode()).hexdigest()}" if any(found) else ""

    def _settings(self) -> str:
        """Settings of this kind of source that change its content."""
        return ""

    def size_bytes(self) -> int | None:
        """Bytes to be read; None if compression hides the number."""
        contents = [part.contents for part in self.parts]
        return total_bytes(chain(*contents)) if all(contents) else None


def total_bytes(items: Iterable[Any]) -> int | None:
    """The sum of what their `size_bytes()` give, for progress; None if one is unknown."""
    sizes = [item.size_bytes() for item in items]
    return None if None in sizes else sum(sizes)
