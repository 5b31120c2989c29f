"""What the C library does with memory that has been freed (glibc; elsewhere nothing happens).

By default it hands every large tensor back to the system and takes it anew: each page is then cleared and mapped again,
which costs a model of 100M parameters a third of its training step. Keeping it has a price of its own: batches of texts
have many shapes, and what freed ones leave between blocks in use adds up, so it is given back between long works.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # of mallopt(3)
MOST = 2**31 - 1  # bytes: what fits its argument
STRIDE = 2**26  # bytes by which the heap grows at least


def keep_freed_memory() -> None:
    """From now on reuse what is freed, blocks of any size. For a process that computes for long."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        if not tune(M_MMAP_THRESHOLD, MOST):  # before 2.35 glibc takes no more than 32 MiB: then map no block at all
            tune(M_MMAP_MAX, 0)
        tune(M_TRIM_THRESHOLD, MOST)
        tune(M_TOP_PAD, STRIDE)


def return_free_memory() -> None:
    """Hand the allocator's free pages back; costs some milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
