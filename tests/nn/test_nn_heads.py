"""Heads and the output of a forward pass."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn import losses
from tformer.nn.classification_heads import (
    POOLINGS,
    ClassifierHeadOptions,
    EmbeddingHeadOptions,
    HeadContext,
    MultipleChoiceHeadOptions,
    NextSentenceHeadOptions,
    Pooling,
    RegressionHeadOptions,
    ReplacedTokenHeadOptions,
    SpanHeadOptions,
    TokenClassifierHeadOptions,
)
from tformer.nn.heads import HEADS, LmHeadOptions, MaskedLmHeadOptions, ModelOutput
from tformer.nn.losses import linear_cross_entropy
from tformer.nn.norm import NormOptions
from tformer.nn.products import Quantize, is_possible, prepare_product


def context(**values: object) -> HeadContext:
    return HeadContext(**{"d_model": 8, "vocab_size": 11, "norm": NormOptions(), **values})


def randomized(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.1, 0.6)
    return module


@pytest.mark.parametrize("kind", ["classifier", "regression"])
def test_a_pooler_may_lack_its_bias_and_end_in_a_norm(kind: str) -> None:
    """As ModernBERT's: project(norm(act(dense(x))))."""
    options = {"classifier": ClassifierHeadOptions, "regression": RegressionHeadOptions}[kind]
    head = options(pooling="mean", pooler_bias=False, pooler_norm=True).build(
        HeadContext(d_model=8, vocab_size=None, norm=NormOptions(bias=False), num_labels=3)
    )
    assert {name for name, _ in head.named_parameters()} == {
        *("pooler.weight", "norm.weight", "project.weight", "project.bias")
    }
    hidden = torch.randn(2, 5, 8)
    dense = torch.tanh(hidden.mean(1) @ head.pooler.weight.T)
    expected = F.layer_norm(dense, (8,)) @ head.project.weight.T + head.project.bias
    torch.testing.assert_close(head(hidden), expected)


def test_lm_head_formula_with_scale_bias_and_softcap() -> None:
    head = randomized(LmHeadOptions(bias=True, scale="inverse_sqrt_d", softcap=2.0).build(context()))
    x = torch.randn(2, 3, 8)
    raw = F.linear(x / math.sqrt(8), head.weight, head.bias)
    torch.testing.assert_close(head(x), 2.0 * torch.tanh(raw / 2.0))
    assert head(x).abs().max() <= 2.0


def test_tied_head_uses_the_table_itself() -> None:
    table = nn.Parameter(torch.randn(11, 8))
    head = LmHeadOptions().build(context(tied=table))
    assert head.weight is table
    assert [id(p) for p in head.parameters()] == [id(table)]


def test_fixnorm_head_uses_rows_of_length_one() -> None:
    table = nn.Parameter(torch.randn(11, 8) * 3)
    head = LmHeadOptions().build(context(tied=table, fixnorm=True))
    torch.testing.assert_close(head.matrix().norm(dim=-1), torch.ones(11))
    x = torch.randn(2, 8)
    torch.testing.assert_close(head(x), x @ F.normalize(table, dim=-1).mT)


def test_masked_lm_transform_bridges_a_factorized_table() -> None:
    table = nn.Parameter(torch.randn(11, 4))
    head = randomized(MaskedLmHeadOptions().build(context(tied=table)))
    x = torch.randn(2, 3, 8)
    inner = F.gelu(F.linear(x, head.dense.weight, head.dense.bias))
    inner = F.layer_norm(inner, (4,), head.norm.weight, head.norm.bias)
    torch.testing.assert_close(head(x), F.linear(inner, head.weight, head.bias))


def test_lm_head_projects_to_a_factorized_table() -> None:
    head = randomized(LmHeadOptions().build(context(tied=nn.Parameter(torch.randn(11, 4)))))
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(head(x), x @ head.project.weight.mT @ head.weight.mT)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("cls", [2.0, 0.0]), ("eos", [4.0, 1.0]), ("mean", [3.0, 0.5]), ("max", [4.0, 1.0])],
)
def test_pooling_finds_real_tokens_left_and_right(how: str, expected: list[float]) -> None:
    hidden = torch.arange(5.0).view(1, 5, 1).expand(2, 5, 3)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    assert POOLINGS[how].pool(hidden, mask)[:, 0].tolist() == expected


@pytest.mark.parametrize("how", get_args(Pooling))
def test_pooling_without_mask_equals_a_full_mask(how: str) -> None:
    hidden = torch.randn(2, 5, 3)
    torch.testing.assert_close(POOLINGS[how].pool(hidden, None), POOLINGS[how].pool(hidden, torch.ones(2, 5)))


def test_attention_pooling_is_a_mean_weighted_by_a_softmax_of_learned_scores() -> None:
    head = randomized(ClassifierHeadOptions(pooling="attention", pooler=False, num_labels=3).build(context()))
    hidden = torch.randn(2, 5, 8)
    weights = F.linear(hidden, head.attend.weight, head.attend.bias).squeeze(-1).softmax(dim=-1)
    expected = F.linear(torch.einsum("bt,btd->bd", weights, hidden), head.project.weight, head.project.bias)
    torch.testing.assert_close(head(hidden), expected)


