"""Cross-entropy from hidden states, eager and compiled."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.quick import first_is_quick
from tformer.nn import losses
from tformer.nn.classification_heads import HeadContext
from tformer.nn.heads import MaskedLmHeadOptions, ModelOutput, counted_places
from tformer.nn.losses import CrossEntropy, linear_cross_entropy
from tformer.nn.norm import NormOptions


def problem(
    *, n: int = 11, d: int = 6, v: int = 9, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, v, (n,))
    labels[::4] = -100
    return (
        torch.randn(n, d, dtype=dtype, requires_grad=True),
        torch.randn(v, d, dtype=dtype, requires_grad=True),
        torch.randn(v, dtype=dtype, requires_grad=True),
        labels,
    )


def reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, softcap: float | None,
    smoothing: float, kind: str,
) -> Tensor:  # fmt: skip
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    if kind == "uniform":
        return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    kept = labels != -100
    log_p, target = logits.log_softmax(-1)[kept], labels[kept].unsqueeze(1)
    share = torch.full_like(log_p, smoothing / (logits.shape[1] - 1)).scatter_(1, target, 1.0 - smoothing)
    return -(share * log_p).sum()


@pytest.mark.parametrize("budget", [1, 9 * 4, 2**25])
@pytest.mark.parametrize("kind", ["uniform", "off_target"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_loss_and_gradients_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, budget: int, kind: Any, smoothing: float, softcap: float | None, with_bias: bool
) -> None:
    monkeypatch.setattr(losses, "LOGIT_ELEMENTS", budget)
    hidden, weight, b, labels = problem()
    bias = b if with_bias else None
    inputs = [hidden, weight] + ([b] if with_bias else [])
    found = linear_cross_entropy(
        hidden, weight, labels, bias=bias, softcap=softcap, label_smoothing=smoothing, smoothing_kind=kind
    )
    expected = reference(hidden, weight, labels, bias=bias, softcap=softcap, smoothing=smoothing, kind=kind)
    plain = reference(hidden, weight, labels, bias=bias, softcap=softcap, smoothing=0.0, kind="uniform")
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.nll, plain)
    assert not found.nll.requires_grad and found.counted == (labels != -100).sum()
    torch.testing.assert_close(
        torch.autograd.grad(found.loss * 3.0, inputs), torch.autograd.grad(expected * 3.0, inputs)
    )


def test_gradcheck_and_tuple_order() -> None:
    hidden, weight, bias, labels = problem(n=4, d=3, v=5)
    assert torch.autograd.gradcheck(
        lambda *a: linear_cross_entropy(a[0], a[1], labels, bias=a[2], softcap=1.5, label_smoothing=0.2).loss,
        (hidden, weight, bias),
    )
    loss, nll, counted, correct = linear_cross_entropy(hidden, weight, labels)
    assert loss.item() == pytest.approx(nll.item()) and counted == 3 and 0 <= correct <= 3


def test_two_definitions_of_smoothing_differ_as_published() -> None:
    hidden, weight, _, labels = problem()
    uniform, off_target = (
        linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, smoothing_kind=kind)  # type: ignore[arg-type]
        for kind in ("uniform", "off_target")
    )
    assert uniform.loss != off_target.loss and uniform.nll == off_target.nll
    # Spreading eps over the K - 1 others equals spreading eps K / (K - 1) over all K.
    other = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1 * 9 / 8)
    torch.testing.assert_close(off_target.loss, other.loss)


def test_correct_counts_the_argmax() -> None:
    hidden, weight, _, labels = problem()
    found = linear_cross_entropy(hidden, weight, labels)
    assert found.correct == ((hidden @ weight.T).argmax(-1) == labels).sum()


def test_everything_ignored_is_zero_with_zero_gradients() -> None:
    hidden, weight, _, labels = problem()
    found = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), label_smoothing=0.1)
    assert found.loss == 0 and found.counted == 0
    for grad in torch.autograd.grad(found.loss, [hidden, weight]):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_no_positions_at_all() -> None:
    hidden, weight, _, _ = problem()
    found = linear_cross_entropy(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
    grad_hidden, grad_weight = torch.autograd.grad(found.loss, [hidden, weight])
    assert found.loss == 0 and not grad_hidden.any() and not grad_weight.any()


def test_per_position_values() -> None:
    hidden, weight, _, labels = problem()
    found = linear_cross_entropy(hidden, weight, labels, reduction="none")
    torch.testing.assert_close(found.nll, F.cross_entropy(hidden @ weight.T, labels, reduction="none").detach())
    assert not found.loss.requires_grad or found.loss.grad_fn is None


def test_bf16_hidden_with_fp32_weight_keeps_the_loss_in_fp32() -> None:
    hidden, weight, bias, labels = problem(n=64, d=32, v=50, dtype=torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    found = linear_cross_entropy(half, weight, labels, bias=bias)
    exact = F.cross_entropy(half.double() @ weight.double().T + bias.double(), labels, reduction="sum")
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss.double(), exact, rtol=1e-2, atol=0.0)
    grads = torch.autograd.grad(found.loss, [half, weight, bias])
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    for grad, expected in zip(grads, torch.autograd.grad(exact, [half, weight, bias]), strict=True):
        torch.testing.assert_close(grad.double(), expected.double(), rtol=0.05, atol=0.05)


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


@pytest.mark.parametrize("elements", [1, 18, 2**20])
def test_a_frozen_bf16_matrix_is_widened_a_few_rows_at_a_time(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "WIDENED_ELEMENTS", elements)
    hidden, weight, bias, labels = problem(v=70, dtype=torch.float32)
    narrow, same = weight.detach().bfloat16(), hidden.detach().clone().requires_grad_()
    found = linear_cross_entropy(hidden, narrow, labels, bias=bias)
    expected = linear_cross_entropy(same, narrow.float(), labels, bias=bias)
    found.loss.backward()
    expected.loss.backward()
    assert torch.allclose(found.loss, expected.loss, rtol=1e-6)
    assert hidden.grad is not None and same.grad is not None
    assert torch.allclose(hidden.grad, same.grad, rtol=1e-5, atol=1e-6)


def test_no_logits_of_all_positions_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGIT_ELEMENTS", 8 * 100)
    hidden, weight, _, labels = problem(n=200, d=4, v=100)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, softcap=5.0).loss.backward()
    assert largest.elements <= 8 * 100 < 200 * 100


def test_nothing_is_prepared_for_backward_under_no_grad() -> None:
    hidden, weight, _, labels = problem()
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, labels)
    assert not found.loss.requires_grad


def test_huge_logits_neither_overflow_nor_lose_the_loss() -> None:
    hidden = torch.tensor([[1.0e4], [-1.0e4]], requires_grad=True)
    weight, labels = torch.tensor([[1.0], [0.5], [-1.0]]), torch.tensor([1, 2])
    found = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(found.loss, F.cross_entropy(hidden @ weight.T, labels, reduction="sum"))
    assert found.correct == 1
    torch.testing.assert_close(torch.autograd.grad(found.loss, hidden)[0], torch.tensor([[0.5], [0.0]]))


def test_a_batch_of_ignored_labels_has_no_loss_and_no_gradient() -> None:
    hidden, weight, bias, labels = problem()
    found = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), bias=bias, label_smoothing=0.1)
    assert found.loss == 0.0 and found.counted == 0
    assert not any(grad.any() for grad in torch.autograd.grad(found.loss, [hidden, weight, bias]))


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
@first_is_quick("dtype", [torch.float32, torch.bfloat16])
def test_compiled_loss_and_gradients_are_those_of_eager(dtype: torch.dtype) -> None:
    for options in ({}, {"label_smoothing": 0.1, "softcap": 5.0}):
        eager, gradients = loss_and_gradients(dtype, compiled=False, **options)
        found, own = loss_and_gradients(dtype, compiled=True, **options)
        torch.testing.assert_close(list(found), list(eager), rtol=1e-5, atol=1e-5)
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        for gradient, expected in zip(own, gradients, strict=True):
            assert (gradient - expected).norm() <= tolerance * expected.norm()


def test_only_a_compiled_forward_asks_for_a_compiled_loss() -> None:
    def forward(x: Tensor) -> ModelOutput:
        return ModelOutput(x, nn.ModuleDict(), compiled=torch.compiler.is_compiling())

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
        head = MaskedLmHeadOptions().build(HeadContext(d_model=8, vocab_size=30, norm=NormOptions()))
        output = ModelOutput(torch.empty(2, 6, 8, device="meta"), nn.ModuleDict({"masked_lm": head}))
        labels = torch.empty(2, 6, device="meta", dtype=torch.long)
        assert output.loss_terms("masked_lm", labels, num_labels=3).loss.shape == ()
        places = torch.empty(2, 6, device="meta", dtype=torch.bool)
        assert [chunk.shape for chunk in output.logit_chunks("masked_lm", places, count=3)] == [(3, 30)]
        with pytest.raises(Exception, match="nonzero"):
            output.loss_terms("masked_lm", labels)


@pytest.mark.parametrize(("softcap", "smoothing"), [(None, 0.0), (5.0, 0.0), (None, 0.1)])
def test_z_loss_is_the_squared_logarithm_of_the_sum_with_its_gradient(softcap: float | None, smoothing: float) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*size, generator=draw, dtype=torch.float64).requires_grad_() for size in ((12, 6), (9, 6), (9,))
    )
    labels = torch.randint(0, 9, (12,), generator=draw)
    labels[3] = -100
    found = linear_cross_entropy(
        hidden, weight, labels, bias=bias, softcap=softcap, label_smoothing=smoothing, z_loss=0.3
    )
    ours = torch.autograd.grad(found.loss, (hidden, weight, bias))
    logits = hidden @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    plain = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    expected = plain + 0.3 * logits.logsumexp(-1)[labels != -100].square().sum()
    theirs = torch.autograd.grad(expected, (hidden, weight, bias))
    torch.testing.assert_close(found.loss, expected)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
