"""Fixtures of the tests of nn."""

from __future__ import annotations

import pytest

from tformer.nn.attention.block_sparse import explicit, kernel


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups of blocks, so that the seams of sparse attention are tested."""
    monkeypatch.setattr(kernel, "GROUP_ELEMENTS", 1500)
    monkeypatch.setattr(explicit, "CHUNK_ELEMENTS", 3000)
