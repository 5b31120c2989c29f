"""Tables of vectors, their neighbours and components, against brute force and numpy's singular value decomposition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.viz.attention_models import DECODER, ENCODER, IMAGES, SEQ2SEQ, load_of
from tformer.inside.embeddings import embedding_report, nearest, tables_of
from tformer.inside.options import EMBEDDING_TABLES, EmbeddingOptions
from tformer.support.errors import InputError, NotFiniteError

DRAW = np.random.default_rng(7)
LABELS = ENCODER.replace("{kind: masked_lm}", "{kind: classifier}") + "data: {labels: [good, bad, ugly]}\n"
UNTIED = SEQ2SEQ.replace("source_target: true, output: true", "source_target: false, output: false")


def cosine(u: np.ndarray, v: np.ndarray) -> float:
    return float(u @ v / (np.linalg.norm(u) * np.linalg.norm(v)))


@pytest.mark.parametrize("centred", [False, True])
def test_neighbours_are_those_of_brute_force(centred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of two rows, too: all cosines of the whole table, sorted."""
    monkeypatch.setattr("tformer.inside.embeddings.CHUNK_ELEMENTS", 2 * 30)
    vectors = (DRAW.normal(size=(30, 5)) + 1).astype(np.float32)
    rows = vectors.astype(float) - (vectors.mean(axis=0, dtype=float) if centred else 0)
    places, cosines = nearest(vectors, [3, 0, 29, 3, 8], 6, centred=centred)
    for row, near, values in zip([3, 0, 29, 3, 8], places, cosines, strict=True):
        every = {other: cosine(rows[row], rows[other]) for other in range(30) if other != row}
        expected = sorted(every, key=lambda other: -every[other])[:6]
        assert near.tolist() == expected
        np.testing.assert_allclose(values, [every[other] for other in expected], atol=1e-6)


def test_few_rows_zeros_and_huge_vectors() -> None:
    vectors = np.array([[1, 0], [0, 0], [3e38, 3e38]], dtype=np.float32)
    places, cosines = nearest(vectors, [0], 10, centred=False)
    assert places.tolist() == [[2, 1]] and cosines[0].tolist() == pytest.approx([0.5**0.5, 0])
    assert [each.shape for each in nearest(vectors, [], 10, centred=False)] == [(0, 2), (0, 2)]


def test_each_family_has_its_tables() -> None:
    assert list(tables_of(load_of(DECODER))) == ["tokens"]
    assert list(tables_of(load_of(DECODER.replace("  heads:", "  tie: {output: false}\n  heads:")))) == [
        "tokens",
        "output",
    ]
    assert list(tables_of(load_of(ENCODER))) == ["tokens"]
    assert list(tables_of(load_of(SEQ2SEQ))) == ["tokens"]
    both = tables_of(load_of(UNTIED))
    assert list(both) == ["tokens", "target", "output"]
    assert list(tables_of(load_of(LABELS))) == ["tokens", "labels"]
    assert list(tables_of(load_of(IMAGES))) == ["labels"]
    assert set(EMBEDDING_TABLES) == {*both, "labels"}


def test_a_report_has_the_rows_with_their_names() -> None:
    loaded = load_of(DECODER)
    model: Any = loaded.model
    report = embedding_report(loaded, EmbeddingOptions(token=("the", "a"), top_k=4))
    vectors = model.embedding.weight.detach().numpy()
    np.testing.assert_array_equal(report.vectors, vectors)
    tokenizer = loaded.text_tokenizer
    assert tokenizer.vocab_size == len(report.names) == len(vectors)
    assert [report.names[place] for place in report.asked] == ["the", "a"]
    np.testing.assert_array_equal(report.neighbours, nearest(vectors, report.asked, 4, centred=False)[0])
    centred = vectors - vectors.mean(0, dtype=float)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(np.abs(report.coordinates), np.abs(left * scale)[:, :3], atol=1e-8)
    np.testing.assert_allclose(report.explained, (scale**2 / (scale**2).sum())[:3], atol=1e-12)
    report.vectors[:] = 0
    assert model.embedding.weight.abs().sum() > 0


def test_components_are_of_the_chosen_rows_and_neighbours_of_all() -> None:
    loaded = load_of(DECODER)
    report = embedding_report(loaded, EmbeddingOptions(tokens="a,the,e,a", token=("r",)))
    assert [report.names[place] for place in report.shown] == ["a", "the", "e"]
    assert np.abs(report.coordinates.mean(axis=0)).max() < 1e-9
    assert len(set(report.neighbours[0].tolist())) == 10 and not set(report.neighbours[0].tolist()) <= {*report.shown}


def test_rows_without_a_token_are_left_out() -> None:
    """Imported tables may have more rows than the vocabulary has tokens."""
    loaded = load_of(DECODER)
    model: Any = loaded.model
    model.embedding.weight = torch.nn.Parameter(torch.cat([model.embedding.weight.detach(), torch.full((5, 16), 1e6)]))
    report = embedding_report(loaded, EmbeddingOptions())
    assert len(report.vectors) == loaded.text_tokenizer.vocab_size and np.abs(report.vectors).max() < 1e6


def test_labels_have_their_names() -> None:
    loaded = load_of(LABELS)
    model: Any = loaded.model
    report = embedding_report(loaded, EmbeddingOptions(table="labels", token=("bad",), centred=True))
    np.testing.assert_array_equal(report.vectors, model.heads["classifier"].project.weight.detach())
    assert report.names.tolist() == ["good", "bad", "ugly"] and report.neighbours.shape == (1, 2) and report.centred


def test_fixnorm_rows_have_the_length_that_the_model_reads() -> None:
    loaded = load_of(DECODER.replace("max_seq_len: 32", "max_seq_len: 32\n  embedding: {fixnorm: true}"))
    report = embedding_report(loaded, EmbeddingOptions())
    np.testing.assert_allclose(np.linalg.norm(report.vectors, axis=1), 1, atol=1e-6)


def test_vectors_that_are_not_finite_are_refused() -> None:
    loaded = load_of(DECODER)
    model: Any = loaded.model
    with torch.no_grad():
        model.embedding.weight[3, 0] = torch.nan
    with pytest.raises(NotFiniteError, match="vectors of the table 'tokens' are not numbers"):
        embedding_report(loaded, EmbeddingOptions())


def test_a_model_without_any_table_is_refused() -> None:
    images = IMAGES.replace("{kind: classifier, pooler: false}", "{kind: regression}")
    images = images.replace("labels: [a, b], ", "")
    with pytest.raises(InputError, match="it reads no tokens") as refused:
        embedding_report(load_of(images), EmbeddingOptions())
    assert refused.value.hint == "it has: none"
