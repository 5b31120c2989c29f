"""The kernels' functions called by several threads at the same time: the numbers of one thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tformer.kernels.functions import Kernels
from tformer.nn.layer_norm import LayerNorm
from tformer.nn.products import rounded_rows

THREADS, CALLS = 4, 40


@pytest.mark.parametrize("kind", ["bf16", "fp32", "int8", "int4"])
def test_one_product_serves_several_threads_with_different_inputs_norms_and_activations(
    kernels: Kernels, kind: str
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 96).mul(0.1), torch.randn(48)
    if kind == "int8":
        rounded, scales = rounded_rows(weight)
        product = kernels.linear(rounded, bias, scales=scales)
    elif kind == "int4":
        rounded, scales = kernels.round_groups(weight)
        product = kernels.linear(rounded, bias, scales=scales, in_features=96)
    else:
        product = kernels.linear(weight.bfloat16() if kind == "bf16" else weight, bias)
    norms = [None, *(LayerNorm(96, eps=eps).requires_grad_(False) for eps in (1e-5, 1e-2))]
    cases = [
        (torch.randn(rows, 96), norms[rows % 3], (None, "gelu", "relu")[rows % 3], rows % 2 == 0)
        for rows in range(1, 13)
    ]

    def call(number: int) -> Tensor:
        x, norm, activation, gated = cases[number % len(cases)]
        return product(x, norm=norm, activation=activation, gated=gated and activation is not None)

    with torch.inference_mode():
        expected = [call(number) for number in range(len(cases))]
    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(torch.inference_mode()(call), range(THREADS * CALLS)))
    assert all(torch.equal(each, expected[number % len(cases)]) for number, each in enumerate(found))


def test_several_threads_attend_and_choose_at_the_same_time(kernels: Kernels) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, 16) for n in (2, 9, 9))
    scores = torch.randn(5, 700)

    def call(number: int) -> tuple[Tensor, ...]:
        return kernels.attend(q + number % 3, k, v, scale=0.3), *kernels.top(scores, 1 + number % 3)

    expected = [call(number) for number in range(3)]
    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(call, range(THREADS * CALLS)))
    for number, each in enumerate(found):
        assert all(torch.equal(one, other) for one, other in zip(each, expected[number % 3], strict=True))
