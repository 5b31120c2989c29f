"""Tags of words: entities by BIO, BILOU or plain tags, their strict F1, and the best sequence of allowed tags.

    BIO     B-PER begins an entity, I-PER goes on with it, O is outside (IOB2)
    BILOU   B-, I- and L- begin, go on with and end an entity of several words, U- is one of one word (BIOES: E-, S-)
    plain   every tag is a class, as parts of speech are; each word with a tag is an entity

An entity is right if type, first and last word are (seqeval's mode "strict"): an I- that follows nothing of its type is
no entity, nor is one of BILOU that never ends.

Shapes: N sentences, W words, L tags.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from tformer.metrics.classification import ClassScores

Scheme = Literal["bio", "bilou", "plain"]
Entity = tuple[str, int, int]
"""Type, first word, and the one after the last."""

OUTSIDE = "O"
SAME_PREFIX = {"E": "L", "S": "U"}  # of BIOES, by the letters of BILOU
FORBIDDEN = -1e9  # log-probability of a transition that is not allowed


def split_tag(tag: str | None) -> tuple[str, str]:
    """(prefix, type): B-PER is B and PER, a missing tag and O are O and nothing; the prefix of other tags is empty."""
    if tag is None or tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, _, kind = tag.partition("-")
    prefix = SAME_PREFIX.get(prefix, prefix)
    return (prefix, kind) if kind and prefix in ("B", "I", "L", "U") else ("", tag)


def scheme_of(tags: Collection[str]) -> Scheme:
    """The scheme in which these are all tags."""
    prefixes = {split_tag(tag)[0] for tag in tags} - {OUTSIDE}
    if not prefixes or "" in prefixes:
        return "plain"
    return "bio" if prefixes <= {"B", "I"} else "bilou"


def may_follow(before: str | None, tag: str | None, scheme: Scheme) -> bool:
    """Whether a tag may stand behind another one; the border of a sentence counts as O."""
    (last, last_kind), (prefix, kind) = split_tag(before), split_tag(tag)
    goes_on = prefix in ("I", "L") and last in ("B", "I") and last_kind == kind
    if scheme == "bilou":
        return goes_on or (prefix not in ("I", "L") and last not in ("B", "I"))
    return scheme == "plain" or goes_on or prefix != "I"


def entities(tags: Sequence[str | None], scheme: Scheme) -> list[Entity]:
    """The entities of a sentence in order. None: a word that got no tag."""
    if scheme == "plain":
        return [(tag, word, word + 1) for word, tag in enumerate(tags) if tag is not None]
    found, parts = list[Entity](), [split_tag(tag) for tag in tags]
    for start, (prefix, kind) in enumerate(parts):
        if prefix in ("B", "U"):
            stop = start + 1
            while stop < len(parts) and parts[stop - 1][0] in ("B", "I") and parts[stop] in (("I", kind), ("L", kind)):
                stop += 1
            if scheme == "bio" or parts[stop - 1][0] in ("L", "U"):
                found.append((kind, start, stop))
    return found


def entity_counts(
    labels: Sequence[Sequence[Entity]], guesses: Sequence[Sequence[Entity]]
) -> tuple[np.ndarray, dict[str, ClassScores]]:
    """(int64 [N, 3]: right, found and there in each sentence; the scores of each type in order)."""
    rows = [(set(right) & set(given), given, right) for right, given in zip(labels, guesses, strict=True)]
    counters = [Counter(kind for row in rows for kind, _, _ in row[part]) for part in range(3)]
    kinds = sorted(set().union(*counters))
    counts_N3 = np.array([[len(part) for part in row] for row in rows], dtype=np.int64).reshape(-1, 3)
    return counts_N3, {kind: ClassScores.of(*(counter[kind] for counter in counters)) for kind in kinds}


@lru_cache(maxsize=8)
def allowed(names: tuple[str, ...]) -> np.ndarray:
    """bool [L + 1, L + 1]: whether a column's tag may follow a row's; the last is the border of a sentence."""
    tags, scheme = (*names, None), scheme_of(names)
    return np.array([[may_follow(before, tag, scheme) for tag in tags] for before in tags])


def best_path(scores_WL: np.ndarray, allowed_LL: np.ndarray) -> np.ndarray:
    """int64 [W]: the tags with the highest sum of scores among allowed sequences (Viterbi 1967).

    Where no sequence is allowed, it is one with the fewest forbidden steps.
    """
    step_LL = np.where(allowed_LL, 0.0, FORBIDDEN)
    total_L, back = step_LL[-1, :-1], list[np.ndarray]()  # back: the best tag before each tag of a word
    for word, scores_L in enumerate(scores_WL):
        if word:
            reached_LL = total_L[:, None] + step_LL[:-1, :-1]
            back.append(reached_LL.argmax(axis=0))
            total_L = reached_LL.max(axis=0)
        total_L = total_L + scores_L
    path = [int((total_L + step_LL[:-1, -1]).argmax())]
    for from_L in reversed(back):
        path.append(int(from_L[path[-1]]))
    return np.array(path[::-1][: len(scores_WL)], dtype=np.int64)
