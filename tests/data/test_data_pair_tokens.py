"""Pairs as ids: filter, truncation, join, split."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.pair_makers import WORDS, Rows, rows_of, tokenize, words
from tformer.data.shards import token_files
from tformer.data.shards.pair_tokens import PairTokens, join_pairs, tokenize_pairs
from tformer.support.errors import InputError, Interrupted
from tformer.tokenizer import Tokenizer, TokenizerOptions, pieces, train_tokenizer
from tformer.workers.work import Work

TEXTS = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)


def shown(pairs: PairTokens, tokenizer: Tokenizer | None = None) -> list[tuple[str, str]]:
    tokenizer = tokenizer or words()
    return [
        (
            tokenizer.decode(a.source.tolist(), skip_special=False),
            tokenizer.decode(a.target.tolist(), skip_special=False),
        )
        for a in pairs.examples(0, range(len(pairs)))
    ]


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("seq2seq", ("[START] the cat [END]", "a mat [END]")),
        ("t5", ("the cat </s>", "a mat </s>")),
        ("roberta", ("<s> the cat </s>", "a mat </s>")),
    ],
)
def test_a_source_has_its_template_and_a_target_its_end(template: str, expected: tuple[str, str]) -> None:
    pairs = tokenize(rows_of([("the cat", "a mat")]), template=template)
    assert shown(pairs, words(template)) == [expected]
    assert pairs.notes == () and pairs.texts(0) == ("the cat", "a mat")


def test_lengths_are_of_the_longer_side_with_its_special_tokens() -> None:
    pairs = tokenize(rows_of([("the cat sat", "a"), ("a", "the cat sat on")]))
    assert pairs.source_lengths.tolist() == [5, 3] and pairs.target_lengths.tolist() == [2, 5]
    assert pairs.lengths.tolist() == [5, 5] == [len(each) for each in pairs.examples(0, [0, 1])]
    example = pairs.examples(3, [1])[0]
    assert example.source.dtype == example.target.dtype == np.int64, "whatever they are kept as"


def test_each_side_has_its_own_tokenizer() -> None:
    options = TokenizerOptions(model="char", vocab_size=40, template="t5")
    other = train_tokenizer(lambda: iter(["xyz" * 9]), options)
    assert other.special.eos is not None
    pairs = tokenize_pairs(
        [rows_of([("the cat", "xyz")])], words(), other, seq_len=9, target_seq_len=9, eos=other.special.eos
    )
    example = pairs.examples(0, [0])[0]
    assert words().decode(example.source.tolist()) == "the cat"
    assert example.target.tolist() == [*other.encode("xyz"), other.special.eos]


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=12))
def test_ids_are_the_tokenizers_and_texts_are_kept(pairs: list[tuple[str, str]]) -> None:
    tokenizer = words()
    tokens = tokenize(rows_of(pairs), keep_all=True)
    assert len(tokens) == len(pairs), "keep_all leaves nothing out"
    for number, ((source, target), example) in enumerate(
        zip(pairs, tokens.examples(0, range(len(pairs))), strict=True)
    ):
        assert example.source.tolist() == tokenizer.encode(source, template=True)
        assert example.target.tolist() == [*tokenizer.encode(target), tokenizer.special.eos]
        assert tokens.texts(number) == (source, target)


def test_batches_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of([(" ".join(WORDS[: n % 7]), " ".join(WORDS[n % 5 :])) for n in range(40)])
    whole = tokenize(rows)
    seen: list[tuple[int, int | None]] = []
    monkeypatch.setattr(token_files, "BATCH_CHARACTERS", 50)
    parts = tokenize(rows, work=Work(report=lambda done, total: seen.append((done, total))))
    assert len(seen) > 5 and seen[-1][0] == seen[-1][1]
    assert (parts.fingerprint, parts.notes, shown(parts)) == (whole.fingerprint, whole.notes, shown(whole))


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
@pytest.mark.parametrize("ratio", [None, 1.5])
@pytest.mark.parametrize("keep_all", [False, True])
def test_long_pairs_are_kept_and_cut_as_if_tokenized_whole(
    overlong: Any, ratio: float | None, keep_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.choice([0, 3, 9, 30, 40, 90]))) for _ in range(120)]
    rows = rows_of(list(zip(texts[:60], texts[60:], strict=True)))
    options: dict[str, Any] = {"overlong": overlong, "max_length_ratio": ratio, "keep_all": keep_all}
    whole = tokenize(rows, **options)
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr(pieces, "PIECE_LIMIT", 40)
    parts = tokenize(rows, **options)
    assert (parts.fingerprint, parts.notes, shown(parts)) == (whole.fingerprint, whole.notes, shown(whole))


def test_a_long_pair_is_refused_with_its_place_size_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 20)
    with pytest.raises(InputError, match=r"^a.tsv:2: the target has more than 16 tokens \(399 characters\), expected"):
        tokenize(rows_of([("a", "a"), ("a", " ".join(["cat"] * 100))]), overlong="refuse", keep_all=True)


def test_a_source_without_tokens_still_gives_an_encoder_something_to_read() -> None:
    pairs = tokenize(rows_of([("", "a")]), template="none", keep_all=True)
    assert len(pairs.examples(0, [0])[0].source) == 1


# -- what is left out --------------------------------------------------------------------------------------------------

MIXED = [
    ("the cat", "a mat"),
    ("", "a mat"),
    ("the cat", " "),
    ("the cat sat on a mat the cat", "a a a a"),
    ("a", "the cat sat on"),
    ("the", "a " * 7),
    ("\u3000", ""),
]


def test_pairs_that_are_empty_too_long_or_uneven_are_left_out_and_counted() -> None:
    pairs = tokenize(rows_of(MIXED), seq_len=8, target_seq_len=8, max_length_ratio=3)
    assert shown(pairs) == [("[START] the cat [END]", "a mat [END]")]
    assert pairs.notes == (
        "a.tsv: 6 of 7 pairs left out: 3 with an empty side, 1 longer than 8 tokens, 2 with a length ratio above 3",
    )
    other = tokenize(rows_of(MIXED), seq_len=8, target_seq_len=5)
    assert other.notes == ("a.tsv: 5 of 7 pairs left out: 3 with an empty side, 2 longer than 8 tokens (targets: 5)",)


def test_the_ratio_counts_no_special_tokens() -> None:
    rows = rows_of([("a", "the cat sat"), ("a", "the cat sat on")])
    assert len(tokenize(rows, max_length_ratio=3)) == 1
    assert len(tokenize(rows, max_length_ratio=4)) == 2


def test_truncation_keeps_special_tokens_and_is_noted() -> None:
    pairs = tokenize(rows_of(MIXED[3:5]), seq_len=5, target_seq_len=4, overlong="truncate")
    assert shown(pairs) == [("[START] the cat sat [END]", "a a a [END]"), ("[START] a [END]", "the cat sat [END]")]
    assert pairs.notes == ("a.tsv: 2 of 2 pairs are longer than 5 tokens (targets: 4) and were cut",)
    assert pairs.texts(0) == MIXED[3], "texts are whole"


def test_for_evaluation_nothing_is_left_out() -> None:
    pairs = tokenize(rows_of(MIXED), seq_len=8, target_seq_len=8, max_length_ratio=1, keep_all=True)
    assert len(pairs) == len(MIXED) and pairs.lengths.max() <= 8
    assert pairs.notes == ("a.tsv: 1 of 7 pairs are longer than 8 tokens and were cut",)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=12), st.integers(3, 9), st.integers(2, 9))
def test_kept_pairs_fit_and_every_pair_is_counted(
    pairs: list[tuple[str, str]], seq_len: int, target_seq_len: int
) -> None:
    rows = rows_of([*pairs, ("a", "a")])
    tokens = tokenize(rows, seq_len=seq_len, target_seq_len=target_seq_len, max_length_ratio=2)
    assert tokens.source_lengths.max() <= seq_len and tokens.target_lengths.max() <= target_seq_len
    bare = np.stack([tokens.source_lengths - 2, tokens.target_lengths - 1])
    assert (bare > 0).all() and (bare.max(0) <= 2 * bare.min(0)).all()
    dropped = len(pairs) + 1 - len(tokens)
    assert (f"{dropped} of {len(pairs) + 1} pairs left out" in "".join(tokens.notes)) == bool(dropped)


def test_the_error_for_no_pair_left_gives_the_reasons() -> None:
    with pytest.raises(InputError, match=r"a\.tsv: none of 2 pairs is left: 2 with an empty side"):
        tokenize(rows_of([("", "a"), ("a", "")]))
    with pytest.raises(InputError, match=r"a\.tsv: no rows"):
        tokenize(Rows(()))
    with pytest.raises(InputError, match=r"data\.seq_len: 2 tokens leave no room for text beside 2 special tokens"):
        tokenize(rows_of([("a", "a")]), seq_len=2)
    with pytest.raises(InputError, match=r"data\.target_seq_len: 1 tokens leave no room"):
        tokenize(rows_of([("a", "a")]), target_seq_len=1)


def test_it_can_be_interrupted() -> None:
    with pytest.raises(Interrupted, match=r"a\.tsv"):
        tokenize(rows_of([("a", "a")]), work=Work(should_stop=lambda: True))


# -- sets --------------------------------------------------------------------------------------------------------------


def test_a_subset_has_its_own_texts_and_fingerprint() -> None:
    pairs = tokenize(rows_of([(word, f"{word} a") for word in WORDS]))
    part = pairs.subset([5, 1])
    assert (len(part), part.texts(0), part.lengths.tolist()) == (2, ("mat", "mat a"), [3, 3])
    assert shown(part) == [shown(pairs)[5], shown(pairs)[1]]
    assert len({pairs.fingerprint, part.fingerprint, pairs.subset([1, 5]).fingerprint}) == 3
    assert part.subset([1]).texts(0) == ("cat", "cat a")


def test_joined_sets_are_one_after_the_other_with_tasks_of_one_name_as_one() -> None:
    one = tokenize(rows_of([("the cat", "sat"), ("a", "mat on")], task="x", name="x.tsv"))
    two = tokenize(rows_of([("mat", "a"), ("", "a")], task="y", name="y.tsv"))
    joined = join_pairs([one.subset([1, 0]), two, one.subset([1])])
    assert shown(joined) == [shown(one)[1], shown(one)[0], *shown(two), shown(one)[1]]
    assert [joined.texts(n)[0] for n in range(4)] == ["a", "the cat", "mat", "a"]
    assert [joined.tasks[each.task] for each in joined.examples(0, range(4))] == ["x", "x", "y", "x"]
    assert joined.name == "x.tsv, y.tsv" and joined.notes == two.notes
    assert join_pairs([one]) is one


def test_named_tasks_have_the_same_numbers_in_every_set() -> None:
    rows = rows_of([("a", "a")], task="y")
    assert tokenize(rows, tasks=("x", "y", "x")).examples(0, [0])[0].task == 1
    both = tokenize([rows, rows_of([("a", "mat")], task="x", name="b.tsv")])
    assert both.tasks == ("y", "x") and [each.task for each in both.examples(0, [0, 1])] == [0, 1]


def test_fingerprint_follows_what_changes_the_examples() -> None:
    rows = rows_of([("the cat", "sat")])
    prints = {
        tokenize(rows).fingerprint,
        tokenize(rows, seq_len=8).fingerprint,
        tokenize(rows, target_seq_len=8).fingerprint,
        tokenize(rows, overlong="truncate").fingerprint,
        tokenize(rows, max_length_ratio=9).fingerprint,
        tokenize(rows, template="t5").fingerprint,
        tokenize(rows_of([("the mat", "sat")])).fingerprint,
    }
    assert len(prints) == 7


# -- the fixed split ---------------------------------------------------------------------------------------------------


def sources_of(pairs: PairTokens) -> list[str]:
    return [pairs.texts(index)[0] for index in range(len(pairs))]


@given(
    st.lists(TEXTS.filter(bool), min_size=2, max_size=40).filter(lambda texts: len(set(texts)) > 1),
    st.floats(0.01, 0.49),
)
def test_equal_sources_fall_on_one_side_and_both_have_some(texts: list[str], fraction: float) -> None:
    pairs = tokenize(rows_of([(text, "a") for text in texts]))
    kept, held_out = (sources_of(part) for part in pairs.split(fraction=fraction))
    assert kept and held_out and not set(kept) & set(held_out)
    assert kept == [text for text in texts if text in kept] and held_out == [text for text in texts if text in held_out]
    assert sorted(kept + held_out) == sorted(texts)
    assert [part.fingerprint for part in pairs.split(fraction=fraction)] == [
        part.fingerprint for part in pairs.split(fraction=fraction)
    ]


def test_the_split_is_near_the_fraction_and_mixed() -> None:
    texts = [" ".join(WORDS[int(digit)] for digit in f"{n:04}" if digit < "6") + " the" * (n % 3) for n in range(900)]
    texts = list(dict.fromkeys(texts))
    pairs = tokenize(rows_of([(text, "a") for text in texts]))
    held_out = sources_of(pairs.split(fraction=0.1)[1])
    places = np.array([texts.index(text) for text in held_out])
    assert len(held_out) == round(0.1 * len(texts)) and 0.3 < places.mean() / len(texts) < 0.7
    turned = pairs.subset(np.arange(len(texts))[::-1]).split(fraction=0.1)[1]
    assert sources_of(turned)[::-1] == held_out, "by the texts, not by their places"


def test_one_source_alone_cannot_be_split() -> None:
    with pytest.raises(InputError, match="2 pairs with 1 different source are too few"):
        tokenize(rows_of([("a", "a"), ("a", "mat")])).split(fraction=0.1)


def test_refused_pairs_are_named_with_place_and_numbers() -> None:
    rows = rows_of([("the cat", "a"), ("the cat sat", "a mat"), ("the cat", "the cat sat on a mat")])
    assert len(tokenize(rows, seq_len=5, target_seq_len=7, overlong="refuse")) == 3
    for limits, told in (
        ((4, 7), "a.tsv:2: the source has 5 tokens, expected at most 4"),
        ((5, 6), "a.tsv:3: the target has 7 tokens, expected at most 6"),
    ):
        with pytest.raises(InputError, match=told):
            tokenize(rows, seq_len=limits[0], target_seq_len=limits[1], overlong="refuse", keep_all=True)


def test_several_named_tasks_can_be_selected() -> None:
    one, other = rows_of([("the cat", "a")] * 3, task="x"), rows_of([("a mat", "a")] * 2, task="y")
    pairs = tokenize([one, other, rows_of([("the", "a")])])
    assert pairs.named_tasks == ("x", "y") and pairs.of_task("y").tolist() == [3, 4]
    assert pairs.subset([0, 5]).named_tasks == () and tokenize(one).named_tasks == ()
