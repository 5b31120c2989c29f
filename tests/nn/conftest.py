"""Fixtures of the tests of nn."""

from __future__ import annotations

import pytest

from tformer.nn.attention import performer, routes
from tformer.nn.attention.block_sparse import explicit, kernel


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups of blocks, chunks and segments, so that the seams of attention are tested."""
    monkeypatch.setattr(kernel, "GROUP_ELEMENTS", 1500)
    monkeypatch.setattr(explicit, "CHUNK_ELEMENTS", 3000)
    monkeypatch.setattr(routes, "CHUNK_ELEMENTS", 3000)
    monkeypatch.setattr(performer, "CHUNK", 8)
    monkeypatch.setattr(performer, "SEGMENT_ELEMENTS", 2 * 4 * 13 * 16)
