"""DPO: the formula in fp64 with a base and adapters, what trl computes, and settings that make no sense."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.objectives.cases import batch_of, context_of, make, model_of, samples_of
from tformer.data.batching.batch import Batch
from tformer.model import Transformer
from tformer.nn.heads import VocabularyHead
from tformer.nn.lora import adapt, projections, without_adapters
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives import build_objective
from tformer.objectives.dpo import DpoOptions, preference_loss

POLICY = (-12.5, -3.25, -40.0, -14.0, -2.0, -55.5)  # of three chosen answers, and of three rejected ones
REFERENCE = (-14.0, -3.0, -41.5, -12.75, -2.5, -50.0)
TOKENS = (5, 2, 9, 4, 3, 11)
BY_TRL = [  # trl 1.16.0, DPOTrainer._compute_loss in fp64: loss, and its gradient by each log-probability
    ("sigmoid", 0.1, 0.566535619, (-0.014389334, -0.017291374, -0.011060408, 0.014389334, 0.017291374, 0.011060408)),
    ("sigmoid", 0.5, 0.384428778, (-0.033635537, -0.098777767, -0.004885372, 0.033635537, 0.098777767, 0.004885372)),
    ("hinge", 0.1, 0.7, (-0.033333333, -0.033333333, -0.033333333, 0.033333333, 0.033333333, 0.033333333)),
    ("hinge", 0.5, 0.458333333, (0.0, -0.166666667, 0.0, 0.0, 0.166666667, 0.0)),
    ("ipo", 0.1, 22.009890046, (-0.585, -1.763888889, -0.320987654, 0.73125, 1.175925926, 0.262626263)),
    ("ipo", 0.5, 0.64322338, (-0.051666667, -0.430555556, -0.024691358, 0.064583333, 0.287037037, 0.02020202)),
]


def adapted(dropout: float = 0.0) -> tuple[Transformer, Transformer]:
    """(base, the same model with trained adapters), both in fp64."""
    base = model_of("dpo", dropout=dropout).double()
    base.compute_dtype = torch.float64
    model = copy.deepcopy(base)
    targets = {part.name for _, parts in projections(model).values() for part in parts}
    adapt(model, targets=targets, rank=2, scale=0.5)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith("adapter.b"):
            torch.nn.init.normal_(parameter, std=0.2)
    return base, model.double()


def answers(model: Transformer, batch: Batch) -> Tensor:
    """[2B] log-probabilities by their definition, from all logits."""
    assert batch.labels is not None
    output, head = model(**batch.model_inputs()), model.heads["lm"]
    assert isinstance(head, VocabularyHead)
    logp = (output.hidden @ head.matrix().T).log_softmax(-1)
    each = logp.gather(2, batch.labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return (each * (batch.labels != IGNORED_LABEL)).sum(1)


def by_definition(h: Tensor, per_token: Tensor, options: DpoOptions) -> Tensor:
    beta, eps = options.beta, options.label_smoothing
    if options.loss == "hinge":
        return torch.clamp(1 - beta * h, min=0).mean()
    if options.loss == "ipo":
        return ((per_token - 0.5 / beta) ** 2).mean()
    return (
        -(1 - eps) * torch.log(1 / (1 + torch.exp(-beta * h))) - eps * torch.log(1 / (1 + torch.exp(beta * h)))
    ).mean()


@pytest.mark.parametrize("options", [
    DpoOptions(), DpoOptions(beta=0.7), DpoOptions(label_smoothing=0.2), DpoOptions(loss="hinge"),
    DpoOptions(loss="ipo"),
])  # fmt: skip
def test_loss_gradients_and_rewards_are_the_formula_in_fp64(options: DpoOptions) -> None:
    batch, objective = batch_of("dpo"), build_objective([options], context_of())
    base, model = adapted()
    with torch.no_grad():
        reference = answers(base, batch)
    ratios = answers(model, batch) - reference
    assert batch.labels is not None
    per_token = ratios / (batch.labels != IGNORED_LABEL).sum(1)
    (chosen, rejected), (one, other) = ratios.chunk(2), per_token.chunk(2)
    by_definition(chosen - rejected, one - other, options).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    result = objective.loss(model, batch)
    [term] = result.terms.values()
    loss = term.sum / int(term.count)
    loss.backward()
    torch.testing.assert_close(loss, by_definition(chosen - rejected, one - other, options), rtol=1e-10, atol=1e-12)
    assert expected and all(".adapter." in name for name in expected)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in expected)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-8, atol=1e-10)
    rewards = options.beta * ratios.detach()
    sums = {"chosen_reward": rewards[:4].sum(), "rejected_reward": rewards[4:].sum(),
            "margin": (rewards[:4] - rewards[4:]).sum(), "accuracy": (rewards[:4] > rewards[4:]).sum()}  # fmt: skip
    for metric, value in sums.items():
        assert float(result.metrics[metric].sum) == pytest.approx(float(value), rel=1e-9)
        assert result.metrics[metric].is_logged and result.metrics[metric].count == 4


@pytest.mark.parametrize(("loss", "beta", "expected", "gradient"), BY_TRL)
def test_losses_and_gradients_are_those_of_trl(loss: Any, beta: float, expected: float, gradient: Any) -> None:
    policy = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    ratios = policy - torch.tensor(REFERENCE, dtype=torch.float64)
    found = preference_loss(ratios, torch.tensor(TOKENS), DpoOptions(loss=loss, beta=beta)).mean()
    found.backward()
    assert found.item() == pytest.approx(expected, abs=1e-8) and policy.grad is not None
    assert policy.grad.tolist() == pytest.approx(gradient, abs=1e-8)


def test_a_base_beside_the_model_is_the_reference_of_one_without_adapters() -> None:
    base, model = adapted()
    objective, merged = make("dpo"), copy.deepcopy(base)
    for name, (linear, _) in projections(model).items():
        if linear.adapter is not None:
            merged.get_submodule(name).weight.data = linear.adapter.merged(linear.weight).double()
    expected = objective.loss(model, batch_of("dpo"))
    objective.base = base
    found = objective.loss(merged, batch_of("dpo"))
    assert found.terms["lm"].sum.item() == pytest.approx(expected.terms["lm"].sum.item(), rel=1e-5)
    assert float(found.metrics["margin"].sum) == pytest.approx(float(expected.metrics["margin"].sum), rel=1e-4)


def test_untrained_adapters_have_the_loss_of_a_guess_and_dropout_adds_no_noise() -> None:
    _, model = adapted(dropout=0.3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.b"):
                parameter.zero_()
    result = make("dpo", weight=1.0).loss(model.train(), batch_of("dpo"))
    assert result.terms["lm"].sum.item() == pytest.approx(4 * np.log(2), abs=1e-12)
    assert float(result.metrics["accuracy"].sum) == float(result.metrics["margin"].sum) == 0


def test_without_adapters_a_model_is_its_base_and_afterwards_itself() -> None:
    base, model = adapted()
    inputs = batch_of("dpo").model_inputs()
    before = model(**inputs).logits
    with pytest.raises(KeyError), without_adapters(model):
        assert torch.equal(model(**inputs).logits, base(**inputs).logits)
        raise KeyError
    assert torch.equal(model(**inputs).logits, before) and not torch.equal(before, base(**inputs).logits)


@pytest.mark.parametrize(("options", "message"), [
    ({"beta": 0.0}, "beta"), ({"beta": -1.0}, "beta"), ({"label_smoothing": 1.0}, "label_smoothing"),
    ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing: found 0.1, expected 0 with the loss ipo"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DpoOptions(**options)


def test_labels_are_on_answers_only() -> None:
    samples, batch = samples_of("dpo"), batch_of("dpo")
    assert batch.labels is not None and batch.input_ids is not None and len(batch.labels) == 2 * len(samples)
    found = make("dpo").originals(samples[0])
    chosen, rejected = found["chosen"], found["rejected"]
    assert batch.input_ids[0, : len(chosen) - 1].tolist() == chosen[:-1].tolist()
    assert batch.labels[0][batch.labels[0] >= 0].tolist() == chosen[1:].tolist()
    assert batch.labels[4][batch.labels[4] >= 0].tolist() == rejected[1:].tolist()