def test_attention_pooling_leaves_out_padding_on_either_side() -> None:
    head = randomized(ClassifierHeadOptions(pooling="attention", num_labels=3).build(context()))
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    scores = head(hidden, mask)
    torch.testing.assert_close(scores, torch.cat([head(hidden[:1, 2:]), head(hidden[1:, :2])]))
    scores.sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    assert hidden.grad[mask == 0].abs().sum() == 0
    assert head.pool(hidden, torch.zeros(2, 5)).abs().sum() == 0


def test_only_attention_pooling_has_parameters() -> None:
    for how in POOLINGS:
        head = ClassifierHeadOptions(pooling=how, num_labels=3).build(context())
        assert (head.attend is not None) == (how == "attention")


@pytest.mark.parametrize("how", ["mean", "max"])
def test_mean_and_maximum_of_nothing_are_zero(how: str) -> None:
    assert POOLINGS[how].pool(torch.randn(1, 4, 3), torch.zeros(1, 4)).abs().sum() == 0


def test_the_maximum_is_that_of_real_positions_even_where_all_are_negative() -> None:
    hidden = torch.tensor([[[-3.0, -1.0], [-2.0, -5.0], [9.0, 9.0]]])
    assert POOLINGS["max"].pool(hidden, torch.tensor([[1, 1, 0]])).tolist() == [[-2.0, -1.0]]


@pytest.mark.parametrize("how", get_args(Pooling))
def test_no_gradient_reaches_padding(how: str) -> None:
    hidden = torch.randn(2, 5, 3, requires_grad=True)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    POOLINGS[how].pool(hidden, mask).sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    assert hidden.grad[mask == 0].abs().sum() == 0 and hidden.grad[mask == 1].abs().sum() > 0


def test_classifier_formula_and_dropout_before_the_projection() -> None:
    head = randomized(ClassifierHeadOptions(num_labels=5).build(context(dropout=0.5)))
    x = torch.randn(2, 3, 8)
    assert not torch.equal(head(x), head(x))
    head.eval()
    pooled = torch.tanh(F.linear(x[:, 0], head.pooler.weight, head.pooler.bias))
    torch.testing.assert_close(head(x), F.linear(pooled, head.project.weight, head.project.bias))


def test_labels_come_from_the_data_when_left_open() -> None:
    assert ClassifierHeadOptions().build(context(num_labels=7)).project.weight.shape[0] == 7
    with pytest.raises(ValueError, match="num_labels"):
        ClassifierHeadOptions().build(context())


def test_shapes_of_the_other_heads() -> None:
    x = torch.randn(2, 3, 8)
    assert RegressionHeadOptions(pooler=False).build(context())(x).shape == (2, 1)
    assert NextSentenceHeadOptions().build(context())(x).shape == (2, 2)
    assert ReplacedTokenHeadOptions().build(context())(x).shape == (2, 3)
    assert TokenClassifierHeadOptions(num_labels=5).build(context())(x).shape == (2, 3, 5)
    assert SpanHeadOptions().build(context())(x).shape == (2, 3, 2)
    assert MultipleChoiceHeadOptions().build(context())(x).shape == (2, 1)


def test_a_head_on_tokens_reads_each_position_alone() -> None:
    """With the transform too, and in evaluation without dropout."""
    x = torch.randn(2, 3, 8)
    for options in (SpanHeadOptions(dropout=0.5), TokenClassifierHeadOptions(num_labels=4, transform=True)):
        head = randomized(options.build(context())).eval()
        found, changed = head(x), x.clone()
        changed[:, 1] += 1.0
        after = head(changed)
        assert torch.equal(found[:, [0, 2]], after[:, [0, 2]]) and not torch.allclose(found[:, 1], after[:, 1])
        torch.testing.assert_close(head(x[:, 2:]), found[:, 2:])
    assert {"project.weight", "project.bias"} == set(SpanHeadOptions().build(context()).state_dict())


def test_a_token_classifier_takes_the_number_of_labels_of_the_data() -> None:
    assert TokenClassifierHeadOptions().build(context(num_labels=7)).project.weight.shape[0] == 7
    with pytest.raises(ValueError, match="token_classifier head needs num_labels"):
        TokenClassifierHeadOptions().build(context())


def test_logits_are_fp32_of_bf16_hidden_states() -> None:
    for options in (LmHeadOptions(bias=True), MaskedLmHeadOptions(), ClassifierHeadOptions(num_labels=2)):
        assert randomized(options.build(context()))(torch.randn(2, 3, 8).bfloat16()).dtype == torch.float32


def test_every_kind_has_a_row() -> None:
    of_sequences = {"classifier", "regression", "next_sentence", "pooler", "multiple_choice", "embedding"}
    assert set(HEADS) == {"lm", "masked_lm", "replaced_token", "token_classifier", "span"} | of_sequences


