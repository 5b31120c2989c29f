"""What the processor multiplies in hardware, and the number formats by the names that recipes use."""

from __future__ import annotations

from typing import Literal

import torch

PrecisionName = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def has_bf16_instructions() -> bool:
    """Whether the CPU multiplies bf16 in hardware (AVX512-BF16 or AMX)."""
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(probe is not None and probe() for probe in probes)
