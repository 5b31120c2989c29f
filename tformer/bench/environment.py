"""What a measurement ran on, in one line: a number without it means nothing."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from tformer.nn.hardware import has_bf16_instructions

CPU_INFO = Path("/proc/cpuinfo")


def environment_line(device: torch.device, *, dtype: str) -> str:
    """Version of PyTorch, number format, processor, threads."""
    if device.type == "cuda":
        return f"torch {torch.__version__}, {dtype}, {torch.cuda.get_device_name(device)}"
    bf16 = ", bf16 instructions" if has_bf16_instructions() else ""
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, {dtype}, {_processor()}, {threads} thread{'s' * (threads != 1)}{bf16}"


def _processor() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
