"""Evaluation of a text equals a plain loop over its tokens, whatever the batch size."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tformer.build import build_model
from tformer.data.batching.windows import restarting_positions
from tformer.data.shards.corpus import TokenCorpus
from tformer.evaluation import lm
from tformer.evaluation.lm import batches, combine_validation, isolates_documents, load_batch, windows
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import ObjectiveContext
from tformer.objectives.causal_lm import CausalLm, CausalLmOptions
from tformer.recipe.model import Model
from tformer.recipe.sections import Data
from tformer.support.errors import InputError
from tformer.tokenizer.special import SpecialIds
from tformer.workers.work import Work

VOCAB = 19


def objective_of(**options):
    return CausalLm(CausalLmOptions(**options), ObjectiveContext(SpecialIds(), seq_len=8))


evaluate_lm = partial(lm.evaluate_lm, objective=objective_of())


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    section = Model(
        d_model=16,
        max_seq_len=8,
        decoder={"num_layers": 2, "num_heads": 2, "positions": {"kind": "learned"}, "dropout": 0.3},
        init={"std": 0.3},
    )
    return build_model(section, vocab_size=VOCAB).eval()


def corpus_of(num_tokens, *, num_bytes=1000, documents=()):
    ids = np.random.default_rng(2).integers(0, VOCAB, num_tokens)
    return TokenCorpus.from_ids(ids, num_bytes=num_bytes, documents=documents)


def plain_loop(model, corpus, context_of, *, document_ids=None):
    """(mean loss, accuracy): token i predicted from tokens context_of(i) ... i - 1, one forward pass each."""
    ids = torch.from_numpy(corpus.slice(0, len(corpus)))
    losses, hits = [], 0
    with torch.no_grad():
        for i in range(1, len(ids)):
            start = context_of(i)
            documents = positions = None
            if document_ids is not None:  # each document of the window counts from 0
                documents = document_ids[None, start:i]
                positions = torch.from_numpy(restarting_positions(documents.numpy()))
            logits = model(ids[None, start:i], document_ids=documents, position_ids=positions).logits[0, -1]
            losses.append(float(F.cross_entropy(logits[None], ids[None, i])))
            hits += int(logits.argmax() == ids[i])
    return sum(losses) / len(losses), hits / len(losses)


@pytest.mark.parametrize("num_tokens", [2, 8, 9, 10, 33, 50])
def test_the_result_equals_a_plain_loop(model, num_tokens):
    corpus = corpus_of(num_tokens)
    result = evaluate_lm(model, corpus, seq_len=8, batch_size=3)
    loss, accuracy = plain_loop(model, corpus, lambda i: (i - 1) // 8 * 8)
    assert result["loss"] == pytest.approx(loss, abs=1e-5)
    assert result["accuracy"] == pytest.approx(accuracy)
    assert result["tokens"] == num_tokens - 1


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.2}, {"z_loss": 0.1}, {"weight": 0.5}, {"label_smoothing": 0.1, "weight": 2.0}]
)
def test_the_loss_is_that_of_the_objective_and_perplexity_that_of_the_tokens(model, options):
    corpora, objective = [corpus_of(50), corpus_of(20)], objective_of(**options)
    parts = [evaluate_lm(model, corpus, objective=objective, seq_len=8, batch_size=4) for corpus in corpora]
    plain = [evaluate_lm(model, corpus, seq_len=8, batch_size=4) for corpus in corpora]
    for part, other, corpus in zip(parts, plain, corpora, strict=True):
        batch = [load_batch(corpus, [window]) for window in windows(len(corpus), 8, 8)]
        with torch.no_grad():
            terms = [objective.loss(model, each).terms["lm"] for each in batch]
        expected = objective.options.weight * sum(float(term.sum) for term in terms) / (len(corpus) - 1)
        assert part["loss"] == pytest.approx(expected, rel=1e-5) != pytest.approx(other["loss"], rel=1e-3)
        assert {**part, "loss": 0, "tokens_per_second": 0} == {**other, "loss": 0, "tokens_per_second": 0}
    together, other = combine_validation(parts), combine_validation(plain)
    assert together["loss"] == pytest.approx(sum(part["loss"] * part["tokens"] for part in parts) / 68)
    assert together["perplexity"] == pytest.approx(other["perplexity"])


def test_perplexity_and_bits_per_byte_follow_from_the_loss(model):
    result = evaluate_lm(model, corpus_of(50, num_bytes=123), seq_len=8, batch_size=4)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_byte"] == pytest.approx(result["loss"] * 49 / math.log(2) / 123)
    assert result["tokens_per_second"] > 0


@pytest.mark.parametrize("stride", [None, 3, 8])
def test_the_result_does_not_depend_on_the_batch_size(model, stride):
    results = [evaluate_lm(model, corpus_of(75), seq_len=8, batch_size=size, stride=stride) for size in (1, 2, 7, 100)]
    for result in results[1:]:
        assert result["loss"] == pytest.approx(results[0]["loss"], abs=1e-6)
        assert result["accuracy"] == results[0]["accuracy"]


@pytest.mark.parametrize("stride", [1, 3, 7])
def test_sliding_windows_equal_a_plain_loop(model, stride):
    corpus = corpus_of(40)
    result = evaluate_lm(model, corpus, seq_len=8, batch_size=4, stride=stride)
    # Window n > 0 ends at prediction 8 + n * stride, reads 8 tokens, and counts its last `stride` predictions.
    loss, accuracy = plain_loop(model, corpus, lambda i: max(0, -(-(i - 8) // stride)) * stride)
    assert result["loss"] == pytest.approx(loss, abs=1e-5)
    assert result["accuracy"] == pytest.approx(accuracy)
    assert result["tokens"] == 39


def test_document_mask_hides_other_documents(model):
    corpus = corpus_of(40, documents=[0, 5, 21])
    document_ids = torch.tensor([0] * 5 + [1] * 16 + [2] * 19)
    result = evaluate_lm(model, corpus, seq_len=8, batch_size=3, document_mask=True)
    loss, _ = plain_loop(model, corpus, lambda i: (i - 1) // 8 * 8, document_ids=document_ids)
    assert result["loss"] == pytest.approx(loss, abs=1e-5)
    assert result["loss"] != pytest.approx(evaluate_lm(model, corpus, seq_len=8, batch_size=3)["loss"], abs=1e-5)


@given(num_tokens=st.integers(2, 200), seq_len=st.integers(1, 40), data=st.data())
def test_every_token_is_predicted_exactly_once(num_tokens, seq_len, data):
    stride = data.draw(st.integers(1, seq_len))
    batch_size = data.draw(st.integers(1, 5))
    corpus = TokenCorpus.from_ids(np.arange(num_tokens))
    predicted = []
    for batch in batches(windows(num_tokens, seq_len, stride), batch_size):
        assert len(batch) <= batch_size
        loaded = load_batch(corpus, batch)
        inputs, labels = loaded.input_ids, loaded.labels
        assert inputs is not None and labels is not None
        assert inputs.shape == labels.shape and inputs.shape[1] <= seq_len
        counted = labels != IGNORED_LABEL
        assert torch.equal(labels[counted], inputs[counted] + 1)
        predicted += labels[counted].tolist()
    assert predicted == list(range(1, num_tokens))


def test_evaluation_neither_trains_nor_drops_nor_draws(model):
    corpus = corpus_of(30)
    model.train()
    before = torch.get_rng_state()
    results = [evaluate_lm(model, corpus, seq_len=8, batch_size=2)["loss"] for _ in range(2)]
    assert results[0] == results[1]
    assert model.training
    assert torch.equal(before, torch.get_rng_state())
    model.eval()


def test_bf16_is_near_fp32(model):
    corpus = corpus_of(200)
    exact = evaluate_lm(model, corpus, seq_len=8, batch_size=8)["loss"]
    model.compute_dtype = torch.bfloat16
    rounded = evaluate_lm(model, corpus, seq_len=8, batch_size=8)["loss"]
    model.compute_dtype = torch.float32
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)


def test_should_stop_is_polled_before_every_batch(model):
    polls = iter([False, False, True])
    progress = []
    result = evaluate_lm(
        model,
        corpus_of(100),
        seq_len=8,
        batch_size=2,
        work=Work(should_stop=lambda: next(polls), report=lambda done, total: progress.append((done, total))),
    )
    assert result["tokens"] == 32
    assert progress == [(16, 99), (32, 99)]
    nothing = evaluate_lm(model, corpus_of(100), seq_len=8, batch_size=2, work=Work(should_stop=lambda: True))
    assert nothing["tokens"] == 0 and math.isnan(nothing["loss"])


def test_a_text_of_one_token_has_nothing_to_predict(model):
    with pytest.raises(InputError, match="1 tokens"):
        evaluate_lm(model, corpus_of(1), seq_len=8, batch_size=2)


@pytest.mark.parametrize("stride", [0, 9, -1])
def test_wrong_strides_give_both_numbers(model, stride):
    with pytest.raises(ValueError, match=rf"8.*{stride}"):
        evaluate_lm(model, corpus_of(20), seq_len=8, batch_size=2, stride=stride)


def test_figures_of_several_texts_are_those_of_their_sums(model):
    corpora = [corpus_of(20, num_bytes=100), corpus_of(35, num_bytes=17), corpus_of(3, num_bytes=900)]
    parts = [evaluate_lm(model, corpus, seq_len=8, batch_size=3) for corpus in corpora]
    combined = combine_validation(parts)
    nats = sum(part["loss"] * part["tokens"] for part in parts)
    assert (combined["tokens"], combined["bytes"]) == (19 + 34 + 2, 1017)
    assert combined["loss"] == pytest.approx(nats / 55)
    assert combined["perplexity"] == pytest.approx(math.exp(nats / 55))
    assert combined["bits_per_byte"] == pytest.approx(nats / math.log(2) / 1017)
    assert combined["accuracy"] * 55 == pytest.approx(sum(part["accuracy"] * part["tokens"] for part in parts))
    assert combine_validation(parts[:1]) == parts[0]


def test_a_part_that_is_predicted_perfectly_still_counts_its_bytes():
    part = {"loss": 0.0, "accuracy": 1.0, "bits_per_byte": 0.0, "tokens": 10, "bytes": 30, "tokens_per_second": 5.0}
    other = part | {"loss": 1.0, "bits_per_byte": 1 / math.log(2), "accuracy": 0.0, "bytes": 10}
    assert combine_validation([part, other])["bits_per_byte"] == pytest.approx(10 / math.log(2) / 40)


@pytest.mark.parametrize(
    ("packing", "mask", "expected"),
    [("concat", False, False), ("concat", True, True), ("documents", False, False), ("none", False, True)],
)
def test_unpacked_documents_are_isolated(packing, mask, expected):
    assert isolates_documents(Data(packing=packing, document_mask=mask)) is expected
