"""Causal language modelling: what batches look like, and the loss against plain cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives import OBJECTIVES, CausalLmOptions, ObjectiveOptions, build_objective
from tformer.objectives.base import LossResult, Objective, ObjectiveContext, Term, total_loss
from tformer.objectives.causal_lm import CausalLm
from tformer.tokenizer.special import SpecialIds

PAD, VOCAB, SEQ_LEN = 9, 11, 6


def make(options: CausalLmOptions = CausalLmOptions(), **sizes: Any) -> Objective:
    context = ObjectiveContext(SpecialIds(pad=PAD), **{"seq_len": SEQ_LEN, **sizes})
    return build_objective([options], context)


def collate(samples: Any, seed: int = 0, **sizes: Any) -> Batch:
    return make(**sizes).collate(samples, rng=np.random.default_rng(seed))


def rows(*lengths: int) -> list[np.ndarray]:
    return [np.arange(length) % 8 + 1 for length in lengths]


class FakeOutput:
    """Logits as a function of each token alone, and `loss_terms` written out."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def loss_terms(
        self, name: str, labels: Tensor, *, num_labels: int | None, label_smoothing: float, smoothing_kind: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert name == "lm"
        logits, labels = self.logits.flatten(0, 1), labels.flatten()
        nll = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED_LABEL)
        kept = labels != IGNORED_LABEL
        log_p = logits[kept].log_softmax(-1)
        if smoothing_kind == "uniform":
            target = torch.full_like(log_p, label_smoothing / VOCAB)
            target[torch.arange(len(target)), labels[kept]] += 1 - label_smoothing
        else:
            target = torch.full_like(log_p, label_smoothing / (VOCAB - 1))
            target[torch.arange(len(target)), labels[kept]] = 1 - label_smoothing
        correct = (logits[kept].argmax(-1) == labels[kept]).sum()
        return -(target * log_p).sum(), nll.detach(), kept.sum(), correct


def fake_model(seen: dict[str, Tensor] | None = None) -> Callable[..., FakeOutput]:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def forward(**inputs: Tensor) -> FakeOutput:
        if seen is not None:
            seen.update(inputs)
        return FakeOutput(table[inputs["input_ids"]])

    return forward


def test_the_table_builds_the_objective() -> None:
    kinds = {options.kind for options in get_args(ObjectiveOptions)}
    assert set(OBJECTIVES) == kinds
    assert type(make()) is CausalLm


def test_a_window_array_is_shifted_and_nothing_is_padded() -> None:
    windows = np.arange(3 * 7).reshape(3, 7)
    batch = collate(windows)
    assert batch.input_ids is not None and batch.labels is not None
    assert batch.input_ids.tolist() == windows[:, :-1].tolist()
    assert batch.labels.tolist() == windows[:, 1:].tolist()
    assert batch.attention_mask is None and batch.position_ids is None and batch.document_ids is None
    assert batch.num_tokens == 18 and make().label_count(batch) == {"lm": 18}
    assert batch.input_ids.is_contiguous() and batch.labels.is_contiguous()


def test_array_and_list_of_windows_give_the_same_batch() -> None:
    windows = np.arange(3 * 7).reshape(3, 7)
    fast, slow = collate(windows), collate(list(windows))
    for name, tensor in fast.model_inputs().items():
        assert torch.equal(tensor, slow.model_inputs()[name])
    assert fast.labels is not None and slow.labels is not None and torch.equal(fast.labels, slow.labels)
    assert fast.model_inputs().keys() == slow.model_inputs().keys()


def test_a_narrow_array_is_padded_when_the_width_is_fixed() -> None:
    batch = collate(np.arange(8).reshape(2, 4), pad_to="max")
    assert batch.input_ids is not None and batch.input_ids.shape == (2, SEQ_LEN)
    assert batch.num_tokens == 6


