"""Freed memory is kept while a process works, and can be given back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tformer import device as memory
from tformer.device import keep_freed_memory, return_free_memory

PROBE = """
import resource, sys
import torch
from tformer.device import keep_freed_memory
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
    code = "from tformer.device import *; keep_freed_memory(); return_free_memory(); return_free_memory()"
    subprocess.run([sys.executable, "-c", code], check=True)


class OldLibrary:
    """glibc before 2.35: mallopt answers 0 to a threshold above 32 MiB, and leaves what was set."""

    def __init__(self, most: int) -> None:
        self.most, self.calls = most, list[tuple[int, int]]()

    def mallopt(self, option: int, value: int) -> int:
        refused = option == memory.M_MMAP_THRESHOLD and value > self.most
        if not refused:
            self.calls.append((option, value))
        return int(not refused)


@pytest.mark.parametrize(("most", "maps_none"), [(2**25, True), (memory.MAX_MALLOPT_VALUE, False)], ids=["old", "new"])
def test_where_the_threshold_is_refused_no_block_is_mapped(
    most: int, maps_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = OldLibrary(most)
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    keep_freed_memory()
    assert ((memory.M_MMAP_MAX, 0) in library.calls) == maps_none and memory.M_MMAP_MAX == -4
    assert ((memory.M_MMAP_THRESHOLD, memory.MAX_MALLOPT_VALUE) in library.calls) != maps_none
    assert (memory.M_TRIM_THRESHOLD, memory.MAX_MALLOPT_VALUE) in library.calls


def test_a_library_without_the_options_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    keep_freed_memory()
    return_free_memory()
