"""Distillation as an objective: terms that add up, a teacher that stays as it is, random streams left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tformer.build import build_model
from tformer.data.batching.batch import Batch
from tformer.model import Transformer
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives import build_objective
from tformer.objectives.base import LossResult, ObjectiveContext, total_loss
from tformer.objectives.causal_lm import CausalLmOptions
from tformer.objectives.distillation import Distillation, Teacher, teacher_layer
from tformer.objectives.labelled import ClassificationOptions, MultiLabelOptions, RegressionOptions
from tformer.objectives.masked_lm import MaskedLmOptions
from tformer.objectives.next_sentence import NextSentenceOptions
from tformer.objectives.seq2seq import Seq2SeqOptions
from tformer.recipe.model import Model
from tformer.tokenizer.special import DecoderTokens, SpecialIds
from tformer.training.teacher import layer_pairs

V, L, T, U = 20, 3, 6, 5
SPECIAL = SpecialIds(pad=0, bos=1, eos=2, unk=3, cls=4, sep=5, mask=6)
CONTEXT = ObjectiveContext(SPECIAL, seq_len=16, vocab_size=V, target=DecoderTokens(start=1, eos=2))
KINDS: dict[str, tuple[Any, ...]] = {
    "causal_lm": (CausalLmOptions(),),
    "masked_lm": (MaskedLmOptions(),),
    "masked_lm,next_sentence": (MaskedLmOptions(), NextSentenceOptions()),
    "classification": (ClassificationOptions(),),
    "multi_label": (MultiLabelOptions(),),
    "regression": (RegressionOptions(),),
    "seq2seq": (Seq2SeqOptions(label_smoothing=0.1),),
}
HEADS = {"causal_lm": ["lm"], "seq2seq": ["lm"], "regression": ["regression"], "masked_lm": ["masked_lm"],
         "masked_lm,next_sentence": ["masked_lm", "next_sentence"]}  # fmt: skip


def model_of(kind: str, *, layers: int = 2, d_model: int = 16, seed: int = 0, dropout: float = 0.0) -> Transformer:
    torch.manual_seed(seed)
    stack = {"num_layers": layers, "num_heads": 2, "feedforward": {"d_ff": 24}, "dropout": dropout,
             "attention_dropout": dropout}  # fmt: skip
    sides = {"causal_lm": ["decoder"], "seq2seq": ["encoder", "decoder"]}.get(kind, ["encoder"])
    heads = [{"kind": head} for head in HEADS.get(kind, ["classifier"])]
    values = {"d_model": d_model, "max_seq_len": 16, "heads": heads, **dict.fromkeys(sides, stack)}
    model = build_model(Model.model_validate(values), vocab_size=V, num_labels=L)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def batch_of(kind: str, rows: int = 4, *, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(7, V, (rows, T), generator=draw)
    mask = torch.arange(T) < torch.randint(2, T + 1, (rows, 1), generator=draw)
    batch = Batch(input_ids=ids, attention_mask=mask, num_tokens=int(mask.sum()))
    if kind == "classification":
        return replace(batch, labels=torch.randint(L, (rows,), generator=draw))
    if kind == "multi_label":
        return replace(batch, labels=torch.randint(2, (rows, L), generator=draw).float())
    if kind == "regression":
        return replace(batch, labels=torch.randn(rows, generator=draw))
    if kind == "seq2seq":
        outputs = torch.arange(U) < torch.randint(2, U + 1, (rows, 1), generator=draw)
        labels = torch.randint(7, V, (rows, U), generator=draw).masked_fill(~outputs, IGNORED_LABEL)
        return replace(batch, labels=labels, decoder_attention_mask=outputs,
                       decoder_input_ids=torch.randint(7, V, (rows, U), generator=draw))  # fmt: skip
    labels = ids.masked_fill(~mask | (torch.arange(T) % 2 == 0 if "masked" in kind else False), IGNORED_LABEL)
    pairs = torch.randint(2, (rows,), generator=draw) if "next" in kind else None
    return replace(batch, labels=labels, next_sentence_label=pairs)


def distillation(kind: str, teacher: Transformer, **options: Any) -> Distillation:
    forward: Callable[..., Any] = options.pop("forward", teacher)
    values: dict[str, Any] = {"temperature": 2.0, "alpha": 0.5, **options}
    for what in ("hidden", "attention"):
        values[f"{what}_pairs"] = layer_pairs(model_of(kind), teacher, what)
    teacher.requires_grad_(False)
    return Distillation(
        build_objective(KINDS[kind], CONTEXT),  # type: ignore[arg-type]
        Teacher(forward, values.pop("order", None)),
        **values,
    )


def step(objective: Any, model: Transformer, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a global batch in parts, as the loop forms them."""
    totals: dict[str, int] = {}
    for batch in batches:
        for name, count in objective.label_count(batch).items():
            totals[name] = totals.get(name, 0) + count
    model.zero_grad()
    loss = 0.0
    for batch in batches:
        part = total_loss(objective.loss(model, batch).terms, totals)
        part.backward()
        loss += part.item()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def rows_of(batch: Batch, rows: slice) -> Batch:
    return replace(batch._map(lambda tensor: tensor[rows]), num_tokens=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_equals_its_teacher_has_nothing_to_learn_from_it(kind: str) -> None:
    teacher = model_of(kind)
    student = copy.deepcopy(teacher)
    found = distillation(kind, teacher, alpha=0.0, hidden=1.0, attention=1.0)
    result = found.loss(student, batch_of(kind))
    learned = {name: term for name, term in result.terms.items() if name not in HEADS.get(kind, ["classifier"])}
    assert {"distillation", "hidden", "attention"} <= learned.keys()
    for name, term in learned.items():
        assert term.sum.detach().abs() < 1e-5, name
    _, gradients = step(found, student, [batch_of(kind)])
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_cutting_the_batch_changes_nothing(kind: str) -> None:
    teacher, student = model_of(kind, seed=1, layers=4), model_of(kind)
    found = distillation(kind, teacher, hidden=0.3, attention=0.2)
    batch = batch_of(kind, 6)
    whole, parts = step(found, student, [batch]), step(
        found, student, [rows_of(batch, slice(0, 1)), rows_of(batch, slice(1, 4)), rows_of(batch, slice(4, 6))]
    )  # fmt: skip
    assert whole[0] == pytest.approx(parts[0], rel=1e-5)
    for name, gradient in whole[1].items():
        torch.testing.assert_close(gradient, parts[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_known_before_the_forward(kind: str) -> None:
    found = distillation(kind, model_of(kind, seed=1), hidden=0.3, attention=0.2)
    result = found.loss(model_of(kind), batch_of(kind))
    assert {name: int(term.count) for name, term in result.terms.items()} == found.label_count(batch_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_counts_nowhere(kind: str) -> None:
    found = distillation(kind, model_of(kind, seed=1), hidden=0.3, attention=0.2)
    batch, student = batch_of(kind), model_of(kind)
    ids, mask = batch.input_ids, batch.attention_mask
    assert ids is not None and mask is not None
    changed = replace(batch, input_ids=ids.masked_fill(~mask, 9))
    if batch.decoder_input_ids is not None and batch.decoder_attention_mask is not None:
        other = batch.decoder_input_ids.masked_fill(~batch.decoder_attention_mask, 9)
        changed = replace(changed, decoder_input_ids=other)
    first, second = (found.loss(student, one).terms for one in (batch, changed))
    for name in first:
        torch.testing.assert_close(first[name].sum, second[name].sum, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_alpha_1_is_plain_training_to_the_bit(kind: str) -> None:
    """Also with dropout: the teacher draws nothing from the stream that the student's dropout reads."""
    teacher = model_of(kind, seed=1, dropout=0.3)
    plain = build_objective(KINDS[kind], CONTEXT)
    grads = []
    for objective in (plain, distillation(kind, teacher, alpha=1.0)):
        student = model_of(kind, dropout=0.3).train()
        torch.manual_seed(7)
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
    assert found.metrics.keys() == {"nll_sum", "correct", "count"}


def test_labels_in_another_order_are_the_same_labels() -> None:
    teacher, student, batch = model_of("classification", seed=1), model_of("classification"), batch_of("classification")
    turned = copy.deepcopy(teacher)
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        for name in ("heads.classifier.project.weight", "heads.classifier.project.bias"):
            turned.get_parameter(name).copy_(teacher.get_parameter(name)[order.argsort()])
    plain = distillation("classification", teacher).loss(student, batch).terms["distillation"].sum
    again = distillation("classification", turned, order=order).loss(student, batch)
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
    result: LossResult = distillation("causal_lm", teacher, hidden=0.3, attention=0.2).loss(student, batch)
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
