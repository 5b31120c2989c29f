"""Giving memory back to the system.

Batches of texts have many shapes, and glibc keeps what the freed ones leave between blocks that are still in use: a
process that trained for an hour can hold several times what it needs.
"""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Hand the allocator's free pages back, where the C library can (glibc); costs some milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
