"""Small caches on a CPU are kept in fp32, which changes nothing but rounding."""

from __future__ import annotations

import pytest
import torch

from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.layer_cache import FEW_SLOTS, LayerCache, quickest_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "device", "slots", "expected"),
    [
        (torch.bfloat16, CPU, FEW_SLOTS, torch.float32),
        (torch.bfloat16, CPU, FEW_SLOTS + 1, torch.bfloat16),
        (torch.float32, CPU, 1, torch.float32),
        (torch.float16, CPU, 1, torch.float16),
        (torch.bfloat16, torch.device("cuda"), 1, torch.bfloat16),
    ],
)
def test_only_few_slots_of_bf16_on_a_cpu_are_widened(
    dtype: torch.dtype, device: torch.device, slots: int, expected: torch.dtype
) -> None:
    assert quickest_dtype(dtype, device, slots=slots) == expected


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_wider_cache_gives_the_same_to_rounding_and_the_inputs_dtype(kv_heads: int) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(32, num_heads=4, num_kv_heads=kv_heads).bfloat16().eval()
    x = torch.randn(2, 5, 32).bfloat16()
    outputs = []
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            cache = LayerCache(
                batch_size=2, num_kv_heads=kv_heads, capacity=8, head_dim=8, value_dim=8, device="cpu", dtype=dtype
            )
            steps = [layer(x[:, at : at + 1], q_pos=torch.tensor([[at]]), cache=cache) for at in range(5)]
            outputs.append(torch.cat(steps, dim=1))
    assert outputs[1].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[1].float(), outputs[0].float(), atol=2e-2, rtol=2e-2)
