"""Rows of Parquet files, decoded a few at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tformer.data.sources.files import FilePath, open_input, require_packages
from tformer.data.sources.remote import RemoteFile
from tformer.support.errors import InputError

PARQUET_ROWS = 256  # decoded at once
PARQUET_BYTES = 1 << 24  # of them, on average
PARQUET_MAGIC = b"PAR1"


def parquet_schema(path: FilePath) -> Any:
    """The schema of a Parquet file, a `pyarrow.Schema`."""
    with _open_parquet(path) as file:
        return file.schema_arrow


def parquet_rows(path: FilePath, names: list[str], *, skip_unreadable: bool = False) -> Iterator[tuple[Any, ...]]:
    """The values of these columns, row by row. If several columns have one name, the first is read.

    Parquet can hold values that Python cannot, as a time of the year 100,000. Raises InputError for one; with
    `skip_unreadable` its column is None for some rows.
    """
    done = 0
    with _open_parquet(path, lambda: done) as file:
        for batch in file.iter_batches(batch_size=_rows_at_once(file.metadata), columns=list(dict.fromkeys(names))):
            by_name = {name: batch.column(batch.schema.names.index(name)) for name in names}
            columns = [_python_values(by_name[name], name, path, done, skip=skip_unreadable) for name in names]
            yield from zip(*columns, strict=True)
            done += len(batch)


def _rows_at_once(metadata: Any) -> int:
    """Rows to decode at once: fewer than `PARQUET_ROWS` where they are large."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    row_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(PARQUET_ROWS, PARQUET_BYTES // max(1, row_bytes)))


@contextlib.contextmanager
def _open_parquet(path: FilePath, rows_done: Callable[[], int] = lambda: 0) -> Iterator[Any]:
    """The `pyarrow.parquet.ParquetFile`. Raises InputError, with the number of rows read, for damaged data."""
    require_packages(path)
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    with open_input(path) as file:
        size = file.seek(0, 2)
        for offset in (0, max(0, size - len(PARQUET_MAGIC))):
            file.seek(offset)
            found = file.read(len(PARQUET_MAGIC))
            if found != PARQUET_MAGIC:
                raise InputError(
                    f"{path}: damaged or not Parquet: expected {PARQUET_MAGIC!r} at byte {offset} of {size}, "
                    f"found {found!r}"
                )
    try:
        with ParquetFile(path.open() if isinstance(path, RemoteFile) else path) as parquet:
            yield parquet
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: damaged Parquet data after row {rows_done()}: {reason}") from error


def _python_values(values: Any, name: str, path: FilePath, done: int, *, skip: bool) -> list[Any]:
    import pyarrow as pa

    try:
        return values.to_pylist()
    except (pa.ArrowException, UnicodeDecodeError):
        raise  # damaged
    except (OverflowError, ValueError) as error:
        if skip:
            return [None] * len(values)
        raise InputError(
            f"{path}: column '{name}' has a value after row {done} that cannot be read: {error}"
        ) from error
