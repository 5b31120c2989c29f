"""Every attention kind on a GPU: what it computes and its gradients are those of the CPU. Skipped without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tformer.nn.attention import (
    ATTENTION,
    AttentionSizes,
    ProjectionOptions,
    Reach,
    build_mechanism,
)
from tformer.nn.attention.additive import AdditiveOptions
from tformer.nn.attention.bigbird import BigBirdOptions
from tformer.nn.attention.full import FullAttentionOptions
from tformer.nn.attention.linformer import LinformerOptions
from tformer.nn.attention.masks import make_mask
from tformer.nn.attention.mechanism import Call
from tformer.nn.attention.performer import PerformerOptions
from tformer.nn.attention.sliding_window import SlidingWindowOptions

OPTIONS: dict[str, ProjectionOptions] = {
    "full": FullAttentionOptions(),
    "additive": AdditiveOptions(),
    "sliding_window": SlidingWindowOptions(window=32, block=16, global_tokens=2, implementation="blocks"),
    "bigbird": BigBirdOptions(block=16, random_blocks=1, implementation="blocks"),
    "linformer": LinformerOptions(rank=16),
    "performer": PerformerOptions(features=16),
}


def test_every_kind_of_the_table_is_compared() -> None:
    assert OPTIONS.keys() == ATTENTION.keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_gpu_computes_what_the_cpu_does(kind: str, causal: bool) -> None:
    if kind == "linformer" and causal:
        pytest.skip("linformer has no causal mode")
    sizes = AttentionSizes(16, 2, 2, 8, 8, max_seq_len=128, causal=causal)
    torch.manual_seed(0)
    mechanism = build_mechanism(OPTIONS[kind], sizes)
    mechanism.reset_parameters(0.02)
    inputs = [torch.randn(2, 2, 100, 8) for _ in range(3)]
    key_mask = torch.ones(2, 100, dtype=torch.bool)
    key_mask[1, 70:] = False
    on_cpu = run(mechanism, inputs, key_mask, causal=causal)
    on_gpu = run(mechanism.to("cuda"), [x.cuda() for x in inputs], key_mask.cuda(), causal=causal)
    for expected, found in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-3)


def run(mechanism: nn.Module, inputs: list[Tensor], key_mask: Tensor, *, causal: bool) -> list[Tensor]:
    """Outputs at real positions, and the gradients of queries, keys and values."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    mask, is_causal = make_mask(causal=causal, num_queries=100, key_mask=key_mask)
    pos = torch.arange(100, device=key_mask.device).unsqueeze(0)
    x_BTD = torch.zeros(2, 100, 16, device=key_mask.device)
    call = Call(x_BTD, pos, pos, 8**-0.5, mask=mask, is_causal=is_causal, reach=Reach(causal, key_mask))
    out = mechanism(*leaves, call)[0].masked_fill(~key_mask[:, None, :, None], 0.0)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
