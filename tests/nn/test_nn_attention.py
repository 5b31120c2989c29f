"""Dense attention: every route against a plain formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.attention_cases import (
    Largest,
    arange,
    attend,
    context_of,
    naive,
    positions_for,
    self_attention,
    tensors,
)
from tests.pairwise import pairwise
from tformer.nn.attention import AttentionContext, core, routes
from tformer.nn.attention.context import AttentionInputs, causal_mask, make_mask
from tformer.nn.positions.base import NoPositionsOptions
from tformer.nn.positions.biases import T5BiasOptions
from tformer.nn.positions.shaw import ShawOptions


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "many chunks":
        monkeypatch.setattr(routes, "CHUNK_ELEMENTS", 2 * 2 * 4 * 6)
    yield


# --- the paths agree --------------------------------------------------------------------------------------------------


def padded(batch: int, queries: int, keys: int) -> Tensor:
    """A mask [B, 1, T, S] with padding, and one row of the second example that may look nowhere."""
    mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    mask[0, :, :, 1] = False
    mask[1, :, 2] = False
    return mask


MASKINGS = ["none", "causal", "mask", "causal mask", "key mask"]


@pytest.mark.parametrize(
    ("masking", "kv_heads", "biased"), pairwise(masking=MASKINGS, kv_heads=[4, 2, 1], biased=[False, True])
)
@pytest.mark.usefixtures("chunks")
def test_fused_explicit_and_chunked_equal_the_formula(masking: str, kv_heads: int, biased: bool) -> None:
    q, k, v = tensors(k=kv_heads)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    given = {
        "none": None,
        "causal": None,
        "mask": padded(2, 6, 6),
        "causal mask": padded(2, 6, 6) & causal,
        "key mask": padded(2, 6, 6)[:, :, :1],
    }[masking]
    is_causal = "causal" in masking
    whole = causal if masking == "causal" else given
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64) if biased else None
    bias_fn = None if bias is None else lambda rows: bias[:, :, rows]
    expected, expected_weights = naive(q, k, v, mask=whole, scale=0.3, bias=bias)
    up = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, (q, k, v), up)

    for need_weights in (False, True):  # fused when nothing forbids it; explicit
        out, weights = attend(
            q, k, v, mask=given, is_causal=is_causal, scale=0.3, bias_fn=bias_fn, need_weights=need_weights
        )
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), up), expected_grads)
        if need_weights:
            torch.testing.assert_close(weights, expected_weights)
        else:
            assert weights is None
    # chunked: a score term of zeros forbids the fused kernel without asking for weights
    zero_fn = lambda q_chunk, rows: q_chunk.new_zeros(*q_chunk.shape[:3], 6)  # noqa: E731
    out, _ = attend(q, k, v, mask=given, is_causal=is_causal, scale=0.3, bias_fn=bias_fn, score_fn=zero_fn)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), up), expected_grads)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("value_dim", [3, 8])
def test_value_size_of_its_own_and_other_key_length(value_dim: int) -> None:
    q, k, v = tensors(k=2, t=4, s=7, v=value_dim)
    out, _ = attend(q, k, v, scale=1.0)
    expected, _ = naive(q, k, v, mask=None, scale=1.0)
    torch.testing.assert_close(out, expected)
    up = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), up), torch.autograd.grad(expected, (q, k, v), up))


@pytest.mark.usefixtures("chunks")
def test_learned_bias_and_shaw_terms_get_the_gradient_of_the_formula() -> None:
    q, k, v = tensors(k=2)
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    rows_k = torch.randn(6, 6, 5, dtype=torch.float64, requires_grad=True)
    rows_v = torch.randn(6, 6, 5, dtype=torch.float64, requires_grad=True)
    out, _ = attend(
        q,
        k,
        v,
        is_causal=True,
        scale=0.5,
        bias_fn=lambda rows: bias[:, :, rows],
        score_fn=lambda q_chunk, rows: torch.einsum("bhtd,tsd->bhts", q_chunk, rows_k[rows]),
        mix_fn=lambda weights, rows: torch.einsum("bhts,tsd->bhtd", weights, rows_v[rows, : weights.shape[-1]]),
    )
    whole_bias = bias + 0.5 * torch.einsum("bhtd,tsd->bhts", q, rows_k)
    expected, weights = naive(q, k, v, mask=torch.ones(6, 6, dtype=torch.bool).tril(), scale=0.5, bias=whole_bias)
    expected = expected + torch.einsum("bhts,tsd->bhtd", weights, rows_v)
    torch.testing.assert_close(out, expected)
    inputs, up = (q, k, v, bias, rows_k, rows_v), torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, up), torch.autograd.grad(expected, inputs, up))


@pytest.mark.parametrize(
    ("masking", "heads", "kept"), pairwise(masking=MASKINGS, heads=[(4, 5), (2, 3)], kept=[True, False])
)
def test_blocked_attention_equals_the_formula(
    monkeypatch: pytest.MonkeyPatch, masking: str, heads: tuple[int, int], kept: bool
) -> None:
    """Run in fp64, where sums over blocks must be exact."""
    kv_heads, value_dim = heads
    monkeypatch.setattr(routes, "QUERY_BLOCK", 4)
    monkeypatch.setattr(routes, "BLOCK_ELEMENTS", 4 * 4 * 6)
    monkeypatch.setattr(routes, "KEPT_ELEMENTS", 2**20 if kept else 0)
    q, k, v = tensors(b=3, k=kv_heads, v=value_dim, t=9, s=9)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    mask = {"mask": padded(3, 9, 9), "causal mask": padded(3, 9, 9) & causal, "key mask": padded(3, 9, 9)[:, :, :1]}
    given = mask.get(masking)
    context = AttentionContext(arange(9), arange(9), mask=given, is_causal="causal" in masking)
    out, _ = routes.attend_blocked(AttentionInputs(q, k, v, context, 0.3))
    expected, _ = naive(q, k, v, mask=causal if masking == "causal" else given, scale=0.3)
    torch.testing.assert_close(out, expected, atol=1e-7, rtol=1e-6)
    up = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), up)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), up), atol=1e-6, rtol=1e-6)


def test_bf16_on_a_cpu_takes_the_blocks_and_stays_close() -> None:
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in tensors(t=40, s=40))
    out, _ = attend(q, k, v, is_causal=True, scale=0.4)
    exact, _ = naive(q.double(), k.double(), v.double(), mask=torch.ones(40, 40).tril().bool(), scale=0.4)
    assert out.dtype == torch.bfloat16 and "Blocked" in type(out.grad_fn).__name__
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
    up = torch.randn_like(out)
    for found, expected in zip(
        torch.autograd.grad(out, (q, k, v), up), torch.autograd.grad(exact, (q, k, v), up.double()), strict=True
    ):
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_blocked_memory_is_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "BLOCK_ELEMENTS", 4 * 16 * 256)
    monkeypatch.setattr(routes, "KEPT_ELEMENTS", 0)
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in tensors(b=1, t=256, s=256))
    with Largest() as largest:
        attend(q, k, v, is_causal=True, scale=0.4)[0].float().sum().backward()
    assert largest.elements <= 4 * 16 * 256 < 4 * 256 * 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["fused", "merged bias", "explicit", "chunked"])
def test_a_fully_masked_row_gives_zeros_and_finite_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, path: str
) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors())
    options: dict[str, Any] = {
        "fused": {},
        "merged bias": {"bias_fn": lambda rows: torch.zeros(1, 4, 6, 6)[:, :, rows]},
        "explicit": {"need_weights": True},
        "chunked": {"score_fn": lambda q_chunk, rows: q_chunk.new_zeros(2, 4, q_chunk.shape[2], 6)},
    }[path]
    if path == "chunked":
        monkeypatch.setattr(routes, "CHUNK_ELEMENTS", 1)
    out, weights = attend(q, k, v, mask=padded(2, 6, 6), scale=0.4, **options)
    assert not out[1, :, 2].any() and out[1, :, 1].any() and out.isfinite().all()
    assert weights is None or not weights[1, :, 2].any()
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads) and not grads[0][1, :, 2].any()


def test_devices_without_a_safe_kernel_are_guarded() -> None:
    """The rule for accelerators, spelled out: look everywhere, then zero."""
    q, k, v = tensors()
    mask = padded(2, 6, 6)
    alive = mask.any(-1, keepdim=True)
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask | ~alive, scale=0.4)
    torch.testing.assert_close(out.masked_fill(~alive, 0.0), attend(q, k, v, mask=mask, scale=0.4)[0])


def test_bad_shapes_are_refused() -> None:
    q, k, v = tensors(t=3)
    with pytest.raises(ValueError, match="found 3 and 6"):
        attend(q, k, v, is_causal=True, scale=1.0)
    q, k, v = tensors(h=4, k=3)
    with pytest.raises(ValueError, match="4 query heads cannot share 3"):
        attend(q, k, v, scale=1.0)


def test_a_small_fixed_bias_rides_in_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    fixed, learned = torch.randn(1, 4, 6, 6), torch.randn(1, 4, 6, 6, requires_grad=True)
    monkeypatch.setattr(core, "ROUTES", [route._replace(run=lambda _, name=route.name: name) for route in core.ROUTES])
    assert attend(q, k, v, scale=1.0, bias_fn=lambda rows: fixed[:, :, rows]) == "fused"
    assert attend(q, k, v, scale=1.0, bias_fn=lambda rows: learned[:, :, rows]) == "chunked"
    with torch.no_grad():
        assert attend(q, k, v, scale=1.0, bias_fn=lambda rows: learned[:, :, rows]) == "fused"


def test_the_chosen_route_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = tensors()
    with caplog.at_level("DEBUG", logger="tformer.nn.attention.core"):
        attend(q, k, v, scale=1.0)
        attend(q, k, v, scale=1.0, need_weights=True)
        attend(*(x.detach().bfloat16() for x in (q, k, v)), scale=1.0)
        attend(*(x.detach().bfloat16().repeat(1, 1, 2, 1) for x in (q, k, v)), scale=1.0)
    assert [record.message.split(":")[0] for record in caplog.records] == ["fused", "chunked", "blocked", "blocked"]


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("chunks")
def test_dropout_repeats_with_its_seed_also_in_the_gradient() -> None:
    q, k, v = tensors()

    def run(seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        out, _ = attend(q, k, v, is_causal=True, scale=1.0, dropout=0.5)
        return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))

    torch.testing.assert_close(run(0), run(0), rtol=0.0, atol=0.0)
    assert not torch.equal(run(0)[0], run(1)[0])


@pytest.mark.usefixtures("chunks")
def test_recomputed_dropout_drops_the_same_weights() -> None:
    """The output is linear in v, so its gradient must be the transpose of the very weights that made it."""
    q, k, _ = tensors(b=1, h=1, k=1)
    torch.manual_seed(0)
    identity = torch.eye(6, dtype=torch.float64).view(1, 1, 6, 6).requires_grad_()
    out, _ = attend(q[:, :1], k, identity, scale=1.0, dropout=0.5)  # the dropped weights themselves
    up = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, identity, up)
    torch.testing.assert_close(grad, out.detach().transpose(-1, -2) @ up)


def test_dropout_keeps_the_mean_and_drops_the_rate() -> None:
    torch.manual_seed(0)
    q, k = torch.zeros(64, 2, 8, 4), torch.zeros(64, 2, 8, 4)
    v = torch.eye(8).expand(64, 2, 8, 8)
    out, _ = attend(q, k, v, scale=1.0, dropout=0.3)
    assert (out == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert out.mean().item() == pytest.approx(1 / 8, rel=0.03)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [NoPositionsOptions(), T5BiasOptions(), ShawOptions(clip=3)])
def test_training_memory_is_a_chunk_not_t_times_t(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    """Dropout, a learned bias or Shaw's terms: nothing of T x T is made, and nothing larger than a chunk is kept."""
    length, heads, chunk = 128, 4, 16
    monkeypatch.setattr(routes, "CHUNK_ELEMENTS", heads * length * chunk)
    monkeypatch.setattr(core, "MERGED_BIAS_ELEMENTS", 0)
    layer = self_attention(dropout=0.1).train()
    module = positions_for(options, layer)
    x = torch.randn(1, length, 16, requires_grad=True)
    kept: list[int] = []
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t),
    ):
        out = layer(x, context_of(length, causal=True), positions=module)
        kept_after_forward = list(kept)
        out.square().sum().backward()
    assert largest.elements <= heads * length * chunk < heads * length * length
    assert max(kept_after_forward) <= length * 16 * 3