@pytest.mark.parametrize(
    ("padding", "inputs", "labels"),
    [
        ("right", [1, 2, PAD, PAD], [2, 3, -100, -100]),
        ("left", [PAD, PAD, 1, 2], [-100, -100, 2, 3]),
    ],
)
def test_short_samples_are_padded_without_labels(padding: str, inputs: list[int], labels: list[int]) -> None:
    batch = collate(rows(5, 3), padding=padding)
    assert batch.input_ids is not None and batch.labels is not None and batch.attention_mask is not None
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], inputs]
    assert batch.labels.tolist() == [[2, 3, 4, 5], labels]
    assert batch.attention_mask.tolist() == [[True] * 4, [label != -100 for label in labels]]
    assert batch.num_tokens == 6 and make().label_count(batch) == {"lm": 6}


@given(
    st.lists(st.integers(2, SEQ_LEN + 1), min_size=1, max_size=5),
    st.sampled_from(["right", "left", "random"]),
    st.sampled_from(["longest", "max"]),
    st.integers(0, 5),
)
def test_padding_keeps_every_pair_of_input_and_label(lengths: list[int], padding: str, pad_to: str, seed: int) -> None:
    samples = rows(*lengths)
    batch = collate(samples, seed, padding=padding, pad_to=pad_to)
    assert batch.input_ids is not None and batch.labels is not None
    assert batch.input_ids.shape[1] == (SEQ_LEN if pad_to == "max" else max(lengths) - 1)
    mask = batch.attention_mask if batch.attention_mask is not None else torch.ones_like(batch.input_ids).bool()
    for index, sample in enumerate(samples):
        assert batch.input_ids[index][mask[index]].tolist() == sample[:-1].tolist()
        assert batch.labels[index][mask[index]].tolist() == sample[1:].tolist()
        assert set(batch.labels[index][~mask[index]].tolist()) <= {IGNORED_LABEL}
        assert set(batch.input_ids[index][~mask[index]].tolist()) <= {PAD}
        places = mask[index].nonzero().flatten()
        assert (places.diff() == 1).all()


def test_random_padding_comes_from_the_generator_alone() -> None:
    batches = [collate(rows(2, 2, 2, 2), seed, padding="random", pad_to="max").attention_mask for seed in (1, 1, 2)]
    first, again, other = batches
    assert first is not None and again is not None and other is not None
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_positions_restart_with_each_document() -> None:
    samples = [
        Example(np.array([1, 2, 3, 4, 5]), np.array([0, 0, 1, 1, 1])),
        Example(np.array([1, 2, 3]), np.array([0, 1, 1])),
    ]
    batch = collate(samples)
    assert batch.document_ids is not None and batch.position_ids is not None and batch.labels is not None
    assert batch.document_ids.tolist() == [[0, 0, 1, 1], [0, 1, -1, -1]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1], [0, 0, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, 4, 5], [2, 3, -100, -100]]


def test_document_ids_are_dropped_where_every_sample_is_one_document() -> None:
    batch = collate([Example(np.array([1, 2, 3]), np.array([4, 4, 5])), Example(np.array([1, 2, 3]))])
    assert batch.document_ids is None and batch.position_ids is None


@pytest.mark.parametrize("samples", [rows(SEQ_LEN + 2), np.ones((2, SEQ_LEN + 2), dtype=np.int64)])
def test_a_sample_longer_than_the_window_is_refused(samples: Any) -> None:
    with pytest.raises(ValueError, match="2 to 7 ids, found 8"):
        collate(samples)


def test_a_sample_without_a_label_is_refused() -> None:
    with pytest.raises(ValueError, match="found 1"):
        collate(rows(1))


def test_without_a_pad_token_padding_is_id_zero() -> None:
    objective = build_objective([CausalLmOptions()], ObjectiveContext(SpecialIds(), seq_len=SEQ_LEN))
    batch = objective.collate(rows(4, 2), rng=np.random.default_rng(0))
    assert batch.input_ids is not None and batch.input_ids[1].tolist() == [1, 0, 0]


