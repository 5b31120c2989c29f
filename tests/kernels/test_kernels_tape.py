"""Recorded kernel calls, repeated by one call of the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tformer.kernels.functions import Kernels
from tformer.kernels.tape import RECORDED, Tape
from tformer.nn.layer_norm import LayerNorm

WIDTH, HEADS = 32, 2
Slots = tuple[Tensor, Tensor, int]


class Layer:
    """One layer as a decoder has it: projections, attention to a cache, output plus residual; and the feed-forward."""

    def __init__(self, kernels: Kernels, rows: int) -> None:
        torch.manual_seed(5)
        sizes = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (64, WIDTH), "down": (WIDTH, 64)}
        self.products = {
            name: kernels.linear(torch.randn(size).mul(0.2).bfloat16(), torch.randn(size[0]))
            for name, size in sizes.items()
        }
        self.step = kernels.attention_step(heads=HEADS, kv_heads=HEADS, head_dim=16, value_dim=16, scale=0.25)
        self.norm = LayerNorm(WIDTH, eps=1e-5).requires_grad_(False)
        self.keys, self.values = (torch.zeros(rows, HEADS, 4, 16, dtype=torch.bfloat16) for _ in range(2))
        self.length = 0

    def extend(self) -> Slots:
        self.length += 1
        if self.length > self.keys.shape[2]:
            self.keys, self.values = (torch.cat([x, torch.zeros_like(x)], 2) for x in (self.keys, self.values))
        return self.keys, self.values, self.length

    def __call__(self, x: Tensor, *, slots: Slots | None = None, mask: Tensor | None = None) -> Tensor:
        keys, values, length = self.extend() if slots is None else slots
        qkv = self.products["qkv"](x, norm=self.norm)
        x = self.products["out"](self.step(qkv, keys, values, length=length, mask=mask), residual=x)
        return self.products["down"](self.products["up"](x, norm=self.norm, activation="gelu"), residual=x)


@pytest.fixture(params=[1, 3])
def layer(kernels: Kernels, request: pytest.FixtureRequest) -> Layer:
    return Layer(kernels, request.param)


def inputs(layer: Layer, count: int) -> list[Tensor]:
    torch.manual_seed(6)
    return [torch.randn(len(layer.keys), 1, WIDTH).bfloat16() for _ in range(count)]


def test_a_repeated_step_gives_what_its_calls_give_bit_for_bit_also_when_the_cache_grows(
    kernels: Kernels, layer: Layer
) -> None:
    twin = Layer(kernels, len(layer.keys))
    first, *others = inputs(layer, 11)
    x = first.clone()
    out, tape = kernels.record(x, lambda: layer(x), lambda: [layer.keys])
    assert tape is not None and torch.equal(out, twin(first))
    for each in others:
        assert tape.takes(each)
        found, expected = tape(each, [layer.extend()]), twin(each)
        assert torch.equal(found, expected)
    assert torch.equal(layer.keys[:, :, :11], twin.keys[:, :, :11])


def test_results_of_earlier_steps_stay(kernels: Kernels, layer: Layer) -> None:
    first, second, third = inputs(layer, 3)
    _, tape = kernels.record(first, lambda: layer(first), lambda: [layer.keys])
    assert tape is not None
    found = tape(second, [layer.extend()])
    before = found.clone()
    tape(third, [layer.extend()])
    assert torch.equal(found, before)


def test_calls_outside_of_the_tape_do_not_change_it(kernels: Kernels, layer: Layer) -> None:
    twin = Layer(kernels, len(layer.keys))
    first, second, other = inputs(layer, 3)
    x = first.clone()
    _, tape = kernels.record(x, lambda: layer(x), lambda: [layer.keys])
    assert tape is not None
    twin(first)
    elsewhere = [torch.zeros_like(part) for part in (layer.keys, layer.values)]
    layer(other, slots=(elsewhere[0], elsewhere[1], 1))  # another text, by the same products
    assert torch.equal(tape(second, [layer.extend()]), twin(second))


@pytest.mark.parametrize("name", ["before", "between", "after", "masked", "without attention", "another cache"])
def test_a_step_that_does_more_than_calls_of_kernels_has_no_tape(kernels: Kernels, layer: Layer, name: str) -> None:
    (x,) = inputs(layer, 1)
    steps: dict[str, Callable[[], Tensor]] = {
        "before": lambda: layer(x + 0),
        "between": lambda: layer.products["down"](layer.products["up"](layer(x)).relu()),
        "after": lambda: layer(x) + 0,
        "masked": lambda: layer(x, mask=torch.ones(1, 1, 1, 1, dtype=torch.bool)),
        "without attention": lambda: layer.products["down"](layer.products["up"](x)),
        "another cache": lambda: layer(x, slots=(layer.keys.clone(), layer.values.clone(), 1)),
    }
    expected = Layer(kernels, len(x))(x) if name in ("before", "masked", "another cache") else None
    out, tape = kernels.record(x, steps[name], lambda: [layer.keys])
    assert tape is None and RECORDED.tape is None
    assert expected is None or torch.equal(out, expected)


def test_other_shapes_and_formats_are_not_taken(kernels: Kernels, layer: Layer) -> None:
    (x,) = inputs(layer, 1)
    _, tape = kernels.record(x, lambda: layer(x), lambda: [layer.keys])
    assert isinstance(tape, Tape) and tape.takes(x.clone())
    assert not tape.takes(x.float()) and not tape.takes(x.repeat(2, 1, 1)) and not tape.takes(x.repeat(1, 2, 1))


def test_a_step_that_fails_ends_the_recording(kernels: Kernels, layer: Layer) -> None:
    (x,) = inputs(layer, 1)
    with pytest.raises(ZeroDivisionError):
        kernels.record(x, lambda: x * (1 // 0), lambda: [])
    assert RECORDED.tape is None
