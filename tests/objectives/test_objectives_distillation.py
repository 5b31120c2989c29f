"""Distillation as an objective: terms that add up, a teacher that stays as it is, random streams left alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.objectives.cases import DISTILLED, batch_of, distillation, make, model_of, rows_of, step
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import total_loss
from tformer.objectives.distillation import teacher_layer


@pytest.mark.parametrize("kind", DISTILLED)
def test_a_student_that_equals_its_teacher_has_nothing_to_learn_from_it(kind: str) -> None:
    teacher = model_of(kind)
    student = copy.deepcopy(teacher)
    found = distillation(kind, teacher, alpha=0.0, hidden=1.0, attention=1.0)
    result = found.loss(student, batch_of(kind))
    learned = {name: term for name, term in result.terms.items() if name not in found.inner.heads}
    assert {"distillation", "hidden", "attention"} <= learned.keys()
    for name, term in learned.items():
        assert term.sum.detach().abs() < 1e-5, name
    _, gradients = step(found, student, [batch_of(kind)])
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) < 1e-5


@pytest.mark.parametrize("kind", DISTILLED)
def test_alpha_1_is_plain_training_to_the_bit(kind: str) -> None:
    """Also with dropout: the teacher draws nothing from the stream that the student's dropout reads."""
    teacher = model_of(kind, seed=1, dropout=0.3)
    grads = []
    for objective in (make(kind, weight=1.0), distillation(kind, teacher, alpha=1.0)):
        student = model_of(kind, dropout=0.3).train()
        grads.append(step(objective, student, [batch_of(kind), batch_of(kind, seed=1)]))
        grads[-1][1]["state"] = torch.get_rng_state()
    assert grads[0][0] == grads[1][0] and grads[0][1].keys() == grads[1][1].keys()
    assert all(torch.equal(grads[0][1][name], grads[1][1][name]) for name in grads[0][1])


def test_the_teacher_keeps_its_weights_and_gets_no_gradients() -> None:
    teacher = model_of("causal_lm", seed=1, dropout=0.5)
    before = copy.deepcopy(teacher.state_dict())
    student = model_of("causal_lm")
    found = distillation("causal_lm", teacher, hidden=1.0, attention=1.0)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for number in range(3):
        student.train()
        step(found, student, [batch_of("causal_lm", seed=number)])
        optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert not teacher.training and all(parameter.grad is None for parameter in teacher.parameters())


def test_the_teacher_sees_the_very_batch_of_the_student() -> None:
    teacher, seen = model_of("seq2seq", seed=1), []

    def forward(**inputs: Any) -> Any:
        seen.append(inputs)
        return teacher(**inputs)

    batch = batch_of("seq2seq")
    distillation("seq2seq", teacher, forward=forward).loss(model_of("seq2seq"), batch)
    [inputs] = seen
    assert inputs.pop("taps") == frozenset() and inputs.keys() == batch.model_inputs().keys()
    assert all(inputs[name] is tensor for name, tensor in batch.model_inputs().items())


def test_the_loss_is_hintons() -> None:
    """alpha CE + (1 - alpha) T² KL, written out."""
    teacher, student, batch = model_of("classification", seed=1), model_of("classification"), batch_of("classification")
    found = distillation("classification", teacher, temperature=3.0, alpha=0.25).loss(student, batch)
    ours, theirs = (model(**batch.model_inputs()).head("classifier") for model in (student, teacher))
    assert batch.labels is not None
    hard = torch.nn.functional.cross_entropy(ours, batch.labels)
    q = (theirs / 3).softmax(-1)
    soft = (q * (q.log() - (ours / 3).softmax(-1).log())).sum(-1).mean()
    torch.testing.assert_close(total_loss(found.terms), 0.25 * hard + 0.75 * 9 * soft)
    assert found.metrics.keys() == {"accuracy"}


def test_the_weight_of_an_objective_multiplies_what_its_teacher_says_too() -> None:
    teacher, student, batch = model_of("causal_lm", seed=1), model_of("causal_lm"), batch_of("causal_lm")
    losses = [
        total_loss(distillation("causal_lm", teacher, alpha=0.25, weight=weight).loss(student, batch).terms)
        for weight in (1.0, 0.5)
    ]
    torch.testing.assert_close(losses[1], 0.5 * losses[0])


def test_labels_in_another_order_are_the_same_labels() -> None:
    teacher, student, batch = model_of("classification", seed=1), model_of("classification"), batch_of("classification")
    turned = copy.deepcopy(teacher)
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        for name in ("heads.classifier.project.weight", "heads.classifier.project.bias"):
            turned.get_parameter(name).copy_(teacher.get_parameter(name)[order.argsort()])
    plain = distillation("classification", teacher).loss(student, batch).terms["distillation"].sum
    again = distillation("classification", turned, order_L=order).loss(student, batch)
    torch.testing.assert_close(plain, again.terms["distillation"].sum)


def test_only_labelled_positions_have_soft_targets() -> None:
    found = distillation("masked_lm", model_of("masked_lm", seed=1))
    batch, student = batch_of("masked_lm"), model_of("masked_lm")
    assert batch.labels is not None
    few = replace(batch, labels=batch.labels.clone().index_fill_(0, torch.tensor([0, 1, 2]), IGNORED_LABEL))
    alone = rows_of(batch, slice(3, 4))
    sums = [found.loss(student, one).terms["distillation"].sum.item() for one in (few, alone)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-4)


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [(2, 4, [1, 3]), (3, 12, [3, 7, 11]), (4, 6, [1, 2, 4, 5]), (3, 3, [0, 1, 2]), (4, 2, [0, 0, 1, 1]), (1, 5, [4])],
)
def test_layers_are_spaced_evenly_and_end_together(student: int, teacher: int, expected: list[int]) -> None:
    assert [teacher_layer(n, student_layers=student, teacher_layers=teacher) for n in range(student)] == expected


def test_layer_terms_against_their_definition() -> None:
    teacher, student, batch = model_of("causal_lm", seed=1, layers=4), model_of("causal_lm"), batch_of("causal_lm")
    student.requires_grad_(False)
    result = distillation("causal_lm", teacher, hidden=0.3, attention=0.2).loss(student, batch)
    mask = batch.attention_mask
    assert mask is not None
    names = [f"decoder.{n}.{tap}" for n in range(4) for tap in ("hidden", "self_attention.weights")]
    ours = student(**batch.model_inputs(), taps=[name for name in names if int(name.split(".")[1]) < 2]).taps
    theirs = teacher(**batch.model_inputs(), taps=names).taps
    hidden, attention = 0.0, 0.0
    for n, other in ((0, 1), (1, 3)):
        h, g = ours[f"decoder.{n}.hidden"], theirs[f"decoder.{other}.hidden"]
        hidden += float(((h - g) ** 2).mean(-1)[mask].sum())
        a, b = ours[f"decoder.{n}.self_attention.weights"], theirs[f"decoder.{other}.self_attention.weights"]
        attention += float(torch.where(b > 0, b * (b.log() - a.log()), 0.0).sum(-1).mean(1)[mask].sum())
    assert float(result.terms["hidden"].sum) == pytest.approx(hidden, rel=1e-5)
    assert float(result.terms["attention"].sum) == pytest.approx(attention, rel=1e-4)
    assert {name: term.weight for name, term in result.terms.items()} == {
        "lm": 0.5, "distillation": 0.5, "hidden": 0.3, "attention": 0.2}  # fmt: skip
