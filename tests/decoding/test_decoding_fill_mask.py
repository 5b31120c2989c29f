"""Filling masks: a model that was taught a few sentences knows the missing word, with every kind of tokenizer."""

from __future__ import annotations

import pytest
import torch

from tformer.build import build_model
from tformer.decoding.fill_mask import Candidate, fill_mask
from tformer.model import Transformer
from tformer.recipe.model import Model
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.options import TemplateName, TokenizerModel

SENTENCES = ["the cat sat on the mat.", "a dog ran to the house.", "two birds flew over a tree."]


def make_tokenizer(kind: TokenizerModel = "wordpiece", template: TemplateName = "bert") -> Tokenizer:
    chosen = TokenizerOptions(model=kind, template=template, vocab_size=400, min_frequency=1)
    return train_tokenizer(lambda: iter(SENTENCES * 3), chosen)


def make_model(vocab_size: int, *, heads: tuple[str, ...] = ("masked_lm",), rows: int = 0) -> Transformer:
    torch.manual_seed(0)
    stack = {"num_layers": 1, "num_heads": 2, "norm": {"place": "pre"}}
    values = {"d_model": 32, "max_seq_len": 48, "vocab_size": vocab_size + rows, "encoder": stack}
    return build_model(Model.model_validate({**values, "heads": [{"kind": kind} for kind in heads]}))


def taught(tokenizer: Tokenizer, *, rows: int = 0) -> Transformer:
    """A model that has learnt the sentences by heart, one token hidden at a time."""
    model = make_model(tokenizer.vocab_size, rows=rows)
    mask_id = tokenizer.special.mask
    assert mask_id is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    ids = [torch.tensor(tokenizer.encode(sentence, template=True)) for sentence in SENTENCES]
    for _ in range(80):
        optimizer.zero_grad()
        for row in ids:
            hidden = row.repeat(len(row), 1)
            labels = torch.full_like(hidden, -100).diagonal_scatter(row)
            loss = model(hidden.diagonal_scatter(torch.full_like(row, mask_id))).loss_terms("masked_lm", labels)
            (loss[0] / len(row)).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def bert() -> tuple[Transformer, Tokenizer]:
    tokenizer = make_tokenizer()
    return taught(tokenizer), tokenizer


def test_the_missing_word_is_found(bert: tuple[Transformer, Tokenizer]) -> None:
    model, tokenizer = bert
    (candidates,) = fill_mask(model, tokenizer, "the [MASK] sat on the mat.", top=3)
    best = candidates[0]
    (expected,) = tokenizer.encode("cat")
    assert best == Candidate("cat", expected, best.probability, "the cat sat on the mat.")
    assert best.probability > 0.5


def test_probabilities_are_the_models_softmax_in_falling_order(bert: tuple[Transformer, Tokenizer]) -> None:
    model, tokenizer = bert
    text = "a dog [MASK] to the house."
    (candidates,) = fill_mask(model, tokenizer, text, top=10_000)
    assert {c.id for c in candidates} == {i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)}
    found = [c.probability for c in candidates]
    assert found == sorted(found, reverse=True)
    head, tail = (tokenizer.encode(part) for part in text.split("[MASK]"))
    special = tokenizer.special
    ids = torch.tensor([[special.cls, *head, special.mask, *tail, special.sep]])
    with torch.no_grad():
        expected = model.eval()(ids).logits[0, 1 + len(head)].softmax(-1)
    torch.testing.assert_close(torch.tensor(found), expected[[c.id for c in candidates]], atol=1e-6, rtol=0)
    assert fill_mask(model, tokenizer, text, top=2)[0] == candidates[:2]


def test_several_masks_are_answered_in_order(bert: tuple[Transformer, Tokenizer]) -> None:
    model, tokenizer = bert
    answers = fill_mask(model, tokenizer, "[MASK] birds flew over a [MASK].", top=2)
    assert [len(candidates) for candidates in answers] == [2, 2]
    special, middle, end = tokenizer.special, tokenizer.encode("birds flew over a"), tokenizer.encode(".")
    ids = torch.tensor([[special.cls, special.mask, *middle, special.mask, *end, special.sep]])
    with torch.no_grad():
        chances = model.eval()(ids).logits[0].softmax(-1)
    for place, candidates in zip((1, 2 + len(middle)), answers, strict=True):
        expected = [float(chances[place, c.id]) for c in candidates]
        assert [c.probability for c in candidates] == pytest.approx(expected, abs=1e-6)
    first, second = (candidates[0] for candidates in answers)
    assert first.text == f"{first.token} birds flew over a [MASK]."
    assert second.text == f"[MASK] birds flew over a {second.token}."


