"""How much memory something takes at its peak, beyond what the process held before.

On a GPU the allocator keeps count. On a CPU it is the process's resident set: Linux keeps its high-water mark (VmHWM)
and lets a process set it back (`/proc/self/clear_refs`, see proc(5)). Elsewhere the mark cannot be set back, so that
work which stays below an earlier peak counts as nothing.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch

from tformer.memory import return_free_memory

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what clear_refs takes for it


class PeakMemory:
    """Counts from the moment it is made; `bytes()` says how far the peak has risen above what was held then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.baseline = torch.cuda.memory_allocated(device)
        else:
            return_free_memory()
            _reset_peak()
            self.baseline = peak_of_process()

    def bytes(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - self.baseline
        return max(0, peak_of_process() - self.baseline)


def peak_of_process() -> int:
    """Bytes of this process's largest resident set so far, or since it was last set back."""
    if STATUS.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
        if found:
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _reset_peak() -> None:
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text(RESET_PEAK)
