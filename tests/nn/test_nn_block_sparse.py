"""The shared block-gather: its geometry, its groups, and that no tensor of it grows with the square of the length."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from tests.nn.attention_cases import Largest, arange, context_of, run
from tests.nn.kind_cases import assert_same, call_of, hooks_of, mechanism_of, padding, tensors
from tformer.nn.attention import AttentionContext, ProjectionOptions
from tformer.nn.attention.bigbird import BigBirdOptions
from tformer.nn.attention.bigbird_frame import Frame
from tformer.nn.attention.block_sparse import explicit, kernel
from tformer.nn.attention.block_sparse.global_tokens import first_tokens, marked_tokens, put_rows
from tformer.nn.attention.block_sparse.kernel import attend_sparse, dense_is_faster
from tformer.nn.attention.block_sparse.pattern import KeyNumbers, Pattern, band_of, runs
from tformer.nn.attention.context import AttentionInputs
from tformer.nn.attention.sliding_window import Fold, SlidingWindowOptions
from tformer.nn.positions.shaw import ShawOptions

KINDS: dict[str, ProjectionOptions] = {
    "window": SlidingWindowOptions(window=16, implementation="blocks"),
    "window-global": SlidingWindowOptions(window=16, global_tokens=3, implementation="blocks"),
    "window-dilated": SlidingWindowOptions(window=8, dilation=2, global_tokens=1, implementation="blocks"),
    "bigbird": BigBirdOptions(block=8, random_blocks=2, implementation="blocks"),
}


@pytest.mark.parametrize("options", list(KINDS.values()), ids=list(KINDS))
@pytest.mark.parametrize("explicit_scores", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_no_tensor_is_as_large_as_the_square_of_the_length(
    options: ProjectionOptions, explicit_scores: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "GROUP_ELEMENTS", 2**14)
    monkeypatch.setattr(explicit, "CHUNK_ELEMENTS", 2**14)
    mechanism, largest = mechanism_of(options, causal=causal), []
    for length in (1024, 2048):
        inputs = tensors(length, batch=1)
        call = call_of(AttentionContext(arange(length), arange(length), causal=causal), batch=1)
        if explicit_scores:
            call["positions"], mechanism.dropout = hooks_of(ShawOptions(clip=4), causal=causal), 0.1
        with Largest() as mode:
            run(mechanism, *inputs, **call)[0].sum().backward()
        largest.append(mode.elements)
    assert largest[1] < 2048 * 2048 / 4
    assert largest[1] <= 2.1 * max(largest[0], 2**14)  # twice the length, twice the largest


def test_chunks_that_are_recomputed_do_not_keep_the_whole_queries_keys_and_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explicit, "CHUNK_ELEMENTS", 2**12)
    mechanism = mechanism_of(KINDS["window"], causal=True)
    call = call_of(AttentionContext(arange(1000), arange(1000), causal=True), batch=1)
    call["positions"] = hooks_of(ShawOptions(clip=4), causal=True)
    inputs = [tensor.clone() for tensor in tensors(1000, batch=1)]
    alive = [weakref.ref(tensor) for tensor in inputs]
    out = run(mechanism, *inputs, **call)[0]
    del inputs
    assert out.requires_grad and not any(reference() is not None for reference in alive)


@pytest.mark.parametrize(
    ("queries", "keys", "start"), [(50, 50, 0), (3, 3, 0), (16, 16, 0), (20, 33, 13), (70, 90, 20)]
)
@pytest.mark.parametrize(("block", "before", "after"), [(8, 16, 16), (8, 5, 0), (4, 0, 3), (16, 64, 64)])
def test_runs_hold_every_block_once_with_its_whole_span(
    queries: int, keys: int, start: int, block: int, before: int, after: int
) -> None:
    pattern = Pattern(block, before, after, torch.zeros(block, before + block + after), start)
    seen = {}
    for some in runs(pattern, queries, keys):
        for number in range(some.num_blocks):
            low = some.low + number * block
            assert some.first + number not in seen and low >= 0 and low + some.span <= keys
            seen[some.first + number] = (some.width, low, low + some.span)
    assert sorted(seen) == list(range(-(-queries // block)))
    for number, (width, low, high) in seen.items():
        begin = start + number * block
        assert width == min(block, queries - number * block)
        assert low == max(0, begin - before) and high == min(keys, begin + block + after)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_groups_of_any_size_give_the_same(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = torch.arange(-8, 16)
    band = band_of((slots - torch.arange(8).unsqueeze(1)).abs() <= 8)
    pattern = Pattern(8, 8, 8, band, keys=KeyNumbers(padding(75, "left").bool()), padded=True)  # type: ignore[union-attr]
    inputs = tensors(75, kv_heads=kv_heads)

    def found(size: int) -> Tensor:
        monkeypatch.setattr(kernel, "GROUP_ELEMENTS", size)
        return attend_sparse(AttentionInputs(*inputs, context_of(75), 0.3), pattern, None)

    for size in (2000, 2**20):
        assert_same(found(size), found(1), inputs, tolerance=2e-6)


def test_a_fold_is_undone() -> None:
    x = torch.arange(2 * 3 * 11 * 2.0).view(2, 3, 11, 2)
    fold = Fold(2, 3)
    folded = fold.heads(x)
    assert folded.shape == (6, 3, 4, 2) and torch.equal(folded[4, :, 2], x[1, :, 7])
    assert torch.equal(fold.back(folded, 11), x)
    assert torch.equal(fold.slots(torch.arange(11).unsqueeze(0))[1], torch.tensor([1, 4, 7, 10]))
    pattern = Pattern(4, 0, 0, torch.zeros(4, 4), start=5, q_pos=torch.arange(5, 11).unsqueeze(0))
    folded_pos = fold.pattern(pattern, 11).q_pos
    assert folded_pos is not None and torch.equal(folded_pos[:, -1], torch.tensor([9, 10, 0] * 2))


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_frame_is_undone(side: str) -> None:
    mask = padding(22, side)
    offset = torch.zeros(1, 1, dtype=torch.long) if mask is None else mask.argmax(1, keepdim=True)
    frame = Frame.of(offset, mask, 22, 22, 8)
    x = torch.randn(2, 3, 22, 2)
    moved, back = frame.keys(x), frame.back(frame.queries(x))[:, :, -22:]
    valid = frame.valid(mask)
    assert moved.shape[2] == 24 and valid is not None
    real = torch.ones(2, 22, dtype=torch.bool) if mask is None else mask.bool()
    assert torch.equal(back[:, :, :22].transpose(1, 2)[real], x.transpose(1, 2)[real])
    for row in range(2):
        count = int(real[row].sum())
        assert torch.equal(moved[row, :, :count], x[row][:, real[row]]) and valid.expand(2, -1)[row].sum() == count


def test_global_tokens_are_the_first_real_ones_or_the_named_ones() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    first = first_tokens(2, mask, 6, mask.device)
    assert first is not None and first.valid is not None
    assert [row[keep].tolist() for row, keep in zip(first.index, first.valid, strict=True)] == [[2, 3], [0], []]
    assert first.mask.nonzero().tolist() == [[0, 2], [0, 3], [1, 0]]
    named = marked_tokens(torch.tensor([[1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 1], [0] * 6]), mask)
    assert named is not None and named.count == 1 and named.index[:2].tolist() == [[5], [0]]
    assert marked_tokens(torch.zeros(3, 6), mask) is None and first_tokens(0, None, 6, mask.device) is None
    out = put_rows(torch.zeros(3, 1, 6, 1), torch.ones(3, 1, 2, 1), first)
    assert torch.equal(out[:, 0, :, 0].bool(), first.mask)


def test_where_dense_is_faster() -> None:
    assert dense_is_faster(256, 256, 10) and dense_is_faster(480, 480, 320)
    assert not dense_is_faster(512, 512, 320) and not dense_is_faster(1, 100, 320)
