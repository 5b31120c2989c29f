"""One contract for all kinds of attention: each is its definition, forward and backward, whole and step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.attention_cases import arange, context_of, run, weights_tap
from tests.nn.kind_cases import (
    HEAD,
    HEADS,
    KINDS,
    REACHES,
    SPARSE,
    assert_same,
    call_of,
    definition,
    hooks_of,
    mechanism_of,
    padding,
    plain_mask,
    tensors,
)
from tests.pairwise import pairwise
from tformer.nn.attention import ATTENTION, AttentionContext, Mechanism
from tformer.nn.attention.block_sparse import kernel
from tformer.nn.attention.performer import PerformerState
from tformer.nn.positions.biases import AlibiOptions, T5BiasOptions
from tformer.nn.positions.shaw import ShawOptions

CAUSAL = [name for name, options in KINDS.items() if options.mechanism.causal]
APART = [name for name in CAUSAL if not KINDS[name].mechanism.one_document]
DROPPED = [name for name, options in KINDS.items() if options.mechanism.drops_weights]


def make(name: str, *, causal: bool, **sizes: Any) -> Mechanism:
    return mechanism_of(KINDS[name], causal=causal and KINDS[name].mechanism.causal, **sizes).double()


def test_every_kind_of_the_table_keeps_the_contract() -> None:
    assert {options.kind for options in KINDS.values()} == ATTENTION.keys()


def compare(name: str, causal: bool, side: str, length: int, kv_heads: int, value_dim: int) -> None:
    mechanism = make(name, causal=causal, kv_heads=kv_heads, value_dim=value_dim, layer=3)
    context = context_of(length, mechanism.sizes.causal, padding(length, side))
    inputs = tensors(length, kv_heads=kv_heads, value_dim=value_dim, dtype=torch.float64)
    found, weights = run(mechanism, *inputs, **call_of(context))
    assert weights is None
    expected = definition(mechanism, *inputs, context)
    assert_same(found, expected, [*inputs, *mechanism.parameters()], tolerance=1e-10)
    if not mechanism.one_document:
        mask = plain_mask(mechanism, context)
        assert torch.equal(mechanism.visible_mask(context).expand_as(mask), mask)


SIZES = [(53, 4, 6), (53, 2, 9), (32, 4, 6), (32, 1, 3), (16, 2, 6), (3, 4, 6), (1, 1, 9)]
ROWS = pairwise(name=list(KINDS), limits=REACHES, sizes=SIZES)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize(("name", "limits", "sizes"), ROWS)
def test_equals_its_definition(name: str, limits: Any, sizes: tuple[int, int, int]) -> None:
    """Outputs and all gradients; sizes: length, key heads and value_dim."""
    compare(name, *limits, *sizes)


@pytest.mark.parametrize("limits", [(False, "right"), (True, "left")])
@pytest.mark.parametrize("name", KINDS)
def test_equals_its_definition_in_one_group(name: str, limits: Any) -> None:
    compare(name, *limits, 41, 2, 9)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", APART)
def test_documents_do_not_see_each_other(name: str, causal: bool) -> None:
    mechanism, inputs = make(name, causal=causal), tensors(43, dtype=torch.float64)
    documents = torch.tensor([[0] * 19 + [1] * 20 + [2] * 4, [5] * 43])
    context = context_of(43, causal, document_ids=documents)
    assert_same(
        run(mechanism, *inputs, **call_of(context))[0], definition(mechanism, *inputs, context), inputs, tolerance=1e-10
    )


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_padding_changes_nothing(name: str, side: str, causal: bool) -> None:
    """Neither where it is nor what it holds. Linformer's projections are of slots: padding before a text moves it."""
    mechanism, shift = make(name, causal=causal), 11 if side == "left" and "linformer" not in name else 0
    causal = mechanism.sizes.causal
    inputs = [x.detach() for x in tensors(48, batch=1, dtype=torch.float64)]
    alone = run(mechanism, *(x[:, :, :37] for x in inputs), **call_of(context_of(37, causal), batch=1))[0]
    real = torch.zeros(1, 48, dtype=torch.bool)
    real[:, shift : shift + 37] = True
    moved = [x.roll(shift, dims=2).masked_fill(~real[:, None, :, None], 50.0) for x in inputs]
    padded = run(mechanism, *moved, **call_of(context_of(48, causal, real), batch=1))[0]
    torch.testing.assert_close(padded[:, :, shift : shift + 37], alone, atol=1e-10, rtol=0)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_changes_the_past_of_no_causal_sequence(name: str) -> None:
    for causal in (False, True):
        mechanism, inputs = make(name, causal=causal), [x.detach() for x in tensors(40, dtype=torch.float64)]
        call = call_of(context_of(40, causal))
        before = run(mechanism, *inputs, **call)[0]
        for x in inputs:
            x[:, :, 23:] += 1.0
        after = run(mechanism, *inputs, **call)[0]
        assert torch.equal(before[:, :, :23], after[:, :, :23]) == causal


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_to_see_gives_zeros_and_finite_gradients(name: str, causal: bool) -> None:
    mechanism, inputs = make(name, causal=causal), tensors(60, dtype=torch.float64)
    mask = torch.zeros(2, 60)
    mask[0, :5] = 1
    for taps in (None, weights_tap()):
        out, weights = run(mechanism, *inputs, **call_of(context_of(60, mechanism.sizes.causal, mask)), taps=taps)
        assert not out[1].any() and out[0, :, :5].any() and (weights is None or not weights[1].any())
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("name", KINDS)
def test_bf16_is_close_to_fp32(name: str) -> None:
    mechanism, inputs, context = mechanism_of(KINDS[name]), tensors(37, dtype=torch.bfloat16), context_of(37)
    found = run(mechanism, *inputs, **call_of(context))[0]
    assert found.dtype == torch.bfloat16
    expected = definition(mechanism, *(x.float() for x in inputs), context)
    assert_same(found.float(), expected, inputs, tolerance=0.15 if "linformer" in name else 0.06)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_weights_make_the_output_from_the_values(name: str, causal: bool) -> None:
    mechanism, (q, k, v) = make(name, causal=causal, kv_heads=2), tensors(30, kv_heads=2, dtype=torch.float64)
    context = context_of(30, mechanism.sizes.causal, padding(30, "right"))
    out, weights = run(mechanism, q, k, v, **call_of(context, taps=weights_tap()))
    assert weights is not None
    hidden = ~plain_mask(mechanism, context)
    assert not weights.masked_select(hidden).any() and (weights < 0).any() == mechanism.signed_weights
    torch.testing.assert_close(weights.double() @ v.repeat_interleave(2, dim=1), out, atol=1e-5, rtol=0)
    torch.testing.assert_close(out, definition(mechanism, q, k, v, context), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "limits", "positions"),
    pairwise(
        name=SPARSE,
        limits=REACHES,
        positions=[AlibiOptions(), T5BiasOptions(buckets=8, max_distance=16), ShawOptions(clip=3)],
    ),
)
@pytest.mark.parametrize("chunks", ["many", "one"])
def test_position_kinds_with_terms_of_their_own(
    name: str, limits: Any, positions: Any, chunks: str, request: pytest.FixtureRequest
) -> None:
    """The dense way, tested elsewhere, is the oracle: outputs and gradients, of the tables too."""
    if chunks == "many":
        request.getfixturevalue("small_groups")
    causal, side = limits
    mechanism, hooks, mask = mechanism_of(KINDS[name], causal=causal), hooks_of(positions, causal=causal), None
    mask = padding(53, side)
    inputs, pos = [*tensors(53), *hooks.parameters()], arange(53) if mask is None else mask.cumsum(1)
    call = call_of(AttentionContext(pos, pos, causal=causal, key_mask=mask), positions=hooks)
    expected, _ = run(mechanism, *inputs[:3], **call, taps=weights_tap())
    assert_same(run(mechanism, *inputs[:3], **call)[0], expected, inputs)


