"""Attention: fused, explicit and chunked paths agree with a plain formula, and with torch's own module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tformer.nn.attention import FullAttentionOptions, blocked, chunked, core
from tformer.nn.attention.core import attend
from tformer.nn.attention.masks import causal_mask, make_mask
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.drophead import DropHead, drop_heads
from tformer.nn.attention.single import attend_single, single_is_faster
from tformer.nn.cache import CrossCache
from tformer.nn.positions import build_positions
from tformer.nn.positions.alibi import AlibiOptions
from tformer.nn.positions.none import NoPositionsOptions
from tformer.nn.positions.rope import RopeOptions
from tformer.nn.positions.shaw import ShawOptions
from tformer.nn.positions.t5_bias import T5BiasOptions
from tformer.nn.projections import block_matrices
from tformer.nn.taps import TapSink, check_taps

LAYER_KINDS = [NoPositionsOptions(), RopeOptions(), AlibiOptions(), T5BiasOptions(), ShawOptions(clip=3)]


def tensors(
    *, b: int = 2, h: int = 4, k: int = 4, t: int = 6, s: int = 6, dim: int = 5, v: int = 5
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((b, h, t, dim), (b, k, s, dim), (b, k, s, v))
    q, keys, values = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, keys, values


def naive(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale + bias) v with repeated heads; rows that may look nowhere are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if bias is None else scores + bias
    if mask is None:
        weights = scores.softmax(-1)
    else:
        weights = scores.masked_fill(~mask, -1e30).softmax(-1) * mask.any(-1, keepdim=True)
    return weights @ v, weights


def positions_for(options: Any, layer: MultiHeadAttention, *, bidirectional: bool = False) -> Any:
    module = build_positions(
        options,
        d_model=16,
        num_heads=layer.num_heads,
        head_dim=layer.head_dim,
        value_dim=layer.value_dim,
        max_seq_len=64,
        bidirectional=bidirectional,
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def self_attention(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(3)
    layer = MultiHeadAttention(16, **{"num_heads": 4, **options})
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def arange(length: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + length).unsqueeze(0)


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "many chunks":
        monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", 2 * 2 * 4 * 6)
    yield


# --- the paths agree --------------------------------------------------------------------------------------------------


def padded(batch: int, queries: int, keys: int) -> Tensor:
    """A mask [B, 1, T, S] with padding, and one row of the second example that may look nowhere."""
    mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    mask[0, :, :, 1] = False
    mask[1, :, 2] = False
    return mask


@pytest.mark.parametrize("masking", ["none", "causal", "mask", "causal mask", "key mask"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("biased", [False, True])
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


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("kv_heads,value_dim", [(4, 5), (2, 3)])
@pytest.mark.parametrize("masking", ["none", "causal", "mask", "causal mask", "key mask"])
def test_blocked_attention_equals_the_formula(
    monkeypatch: pytest.MonkeyPatch, masking: str, kv_heads: int, value_dim: int, kept: bool
) -> None:
    """Run in fp64, where the blocks' bookkeeping must be exact."""
    monkeypatch.setattr(blocked, "QUERY_BLOCK", 4)
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 4 * 4 * 6)
    monkeypatch.setattr(blocked, "KEPT_ELEMENTS", 2**20 if kept else 0)
    q, k, v = tensors(b=3, k=kv_heads, v=value_dim, t=9, s=9)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    mask = {"mask": padded(3, 9, 9), "causal mask": padded(3, 9, 9) & causal, "key mask": padded(3, 9, 9)[:, :, :1]}
    given = mask.get(masking)
    out = blocked.attend_blocked(q, k, v, mask=given, is_causal="causal" in masking, scale=0.3)
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
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 4 * 16 * 256)
    monkeypatch.setattr(blocked, "KEPT_ELEMENTS", 0)
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
        monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", 1)
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
    monkeypatch.setattr(core, "attend_chunked", lambda *a, **kw: (None, None))
    assert attend(q, k, v, scale=1.0, bias_fn=lambda rows: fixed[:, :, rows])[0] is not None
    assert attend(q, k, v, scale=1.0, bias_fn=lambda rows: learned[:, :, rows])[0] is None
    with torch.no_grad():
        assert attend(q, k, v, scale=1.0, bias_fn=lambda rows: learned[:, :, rows])[0] is not None


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


