"""BigBird: equal to a mask in plain loops, forward and gradients, whole and step by step; its random blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.attention_cases import arange, context_of, run, weights_tap
from tests.nn.sparse_cases import REACHES, SCALE, assert_same, call_of, hooks_of, mechanism_of, naive, padding, tensors
from tests.pairwise import pairwise
from tformer.nn.attention.bigbird import BigBirdAttention, BigBirdOptions
from tformer.nn.attention.bigbird_blocks import Blocks
from tformer.nn.attention.block_sparse import explicit, kernel
from tformer.nn.attention.block_sparse.flex import attend_flex
from tformer.nn.attention.context import AttentionContext, AttentionInputs
from tformer.nn.positions.biases import AlibiOptions, T5BiasOptions
from tformer.nn.positions.shaw import ShawOptions

pytestmark = pytest.mark.usefixtures("small_groups")


def make(
    *, causal: bool = False, layer: int = 0, sizes: dict[str, int] | None = None, **options: Any
) -> BigBirdAttention:
    chosen = BigBirdOptions(**{"block": 4, "random_blocks": 2, "implementation": "blocks", **options})
    mechanism = mechanism_of(chosen, causal=causal, layer=layer, **(sizes or {}))
    assert isinstance(mechanism, BigBirdAttention)
    return mechanism


def drawn(options: BigBirdOptions, block: int, num_blocks: int, causal: bool, layer: int) -> set[int]:
    blocks = Blocks(
        size=options.block,
        side=options.window_blocks // 2,
        num_global=options.global_blocks,
        num_random=options.random_blocks,
        seed=options.seed,
        layer=layer,
        causal=causal,
        offset=torch.tensor([[0]]),
        count=torch.tensor([[num_blocks]]),
    )
    index, exists = blocks.random(torch.tensor([[block]]))
    return set(index[exists].tolist())


def plain_mask(
    options: BigBirdOptions, reach: AttentionContext, batch: int, queries: int, keys: int, *, layer: int = 0
) -> Tensor:
    """Block by block, as the paper says it; blocks are counted from the first real token."""
    mask = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    for row in range(batch):
        real = [j for j in range(keys) if reach.key_mask is None or reach.key_mask[row, j]]
        offset, blocks = real[0], -(-(real[-1] + 1 - real[0]) // options.block)
        chosen = set(range(options.global_blocks))
        if not reach.causal:
            chosen |= set(range(blocks - options.global_blocks, blocks))
        for t in range(queries):
            i = keys - queries + t
            if i < offset:
                continue
            own = (i - offset) // options.block
            seen = {own + step for step in range(-(options.window_blocks // 2), options.window_blocks // 2 + 1)}
            seen |= chosen | drawn(options, own, blocks, reach.causal, layer)
            for j in real:
                block = (j - offset) // options.block
                there = block in seen or (own in chosen and not reach.causal)
                there = there and not (reach.causal and j > i)
                if reach.document_ids is not None:
                    there = there and bool(reach.document_ids[row, i] == reach.document_ids[row, j])
                mask[row, 0, t, j] = there
    return mask


OPTIONS = [
    {},
    {"global_blocks": 2, "random_blocks": 1},
    {"global_blocks": 0, "window_blocks": 5},
    {"random_blocks": 0},
    {"window_blocks": 1, "random_blocks": 3, "seed": 7},
]


@pytest.mark.parametrize(("limits", "options", "length"), pairwise(limits=REACHES, options=OPTIONS, length=[53, 32, 3]))
def test_equals_the_mask_in_plain_loops(limits: Any, options: dict[str, Any], length: int) -> None:
    causal, side = limits
    mechanism = make(causal=causal, layer=3, **options)
    reach = context_of(length, causal, padding(length, side))
    inputs = tensors(length)
    mask = plain_mask(mechanism.options, reach, 2, length, length, layer=3)
    found, weights = run(mechanism, *inputs, **call_of(reach))
    assert weights is None
    assert_same(found, naive(*inputs, mask), inputs)
    dense = mechanism.visible_mask(reach)
    assert torch.equal(dense.expand_as(mask), mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1500, 10**6])
def test_shared_key_heads_other_value_sizes_and_documents(
    causal: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "GROUP_ELEMENTS", groups)
    mechanism = make(causal=causal, sizes={"kv_heads": 2, "value_dim": 9})
    documents = torch.tensor([[0] * 19 + [1] * 20 + [2] * 4, [5] * 43])
    for reach in (context_of(43, causal, padding(43, "left")), context_of(43, causal, document_ids=documents)):
        inputs = tensors(43, kv_heads=2, value_dim=9)
        expected = naive(*inputs, plain_mask(mechanism.options, reach, 2, 43, 43))
        assert_same(run(mechanism, *inputs, **call_of(reach))[0], expected, inputs)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing(side: str, causal: bool) -> None:
    mechanism = make(causal=causal)
    q, k, v = (x.detach() for x in tensors(48, batch=1))
    alone = run(mechanism, q[:, :, :37], k[:, :, :37], v[:, :, :37], **call_of(context_of(37, causal), batch=1))[0]
    shift = 11 if side == "left" else 0
    mask = torch.zeros(1, 48)
    mask[:, shift : shift + 37] = 1
    moved = [x.roll(shift, dims=2) for x in (q, k, v)]
    padded = run(mechanism, *moved, **call_of(context_of(48, causal, mask), batch=1))[0]
    torch.testing.assert_close(padded[:, :, shift : shift + 37], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_query_never_sees_the_future(causal: bool) -> None:
    mechanism = make(causal=causal)
    q, k, v = (x.detach() for x in tensors(64))
    call = call_of(context_of(64, causal))
    before = run(mechanism, q, k, v, **call)[0]
    for x in (q, k, v):
        x[:, :, 41:] += 1.0
    after = run(mechanism, q, k, v, **call)[0]
    assert torch.equal(before[:, :, :41], after[:, :, :41]) == causal


def test_bf16_is_close_to_fp32() -> None:
    mechanism, inputs = make(), tensors(53, dtype=torch.bfloat16)
    expected = naive(*(x.float() for x in inputs), plain_mask(mechanism.options, context_of(53), 2, 53, 53))
    found = run(mechanism, *inputs, **call_of(context_of(53)))[0]
    assert found.dtype == torch.bfloat16
    assert_same(found.float(), expected, inputs, tolerance=0.06)


@pytest.mark.parametrize(
    ("limits", "kind", "chunk"),
    pairwise(
        limits=REACHES,
        kind=[AlibiOptions(), T5BiasOptions(buckets=8, max_distance=16), ShawOptions(clip=3)],
        chunk=[3000, 10**6],
    ),
)
def test_position_kinds_with_terms_of_their_own(
    limits: Any, kind: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense way, tested elsewhere, is the oracle: outputs and gradients, of the tables too."""
    causal, side = limits
    monkeypatch.setattr(explicit, "CHUNK_ELEMENTS", chunk)
    mechanism, hooks, mask = make(causal=causal), hooks_of(kind, causal=causal), padding(53, side)
    inputs, positions = [*tensors(53), *hooks.parameters()], arange(53) if mask is None else mask.cumsum(1)
    call = call_of(AttentionContext(positions, positions, causal=causal, key_mask=mask), positions=hooks)
    expected, _ = run(mechanism, *inputs[:3], **call, taps=weights_tap())
    assert_same(run(mechanism, *inputs[:3], **call)[0], expected, inputs)


