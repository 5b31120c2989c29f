"""Disentangled attention: buckets as published, shared tables and projections, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.nn.attention_cases import context_of
from tformer.build import build_model
from tformer.nn.attention.disentangled import DisentangledOptions, log_bucket
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.recipe.model import Model
from tformer.support.errors import InputError


@pytest.mark.parametrize(("buckets", "max_distance"), [(256, 512), (6, 9), (8, 100), (5, 23)])
def test_buckets_are_the_published_ones(buckets: int, max_distance: int) -> None:
    theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2").make_log_bucket_position
    distances = torch.arange(-600, 601)
    expected = theirs(distances, buckets, max_distance).long()
    assert torch.equal(log_bucket(distances, buckets=buckets, max_distance=max_distance), expected)


def test_a_shared_table_passes_through_the_projections_of_queries_and_keys() -> None:
    torch.manual_seed(0)
    options = DisentangledOptions(buckets=4, max_distance=6)
    attention = MultiHeadAttention(16, options=options, num_heads=2)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    mechanism = attention.mechanism
    x, table = torch.randn(1, 7, 16), mechanism.norm(mechanism.table)  # type: ignore[operator, arg-type]
    q, k, v = (part.view(7, 2, 8).transpose(0, 1) for part in attention.qkv(x)[0].split(16, dim=-1))
    q_r, k_r, _ = (part.view(8, 2, 8).transpose(0, 1) for part in attention.qkv(table).split(16, dim=-1))
    scores = torch.empty(2, 7, 7)
    for i in range(7):
        for j in range(7):
            row = int((log_bucket(torch.tensor(i - j), buckets=4, max_distance=6) + 4).clamp(0, 7))
            pairs = q[:, i] * k[:, j] + q[:, i] * k_r[:, row] + k[:, j] * q_r[:, row]
            scores[:, i, j] = pairs.sum(-1) / (3 * 8) ** 0.5
    expected = attention.out((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    torch.testing.assert_close(attention(x, context_of(7))[0], expected, atol=1e-5, rtol=1e-5)


def section(**attention: Any) -> Model:
    layers = {1: {"attention": attention.pop("second", {})}}
    stack = {"num_layers": 2, "num_heads": 2, "attention": {"kind": "disentangled", **attention}, "layers": layers}
    return Model.model_validate({"d_model": 16, "vocab_size": 11, "encoder": stack, "heads": [{"kind": "masked_lm"}]})


def test_all_layers_share_a_table_and_each_has_its_own_projections() -> None:
    plain, shared, own = (
        build_model(section(buckets=8, max_distance=20, **options)).num_parameters()
        for options in ({"terms": "c2p"}, {}, {"share_projections": False})
    )
    full = build_model(section()).num_parameters() - 2 * 256 * 16
    assert plain == shared == full + 2 * 8 * 16
    assert own == shared + 2 * 2 * (16 * 16 + 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": 3}, "buckets must be 0 or at least 4, found 3"),
        ({"buckets": 16, "max_distance": 9}, "must exceed half the buckets"),
        ({"qk_norm": True}, "qk_norm: not defined together with disentangled attention"),
        ({"second": {"buckets": 8}}, "must be the same in all layers"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, InputError), match=message):
        build_model(section(**options))