SMALL_HEADS: dict[str, Any] = {"lm": LmHeadOptions(), "masked_lm": MaskedLmHeadOptions(transform=False)}


def output(**options: Any) -> ModelOutput:
    torch.manual_seed(0)
    context = HeadContext(d_model=8, vocab_size=11, norm=NormOptions())
    heads = {name: head.build(context) for name, head in {**SMALL_HEADS, **options}.items()}
    for head in heads.values():
        for parameter in head.parameters():
            nn.init.normal_(parameter)
    return ModelOutput(torch.randn(4, 16, 8), nn.ModuleDict(heads))


def labels(share: float) -> Tensor:
    """[4, 16], of which this share is ignored."""
    found = torch.randint(0, 11, (4, 16))
    found.view(-1)[torch.randperm(64)[: round(64 * share)]] = -100
    return found


@pytest.mark.parametrize("name", ["lm", "masked_lm"])
@pytest.mark.parametrize(("ignored", "computed"), [(0.0, 64), (0.05, 64), (0.25, 48), (0.85, 10), (1.0, 0)])
def test_ignored_positions_reach_no_head_where_there_are_more_than_a_few(
    name: str, ignored: float, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, wanted, seen = output(), labels(ignored), []
    features = type(out.heads[name]).features
    monkeypatch.setattr(
        type(out.heads[name]), "features", lambda self, x, *rest: seen.append(len(x)) or features(self, x, *rest)
    )
    loss, _, count, _ = out.loss_terms(name, wanted)
    assert seen == [computed] and int(count) == int((wanted != -100).sum())
    expected = F.cross_entropy(out.head(name).flatten(0, 1), wanted.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_losses_of_each_position_keep_their_places() -> None:
    out, wanted = output(), labels(0.8)
    loss, *_ = out.loss_terms("masked_lm", wanted, reduction="none")
    expected = F.cross_entropy(out.head("masked_lm").flatten(0, 1), wanted.flatten(), reduction="none")
    torch.testing.assert_close(loss, expected)


def test_a_head_without_a_vocabulary_has_no_such_loss() -> None:
    out = output(next_sentence=NextSentenceHeadOptions())
    with pytest.raises(ValueError, match="expected a head over the vocabulary"):
        out.loss_terms("next_sentence", labels(0.0))
    with pytest.raises(ValueError, match="expected a head over the vocabulary"):
        next(out.logit_chunks("next_sentence", labels(0.0) > 0))


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize(
    "options", [LmHeadOptions(softcap=2.0, bias=True), MaskedLmHeadOptions()], ids=["lm", "masked"]
)
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "smoothing",
    [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "smoothing_kind": "off_target"}, {"reduction": "none"}],
    ids=str,
)
def test_a_frozen_heads_loss_is_that_of_its_own_product(
    quantize: Quantize, options: Any, ignored: float, smoothing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss, the nll and what is correct agree with its logits exactly, and with the matrix to what it rounds."""
    if prepare_product(torch.ones(2, 2), None, "none") is None or (not is_possible(quantize, torch.device("cpu"))):
        pytest.skip("no such product here")
    out, wanted = output(chosen=options), labels(ignored)
    monkeypatch.setattr(losses, "SLAB_ELEMENTS", 20 * 11)  # several parts
    monkeypatch.setattr(losses, "BLOCK_ELEMENTS", 7 * 11)
    head: Any = out.heads["chosen"]
    before = out.loss_terms("chosen", wanted, **smoothing)
    head.freeze(quantize, torch.float32)
    if head.dense is not None:
        head.dense.freeze(quantize)
    found = out.loss_terms("chosen", wanted, **smoothing)
    logits, flat = out.head("chosen").flatten(0, 1), wanted.flatten()
    one_by_one = F.cross_entropy(logits, flat, reduction="none")
    exact = linear_cross_entropy(logits, torch.eye(11), flat, **smoothing)
    summed = smoothing.get("reduction", "sum") == "sum"
    torch.testing.assert_close(found.nll, one_by_one.sum() if summed else one_by_one)
    torch.testing.assert_close(found, exact, check_dtype=False)
    assert not found.loss.requires_grad and [x.dtype for x in found] == [x.dtype for x in before]
    torch.testing.assert_close(found.loss, before.loss.detach(), rtol=0.1 if quantize == "int8" else 1e-5, atol=0.2)


def test_the_embedding_head_pools_to_vectors_of_length_1_and_has_no_parameters() -> None:
    hidden, mask = torch.randn(3, 5, 8), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    for how in ("cls", "mean", "max", "eos"):
        pooled = POOLINGS[how].pool(hidden, mask)
        unit, plain = (EmbeddingHeadOptions(pooling=how, normalize=each).build(context()) for each in (True, False))
        torch.testing.assert_close(plain(hidden, mask), pooled)
        torch.testing.assert_close(unit(hidden, mask), pooled / pooled.norm(dim=-1, keepdim=True))
        assert not list(unit.parameters()) and [each.name for each in unit.taps()] == ["pooled", "vector"]