def test_dropout_is_the_same_in_the_backward_pass() -> None:
    mechanism, inputs = make(), tensors(53)
    mechanism.dropout = 0.5
    out = run(mechanism, *inputs, **call_of(context_of(53)))[0]
    (grad,) = torch.autograd.grad(out.sum(), [inputs[2]])
    # The output is linear in the values: <grad, v> is the output's sum, only if the same weights were dropped.
    torch.testing.assert_close((grad * inputs[2]).sum(), out.sum(), atol=1e-3, rtol=1e-4)
    assert not torch.allclose(out, run(mechanism.eval(), *inputs, **call_of(context_of(53)))[0], atol=1e-3)


@pytest.mark.parametrize(
    ("options", "sizes", "side"),
    pairwise(
        options=OPTIONS,
        sizes=[[1] * 60, [33] + [1] * 27, [20, 3, 1, 36], [9, 4, 2, 30, 15]],
        side=["none", "left"],
    ),
)
def test_new_queries_behind_a_cache_get_what_the_whole_sequence_gets(
    options: dict[str, Any], sizes: list[int], side: str
) -> None:
    mechanism = make(causal=True, **options)
    mask = padding(60, side)
    q, k, v = (x.detach() for x in tensors(60))
    whole = naive(q, k, v, plain_mask(mechanism.options, context_of(60, True, mask), 2, 60, 60))
    start = 0
    for size in sizes:
        end = start + size
        reach = context_of(size, True, None if mask is None or end <= 20 else mask[:, :end], keys=end)
        rows = slice(None) if mask is None or end > 20 else slice(0, 1)  # before its first token a row has no pattern
        out, _ = run(mechanism, q[:, :, start:end], k[:, :, :end], v[:, :, :end], **call_of(reach))
        torch.testing.assert_close(out[rows], whole[rows, :, start:end], atol=1e-5, rtol=0)
        start = end