class Largest(TorchDispatchMode):
    """The most elements that any operation's output had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("options", [NoPositionsOptions(), T5BiasOptions(), ShawOptions(clip=3)])
def test_training_memory_is_a_chunk_not_t_times_t(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    """Dropout, a learned bias or Shaw's terms: nothing of T x T is made, and nothing larger than a chunk is kept."""
    length, heads, chunk = 128, 4, 16
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", heads * length * chunk)
    monkeypatch.setattr(core, "MERGED_BIAS_ELEMENTS", 0)
    layer = self_attention(dropout=0.1).train()
    module = positions_for(options, layer)
    x = torch.randn(1, length, 16, requires_grad=True)
    kept: list[int] = []
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t),
    ):
        out = layer(x, q_pos=arange(length), is_causal=True, positions=module)
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
    for queries in (5, 2):
        mask, is_causal = make_mask(
            causal=True,
            num_queries=queries,
            num_keys=5,
            key_mask=keys,
            document_ids=documents[:, -queries:],
            key_document_ids=documents,
        )
        assert mask is not None and is_causal == (queries == 5) and mask.shape == (2, 1, queries, 5)
        for b in range(2):
            for t in range(queries):
                slot = 5 - queries + t
                for s in range(5):
                    allowed = s <= slot and bool(keys[b, s]) and documents[b, slot] == documents[b, s]
                    assert mask[b, 0, t, s] == allowed
    mask, is_causal = make_mask(causal=False, num_queries=5, key_mask=keys)
    assert mask is not None and not is_causal and torch.equal(mask[:, 0, 0], keys.bool())
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]


# --- the module -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", LAYER_KINDS, ids=lambda options: options.kind)
@pytest.mark.parametrize("training", [False, True])
def test_the_future_cannot_change_the_past(options: Any, training: bool) -> None:
    layer = self_attention(num_kv_heads=2, head_dim=6, options=FullAttentionOptions(qk_norm=True)).train(training)
    module = positions_for(options, layer)
    x = torch.randn(2, 9, 16)
    changed = x.clone()
    changed[:, 5:] += torch.randn(2, 4, 16)
    before, after = (layer(y, q_pos=arange(9), is_causal=True, positions=module) for y in (x, changed))
    torch.testing.assert_close(before[:, :5], after[:, :5], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("options", LAYER_KINDS, ids=lambda options: options.kind)
@pytest.mark.parametrize("causal", [False, True])
def test_relative_kinds_see_only_distances(options: Any, causal: bool) -> None:
    layer = self_attention()
    module = positions_for(options, layer, bidirectional=not causal)
    x = torch.randn(2, 6, 16)
    here, there = (layer(x, q_pos=arange(6, start), is_causal=causal, positions=module) for start in (0, 31))
    torch.testing.assert_close(here, there, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", LAYER_KINDS, ids=lambda options: options.kind)
def test_padding_does_not_change_the_rest(options: Any) -> None:
    """Left padding with shifted positions equals no padding."""
    layer = self_attention()
    module = positions_for(options, layer)
    x = torch.randn(1, 5, 16)
    alone = layer(x, q_pos=arange(5), is_causal=True, positions=module)
    padded_x = torch.cat([torch.randn(1, 3, 16), x], dim=1)
    keys = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    mask, is_causal = make_mask(causal=True, num_queries=8, key_mask=keys)
    pos = (keys.cumsum(1) - 1).clamp(min=0)
    beside = layer(padded_x, q_pos=pos, mask=mask, is_causal=is_causal, positions=module)
    torch.testing.assert_close(beside[:, 3:], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", LAYER_KINDS, ids=lambda options: options.kind)
def test_tapped_weights_are_those_that_were_used(options: Any) -> None:
    """The explicit path that shows weights gives the output of the path that does not."""
    layer = self_attention(num_kv_heads=2, value_dim=3).eval()
    module = positions_for(options, layer)
    x = torch.randn(2, 7, 16)
    taps = TapSink(frozenset({"decoder.0.self_attention.weights"}))
    scoped = taps.scope("decoder").scope(0).scope("self_attention")
    seen = layer(x, q_pos=arange(7), is_causal=True, positions=module, taps=scoped)
    torch.testing.assert_close(seen, layer(x, q_pos=arange(7), is_causal=True, positions=module), atol=1e-5, rtol=1e-5)
    weights = taps.values["decoder.0.self_attention.weights"]
    assert weights.shape == (2, 4, 7, 7) and not weights.triu(1).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7))


def test_unknown_taps_name_the_nearest() -> None:
    check_taps({"encoder.0.hidden"}, ["encoder.0.hidden"])
    with pytest.raises(ValueError, match=r"unknown tap 'encoder.0.hiden'; nearest: encoder.0.hidden"):
        check_taps({"encoder.0.hiden"}, ["encoder.0.hidden", "decoder.1.self_attention.weights"])


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_agrees_with_torch(causal: bool) -> None:
    layer = self_attention()
    other = nn.MultiheadAttention(16, 4, batch_first=True)
    other.load_state_dict(
        {
            "in_proj_weight": layer.qkv.weight, "in_proj_bias": layer.qkv.bias,
            "out_proj.weight": layer.out.weight, "out_proj.bias": layer.out.bias,
        }
    )  # fmt: skip
    x = torch.randn(2, 6, 16)
    keys = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    forbidden = ~torch.ones(6, 6, dtype=torch.bool).tril() if causal else None
    expected, _ = other(x, x, x, key_padding_mask=~keys, attn_mask=forbidden)
    mask, is_causal = make_mask(causal=causal, num_queries=6, key_mask=keys)
    torch.testing.assert_close(
        layer(x, q_pos=arange(6), mask=mask, is_causal=is_causal), expected, atol=1e-5, rtol=1e-5
    )


def test_cross_attention_agrees_with_torch() -> None:
    layer = self_attention(memory_dim=12)
    other = nn.MultiheadAttention(16, 4, kdim=12, vdim=12, batch_first=True)
    k_weight, v_weight = layer.kv.weight.chunk(2)
    other.load_state_dict(
        {
            "q_proj_weight": layer.q.weight, "k_proj_weight": k_weight, "v_proj_weight": v_weight,
            "in_proj_bias": torch.cat([layer.q.bias, layer.kv.bias]),
            "out_proj.weight": layer.out.weight, "out_proj.bias": layer.out.bias,
        }
    )  # fmt: skip
    x, memory = torch.randn(2, 4, 16), torch.randn(2, 7, 12)
    keys = torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0]]).bool()
    expected, _ = other(x, memory, memory, key_padding_mask=~keys)
    mask, _ = make_mask(causal=False, num_queries=4, num_keys=7, key_mask=keys)
    torch.testing.assert_close(layer(x, memory=memory, q_pos=arange(4), mask=mask), expected, atol=1e-5, rtol=1e-5)