# --- masks ------------------------------------------------------------------------------------------------------------


def test_masks_are_none_when_nothing_is_masked() -> None:
    ones = torch.ones(2, 5, dtype=torch.bool)
    assert make_mask(causal=True, num_queries=5) == (None, True)
    assert make_mask(causal=False, num_queries=5) == (None, False)
    assert make_mask(causal=True, num_queries=5, key_mask=ones) == (None, True)
    assert make_mask(causal=True, num_queries=1, num_keys=5, key_mask=ones) == (None, False)


def test_masks_against_loops() -> None:
    keys = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 1]])
    documents = torch.tensor([[0, 0, 0, 1, 1], [3, 3, 4, 4, 4]])
    for queries, ids in ((5, documents), (5, None), (2, None)):
        mask, is_causal = make_mask(causal=True, num_queries=queries, num_keys=5, key_mask=keys, document_ids=ids)
        assert mask is not None and is_causal == (queries == 5) and mask.shape == (2, 1, queries, 5)
        for b in range(2):
            for t in range(queries):
                slot = 5 - queries + t
                for s in range(5):
                    allowed = s <= slot and bool(keys[b, s]) and (ids is None or bool(ids[b, slot] == ids[b, s]))
                    assert mask[b, 0, t, s] == allowed
    mask, is_causal = make_mask(causal=False, num_queries=5, key_mask=keys)
    assert mask is not None and not is_causal and torch.equal(mask[:, 0, 0], keys.bool())
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
