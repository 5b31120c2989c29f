"""Freed memory is kept while a process works, and can be given back."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import resource, sys
import torch
from tformer.nn.memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    torch.ones(2**24)  # 64 MiB, more than glibc would ever keep by itself
before = faults()
torch.ones(2**24)
print(faults() - before)
"""
PAGES = 2**26 // 4096


def _faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", PROBE, how], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_kept_memory_is_mapped_once() -> None:
    kept, given_back = _faults("keep"), _faults("default")
    if given_back < PAGES / 100:
        pytest.skip("this C library, or large pages, keep it anyway")
    assert kept < given_back / 10


def test_both_work_wherever_they_are_called() -> None:
    code = "from tformer.nn.memory import *; keep_freed_memory(); return_free_memory(); return_free_memory()"
    subprocess.run([sys.executable, "-c", code], check=True)