def test_the_loss_is_cross_entropy_over_real_labels() -> None:
    objective, model = make(CausalLmOptions(weight=0.5)), fake_model()
    batch = collate(rows(5, 3))
    result = objective.loss(model, batch)
    assert batch.input_ids is not None and batch.labels is not None
    expected = F.cross_entropy(model(input_ids=batch.input_ids).logits.flatten(0, 1), batch.labels.flatten())
    torch.testing.assert_close(result.terms["lm"].sum / 6, expected)
    torch.testing.assert_close(total_loss(result.terms), 0.5 * expected)
    torch.testing.assert_close(result.metrics["nll_sum"], result.terms["lm"].sum.detach())
    assert result.metrics["count"] == 6 and 0 <= int(result.metrics["correct"]) <= 6
    assert not result.metrics["nll_sum"].requires_grad


def test_label_count_is_the_terms_count() -> None:
    batch = collate(rows(5, 3, 7))
    assert make().label_count(batch)["lm"] == make().loss(fake_model(), batch).terms["lm"].count


@pytest.mark.parametrize("kind", ["uniform", "off_target"])
def test_label_smoothing_reaches_the_loss_but_not_the_reported_likelihood(kind: Any) -> None:
    batch = collate(rows(5, 3))
    plain = make().loss(fake_model(), batch)
    smoothed = make(CausalLmOptions(label_smoothing=0.1, smoothing_kind=kind)).loss(fake_model(), batch)
    torch.testing.assert_close(smoothed.metrics["nll_sum"], plain.metrics["nll_sum"])
    assert (smoothed.terms["lm"].sum - plain.terms["lm"].sum).abs() > 1e-3


def test_the_model_gets_masks_and_positions_but_no_labels() -> None:
    seen: dict[str, Tensor] = {}
    samples = [Example(np.array([1, 2, 3]), np.array([0, 1, 1])), Example(np.array([1, 2]))]
    make().loss(fake_model(seen), collate(samples))
    assert seen.keys() == {"input_ids", "attention_mask", "position_ids", "document_ids"}


def test_a_cut_batch_has_the_loss_of_the_whole() -> None:
    samples, model, objective = rows(5, 3, 7, 2), fake_model(), make()
    whole = total_loss(objective.loss(model, collate(samples)).terms)
    parts = [collate(samples[:1]), collate(samples[1:])]
    counts = {"lm": sum(objective.label_count(part)["lm"] for part in parts)}
    pieces = sum(total_loss(objective.loss(model, part).terms, counts) for part in parts)
    torch.testing.assert_close(whole, pieces)


def test_total_loss_adds_weighted_means() -> None:
    terms = {"a": Term(torch.tensor(6.0), 3, 1.0), "b": Term(torch.tensor(8.0), torch.tensor(2), 0.5)}
    assert float(total_loss(terms)) == 4.0
    assert float(total_loss(LossResult(terms, {}).terms, {"a": 6, "b": 4})) == 2.0


@pytest.mark.parametrize("options", [{"label_smoothing": 1.0}, {"label_smoothing": -0.1}, {"weight": 0.0}])
def test_options_refuse_what_makes_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CausalLmOptions(**options)  # type: ignore[arg-type]


def test_the_real_model_speaks_the_same_contract() -> None:
    from tformer.build import build_model
    from tformer.nn.feedforward import FeedForwardOptions
    from tformer.recipe.model import Model, Stack

    section = Model(
        d_model=8,
        max_seq_len=SEQ_LEN,
        decoder=Stack(num_layers=1, num_heads=2, feedforward=FeedForwardOptions(d_ff=16)),
    )
    model = build_model(section, vocab_size=VOCAB).eval()
    batch = collate(rows(5, 3), padding="left")
    result = make().loss(model, batch)
    logits = model(**batch.model_inputs()).logits
    assert batch.labels is not None
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    torch.testing.assert_close(result.terms["lm"].sum, expected)
    assert int(result.metrics["count"]) == 6