@pytest.mark.parametrize("spelling", ["[MASK]", "<mask>"])
def test_both_spellings_mean_the_mask(bert: tuple[Transformer, Tokenizer], spelling: str) -> None:
    ((best,),) = fill_mask(*bert, f"the cat {spelling} on the mat.", top=1)
    assert best.token == "sat"


@pytest.mark.parametrize(
    ("kind", "template"),
    [
        ("byte-bpe", "roberta"),
        ("word", "bert"),
        pytest.param("bpe", "bert", marks=pytest.mark.slow),
        pytest.param("char", "bert", marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_tokenizer(kind: TokenizerModel, template: TemplateName) -> None:
    tokenizer = make_tokenizer(kind, template)
    model = taught(tokenizer)
    if kind == "char":
        ((best,),) = fill_mask(model, tokenizer, "the c[MASK]t sat on the mat.", top=1)
        assert (best.token, best.text) == ("a", "the cat sat on the mat.")
        return
    places = [(sentence, word) for sentence in SENTENCES for word in sentence.rstrip(".").split()[1:]]
    sentence, word = next((s, w) for s, w in places if len(tokenizer.encode(f" {w}")) == 1)
    ((best,),) = fill_mask(model, tokenizer, sentence.replace(f" {word}", " <mask>"), top=1)
    assert (best.token, best.text) == (word, sentence)


def test_a_mask_that_stays_keeps_its_space() -> None:
    tokenizer = make_tokenizer("byte-bpe", "roberta")
    model = make_model(tokenizer.vocab_size)
    answers = fill_mask(model, tokenizer, "the <mask> sat on the m<mask>t.", top=1)
    assert answers[0][0].text.endswith(" sat on the m<mask>t.")
    assert answers[1][0].text.startswith("the <mask> sat on the m")


@pytest.mark.parametrize(
    ("kind", "template"),
    [("byte-bpe", "roberta"), ("bpe", "bert"), ("unigram", "bert"), ("word", "bert"), ("char", "bert"),
     ("wordpiece", "bert")],
)  # fmt: skip
def test_only_the_mask_and_a_space_before_it_change(kind: TokenizerModel, template: TemplateName) -> None:
    """Whatever the tokenizer loses of the text: unknown words, double spaces, cases."""
    tokenizer = make_tokenizer(kind, template)
    before, after = "Žebra\n  x-", " §9  [MASK]"
    (first, second) = fill_mask(make_model(tokenizer.vocab_size), tokenizer, f"{before}[MASK]{after}", top=1000)
    assert all(c.text.startswith(before) and c.text.endswith(after) for c in first)
    assert all(c.text.startswith(f"{before}[MASK]{after.removesuffix(' [MASK]')}") for c in second)
    if kind in ("word", "char"):
        assert all(c.text == before + tokenizer.decode([c.id]) + after for c in first)


def test_rows_beyond_the_vocabulary_are_never_candidates() -> None:
    """A vocabulary that was rounded up, with rows that outshine every token."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer.vocab_size, rows=7)
    with torch.no_grad():
        model.heads["masked_lm"].get_parameter("bias")[-7:] = 50.0
    (candidates,) = fill_mask(model, tokenizer, "the [MASK] sat", top=10_000)
    assert max(c.id for c in candidates) < tokenizer.vocab_size
    assert 0.9 < sum(c.probability for c in candidates) <= 1.0 + 1e-6


def test_the_models_mode_is_left_as_it_was(bert: tuple[Transformer, Tokenizer]) -> None:
    model, tokenizer = bert
    for mode in (True, False):
        model.train(mode)
        fill_mask(model, tokenizer, "the [MASK] sat", top=1)
        assert model.training is mode


def test_a_text_without_a_mask_is_refused(bert: tuple[Transformer, Tokenizer]) -> None:
    with pytest.raises(InputError, match=r"no mask in the text, expected \[MASK\]"):
        fill_mask(*bert, "the cat sat", top=3)


def test_a_text_longer_than_the_model_reads_is_refused(bert: tuple[Transformer, Tokenizer]) -> None:
    with pytest.raises(InputError, match="52 tokens with its special ones, but the model reads 48"):
        fill_mask(*bert, "cat " * 49 + "[MASK]", top=3)


def test_a_model_of_another_kind_is_refused() -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer.vocab_size, heads=("next_sentence",))
    with pytest.raises(InputError, match="this one's heads: next_sentence"):
        fill_mask(model, tokenizer, "the [MASK] sat", top=3)


def test_a_tokenizer_without_a_mask_token_is_refused() -> None:
    tokenizer = make_tokenizer("word", "none")
    with pytest.raises(InputError, match=r"tokenizer \(word\) has no mask token"):
        fill_mask(make_model(tokenizer.vocab_size), tokenizer, "the [MASK] sat", top=3)