def test_sizes_of_the_fused_projections() -> None:
    layer = MultiHeadAttention(
        16, FullAttentionOptions(qkv_bias=False, out_bias=False), num_heads=6, num_kv_heads=2, head_dim=5, value_dim=3
    )
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {"qkv.weight": (6 * 5 + 2 * 5 + 2 * 3, 16), "out.weight": (16, 6 * 3)}
    found = {name: (matrix, rows) for name, matrix, rows in block_matrices(layer)}
    assert found == {".qkv": (layer.qkv, [30, 10, 6]), ".out": (layer.out, [16])}
    assert layer(torch.randn(2, 3, 16), q_pos=arange(3)).shape == (2, 3, 16)
    with pytest.raises(ValueError, match="d_model 16 is not divisible by num_heads 3"):
        MultiHeadAttention(16, num_heads=3)
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by num_kv_heads 3"):
        MultiHeadAttention(16, num_heads=4, num_kv_heads=3)


def test_scale_and_qk_norm_options() -> None:
    x = torch.randn(2, 5, 16)
    for options in (FullAttentionOptions(scale=1.0), FullAttentionOptions(qk_norm=True)):
        layer = self_attention(options=options)
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in layer.qkv(x).chunk(3, dim=-1))
        if options.qk_norm:
            q, k = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        out, _ = naive(q, k, v, mask=None, scale=1.0 if options.scale == 1.0 else 0.5)
        torch.testing.assert_close(
            layer(x, q_pos=arange(5)), layer.out(out.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-5
        )


def test_grouped_heads_equal_repeated_heads() -> None:
    grouped = self_attention(num_kv_heads=2)
    whole = self_attention()
    q, k, v = grouped.qkv.weight.split([16, 8, 8])
    bias_q, bias_k, bias_v = grouped.qkv.bias.split([16, 8, 8])
    repeat = lambda y: y.unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1)  # noqa: E731
    whole.load_state_dict(
        {
            "qkv.weight": torch.cat([q, repeat(k), repeat(v)]),
            "qkv.bias": torch.cat([bias_q, repeat(bias_k), repeat(bias_v)]),
            "out.weight": grouped.out.weight, "out.bias": grouped.out.bias,
        }
    )  # fmt: skip
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(
        grouped(x, q_pos=arange(5), is_causal=True), whole(x, q_pos=arange(5), is_causal=True), atol=1e-5, rtol=1e-5
    )


