"""Templates as they are found by probing, and texts cut to fit inside them."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.template import TextTemplate, assemble, pair_template, single_template
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

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
def test_the_part_that_was_asked_for_stays(truncation: str, kept: list[int]) -> None:
    texts = [list(range(10)), [7, 8]]
    ids, _, lengths, cut = assemble(texts, ONE, room=5, pairs=False, truncation=truncation)  # type: ignore[arg-type]
    assert ids.tolist() == [100, *kept, 101, 100, 7, 8, 101]
    assert (lengths.tolist(), cut) == ([7, 4], 1)