@pytest.mark.parametrize("chunks", ["many", "one"])
@pytest.mark.parametrize("name", DROPPED)
def test_dropout_is_the_same_in_the_backward_pass_and_keeps_the_mean(
    name: str, chunks: str, request: pytest.FixtureRequest
) -> None:
    if chunks == "many":
        request.getfixturevalue("small_groups")
    mechanism, inputs, call = mechanism_of(KINDS[name]), tensors(30), call_of(context_of(30))
    mechanism.dropout, v = 0.5, inputs[2]
    out = run(mechanism, *inputs, **call)[0]
    # The output is linear in the values: <grad, v> is the output's sum, only if the same weights were dropped.
    (grad,) = torch.autograd.grad(out.sum(), [v])
    torch.testing.assert_close((grad * v).sum(), out.sum(), atol=1e-3, rtol=1e-4)
    with torch.no_grad():
        repeated, count = (x.repeat(100, 1, 1, 1) for x in inputs), 100
        many = run(mechanism, *repeated, **call_of(context_of(30), batch=2 * count))[0].unflatten(0, (count, 2))
        expected = run(mechanism.eval(), *inputs, **call)[0]
    assert not torch.allclose(out, expected, atol=1e-3)
    assert (many.mean(0) - expected).abs().mean() < 0.15 * max(1.0, float(expected.abs().mean()))


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize(
    ("name", "sizes", "side"),
    pairwise(
        name=CAUSAL,
        sizes=[[1] * 60, [33] + [1] * 27, [20, 3, 1, 36], [25, 5, 30], [9, 4, 2, 30, 15]],
        side=["none", "left"],
    ),
)
def test_new_queries_behind_a_cache_get_what_the_whole_sequence_gets(name: str, sizes: list[int], side: str) -> None:
    mechanism, mask = make(name, causal=True), padding(60, side)
    q, k, v = (x.detach() for x in tensors(60, dtype=torch.float64))
    whole = definition(mechanism, q, k, v, context_of(60, True, mask))
    state = mechanism.new_state(batch_size=2, capacity=60, device="cpu", dtype=torch.float64)
    start = 0
    for size in sizes:
        end = start + size
        rows = slice(None) if mask is None or end > 20 else slice(0, 1)
        # Before its first token a row of BigBird has no pattern.
        seen = None if mask is None or (end <= 20 and "bigbird" in name) else mask[:, :end]
        context, new = context_of(size, True, seen, keys=end), slice(start, end)
        if isinstance(state, PerformerState):
            out, _ = run(mechanism, *(x[:, :, new] for x in (q, k, v)), **call_of(context), state=state)
        else:
            out, _ = run(mechanism, q[:, :, new], k[:, :, :end], v[:, :, :end], **call_of(context))
        torch.testing.assert_close(out[rows], whole[rows, :, new], atol=1e-10, rtol=0)
        start = end


