"""What all objectives share: a loss by its definition, whatever the padding and however a batch is cut."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.objectives.cases import (
    DISTILLED,
    KINDS,
    WHOLE,
    batch_of,
    distillation,
    make,
    model_of,
    rows_of,
    samples_of,
    step,
)
from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives import OBJECTIVES, ObjectiveOptions
from tformer.objectives.base import LossResult, Objective, Term, total_loss

TRAINED = [*KINDS, *(f"{kind}, distilled" for kind in DISTILLED)]
"""Every case alone and, where that can be, with a teacher."""


def objective_of(case: str) -> tuple[str, Objective]:
    kind, distilled, _ = case.partition(", distilled")
    if not distilled:
        return kind, make(kind)
    return kind, distillation(kind, model_of(kind, seed=1, layers=4), hidden=0.3, attention=0.2)


def assert_equal_steps(one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5) and one[1].keys() == other[1].keys() and one[1]
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-4, atol=1e-5)


def alone(batch: Batch, row: int) -> Batch:
    """One row without its padding."""

    def columns(mask: Tensor | None) -> Any:
        return slice(None) if mask is None else mask[row]

    source, target = columns(batch.attention_mask), columns(batch.decoder_attention_mask)
    answered = batch.input_ids if batch.decoder_input_ids is None else batch.decoder_input_ids
    rows = {}
    for name, tensor in batch.tensors().items():
        aligned = answered is not None and tensor.shape == answered.shape
        of_target = name.startswith("decoder_") or (name == "labels" and batch.decoder_input_ids is not None)
        cut = tensor.ndim == 2 and (name != "labels" or aligned)
        rows[name] = tensor[row : row + 1, target if of_target else source] if cut else tensor[row : row + 1]
    return Batch(**rows)


def by_definition(name: str, output: Any, batch: Batch, options: Any) -> dict[str, float]:
    """The sums of a head's loss and metrics."""
    labels = batch.next_sentence_label if name == "next_sentence" else batch.labels
    assert labels is not None
    scores = output.head(name).detach()
    if name == "regression":
        error = (scores.squeeze(1) - labels).abs()
        squares = float(error.square().sum())
        return {"loss": squares, "count": 1}
    if name == "span":
        log_p_T2, marks = scores[0, labels[0] != IGNORED_LABEL].log_softmax(0), labels[labels != IGNORED_LABEL]
        borders = [int((marks & bit).nonzero()) for bit in (1, 2)]
        nll = -float(log_p_T2[borders, [0, 1]].mean())
        return {"loss": nll, "accuracy": log_p_T2.argmax(0).tolist() == borders, "count": 1}
    if labels.is_floating_point():
        p = scores.sigmoid()
        nll = -float((labels * p.log() + (1 - labels) * (1 - p).log()).sum())
        correct = int(((p > 0.5) == labels.bool()).sum())
        return {"loss": nll, "accuracy": correct, "count": labels.numel()}
    scores, labels = scores.flatten(0, -2), labels.flatten()
    kept = labels != IGNORED_LABEL
    log_p, labels = scores[kept].log_softmax(-1), labels[kept]
    on_label, size = log_p.gather(1, labels[:, None]).sum(), log_p.shape[1]
    eps = getattr(options, "label_smoothing", 0.0)
    off_target = getattr(options, "smoothing_kind", "uniform") == "off_target"
    spread = (log_p.sum() - on_label) / (size - 1) if off_target else log_p.sum() / size
    loss = -float((1 - eps) * on_label + eps * spread)
    correct = int((log_p.argmax(-1) == labels).sum())
    return {"loss": loss, "nll": -float(on_label), "accuracy": correct, "count": len(labels)}


def options_with(field: str) -> list[Any]:
    return [each for each in get_args(ObjectiveOptions) if field in {one.name for one in dataclasses.fields(each)}]


def test_every_objective_has_a_case() -> None:
    assert {kind for case in KINDS for kind in case.split(",")} == set(OBJECTIVES)
    assert set(OBJECTIVES) == {options.kind for options in get_args(ObjectiveOptions)}
    for case, options in KINDS.items():
        assert [type(each) for each in make(case).members] == [each.objective for each in options]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in DISTILLED),
        *((each.kind, {"label_smoothing": 0.1}) for each in options_with("label_smoothing") if each.kind != "dpo"),
        *((each.kind, {"label_smoothing": 0.1, "smoothing_kind": "off_target"})
          for each in options_with("smoothing_kind")),
    ],
)  # fmt: skip
def test_loss_and_metrics_are_their_definitions_summed_over_the_rows_alone(kind: str, options: dict[str, Any]) -> None:
    objective, model, batch = make(kind, **options), model_of(kind), batch_of(kind)
    result = objective.loss(model, batch)
    outputs = [(one, model(**one.model_inputs())) for one in (alone(batch, row) for row in range(4))]
    assert list(result.terms) == [member.head.kind for member in objective.members]
    for place, member in enumerate(objective.members):
        name, expected = member.head.kind, Counter[str]()
        for one, output in outputs:
            expected.update(by_definition(name, output, one, member.options))
        term = result.terms[name]
        assert float(term.sum.detach()) == pytest.approx(expected.pop("loss"), rel=1e-5)
        assert term.weight == member.options.weight and int(term.count) == expected["count"]
        count = expected.pop("count")
        if not member.predicts_tokens:
            expected.pop("nll", None)
        found = {key: result.metrics[f"{name}_{key}" if place else key] for key in expected}
        assert {key: float(metric.sum) for key, metric in found.items()} == pytest.approx(expected, rel=1e-5)
        assert all(int(metric.count) == count for metric in found.values())
        assert ("nll" in result.metrics) == objective.members[0].predicts_tokens
    assert float(total_loss(result.terms).detach()) == pytest.approx(
        sum(term.weight * float(term.sum.detach()) / int(term.count) for term in result.terms.values())
    )