def test_flex_has_the_same_pattern() -> None:
    """Its rule, run here without its compiler and without gradients."""
    for causal, side in REACHES:
        mechanism, reach = make(causal=causal), context_of(40, causal, padding(40, side))
        q, k, v = (x.detach() for x in tensors(40))
        rule = mechanism.blocks(reach).rule(10, start=0)
        found = attend_flex(AttentionInputs(q, k, v, reach, SCALE), rule)
        torch.testing.assert_close(
            found, naive(q, k, v, plain_mask(mechanism.options, reach, 2, 40, 40)), atol=1e-5, rtol=0
        )


# --- random blocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_random_blocks_are_new_ones_and_as_many_as_there_are(causal: bool) -> None:
    options = BigBirdOptions(random_blocks=3)
    for num_blocks in (1, 2, 5, 6, 7, 30):
        for block in range(num_blocks):
            others = set(range(1, block - 1 if causal else num_blocks - 1))
            others -= {block - 1, block, block + 1}
            found = drawn(options, block, num_blocks, causal, 0)
            assert found <= others and len(found) == min(3, len(others))


def test_random_blocks_are_drawn_evenly_and_anew_for_every_layer_and_seed() -> None:
    options = BigBirdOptions(random_blocks=3)
    draws = {layer: tuple(sorted(drawn(options, 10, 30, False, layer))) for layer in range(2000)}
    counts = Counter(block for found in draws.values() for block in found)
    expected = 2000 * 3 / 25  # blocks 1 ... 28 without the window's three
    assert len(counts) == 25 and all(0.75 * expected < count < 1.25 * expected for count in counts.values())
    assert len(set(draws.values())) > 1000
    assert drawn(replace(options, seed=1), 10, 30, False, 0) != drawn(options, 10, 30, False, 0)
    assert drawn(options, 10, 30, False, 0) == drawn(options, 10, 30, False, 0)


def test_causal_random_blocks_do_not_depend_on_the_length() -> None:
    options = BigBirdOptions(random_blocks=2)
    assert drawn(options, 12, 13, True, 0) == drawn(options, 12, 400, True, 0)


# --- the choice of the way, and options -------------------------------------------------------------------------------


def test_short_inputs_take_the_dense_way_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, inputs = make(implementation="auto"), tensors(53)
    expected = naive(*inputs, plain_mask(mechanism.options, context_of(53), 2, 53, 53))
    monkeypatch.setattr(kernel._BlockSparseAttention, "apply", lambda *_: pytest.fail("not dense"))
    assert_same(run(mechanism, *inputs, **call_of(context_of(53)))[0], expected, inputs)


def test_weights_are_those_of_the_mask() -> None:
    mechanism, reach = make(), context_of(53, False, padding(53, "right"))
    q, k, v = tensors(53)
    out, weights = run(mechanism, q, k, v, **call_of(reach, taps=weights_tap()))
    mask = plain_mask(mechanism.options, reach, 2, 53, 53)
    assert weights is not None and weights.masked_select(~mask).abs().max() == 0
    torch.testing.assert_close(out, naive(q, k, v, mask), atol=1e-5, rtol=0)


def test_a_model_with_flex_runs_without_cuda_by_blocks() -> None:
    found, _ = run(make(implementation="flex"), *tensors(53), **call_of(context_of(53)))
    expected, _ = run(make(implementation="blocks"), *tensors(53), **call_of(context_of(53)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("values", "words"), [
    ({"block": 0}, "block must be greater than 0, found 0"),
    ({"window_blocks": 4}, "window_blocks: expected an odd number, found 4"),
    ({"global_blocks": -1}, "global_blocks must be at least 0, found -1"),
    ({"random_blocks": -2}, "random_blocks must be at least 0, found -2"),
])  # fmt: skip
def test_options_out_of_range_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        BigBirdOptions(**values)