# --- the choice of the way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", REACHES)
@pytest.mark.parametrize("name", ["window-0", "window-2", "bigbird-0"])
def test_short_inputs_take_the_dense_way_with_the_same_result(
    name: str, limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    causal, side = limits
    mechanism = mechanism_of(replace(KINDS[name], implementation="auto"), causal=causal)  # type: ignore[call-arg]
    monkeypatch.setattr(kernel._BlockSparseAttention, "apply", lambda *_: pytest.fail("not dense"))
    for length in (4, 5, 53):
        context, inputs = context_of(length, causal, padding(length, side)), tensors(length)
        expected = definition(mechanism, *inputs, context)
        assert_same(run(mechanism, *inputs, **call_of(context))[0], expected, inputs)


@pytest.mark.parametrize("name", ["window-0", "bigbird-0"])
def test_a_model_with_flex_runs_without_cuda_by_blocks(name: str) -> None:
    inputs, call = tensors(30), call_of(context_of(30))
    ways = (replace(KINDS[name], implementation=x) for x in ("flex", "blocks"))  # type: ignore[call-arg]
    found, expected = (run(mechanism_of(options), *inputs, **call)[0] for options in ways)
    assert torch.equal(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_gpu_computes_what_the_cpu_does(name: str, causal: bool) -> None:
    mechanism = mechanism_of(KINDS[name], causal=causal and KINDS[name].mechanism.causal)
    mask = padding(60, "right")
    assert mask is not None

    def results(device: str) -> list[Tensor]:
        leaves = [x.detach().to(device).requires_grad_() for x in tensors(60)]
        pos, real = arange(60).to(device), mask.bool().to(device)
        context = AttentionContext(pos, pos, causal=mechanism.sizes.causal, key_mask=real).with_mask()
        out, _ = run(mechanism.to(device), *leaves, context, x_BTD=torch.zeros(2, 60, HEADS * HEAD, device=device))
        out = out.masked_fill(~real[:, None, :, None], 0.0)
        return [out.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(out.square().sum(), leaves))]

    for expected, found in zip(results("cpu"), results("cuda"), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