def test_dropout_and_drophead_only_while_training() -> None:
    layer = self_attention(dropout=0.5, drophead=DropHead(0.5))
    x = torch.randn(2, 5, 16)
    layer.eval()
    assert torch.equal(layer(x, q_pos=arange(5)), layer(x, q_pos=arange(5)))
    layer.train()
    assert not torch.equal(layer(x, q_pos=arange(5)), layer(x, q_pos=arange(5)))


def test_drophead_keeps_one_head_at_least_and_the_sum() -> None:
    torch.manual_seed(0)
    gates = drop_heads(2000, 4, 0.6, torch.device("cpu")).view(2000, 4)
    torch.testing.assert_close(gates.sum(1), torch.full((2000,), 4.0))  # H / kept on each of the kept
    kept = (gates > 0).sum(1)
    assert kept.min() == 1 and (gates > 0).float().mean().item() == pytest.approx(0.4 + 0.6**4 / 4, abs=0.02)


def test_bf16_stream_with_fp32_weights() -> None:
    layer = self_attention()
    x = torch.randn(2, 5, 16)
    out = layer(x.bfloat16(), q_pos=arange(5), is_causal=True, positions=positions_for(RopeOptions(), layer))
    exact = layer(x, q_pos=arange(5), is_causal=True, positions=positions_for(RopeOptions(), layer))
    assert out.dtype == torch.bfloat16 and layer.qkv.weight.dtype == torch.float32
    torch.testing.assert_close(out.float(), exact, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_beams_share_the_keys_of_their_sentence(queries: int, kv_heads: int) -> None:
    torch.manual_seed(5)
    layer = MultiHeadAttention(16, num_heads=4, num_kv_heads=kv_heads, value_dim=5, memory_dim=12)
    memory, x = torch.randn(2, 5, 12), torch.randn(2 * 3, queries, 16)
    mask, _ = make_mask(causal=False, num_queries=queries, key_mask=torch.tensor([[1] * 5, [1, 1, 0, 0, 0]]))
    assert mask is not None
    shared = CrossCache()
    layer(x[:2], memory=memory, q_pos=arange(queries), mask=mask, cache=shared)
    sink, expected_sink = TapSink(frozenset({"weights"})), TapSink(frozenset({"weights"}))
    found = layer(x, q_pos=arange(queries), mask=mask, cache=shared, taps=sink)
    expected = layer(
        x,
        memory=memory.repeat_interleave(3, dim=0),
        q_pos=arange(queries),
        mask=mask.repeat_interleave(3, dim=0),
        taps=expected_sink,
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(sink.values["weights"], expected_sink.values["weights"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(layer(x, q_pos=arange(queries), mask=mask, cache=shared), expected, atol=1e-6, rtol=1e-6)


def test_cross_attention_asks_with_one_side_and_answers_with_the_other() -> None:
    torch.manual_seed(6)
    layer = MultiHeadAttention(16, num_heads=4, memory_dim=16)
    x, memory = torch.randn(1, 4, 16), torch.randn(1, 4, 16)
    q = layer.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
    k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in layer.kv(memory).chunk(2, dim=-1))
    expected, _ = naive(q, k, v, mask=None, scale=0.5)
    out = layer(x, memory=memory, q_pos=arange(4))
    torch.testing.assert_close(out, layer.out(expected.transpose(1, 2).flatten(2)), atol=1e-6, rtol=1e-6)
    assert (layer(memory, memory=x, q_pos=arange(4)) - out).abs().max() > 1e-3


@pytest.mark.parametrize("masked", [False, True], ids=["open", "masked"])
@pytest.mark.parametrize(("kv_heads", "value_dim"), [(4, 5), (2, 5), (1, 7)])
def test_a_single_query_equals_the_formula(kv_heads: int, value_dim: int, masked: bool) -> None:
    q, k, v = tensors(b=3, k=kv_heads, t=1, s=6, v=value_dim)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0] * 6]).bool()[:, None, None] if masked else None
    expected, _ = naive(q, k, v, mask=mask, scale=0.4)
    torch.testing.assert_close(attend_single(q, k, v, mask=mask, scale=0.4), expected)


def test_bf16_on_a_cpu_takes_the_single_query_and_stays_close() -> None:
    q, k, v = (x.detach().bfloat16() for x in tensors(t=1))
    assert single_is_faster(q) and not single_is_faster(q.float()) and not single_is_faster(q.repeat(1, 1, 2, 1))
    expected, _ = naive(q.double(), k.double(), v.double(), mask=None, scale=0.4)
    torch.testing.assert_close(attend(q, k, v, scale=0.4)[0].double(), expected, atol=2e-2, rtol=2e-2)
