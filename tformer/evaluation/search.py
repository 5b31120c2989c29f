"""Vectors of texts in a .npy file, and the search for those nearest to a query: exact cosines, memory-mapped.

Beside NAME.npy stands NAME.npy.jsonl: a line on the model that made the vectors, then the text of each vector as a JSON
string, one a line. A cosine does not depend on the lengths of vectors, so vectors of int8 need no scales.

Shapes: N vectors, n of a chunk, Q queries, D width, K found, L lines.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tformer.data.sources.reading import Reading
from tformer.decoding.lines import text_blocks
from tformer.evaluation.vector_options import NPY
from tformer.support.bounds import mistake_of
from tformer.support.errors import InputError
from tformer.support.files import in_blocks, write_file

CHUNK_BYTES = 1 << 22  # of fp32 numbers, which fit into the cache of a processor
DTYPES = ("float32", "float16", "int8")


def to_int8(vectors_ND: np.ndarray) -> np.ndarray:
    """int8 [N, D]: each vector times 127 / max |x|, rounded: each number is off by at most max |x| / 254."""
    largest_N1 = np.abs(vectors_ND).max(axis=1, keepdims=True)
    return np.rint(vectors_ND * (127 / np.where(largest_N1 > 0, largest_N1, 1))).astype(np.int8)


def write_vectors(path: Path, blocks: Iterable[np.ndarray], *, count: int, width: int, dtype: str) -> None:
    """Write blocks of fp32 vectors as a .npy file that appears whole.

    Raises InputError for other than `count` vectors, StorageError where there is no room.
    """
    header = io.BytesIO()
    shape = {"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(header, shape)

    def chunks() -> Iterator[bytes]:
        yield header.getvalue()
        done = 0
        for block_ND in blocks:
            yield (to_int8(block_ND) if dtype == "int8" else np.ascontiguousarray(block_ND, dtype="<f4")).tobytes()
            done += len(block_ND)
        if done != count:
            raise InputError(f"{path}: found {done:,} texts after {count:,}: the input changed while it was read")

    write_file(path, chunks())


def write_texts(path: Path, facts: Mapping[str, Any], texts: Iterable[str]) -> None:
    """Write the file beside the vectors at `path`."""
    lines = (json.dumps(each, ensure_ascii=False) for each in chain([facts], texts))
    write_file(beside(path), in_blocks(f"{line}\n".encode("utf-8", "surrogatepass") for line in lines))


def beside(path: Path) -> Path:
    """The file of facts and texts beside a file of vectors."""
    return path.with_name(f"{path.name}.jsonl")


@dataclass(frozen=True)
class How:
    """The options of `tformer embed` with which a query must be read as the texts were."""

    pooling: str | None = None
    normalize: bool = False
    dimensions: int | None = None
    layer: int | None = None


@dataclass(frozen=True)
class VectorOrigin:
    """The model that made vectors, the hash of its weights, and how it read texts; None: not known."""

    run: str | None = None
    sha256: str | None = None
    options: How = How()


class StoredTexts(Sequence[str]):
    """The texts beside vectors, memory-mapped: a line is decoded when it is read. Raises InputError for damaged ones.

    Attributes:
        facts: the first line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes_n = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
        self._ends_L = np.append(-1, np.flatnonzero(self._bytes_n == ord("\n")))
        self.facts: VectorOrigin = self._line(0, TypeAdapter(VectorOrigin))

    def __len__(self) -> int:
        return len(self._ends_L) - 2

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._line(index + 1, TypeAdapter(str))

    def _line(self, number: int, kind: TypeAdapter[Any]) -> Any:
        try:
            first, last = self._ends_L[number : number + 2]
            line = self._bytes_n[first + 1 : last].tobytes().decode("utf-8", "surrogatepass")
            return kind.validate_python(json.loads(line))
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            found = f"{'.'.join(map(str, wrong['loc']))}: {mistake_of(wrong)}".removeprefix(": ")
        except (ValueError, RecursionError) as error:
            found = str(error)
        raise InputError(f"{self._path}: damaged: line {number + 1}: {found}")


