"""Heads: formulas, tying, pooling with padding."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tformer.nn.heads import (
    HEADS,
    ClassifierHeadOptions,
    HeadContext,
    LmHeadOptions,
    MaskedLmHeadOptions,
    NextSentenceHeadOptions,
    RegressionHeadOptions,
    ReplacedTokenHeadOptions,
    build_head,
    pool,
)
from tformer.nn.norm import NormOptions


def context(**values: object) -> HeadContext:
    return HeadContext(**{"d_model": 8, "vocab_size": 11, "norm": NormOptions(), **values})


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.1, 0.6)
    return module


def test_lm_head_formula_with_scale_bias_and_softcap() -> None:
    head = randomised(build_head(LmHeadOptions(bias=True, scale="inverse_sqrt_d", softcap=2.0), context()))
    x = torch.randn(2, 3, 8)
    raw = F.linear(x / math.sqrt(8), head.weight, head.bias)
    torch.testing.assert_close(head(x), 2.0 * torch.tanh(raw / 2.0))
    assert head(x).abs().max() <= 2.0


def test_tied_head_uses_the_table_itself() -> None:
    table = nn.Parameter(torch.randn(11, 8))
    head = build_head(LmHeadOptions(), context(tied=table))
    assert head.weight is table
    assert [id(p) for p in head.parameters()] == [id(table)]


def test_fixnorm_head_uses_rows_of_length_one() -> None:
    table = nn.Parameter(torch.randn(11, 8) * 3)
    head = build_head(LmHeadOptions(), context(tied=table, fixnorm=True))
    torch.testing.assert_close(head.matrix().norm(dim=-1), torch.ones(11))
    x = torch.randn(2, 8)
    torch.testing.assert_close(head(x), x @ F.normalize(table, dim=-1).mT)


def test_masked_lm_transform_bridges_a_factorised_table() -> None:
    table = nn.Parameter(torch.randn(11, 4))
    head = randomised(build_head(MaskedLmHeadOptions(), context(tied=table)))
    x = torch.randn(2, 3, 8)
    inner = F.gelu(F.linear(x, head.dense.weight, head.dense.bias))
    inner = F.layer_norm(inner, (4,), head.norm.weight, head.norm.bias)
    torch.testing.assert_close(head(x), F.linear(inner, head.weight, head.bias))


def test_lm_head_projects_to_a_factorised_table() -> None:
    head = randomised(build_head(LmHeadOptions(), context(tied=nn.Parameter(torch.randn(11, 4)))))
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(head(x), x @ head.project.weight.mT @ head.weight.mT)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("cls", [2.0, 0.0]), ("eos", [4.0, 1.0]), ("mean", [3.0, 0.5])],
)
def test_pooling_finds_real_tokens_left_and_right(how: str, expected: list[float]) -> None:
    hidden = torch.arange(5.0).view(1, 5, 1).expand(2, 5, 3)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    assert pool(hidden, mask, how)[:, 0].tolist() == expected


@pytest.mark.parametrize("how", ["cls", "eos", "mean"])
def test_pooling_without_mask_equals_a_full_mask(how: str) -> None:
    hidden = torch.randn(2, 5, 3)
    torch.testing.assert_close(pool(hidden, None, how), pool(hidden, torch.ones(2, 5), how))


def test_mean_of_nothing_is_zero() -> None:
    assert pool(torch.randn(1, 4, 3), torch.zeros(1, 4), "mean").abs().sum() == 0


def test_classifier_formula_and_dropout_before_the_projection() -> None:
    head = randomised(build_head(ClassifierHeadOptions(num_labels=5), context(dropout=0.5)))
    x = torch.randn(2, 3, 8)
    assert not torch.equal(head(x), head(x))
    head.eval()
    pooled = torch.tanh(F.linear(x[:, 0], head.pooler.weight, head.pooler.bias))
    torch.testing.assert_close(head(x), F.linear(pooled, head.project.weight, head.project.bias))


def test_labels_come_from_the_data_when_left_open() -> None:
    assert build_head(ClassifierHeadOptions(), context(num_labels=7)).project.weight.shape[0] == 7
    with pytest.raises(ValueError, match="num_labels"):
        build_head(ClassifierHeadOptions(), context())


def test_shapes_of_the_other_heads() -> None:
    x = torch.randn(2, 3, 8)
    assert build_head(RegressionHeadOptions(pooler=False), context())(x).shape == (2, 1)
    assert build_head(NextSentenceHeadOptions(), context())(x).shape == (2, 2)
    assert build_head(ReplacedTokenHeadOptions(), context())(x).shape == (2, 3)


def test_logits_are_fp32_of_bf16_hidden_states() -> None:
    for options in (LmHeadOptions(bias=True), MaskedLmHeadOptions(), ClassifierHeadOptions(num_labels=2)):
        assert randomised(build_head(options, context()))(torch.randn(2, 3, 8).bfloat16()).dtype == torch.float32


def test_every_kind_has_a_row() -> None:
    assert set(HEADS) == {"lm", "masked_lm", "classifier", "regression", "next_sentence", "replaced_token"}
