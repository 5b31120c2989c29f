"""The loss as a GPU computes it: between the products compiled code, and nothing whose size depends on numbers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tformer.nn import losses
from tformer.nn.heads import VocabularyHead
from tformer.nn.losses import CrossEntropy, linear_cross_entropy
from tformer.nn.output import Output, counted_places

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])]


@pytest.fixture(params=BACKENDS)
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One graph, or the test fails."""
    torch._dynamo.reset()
    work = torch.compile(losses._work, backend=request.param, fullgraph=True)
    monkeypatch.setattr(losses, "_compiled_work", lambda: work)
    monkeypatch.setattr(losses, "BLOCK_ELEMENTS", 70 * 9)
    yield
    torch._dynamo.reset()


def loss_and_gradients(dtype: torch.dtype, *, compiled: bool, **options: Any) -> tuple[CrossEntropy, list[Tensor]]:
    torch.manual_seed(0)
    hidden = torch.randn(23, 16).to(dtype).requires_grad_()
    weight, bias = (torch.randn(70, 16) / 4).requires_grad_(), torch.randn(70).requires_grad_()
    labels = torch.randint(0, 70, (23,))
    labels[::4] = -100
    found = linear_cross_entropy(hidden, weight, labels, bias=bias, compiled=compiled, **options)
    return found, list(torch.autograd.grad(found.loss, [hidden, weight, bias]))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_loss_and_gradients_are_those_of_eager(dtype: torch.dtype) -> None:
    for options in ({}, {"label_smoothing": 0.1, "softcap": 5.0, "scale": 0.7}):
        eager, gradients = loss_and_gradients(dtype, compiled=False, **options)
        found, own = loss_and_gradients(dtype, compiled=True, **options)
        torch.testing.assert_close(list(found), list(eager), rtol=1e-5, atol=1e-5)
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        for gradient, expected in zip(own, gradients, strict=True):
            assert (gradient - expected).norm() <= tolerance * expected.norm()


def test_only_a_compiled_forward_asks_for_a_compiled_loss() -> None:
    def forward(x: Tensor) -> Output:
        return Output(x, nn.ModuleDict(), compiled=torch.compiler.is_compiling())

    assert not forward(torch.ones(2)).compiled
    assert torch.compile(forward, backend="eager", fullgraph=True)(torch.ones(2)).compiled
    torch._dynamo.reset()


def test_off_the_cpu_16_bit_matrices_have_rows_of_whole_cache_lines() -> None:
    with FakeTensorMode():
        weight = torch.empty(97, 8, device="meta")
        assert losses._aligned(weight, torch.bfloat16).shape == (128, 8)
        assert losses._aligned(weight, torch.float32).shape == (97, 8)
        hidden, labels = torch.empty(5, 8, device="meta", dtype=torch.bfloat16), torch.empty(5, device="meta").long()
        with torch.no_grad():
            assert linear_cross_entropy(hidden, weight, labels).loss.device.type == "meta"


def test_places_of_a_known_count_are_those_that_are_true() -> None:
    torch.manual_seed(0)
    for share in (0.0, 0.15, 0.5, 1.0):
        kept = torch.rand(57) < share
        assert torch.equal(counted_places(kept, int(kept.sum())), kept.nonzero().squeeze(1))


def test_a_masked_loss_on_a_gpu_needs_its_count_alone() -> None:
    """Without one it would have to ask the device, which fake tensors refuse."""
    with FakeTensorMode(), torch.no_grad(), torch.device("meta"):
        head = VocabularyHead(8, 30)
        output = Output(torch.empty(2, 6, 8, device="meta"), nn.ModuleDict({"masked_lm": head}))
        labels = torch.empty(2, 6, device="meta", dtype=torch.long)
        assert output.loss_terms("masked_lm", labels, num_labels=3).loss.shape == ()
        places = torch.empty(2, 6, device="meta", dtype=torch.bool)
        assert [chunk.shape for chunk in output.logit_chunks("masked_lm", places, count=3)] == [(3, 30)]
        with pytest.raises(Exception, match="nonzero"):
            output.loss_terms("masked_lm", labels)
