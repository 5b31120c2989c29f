"""Entities and their strict F1 against seqeval and its formula; the best allowed tags against all sequences."""

from __future__ import annotations

from dataclasses import astuple
from itertools import product
from typing import Any

import numpy as np
import pytest

from tformer.metrics.classification import ClassScores
from tformer.metrics.tags import Scheme, allowed, best_path, entities, entity_counts, scheme_of

BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
BILOU = ("O", "B-PER", "I-PER", "L-PER", "U-PER", "B-LOC", "I-LOC", "L-LOC", "U-LOC")


def drawn(names: tuple[str, ...], count: int, seed: int) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    return [list(rng.choice(names, size=size)) for size in rng.integers(0, 9, count)]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("O I-PER O", []),  # seqeval's default says PER, its strict mode nothing
        ("B-PER I-LOC", [("PER", 0, 1)]),
        ("B-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),
    ],
)
def test_entities_of_bio_are_strict(tags: str, expected: list[Any]) -> None:
    assert entities(tags.split(), "bio") == expected


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-PER L-PER U-LOC", [("PER", 0, 2), ("LOC", 2, 3)]),
        ("B-PER I-PER O", []),  # it never ends
        ("B-PER L-LOC", []),
        ("B-PER E-PER S-LOC", [("PER", 0, 2), ("LOC", 2, 3)]),  # BIOES
        ("B-PER L-PER L-PER", [("PER", 0, 2)]),
    ],
)
def test_entities_of_bilou_are_strict(tags: str, expected: list[Any]) -> None:
    assert entities(tags.split(), "bilou") == expected


def regular_expression_entities(tags: list[str], scheme: Scheme) -> set[tuple[str, int, int]]:
    """Every span that has the form of an entity and cannot go on: a second definition."""
    found = set()
    for start in range(len(tags)):
        for stop in range(start + 1, len(tags) + 1):
            kinds = {tag[2:] for tag in tags[start:stop]}
            shape = "".join(tag[0] for tag in tags[start:stop])
            if "O" in shape or len(kinds) != 1:
                continue
            [kind] = kinds
            goes_on = stop < len(tags) and tags[stop] == f"I-{kind}"
            if scheme == "bio" and shape == "B" + "I" * (len(shape) - 1) and not goes_on:
                found.add((kind, start, stop))
            if scheme == "bilou" and (shape == "U" or shape == "B" + "I" * (len(shape) - 2) + "L"):
                found.add((kind, start, stop))
    return found


@pytest.mark.parametrize(("names", "scheme"), [(BIO, "bio"), (BILOU, "bilou")])
def test_entities_are_those_of_a_second_definition(names: tuple[str, ...], scheme: Scheme) -> None:
    for tags in drawn(names, 2000, 1):
        assert set(entities(tags, scheme)) == regular_expression_entities(tags, scheme), tags


SEQEVAL = {  # precision, recall, F1 and support of seqeval 1.2.2, mode strict, schemes IOB2 and BILOU
    "bio": {"LOC": (0.679245, 0.712871, 0.695652, 303), "PER": (0.705696, 0.652047, 0.677812, 342),
            "micro avg": (0.692429, 0.680620, 0.686474, 645)},
    "bilou": {"LOC": (0.722772, 0.722772, 0.722772, 202), "PER": (0.606218, 0.615789, 0.610966, 190),
              "micro avg": (0.665823, 0.670918, 0.668361, 392)},
}  # fmt: skip


@pytest.mark.parametrize(("names", "scheme"), [(BIO, "bio"), (BILOU, "bilou")])
def test_scores_are_those_of_seqeval_in_strict_mode(names: tuple[str, ...], scheme: Scheme) -> None:
    labels, rng = drawn(names, 400, 2), np.random.default_rng(3)
    guesses = [[str(rng.choice(names)) if rng.random() < 0.3 else tag for tag in tags] for tags in labels]
    counts_N3, found = entity_counts(*([entities(tags, scheme) for tags in side] for side in (labels, guesses)))
    found["micro avg"] = ClassScores.of(*counts_N3.sum(axis=0).tolist())
    for kind, expected in SEQEVAL[scheme].items():
        assert astuple(found[kind]) == pytest.approx(expected, abs=1e-6), kind


def test_counts_are_of_each_sentence() -> None:
    counts_N3, of_type = entity_counts([[("A", 0, 1)], []], [[("A", 0, 1), ("B", 2, 3)], [("B", 0, 1)]])
    assert counts_N3.tolist() == [[1, 2, 1], [0, 1, 0]]
    assert of_type["A"].f1 == 1 and of_type["B"].f1 == 0 and of_type["B"].support == 0


def test_schemes_are_told_by_their_tags() -> None:
    assert scheme_of(BIO) == "bio" and scheme_of(BILOU) == "bilou" and scheme_of(["O", "S-X", "B-X"]) == "bilou"
    assert scheme_of(["DET", "NOUN"]) == scheme_of(["O", "B-X", "NOUN"]) == scheme_of(["O"]) == "plain"


@pytest.mark.parametrize(("names", "scheme"), [(BIO, "bio"), (BILOU[:5], "bilou")])
def test_the_best_path_is_the_best_of_all_allowed_ones(names: tuple[str, ...], scheme: Scheme) -> None:
    rng, allowed_LL, border = np.random.default_rng(4), allowed(names), len(names)
    for words in (1, 2, 4):
        scores_WL = rng.normal(size=(words, len(names)))
        best = max(
            (sum(scores_WL[word, tag] for word, tag in enumerate(path)), path)
            for path in product(range(len(names)), repeat=words)
            if all(allowed_LL[a, b] for a, b in zip((border, *path), (*path, border), strict=True))
        )
        assert best_path(scores_WL, allowed_LL).tolist() == list(best[1])
    assert best_path(np.zeros((0, len(names))), allowed_LL).tolist() == []


def test_a_path_is_found_where_none_is_allowed() -> None:
    assert best_path(np.zeros((1, 1)), allowed(("I-PER",))).tolist() == [0]