@dataclass(frozen=True)
class VectorIndex:
    """Vectors, their texts if these are known, and what made them.

    Attributes:
        vectors_ND: float32, float16 or int8, perhaps memory-mapped.
    """

    vectors_ND: np.ndarray
    texts: Sequence[str] | None = None
    facts: VectorOrigin = field(default_factory=VectorOrigin)
    name: str = "the index"

    @classmethod
    def open(cls, path: Path, *, texts: str | None = None) -> VectorIndex:
        """A .npy file, memory-mapped. texts: a file with one a line; None: those beside it, if there are any.

        Raises InputError for no such file, an array of another shape or type, and another number of texts.
        """
        if path.suffix.lower() != NPY:
            raise InputError(f"{path}: found {path.suffix or 'no ending'}, expected {NPY}",
                             hint=f"tformer embed --input FILE --output FILE{NPY}")  # fmt: skip
        if not path.is_file():
            raise InputError(f"{path}: no such file", hint=f"tformer embed --input FILE --output {path}")
        try:
            vectors = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OverflowError, TokenError) as error:
            found = "no array of numbers" if "pickle" in str(error) else str(error).splitlines()[0]
            raise InputError(f"{path}: damaged or not {NPY}: {found}") from None
        if vectors.ndim != 2 or vectors.dtype.name not in DTYPES or not vectors.size:
            found = f"{vectors.dtype.name} {list(vectors.shape)}"
            raise InputError(f"{path}: found {found}, expected vectors [N, D] of {' or '.join(DTYPES)}")
        stored = StoredTexts(beside(path)) if beside(path).is_file() else None
        known: Sequence[str] | None = stored
        if texts is not None:
            known = [text for block in text_blocks(texts, pairs=False, reading=Reading()) for text, _ in block]
        if known is not None and len(known) != len(vectors):
            source = beside(path) if texts is None else texts
            raise InputError(f"{source}: found {len(known):,} texts, {path} has {len(vectors):,} vectors")
        return cls(vectors, known, VectorOrigin() if stored is None else stored.facts, str(path))

    def __len__(self) -> int:
        return len(self.vectors_ND)

    @cached_property
    def _lengths_N(self) -> np.ndarray:
        """fp32 [N]: length of each vector; NaN until `_chunks` has read it."""
        return np.full(len(self), np.nan, dtype=np.float32)

    def nearest(self, queries_QD: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
        """(row numbers int64 [Q, K], cosines fp32 [Q, K]) of the `top` nearest, or of all if there are fewer.

        Equal cosines are in the order of their rows. A vector of zeros has the cosine 0 to every query. Raises
        InputError for another width, and for a number that is not finite.
        """
        width = self.vectors_ND.shape[1]
        if queries_QD.shape[1] != width:
            raise InputError(f"{self.name} has vectors of {width} numbers, the query has {queries_QD.shape[1]}",
                             hint="the model and --dimensions must be those of the index")  # fmt: skip
        queries_QD = queries_QD / np.maximum(np.linalg.norm(queries_QD, axis=1, keepdims=True), 1e-12)
        rows, cosines = np.zeros((len(queries_QD), 0), np.int64), np.zeros((len(queries_QD), 0), np.float32)
        for start, chunk_nD, lengths_n in self._chunks():
            scores_Qn = queries_QD @ chunk_nD.T / np.maximum(lengths_n, 1e-12)
            if top < len(chunk_nD):
                best = np.argpartition(-scores_Qn, top - 1, axis=1)[:, :top]
            else:
                best = np.broadcast_to(np.arange(len(chunk_nD)), scores_Qn.shape)
            rows = np.concatenate([rows, best + start], axis=1)
            cosines = np.concatenate([cosines, np.take_along_axis(scores_Qn, best, axis=1)], axis=1)
            order = np.lexsort((rows, -cosines), axis=1)[:, :top]
            rows, cosines = np.take_along_axis(rows, order, axis=1), np.take_along_axis(cosines, order, axis=1)
        return rows, cosines

    def _chunks(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(first row, fp32 vectors, their lengths) of consecutive rows; valid until the next ones."""
        size = max(1, CHUNK_BYTES // (4 * self.vectors_ND.shape[1]))
        widened = np.empty((size, self.vectors_ND.shape[1]), dtype=np.float32)  # new memory for each chunk is slow
        for start in range(0, len(self), size):
            chunk_nD, lengths_n = self.vectors_ND[start : start + size], self._lengths_N[start : start + size]
            if chunk_nD.dtype != np.float32:
                widened[: len(chunk_nD)] = chunk_nD
                chunk_nD = widened[: len(chunk_nD)]
            if np.isnan(lengths_n).any():  # measured while the chunk is in the cache
                lengths_n[:] = np.sqrt(np.einsum("nd,nd->n", chunk_nD, chunk_nD))
                if not (finite_n := np.isfinite(lengths_n)).all():
                    row = start + int(finite_n.argmin())
                    raise InputError(f"{self.name}: vector {row} has a number that is not finite, or too large")
            yield start, np.asarray(chunk_nD), lengths_n
