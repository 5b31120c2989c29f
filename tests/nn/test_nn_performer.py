"""Performer: features, their levels, the state and memory; what it computes is also in the contract of all kinds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.nn.attention_cases import Largest, arange, run
from tests.nn.kind_cases import definition
from tformer.nn.attention import AttentionContext, AttentionSizes, performer
from tformer.nn.attention.performer import (
    PerformerAttention,
    PerformerOptions,
    PerformerState,
    default_features,
    draw_directions,
    mixed_seed,
)
from tformer.nn.structured_dropout import TrainingStep


def squared_error(features: int, *, draws: int, std: float) -> float:
    """Mean squared difference to exact softmax attention, over tables."""
    q, k, v = (x.detach() for x in draw(t=48, b=1, h=2, k=2, dim=16, v=16))
    q, k, scale = q * std, k * std, 16**-0.5
    exact = (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v
    layer, errors = mechanism(head_dim=16, features=features, scale="auto").double(), []
    for seed in range(draws):
        layer.directions.copy_(draw_directions(features, 16, seed=seed))
        errors.append(float((run(layer, q, k, v, **call(48, causal=False))[0] - exact).square().mean()))
    return float(np.mean(errors))


def test_squared_error_to_softmax_falls_as_one_over_the_features() -> None:
    """Queries and keys of standard deviation 0.4 in 16 dimensions: 8.8e-4 at 32 features, 3e-5 at 1024, slope -0.94.

    The variance grows as exp(|q + k|^2): with unit variance 1024 features are too few for the law to have set in.
    """
    sizes = [32, 64, 128, 256, 512, 1024]
    errors = [squared_error(features, draws=24, std=0.4) for features in sizes]
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert -1.3 <= slope <= -0.7, (slope, errors)
    assert errors[-1] < errors[0] / 12 and errors[0] < 2e-3


def test_rows_are_orthogonal_in_blocks_and_long_as_gaussian_vectors() -> None:
    table = draw_directions(40, 16, seed=1).double()
    for start in (0, 16, 32):
        block = table[start : start + 16]
        gram = block @ block.T
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-5
    lengths = torch.cat([draw_directions(64, 16, seed=seed) for seed in range(50)]).norm(dim=1)
    assert float(lengths.square().mean()) == pytest.approx(16, rel=0.05)
    assert float(lengths.square().var()) == pytest.approx(32, rel=0.15)  # chi-squared with 16 degrees of freedom


def test_every_direction_is_as_likely_as_its_opposite() -> None:
    rows = torch.stack([draw_directions(4, 4, seed=seed) for seed in range(4000)])
    assert rows.mean(0).abs().max() < 0.08  # of a standard deviation of 1
    assert float((rows[:, 0].sign() > 0).float().mean()) == pytest.approx(0.5, abs=0.03)


def test_the_kernel_has_no_bias() -> None:
    torch.manual_seed(0)
    q, k = 0.5 * torch.randn(8, dtype=torch.float64), 0.5 * torch.randn(8, dtype=torch.float64)
    rows = torch.cat([draw_directions(64, 8, seed=seed) for seed in range(800)]).double()
    found = ((rows @ q - q @ q / 2).exp() * (rows @ k - k @ k / 2).exp()).mean()
    assert float(found) == pytest.approx(math.exp(float(q @ k)), rel=0.03)


def test_default_number_of_features() -> None:
    assert [default_features(d) for d in (1, 2, 32, 64, 128)] == [1, 1, 110, 266, 621]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 0}, "features must be greater than 0, found 0"),
        ({"features": -3}, "features must be greater than 0, found -3"),
        ({"redraw_steps": -1}, "redraw_steps must be at least 0, found -1"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerformerOptions(**options)


def test_documents_cannot_be_kept_apart() -> None:
    context = AttentionContext(arange(5), arange(5), causal=True, document_ids=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="document_ids: performer"):
        run(mechanism(), *draw(t=5), context, x_BTD=torch.empty(0))


# New draws of the table


def step(number: int, seed: int = 7) -> TrainingStep:
    return TrainingStep(number=number, max_steps=100, warmup_steps=0, seed=seed + number)


def test_the_table_is_redrawn_every_so_many_steps_and_only_then() -> None:
    layer = mechanism(redraw_steps=4)
    changed = []
    for number in range(1, 14):
        table = layer.directions.clone()
        layer.begin_step(step(number))
        changed.append(not torch.equal(table, layer.directions))
    assert [number for number, is_new in enumerate(changed, start=1) if is_new] == [5, 9, 13]


def test_a_table_follows_from_the_step_alone_and_moves_no_stream() -> None:
    layers = [
        mechanism(redraw_steps=1, layer=0),
        mechanism(redraw_steps=1, layer=0),
        mechanism(redraw_steps=1, layer=1),
    ]
    layers[0].begin_step(step(2))
    state = torch.get_rng_state()
    for layer in layers:
        layer.begin_step(step(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(layers[0].directions, layers[1].directions)
    assert not torch.equal(layers[0].directions, layers[2].directions)


def test_seeds_of_near_places_are_unrelated() -> None:
    seeds = {mixed_seed(seed, layer, causal) for seed in range(20) for layer in range(20) for causal in (0, 1)}
    assert len(seeds) == 800 and all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed % 1024 for seed in seeds}) > 500


def test_without_redraws_the_table_stays() -> None:
    layer = mechanism(redraw_steps=0)
    table = layer.directions.clone()
    for number in (1, 2, 1001):
        layer.begin_step(step(number))
    assert torch.equal(table, layer.directions)


def test_the_table_is_saved_and_depends_on_the_seed_of_the_model() -> None:
    torch.manual_seed(1)
    one, same = mechanism(), mechanism()
    torch.manual_seed(2)
    other = mechanism()
    assert torch.equal(one.directions, same.directions) and not torch.equal(one.directions, other.directions)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.directions, other.directions)
    assert not list(one.parameters())


Tensors = tuple[Tensor, Tensor, Tensor]


def mechanism(*, head_dim: int = 6, layer: int = 0, **options: Any) -> PerformerAttention:
    sizes = AttentionSizes(24, 4, 4, head_dim, head_dim, layer=layer)
    return PerformerAttention(PerformerOptions(**{"features": 13, "scale": 0.4, **options}), sizes)


def draw(
    *, t: int, b: int = 2, h: int = 4, k: int = 4, dim: int = 6, v: int = 6, dtype: Any = torch.float64
) -> Tensors:
    generator = torch.Generator().manual_seed(t)
    shapes = ((b, h, t, dim), (b, k, t, dim), (b, k, t, v))
    q, keys, values = (torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes)
    return q, keys, values


def call(length: int, *, causal: bool, mask: Tensor | None = None, **others: Any) -> dict[str, Any]:
    """Named arguments of the mechanism."""
    context = AttentionContext(arange(length), arange(length), causal=causal, key_mask=mask)
    return {"context": context, "x_BTD": torch.empty(0), **others}


def unequal_lengths(length: int) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, length - length // 3 :] = False
    mask[1, : length // 4] = False
    return mask


@pytest.fixture(params=["one segment", "several segments"])
def segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performer, "CHUNK", 8)
    if request.param == "several segments":
        monkeypatch.setattr(performer, "SEGMENT_ELEMENTS", 2 * 4 * 13 * 16)


@pytest.mark.parametrize("causal", [False, True])
def test_fp32_equals_the_fp64_formula(causal: bool) -> None:
    layer, wide = mechanism(head_dim=32, features=64, scale="auto"), draw(t=300, dim=32, v=32)
    narrow = tuple(x.detach().float().requires_grad_() for x in wide)
    mask = unequal_lengths(300)
    given = call(300, causal=causal, mask=mask)
    expected = definition(layer, *wide, given["context"])
    out, _ = run(layer, *narrow, **given)
    grad = torch.randn_like(expected)
    assert (out - expected).abs().max() <= 1e-5
    pairs = zip(torch.autograd.grad(out, narrow, grad.float()), torch.autograd.grad(expected, wide, grad), strict=True)
    for found, wanted in pairs:
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp_min(1.0)


def test_bf16_inputs_give_bf16_outputs_from_fp32_sums() -> None:
    layer, qkv = mechanism(), draw(t=40, dtype=torch.bfloat16)
    out, _ = run(layer, *qkv, **call(40, causal=True))
    wide, _ = run(layer, *(x.float() for x in qkv), **call(40, causal=True))
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.to(torch.bfloat16))


@pytest.mark.usefixtures("segments")
def test_the_future_changes_nothing_not_even_the_last_bit() -> None:
    layer, (q, k, v) = mechanism(), draw(t=43, dtype=torch.float32)
    before, _ = run(layer, q, k, v, **call(43, causal=True))
    for place in (1, 7, 8, 20, 42):
        changed = [x.detach().clone() for x in (q, k, v)]
        for tensor in changed:
            tensor[:, :, place:] = 60.0 * torch.randn_like(tensor[:, :, place:])
        after, _ = run(layer, *changed, **call(43, causal=True))
        assert torch.equal(after[:, :, :place], before[:, :, :place])


@pytest.mark.parametrize("causal", [False, True])
def test_long_vectors_overflow_nowhere(causal: bool) -> None:
    layer, (q, k, v) = mechanism(), (x.detach() for x in draw(t=30, dtype=torch.float32))
    out, _ = run(layer, q * 40.0, k * 40.0, v, **call(30, causal=causal))
    assert bool(out.isfinite().all()) and float(out.abs().max()) <= float(v.abs().max()) * 1.001
    if causal:
        out, _ = run(layer, q * 4.0, k * 4.0, v, **call(30, causal=True))
        torch.testing.assert_close(out[:, :, 0], v[:, :, 0])  # the first query sees the first key alone


# Decoding


def fed(layer: PerformerAttention, qkv: Tensors, mask: Tensor, parts: list[int]) -> tuple[Tensor, PerformerState]:
    state, start, outs = layer.new_state(batch_size=2, capacity=9, device="cpu", dtype=torch.float64), 0, []
    assert isinstance(state, PerformerState)
    for part in parts:
        rows = slice(start, start + part)
        seen = mask[:, : start + part]  # of all slots, as the model tells it
        outs.append(run(layer, *(x[:, :, rows] for x in qkv), **call(part, causal=True, mask=seen, state=state))[0])
        start += part
    return torch.cat(outs, dim=2), state


def test_levels_are_rescaled_when_a_longer_key_comes() -> None:
    layer, (q, k, v) = mechanism().double(), draw(t=12)
    k = k * torch.linspace(0.1, 6.0, 12, dtype=torch.float64)[:, None]
    mask = torch.ones(2, 12, dtype=torch.bool)
    expected = definition(layer, q, k, v, call(12, causal=True)["context"])
    torch.testing.assert_close(fed(layer, (q, k, v), mask, [1] * 12)[0], expected, atol=1e-10, rtol=1e-8)


def test_rows_of_the_state_move_and_repeat() -> None:
    layer, qkv = mechanism().double(), draw(t=9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    _, state = fed(layer, tuple(x[:, :, :8] for x in qkv), mask, [8])  # type: ignore[arg-type]
    state.select_rows(torch.tensor([1, 1, 0]), capacity=99)
    last = tuple(x[[1, 1, 0], :, 8:] for x in qkv)
    out, _ = run(layer, *last, **call(1, causal=True, state=state))
    expected, _ = run(layer, *qkv, **call(9, causal=True))
    torch.testing.assert_close(out, expected[[1, 1, 0], :, 8:])


def test_a_state_can_be_emptied_but_not_cut() -> None:
    layer, qkv = mechanism().double(), draw(t=9)
    _, state = fed(layer, qkv, torch.ones(2, 9, dtype=torch.bool), [9])
    assert isinstance(state, PerformerState) and state.sums is not None
    assert state.sums.sums.shape == (2, 4, 13, 7) and state.length == 9
    state.truncate(9)
    with pytest.raises(ValueError, match="performer attention keeps sums of 9 positions, not of the first 4"):
        state.truncate(4)
    state.truncate(0)
    assert state.sums is None and state.length == 0


# Cost


@pytest.mark.parametrize("causal", [False, True])
def test_no_tensor_grows_with_the_square_of_the_length(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performer, "SEGMENT_ELEMENTS", 2**14)
    largest = []
    for length in (512, 1024, 2048):
        layer, qkv = mechanism(), draw(t=length, b=1, dtype=torch.float32)
        with Largest() as seen:
            run(layer, *qkv, **call(length, causal=causal))[0].sum().backward()
        largest.append(seen.elements)
    assert largest[2] <= 2 * largest[1] <= 4 * largest[0] and largest[2] <= 8 * 4 * 2048 * 6


def kept_elements(run: Callable[[], Any]) -> int:
    """Elements of distinct memory that the backward pass keeps."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = run()
    assert alive is not None
    return sum(storages.values())


@pytest.mark.parametrize("causal", [False, True])
def test_training_keeps_little_beside_its_inputs(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performer, "SEGMENT_ELEMENTS", 2**15)
    layer, qkv = mechanism(features=64), draw(t=4096, b=1, dtype=torch.float32)
    kept = kept_elements(lambda: run(layer, *qkv, **call(4096, causal=causal))[0])
    assert kept < 4 * sum(x.numel() for x in qkv)  # all features would be 20 times that
