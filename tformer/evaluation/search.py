"""Vectors of texts in a .npy file, and the search for those nearest to a query: exact cosines, memory-mapped.

Beside NAME.npy stands NAME.npy.jsonl: a line on the model that made the vectors, then the text of each vector as a JSON
string, one a line. A cosine does not depend on the lengths of vectors, so vectors of int8 need no scales.

Shapes: N vectors, Q queries, D width, K found.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tformer.data.sources.reading import Reading
from tformer.decoding.lines import text_blocks
from tformer.evaluation.vector_options import NPY
from tformer.support.errors import InputError
from tformer.support.files import write_file

CHUNK_BYTES = 1 << 22  # of fp32 numbers, which fit into the cache of a processor
DTYPES = ("float32", "float16", "int8")


def to_int8(vectors_ND: np.ndarray) -> np.ndarray:
    """int8 [N, D]: each vector times 127 / max |x|, rounded: each number is off by at most max |x| / 254."""
    largest_N1 = np.abs(vectors_ND).max(axis=1, keepdims=True)
    return np.rint(vectors_ND * (127 / np.where(largest_N1 > 0, largest_N1, 1))).astype(np.int8)


def write_vectors(path: Path, blocks: Iterable[np.ndarray], *, count: int, width: int, dtype: str) -> None:
    """Write blocks of fp32 vectors, `count` in all, as a .npy file that appears whole. StorageError: no room."""
    header = io.BytesIO()
    shape = {"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(header, shape)

    def chunks() -> Iterator[bytes]:
        yield header.getvalue()
        for block_ND in blocks:
            yield (to_int8(block_ND) if dtype == "int8" else np.ascontiguousarray(block_ND, dtype="<f4")).tobytes()

    write_file(path, chunks())


def write_texts(path: Path, facts: Mapping[str, Any], texts: Iterable[str]) -> None:
    """Write the file beside the vectors at `path`."""
    lines = (json.dumps(each, ensure_ascii=False) for each in (facts, *texts))
    write_file(beside(path), (f"{line}\n".encode("utf-8", "surrogatepass") for line in lines))


def beside(path: Path) -> Path:
    """The file of facts and texts beside a file of vectors."""
    return path.with_name(f"{path.name}.jsonl")


@dataclass(frozen=True)
class VectorIndex:
    """Vectors, their texts if these are known, and what made them.

    Attributes:
        vectors_ND: float32, float16 or int8, perhaps memory-mapped.
        facts: `run`, `sha256` of its weights, and the `options` of the vectors; {}: unknown.
    """

    vectors_ND: np.ndarray
    texts: Sequence[str] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
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
        except (ValueError, EOFError) as error:
            raise InputError(f"{path}: damaged or not {NPY}: {str(error).splitlines()[0]}") from None
        if vectors.ndim != 2 or vectors.dtype.name not in DTYPES or not vectors.size:
            found = f"{vectors.dtype.name} {list(vectors.shape)}"
            raise InputError(f"{path}: found {found}, expected vectors [N, D] of {' or '.join(DTYPES)}")
        facts, known = _read_texts(beside(path))
        if texts is not None:
            known = [text for block in text_blocks(texts, pairs=False, reading=Reading()) for text, _ in block]
        if known is not None and len(known) != len(vectors):
            source = beside(path) if texts is None else texts
            raise InputError(f"{source}: found {len(known):,} texts, {path} has {len(vectors):,} vectors")
        return cls(vectors, known, facts, str(path))

    def __len__(self) -> int:
        return len(self.vectors_ND)

    @cached_property
    def lengths_N(self) -> np.ndarray:
        """fp32 [N]: length of each vector. Raises InputError for a number that is not finite."""
        lengths_N = np.concatenate([np.linalg.norm(chunk, axis=1) for _, chunk in self._chunks()])
        if not (finite_N := np.isfinite(lengths_N)).all():
            raise InputError(f"{self.name}: vector {int(finite_N.argmin())} has a number that is not finite")
        return lengths_N

    def nearest(self, queries_QD: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
        """(row numbers int64 [Q, K], cosines fp32 [Q, K]) of the `top` nearest, or of all if there are fewer.

        Equal cosines are in the order of their rows. A vector of zeros has the cosine 0 to every query.
        """
        width = self.vectors_ND.shape[1]
        if queries_QD.shape[1] != width:
            raise InputError(f"{self.name} has vectors of {width} numbers, the query has {queries_QD.shape[1]}",
                             hint="the model and --dimensions must be those of the index")  # fmt: skip
        queries_QD = queries_QD / np.maximum(np.linalg.norm(queries_QD, axis=1, keepdims=True), 1e-12)
        lengths_N = np.maximum(self.lengths_N, 1e-12)
        rows, cosines = np.zeros((len(queries_QD), 0), np.int64), np.zeros((len(queries_QD), 0), np.float32)
        for start, chunk_nD in self._chunks():
            scores_Qn = queries_QD @ chunk_nD.T / lengths_N[start : start + len(chunk_nD)]
            if top < len(chunk_nD):
                best = np.argpartition(-scores_Qn, top - 1, axis=1)[:, :top]
            else:
                best = np.broadcast_to(np.arange(len(chunk_nD)), scores_Qn.shape)
            rows = np.concatenate([rows, best + start], axis=1)
            cosines = np.concatenate([cosines, np.take_along_axis(scores_Qn, best, axis=1)], axis=1)
            order = np.lexsort((rows, -cosines), axis=1)[:, :top]
            rows, cosines = np.take_along_axis(rows, order, axis=1), np.take_along_axis(cosines, order, axis=1)
        return rows, cosines

    def _chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, fp32 vectors) of consecutive rows."""
        size = max(1, CHUNK_BYTES // (4 * self.vectors_ND.shape[1]))
        for start in range(0, len(self), size):
            yield start, np.asarray(self.vectors_ND[start : start + size], dtype=np.float32)


def _read_texts(path: Path) -> tuple[dict[str, Any], list[str] | None]:
    """(facts, texts) of the file beside vectors; ({}, None) where there is none."""
    if not path.is_file():
        return {}, None
    try:
        facts, *texts = [json.loads(line) for line in path.read_text("utf-8", "surrogatepass").split("\n") if line]
    except ValueError as error:
        raise InputError(f"{path}: damaged: {error}") from None
    if not isinstance(facts, dict) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{path}: damaged: expected an object in line 1 and a text in each other line")
    return facts, texts
