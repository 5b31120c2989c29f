"""Freed memory is kept while a process works, and can be given back."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import resource, sys
import torch
from tformer.memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    kept = [torch.ones(2**n) for n in (23, 22, 21, 23, 20, 22)]  # a model's tensors of one step: 4 to 32 MiB
    return sum(len(tensor) for tensor in kept)
for _ in range(8):
    step()
before = faults()
for _ in range(4):
    step()
print(faults() - before)
"""
PAGES = 4 * 4 * 2**25 // 4096  # of the last four steps, about


def _faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", PROBE, how], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_kept_memory_is_mapped_once() -> None:
    kept, given_back = _faults("keep"), _faults("default")
    if given_back < PAGES / 100:
        pytest.skip("this C library, or large pages, keep it anyway")
    assert kept < given_back / 3


def test_both_work_wherever_they_are_called() -> None:
    code = "from tformer.memory import *; keep_freed_memory(); return_free_memory(); return_free_memory()"
    subprocess.run([sys.executable, "-c", code], check=True)
