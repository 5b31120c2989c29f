"""Consistency of two passes: the formulas of R-Drop and SimCut, counts, accumulation, and what stays as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.objectives.test_objectives_distillation import (
    CONTEXT,
    HEADS,
    KINDS,
    SPECIAL,
    batch_of,
    model_of,
    rows_of,
    step,
)
from tests.training.small_steps import Stepper, host_batch, small_recipe
from tformer.data.batching.batch import Batch
from tformer.data.shards.pair_tokens import PairExample
from tformer.model import Transformer
from tformer.nn.heads import Output
from tformer.nn.losses import IGNORED_LABEL
from tformer.nn.structured_dropout import DropHead, SharedDraws
from tformer.objectives import build_objective
from tformer.objectives.base import total_loss
from tformer.objectives.consistency import Consistency, RDropOptions, SimCutOptions
from tformer.objectives.labelled import ClassificationOptions

OPTIONS = {
    "r_drop": RDropOptions(alpha=0.7),
    "r_drop, cut": RDropOptions(alpha=0.7, cut=0.3),
    "simcut": SimCutOptions(alpha=2.0, cut=0.3),
}


def consistency(kind: str, how: str) -> Consistency:
    options = OPTIONS[how]
    return options.objective(build_objective(KINDS[kind], CONTEXT), options)  # type: ignore[arg-type]


def cut_batch(kind: str, rows: int = 4, *, seed: int = 0) -> Batch:
    """A batch with some tokens cut, as `Consistency.collate` makes it."""
    batch, draw = batch_of(kind, rows, seed=seed), torch.Generator().manual_seed(seed)
    assert batch.input_ids is not None
    batch = replace(batch, embedding_mask=torch.rand(batch.input_ids.shape, generator=draw) >= 0.3)
    if batch.decoder_input_ids is None:
        return batch
    return replace(batch, decoder_embedding_mask=torch.rand(batch.decoder_input_ids.shape, generator=draw) >= 0.3)


def given(kind: str, how: str, rows: int = 4) -> Batch:
    return cut_batch(kind, rows) if OPTIONS[how].cut else batch_of(kind, rows)


class Recorder:
    """A model that remembers its output."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> Output:
        self.inputs, self.output = inputs, self.model(**inputs)
        return self.output


