"""Labelled texts as ids: templates, truncation, labels, held-out part."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.pair_makers import WORDS, Rows, words
from tformer.data.shards import token_files
from tformer.data.shards.labelled_tokens import LabelledTokens, tokenize_labelled
from tformer.data.shards.template import TextTemplate, assemble, pair_template, single_template
from tformer.data.sources.labelled import FEW_CLASSES, LabelIndex, stratified_split
from tformer.data.sources.tables import LabelledRow
from tformer.support.errors import InputError, Interrupted
from tformer.tokenizer import Tokenizer, TokenizerOptions, pieces, train_tokenizer
from tformer.tokenizer.pieces import Truncation
from tformer.workers.work import Work

MODELS = ["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"]
BERT = TextTemplate((100,), (101,), (101,), (0,), (0,), (1,), second_type=1)
ONE = TextTemplate((100,), (), (101,), (0,), (), (0,), second_type=0)


@cache
def make(model: str, template: str) -> Tokenizer:
    options = TokenizerOptions(model=model, vocab_size=400, template=template)  # type: ignore[arg-type]
    return train_tokenizer(lambda: iter(["the cat sat on a mat\n" * 9]), options)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["bert", "roberta", "t5", "seq2seq"])
def test_putting_the_template_around_equals_the_tokenizers_own(model: str, name: str) -> None:
    tokenizer = make(model, name)
    texts = ["the cat", "sat on a"]
    ids, _, lengths, cut = assemble(
        tokenizer.encode_batch(texts), single_template(tokenizer), room=60, pairs=False, truncation="head"
    )
    assert ids.tolist() == [token for text in texts for token in tokenizer.encode(text, template=True)]
    assert lengths.tolist() == [len(tokenizer.encode(text, template=True)) for text in texts] and not cut
    for pair in (texts, ["", "a"], ["a", ""], ["", ""]):
        ids, types, _, _ = assemble(
            tokenizer.encode_batch(pair), pair_template(tokenizer), room=60, pairs=True, truncation="head"
        )
        assert (ids.tolist(), types.tolist()) == tokenizer.encode_pair(*pair)


def test_token_types_tell_texts_apart_only_where_the_template_does() -> None:
    assert pair_template(make("word", "bert")).second_type == 1
    assert pair_template(make("word", "roberta")).second_type == 0


@pytest.mark.parametrize("model", MODELS)
def test_without_a_template_texts_end_or_are_parted(model: str) -> None:
    gpt = make(model, "gpt")
    assert single_template(gpt).suffix == (gpt.special.eos,) == pair_template(gpt).middle == pair_template(gpt).suffix
    none = make(model, "none")
    assert single_template(none).num_special == 0
    assert pair_template(none).middle and pair_template(none).second_type == 1


def trim_as_bert_does(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    first, second = list(first), list(second)
    while len(first) + len(second) > room:
        (first if len(first) > len(second) else second).pop()
    return first, second


@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6), room=st.integers(2, 20)
)
def test_pairs_are_cut_as_bert_cuts_them(sizes: list[tuple[int, int]], room: int) -> None:
    texts = [list(range(start, start + size)) for pair in sizes for start, size in zip((0, 50), pair, strict=True)]
    ids, types, lengths, cut = assemble(texts, BERT, room=room, pairs=True, truncation="head")
    expected, kinds = [], []
    for first, second in zip(texts[::2], texts[1::2], strict=True):
        first, second = trim_as_bert_does(first, second, room)
        expected += [100, *first, 101, *second, 101]
        kinds += [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert (ids.tolist(), types.tolist()) == (expected, kinds)
    assert lengths.max() <= room + 3 and lengths.sum() == len(ids)
    assert cut == sum(a + b > room for a, b in sizes)


@pytest.mark.parametrize(
    ("truncation", "kept"), [("head", [0, 1, 2, 3, 4]), ("tail", [5, 6, 7, 8, 9]), ("head_tail", [0, 1, 2, 8, 9])]
)
def test_truncation_keeps_the_chosen_part(truncation: str, kept: list[int]) -> None:
    texts = [list(range(10)), [7, 8]]
    ids, _, lengths, cut = assemble(texts, ONE, room=5, pairs=False, truncation=truncation)  # type: ignore[arg-type]
    assert ids.tolist() == [100, *kept, 101, 100, 7, 8, 101]
    assert (lengths.tolist(), cut) == ([7, 4], 1)


def bert() -> Tokenizer:
    return words("bert")


def source(
    texts: Sequence[str], labels: Sequence[str | None] | None = None, seconds: Sequence[str] | None = None
) -> Rows:
    labels = labels or [None] * len(texts)
    others = seconds or [None] * len(texts)  # type: ignore[list-item]
    triples = zip(texts, others, labels, strict=True)
    return Rows(tuple(LabelledRow(a, b, label, f"a.tsv:{n}") for n, (a, b, label) in enumerate(triples, 1)))


def tokenize(rows: Rows, seq_len: int = 16, index: LabelIndex | None = None, **options: object) -> LabelledTokens:
    return tokenize_labelled([rows], bert(), seq_len=seq_len, index=index, **options)  # type: ignore[arg-type]


def test_examples_have_template_and_class() -> None:
    tokens = tokenize(source(["the cat", "", "sat on a mat"], ["x", "y", "x"]), index=LabelIndex(("x", "y")))
    assert (len(tokens), tokens.lengths.tolist(), tokens.labels.tolist()) == (3, [4, 2, 6], [0, 1, 0])
    examples = tokens.examples(0, [2, 0, 1])
    assert [bert().decode(each.ids.tolist(), skip_special=False) for each in examples] == [
        "[CLS] sat on a mat [SEP]",
        "[CLS] the cat [SEP]",
        "[CLS] [SEP]",
    ]
    assert [each.label for each in examples] == [0, 0, 1]
    assert all(each.token_type_ids is None and each.ids.dtype == np.int64 for each in examples)
    assert tokens.row(2).text == "sat on a mat"
    assert [list(a.ids) for a in tokens.examples(7, [0])] == [list(examples[1].ids)], "the same in every epoch"


def test_pairs_have_token_types_when_the_model_has() -> None:
    rows = source(["the cat", "a"], seconds=["sat", "mat on"])
    example = tokenize(rows, token_types=True).examples(0, [0])[0]
    assert example.token_type_ids is not None and example.token_type_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert (example.ids.tolist(), example.token_type_ids.tolist()) == bert().encode_pair("the cat", "sat")
    assert tokenize(rows).examples(0, [0])[0].token_type_ids is None
    assert tokenize(source(["the"]), token_types=True).examples(0, [0])[0].token_type_ids is None


def test_scores_several_labels_and_none() -> None:
    scores = tokenize(source(["a", "the"], ["1.5", "-2"]), numeric=True)
    assert scores.labels.dtype == np.float32 and [each.label for each in scores.examples(0, [0, 1])] == [1.5, -2.0]
    flags = tokenize(source(["a", "the"], ["x|z", ""]), index=LabelIndex(("x", "y", "z"), multi=True))
    assert flags.labels.dtype == bool and flags.labels.shape == (2, 3)
    assert flags.examples(0, [0])[0].label.tolist() == [True, False, True]  # type: ignore[union-attr]
    without = tokenize(source(["a"]))
    assert without.labels is None and without.examples(0, [0])[0].label is None


def test_truncation_is_counted_and_noted() -> None:
    tokens = tokenize(source(["the cat sat on a mat", "a", "the cat sat"]), seq_len=5)
    assert tokens.truncated == 1 and tokens.lengths.max() == 5
    assert tokens.notes == ("a.tsv: 1 of 3 texts are longer than 5 tokens and were cut (33.3%)",)
    assert bert().decode(tokens.examples(0, [0])[0].ids.tolist()) == "the cat sat"
    tail = tokenize(source(["the cat sat on a mat"]), seq_len=5, truncation="tail")
    assert bert().decode(tail.examples(0, [0])[0].ids.tolist()) == "on a mat"
    assert tokenize(source(["a"])).notes == ()


def test_batches_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = source([" ".join(WORDS[: n % 7]) for n in range(40)], seconds=[" ".join(WORDS[n % 5 :]) for n in range(40)])
    whole = tokenize(rows, seq_len=8, token_types=True)
    seen: list[tuple[int, int | None]] = []
    monkeypatch.setattr(token_files, "BATCH_CHARACTERS", 50)
    parts = tokenize(
        rows, seq_len=8, token_types=True, work=Work(report=lambda done, total: seen.append((done, total)))
    )
    assert len(seen) > 5 and seen[-1][0] == seen[-1][1]
    assert parts.fingerprint == whole.fingerprint and parts.truncated == whole.truncated
    for one, other in zip(whole.examples(0, range(40)), parts.examples(0, range(40)), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.token_type_ids.tolist() == other.token_type_ids.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("truncation", get_args(Truncation))
@pytest.mark.parametrize("is_pair", [False, True])
def test_long_texts_have_the_ids_that_they_have_when_tokenized_whole(
    is_pair: bool, truncation: Truncation, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.choice([0, 3, 8, 9, 30, 90]))) for _ in range(60)]
    rows = source(texts[:30], seconds=texts[30:] if is_pair else None)
    whole = tokenize(rows, seq_len=12, truncation=truncation, token_types=is_pair)
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr(pieces, "PIECE_LIMIT", 40)
    parts = tokenize(rows, seq_len=12, truncation=truncation, token_types=is_pair)
    assert parts.truncated == whole.truncated > 0 and parts.notes == whole.notes
    for one, other in zip(whole.examples(0, range(30)), parts.examples(0, range(30)), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        if is_pair:
            assert one.token_type_ids.tolist() == other.token_type_ids.tolist()  # type: ignore[union-attr]


def test_a_subset_has_its_own_rows_labels_and_fingerprint() -> None:
    tokens = tokenize(source(WORDS, list("xyxyxy")), index=LabelIndex(("x", "y")))
    part = tokens.subset([5, 1])
    assert (len(part), part.labels.tolist(), part.row(0).text) == (2, [1, 1], "mat")
    assert part.examples(0, [1])[0].ids.tolist() == tokens.examples(0, [1])[0].ids.tolist()
    assert len({tokens.fingerprint, part.fingerprint, tokens.subset([1, 5]).fingerprint}) == 3
    assert part.subset([1]).row(0).text == "cat"


def test_fingerprint_follows_what_changes_the_examples() -> None:
    rows = source(["the cat"], ["x"])
    prints = {
        tokenize(rows, index=LabelIndex(("x", "y"))).fingerprint,
        tokenize(rows, index=LabelIndex(("y", "x"))).fingerprint,
        tokenize(rows, seq_len=8).fingerprint,
        tokenize(rows, truncation="tail").fingerprint,
        tokenize(source(["the mat"], ["x"])).fingerprint,
    }
    assert len(prints) == 5


def test_mistakes_are_input_errors() -> None:
    with pytest.raises(InputError, match=r"a\.tsv:2: unknown label 'z'"):
        tokenize(source(["a", "the"], ["x", "z"]), index=LabelIndex(("x", "y")))
    with pytest.raises(InputError, match=r"a\.tsv:1: no label"):
        tokenize(source(["a"]), numeric=True)
    with pytest.raises(InputError, match=r"a\.tsv: no rows"):
        tokenize(Rows(()))
    with pytest.raises(InputError, match="2 tokens leave no room for text beside 2 special tokens"):
        tokenize(source(["a"]), seq_len=2)


def test_it_can_be_interrupted() -> None:
    with pytest.raises(Interrupted, match=r"a\.tsv"):
        tokenize(source(["a"]), work=Work(should_stop=lambda: True))


# -- the fixed split ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.floats(0.01, 0.49))
def test_every_class_of_two_is_on_both_sides(values: list[int], fraction: float) -> None:
    labels = np.array(values)
    kept, held_out = stratified_split(labels, fraction=fraction)
    assert sorted([*kept, *held_out]) == list(range(len(labels)))
    for label in set(values):
        total, out = values.count(label), int((labels[held_out] == label).sum())
        assert total < 2 or 1 <= out <= total - 1
        assert abs(out - fraction * total) <= 1
    again = stratified_split(labels, fraction=fraction)
    assert again[0].tolist() == kept.tolist() and again[1].tolist() == held_out.tolist()


def test_the_split_is_mixed() -> None:
    labels = np.zeros(1000, dtype=np.int64)
    held_out = stratified_split(labels, fraction=0.1)[1]
    assert len(held_out) == 100 and 300 < held_out.mean() < 700


@pytest.mark.parametrize("labels", [np.linspace(0, 1, 50, dtype=np.float32), np.zeros((50, 3), dtype=bool)])
def test_scores_and_several_labels_are_drawn_at_random(labels: np.ndarray) -> None:
    kept, held_out = stratified_split(labels, fraction=0.2)
    assert (len(kept), len(held_out)) == (40, 10)


def test_many_small_classes_do_not_hold_out_more_than_the_fraction() -> None:
    labels = np.repeat(np.arange(1000), 2)
    kept, held_out = stratified_split(labels, fraction=0.1)
    assert len(held_out) == 200 and len(np.unique(labels[held_out])) == 200
    assert len(np.unique(labels[kept])) == 1000, "every class keeps one"
    assert 300 < labels[held_out].mean() < 700, "not the first classes"


def test_every_class_is_held_out_where_the_fraction_allows() -> None:
    labels = np.repeat(np.arange(100), [5] * 50 + [15] * 50)
    held_out = stratified_split(labels, fraction=0.1)[1]
    assert len(held_out) == 100 and len(np.unique(labels[held_out])) == 100


def test_few_classes_are_all_held_out_however_small_the_fraction() -> None:
    labels = np.repeat(np.arange(10), 4)
    assert labels[stratified_split(labels, fraction=0.05)[1]].tolist() == list(range(10))


@given(st.lists(st.integers(0, 60), max_size=200), st.floats(0.01, 0.49))
def test_the_held_out_part_is_near_the_fraction(values: list[int], fraction: float) -> None:
    labels = np.array(values, dtype=np.int64)
    kept, held_out = stratified_split(labels, fraction=fraction)
    assert len(held_out) <= max(round(fraction * len(labels)), len(labels) * fraction + FEW_CLASSES)
    assert sorted([*kept, *held_out]) == list(range(len(labels)))
    assert set(labels[kept].tolist()) == set(values)