@pytest.mark.parametrize("case", TRAINED)
def test_counts_are_known_before_the_forward_and_metrics_have_no_gradient(case: str) -> None:
    kind, objective = objective_of(case)
    batch = batch_of(kind)
    result = objective.loss(model_of(kind), batch)
    assert {name: int(term.count) for name, term in result.terms.items()} == objective.label_count(batch)
    assert not any(metric.sum.requires_grad for metric in result.metrics.values())


@pytest.mark.parametrize("case", [case for case in TRAINED if case not in WHOLE])
def test_a_cut_batch_has_the_loss_and_the_gradients_of_the_whole(case: str) -> None:
    kind, objective = objective_of(case)
    model, batch = model_of(kind), batch_of(kind)
    sides = 2 if kind == "dpo" else 1
    parts = [rows_of(batch, rows, parts=sides) for rows in (slice(0, 1), slice(1, 3), slice(3, 4))]
    assert_equal_steps(step(objective, model, [batch]), step(objective, model, parts))


@pytest.mark.parametrize("case", TRAINED)
def test_padding_counts_nowhere(case: str) -> None:
    """More of it, on the other side where the objective allows that, and with other ids in it."""
    kind, objective = objective_of(case)
    model, batch = model_of(kind), batch_of(kind)
    assert batch.input_ids is not None and batch.attention_mask is not None
    changed = {"input_ids": batch.input_ids.masked_fill(~batch.attention_mask, 9)}
    if batch.decoder_input_ids is not None and batch.decoder_attention_mask is not None:
        changed["decoder_input_ids"] = batch.decoder_input_ids.masked_fill(~batch.decoder_attention_mask, 9)
    expected = step(objective, model, [batch])
    for other in (
        batch_of(kind, pad_to="max"), batch_of(kind, padding="left"), dataclasses.replace(batch, **changed)
    ):  # fmt: skip
        assert_equal_steps(expected, step(objective, model, [other]))


def listed(batch: Batch) -> Mapping[str, Any]:
    return {name: tensor.tolist() for name, tensor in batch.tensors().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_a_function_of_samples_and_generator_and_leaves_the_samples_alone(kind: str) -> None:
    samples, objective = samples_of(kind), make(kind)
    whole, again, other = (listed(objective.collate(samples, rng=np.random.default_rng(seed))) for seed in (1, 1, 2))
    assert whole == again and (whole != other) == make(kind).collates_at_random
    assert "labels" in whole and "labels" not in objective.collate(samples, rng=np.random.default_rng(0)).model_inputs()
    for sample, before in zip(samples, samples_of(kind), strict=True):
        for name, ids in objective.originals(sample).items():
            assert ids.tolist() == objective.originals(before)[name].tolist()


@pytest.mark.parametrize("kind", ["causal_lm", "masked_lm", "replaced_token", "span_corruption", "denoising"])
def test_windows_come_as_an_array_as_arrays_or_as_examples(kind: str) -> None:
    rows = np.random.default_rng(0).integers(7, 40, size=(3, 24))  # a width that needs no padding
    forms: list[Any] = [rows, list(rows), [Example(row) for row in rows]]
    first, *others = (listed(make(kind).collate(form, rng=np.random.default_rng(0))) for form in forms)
    assert others == [first, first]
    if "decoder_input_ids" not in first:
        assert first.keys() == {"input_ids", "labels"}


def test_total_loss_adds_weighted_means() -> None:
    terms = {"a": Term(torch.tensor(6.0), 3, 1.0), "b": Term(torch.tensor(8.0), torch.tensor(2), 0.5)}
    assert float(total_loss(terms)) == 4.0
    assert float(total_loss(LossResult(terms, {}).terms, {"a": 6, "b": 4})) == 2.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("label_smoothing", 1.0), ("label_smoothing", -0.1), ("word_dropout", 1.0), ("weight", 0.0)],
)
def test_options_refuse_what_makes_no_sense(field: str, value: float) -> None:
    for options in options_with(field):
        with pytest.raises(ValueError, match=field):
            options(**{field: value})