def divergences(kind: str, predictions: list[Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """(KL(p || q), KL(q || p)) summed over the predictions, by torch's own functions; of scores (p - q)² twice."""
    one, other = predictions
    if kind == "regression":
        return (one - other).square().sum(), (one - other).square().sum()
    if kind == "multi_label":
        one, other = (torch.stack([F.logsigmoid(z), F.logsigmoid(-z)], -1) for z in predictions)
    else:
        one, other = one.log_softmax(-1), other.log_softmax(-1)
    if one.ndim == 3 and kind != "multi_label":
        assert batch.labels is not None
        labelled = batch.labels != IGNORED_LABEL
        one, other = one[labelled], other[labelled]
    kl = [F.kl_div(q, p, log_target=True, reduction="sum") for p, q in ((one, other), (other, one))]
    return kl[0], kl[1]


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_papers_formula(kind: str, how: str) -> None:
    """With dropout: the two copies of each row are read by the same pass, with draws of their own."""
    model, batch, found = model_of(kind, dropout=0.3).train(), given(kind, how), consistency(kind, how)
    for head in model.heads.values():
        head.eval()  # its dropout would be drawn again below
    seen = Recorder(model)
    torch.manual_seed(1)
    result = found.loss(seen, batch)
    loss = total_loss(result.terms)
    own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    halves = [
        Output(seen.output.hidden[start::2], model.heads, None if seen.output.mask is None else batch.attention_mask)
        for start in (0, 1)
    ]
    if kind == "seq2seq":
        halves = [replace(half, mask=batch.decoder_attention_mask) for half in halves]
    inner = found.inner
    learned = [inner.terms(half, batch).terms for half in halves]
    expected = torch.zeros(())
    for name, term in learned[0].items():
        both = (term.sum + learned[1][name].sum) / 2 if found.learns_both else term.sum
        expected = expected + term.weight * both / term.count
    for objective in inner.members:
        head = objective.head.kind
        predictions = [half.head(head) for half in halves]
        forward, backward = divergences("" if head == "next_sentence" else kind, predictions, batch)
        divergence = (forward + backward) / 2 if found.learns_both else forward
        expected = expected + found.options.alpha * divergence / learned[0][head].count
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(own, torch.autograd.grad(expected, list(model.parameters()), allow_unused=True), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_without_dropout_r_drop_is_plain_training(kind: str) -> None:
    """The two passes are equal then: the divergence is 0, and the loss that of one pass."""
    model, batch = model_of(kind), batch_of(kind)
    plain, doubled = step(build_objective(KINDS[kind], CONTEXT), model, [batch]), step(  # type: ignore[arg-type]
        consistency(kind, "r_drop"), model, [batch]
    )  # fmt: skip
    assert plain[0] == pytest.approx(doubled[0], rel=1e-5)
    for name, gradient in plain[1].items():
        torch.testing.assert_close(gradient, doubled[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["r_drop, cut", "simcut"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_pass_reads_zeros_for_the_tokens_that_are_cut(kind: str, how: str) -> None:
    """The first pass is the plain one."""
    model, batch = model_of(kind), cut_batch(kind)
    seen = Recorder(model)
    consistency(kind, how).loss(seen, batch)
    whole = replace(batch, embedding_mask=None, decoder_embedding_mask=None)
    torch.testing.assert_close(seen.output.hidden[0::2], model(**whole.model_inputs()).hidden)
    cut = model(**batch.model_inputs()).hidden
    torch.testing.assert_close(seen.output.hidden[1::2], cut)
    assert not torch.allclose(cut, seen.output.hidden[0::2])


def test_a_masked_embedding_is_a_row_of_zeros() -> None:
    model = model_of("masked_lm")
    ids = torch.tensor([[7, 8, 9]])
    mask = torch.tensor([[True, False, True]])
    [found] = model(input_ids=ids, embedding_mask=mask, taps=["encoder.embedding.tokens"]).taps.values()
    assert found[0, 1].abs().sum() == 0 and torch.equal(found[0, 0], model.embedding.weight[7])


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_cutting_the_batch_changes_nothing(kind: str, how: str) -> None:
    model, found, batch = model_of(kind), consistency(kind, how), given(kind, how, 6)
    whole, parts = step(found, model, [batch]), step(
        found, model, [rows_of(batch, slice(0, 1)), rows_of(batch, slice(1, 4)), rows_of(batch, slice(4, 6))]
    )  # fmt: skip
    assert whole[0] == pytest.approx(parts[0], rel=1e-5)
    for name, gradient in whole[1].items():
        torch.testing.assert_close(gradient, parts[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_known_before_the_forward(kind: str, how: str) -> None:
    found = consistency(kind, how)
    result = found.loss(model_of(kind), given(kind, how))
    assert {name: int(term.count) for name, term in result.terms.items()} == found.label_count(given(kind, how))
    heads = HEADS.get(kind, ["classifier"])
    assert result.terms.keys() == {*heads, "consistency", *(f"{head}_consistency" for head in heads[1:])}


def test_metrics_and_validation_are_those_of_the_plain_objective() -> None:
    model, batch = model_of("classification"), batch_of("classification")
    found = consistency("classification", "r_drop")
    plain = found.inner.loss(model, batch).metrics
    assert all(torch.equal(value, plain[name]) for name, value in found.loss(model, batch).metrics.items())


@pytest.mark.parametrize("how", ["r_drop, cut", "simcut"])
def test_tokens_to_cut_are_drawn_in_collate_and_only_in_training(how: str) -> None:
    """So every process has the rows of one, and a resumed run the masks of an uninterrupted one."""
    found = consistency("seq2seq", how)
    samples = [PairExample(np.arange(7, 12), np.array([7, 8, SPECIAL.eos])) for _ in range(60)]
    first, again, other = (found.collate(samples, rng=np.random.default_rng(seed)) for seed in (0, 0, 1))
    for name in ("embedding_mask", "decoder_embedding_mask"):
        one, same, different = (getattr(batch, name) for batch in (first, again, other))
        assert torch.equal(one, same) and not torch.equal(one, different)
        assert 0.2 < 1 - one.float().mean() < 0.4
    assert found.collates_at_random
    plain = found.collate(samples, rng=np.random.default_rng(0), training=False)
    assert plain.embedding_mask is None and plain.decoder_embedding_mask is None


def test_r_drop_without_a_cut_collates_as_the_plain_objective_does() -> None:
    found = consistency("seq2seq", "r_drop")
    assert found.collates_at_random == found.inner.collates_at_random is False


def test_shared_draws_have_a_line_for_each_copy() -> None:
    """DropHead gates of two processes, together, are those of one process that reads every row twice."""
    whole = SharedDraws(3, rows=slice(0, 5), num_rows=5, device=torch.device("cpu"), copies=2)
    every = whole.of_rows(4, torch.device("cpu")).view(5, 2, 4)
    for rank in (0, 1):
        part = SharedDraws(3, rows=slice(rank, 5, 2), num_rows=5, device=torch.device("cpu"), copies=2)
        assert torch.equal(part.of_rows(4, torch.device("cpu")).view(-1, 2, 4), every[rank::2])
    gates = DropHead(0.5)
    gates.shared = SharedDraws(3, rows=slice(0, 5), num_rows=5, device=torch.device("cpu"), copies=2)
    assert gates(torch.ones(10, 4, 1, 1)).shape == (10, 4, 1, 1)


@pytest.mark.parametrize("preset", ["gpt/small", "transformer/tiny", "bert/classify"])
def test_bf16_is_near_fp32(preset: str) -> None:
    recipe = small_recipe(preset, dropout=False)
    training = recipe.training.model_copy(update={"consistency": SimCutOptions(cut=0.3)})
    recipe = recipe.model_copy(update={"training": training})
    losses = []
    for precision in ("fp32", "bf16"):
        stepper = Stepper(recipe, precision=precision)
        losses.append(float(stepper.step(host_batch(recipe, stepper.objective))))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_the_divergence_becomes_small_where_it_has_weight() -> None:
    """Twenty steps on one batch: with a large alpha the two passes agree more than with a small one."""
    found = {}
    for alpha in (0.001, 20.0):
        torch.manual_seed(0)
        options = RDropOptions(alpha=alpha)
        objective = options.objective(build_objective([ClassificationOptions()], CONTEXT), options)
        model, batch = model_of("classification", dropout=0.3).train(), batch_of("classification", 16)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            total_loss(objective.loss(model, batch).terms).backward()
            optimizer.step()
        torch.manual_seed(1)
        found[alpha] = float(objective.loss(model, batch).terms["consistency"].sum.detach())
    assert found[20.0] < 0.2 * found[0.001]
