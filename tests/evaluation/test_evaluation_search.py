"""Vector indexes: exact search over chunks, int8, and files that appear whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tformer.evaluation import search
from tformer.evaluation.search import VectorIndex, VectorOrigin, to_int8, write_texts, write_vectors
from tformer.support.errors import InputError

RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(300, 16)).astype(np.float32)
QUERIES = RNG.normal(size=(5, 16)).astype(np.float32)


def cosines_of(queries: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    queries, vectors = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, vectors.astype(np.float64)))
    return queries @ vectors.T


@pytest.mark.parametrize("top", [1, 7, 300, 1000])
@pytest.mark.parametrize("rows_of_a_chunk", [1, 64, 1000])
def test_the_search_is_exact(top: int, rows_of_a_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CHUNK_BYTES", 4 * 16 * rows_of_a_chunk)
    rows, cosines = VectorIndex(VECTORS).nearest(QUERIES, top)
    expected = cosines_of(QUERIES, VECTORS)
    order = np.argsort(-expected, axis=1)[:, :top]
    assert np.array_equal(rows, order)
    np.testing.assert_allclose(cosines, np.take_along_axis(expected, order, axis=1), atol=1e-6)


def test_int8_keeps_cosines_and_no_scales() -> None:
    scaled = VECTORS * RNG.uniform(0.01, 100, size=(300, 1)).astype(np.float32)
    quantized = to_int8(scaled)
    assert quantized.dtype == np.int8 and np.array_equal(np.abs(quantized).max(axis=1), np.full(300, 127))
    error = np.abs(cosines_of(QUERIES, quantized) - cosines_of(QUERIES, VECTORS)).max()
    assert error < 0.01
    _, cosines = VectorIndex(quantized).nearest(QUERIES, 3)
    np.testing.assert_allclose(cosines, np.sort(cosines_of(QUERIES, quantized))[:, :-4:-1], atol=1e-6)


def test_int8_finds_what_float32_finds() -> None:
    """Of the 10 nearest of random vectors, whose cosines are as close as any, 95 % are found."""
    vectors, queries = RNG.normal(size=(20_000, 64)).astype(np.float32), RNG.normal(size=(50, 64)).astype(np.float32)
    exact, found = (VectorIndex(each).nearest(queries, 10)[0] for each in (vectors, to_int8(vectors)))
    assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(exact.tolist(), found.tolist(), strict=True)]) > 0.95


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_second_search_finds_the_same(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CHUNK_BYTES", 4 * 16 * 64)
    index = VectorIndex(to_int8(VECTORS) if dtype == "int8" else VECTORS.astype(dtype))
    (rows, cosines), (again, same) = index.nearest(QUERIES, 5), index.nearest(QUERIES, 5)
    assert np.array_equal(rows, again) and np.array_equal(cosines, same)


def test_a_vector_of_zeros_is_near_nothing() -> None:
    vectors = np.zeros((2, 4), np.float32)
    vectors[1, 0] = 1
    rows, cosines = VectorIndex(vectors).nearest(np.eye(4, dtype=np.float32)[:1], 2)
    assert rows.tolist() == [[1, 0]] and cosines.tolist() == [[1.0, 0.0]]
    assert not to_int8(vectors[:1]).any()


def test_a_written_index_is_mapped_and_has_its_texts(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    write_vectors(path, np.array_split(VECTORS, 7), count=300, width=16, dtype="float32")
    texts = [f"{number}\u2028é\n" for number in range(300)]
    write_texts(path, {"run": "r"}, texts)
    index = VectorIndex.open(path)
    assert isinstance(index.vectors_ND, np.memmap) and np.array_equal(index.vectors_ND, VECTORS)
    assert list(index.texts or ()) == texts and index.facts == VectorOrigin(run="r")


def test_an_input_that_changed_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    path.write_bytes(b"before")
    with pytest.raises(InputError, match="found 300 texts after 299: the input changed"):
        write_vectors(path, [VECTORS], count=299, width=16, dtype="float32")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_an_index_that_cannot_be_finished_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    path.write_bytes(b"before")

    def failing():
        yield VECTORS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_vectors(path, failing(), count=600, width=16, dtype="int8")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
