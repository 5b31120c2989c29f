"""Rise of peak memory: of the allocator on a GPU, else of the resident set.

Linux keeps the peak (VmHWM) and lets a process reset it (`/proc/self/clear_refs`, see proc(5)). Elsewhere work that
stays below an earlier peak counts as nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tformer.bench.machine import peak_of_process
from tformer.support.device import return_free_memory

CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # written to clear_refs


class PeakMemory:
    """Rise of the peak memory above what was held when this object was made, which resets the peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.baseline = torch.cuda.memory_allocated(device)
        else:
            return_free_memory()
            if CLEAR_REFS.exists():
                CLEAR_REFS.write_text(RESET_PEAK)
            self.baseline = peak_of_process()

    def bytes(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - self.baseline
        return max(0, peak_of_process() - self.baseline)
