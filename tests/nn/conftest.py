"""Fixtures of the tests of nn."""

from __future__ import annotations

import pytest

from tformer.nn.attention.block_sparse import (
    explicit as block_sparse_explicit,
)
from tformer.nn.attention.block_sparse import (
    kernel as block_sparse,
)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups of blocks, so that the seams of sparse attention are tested."""
    monkeypatch.setattr(block_sparse, "GROUP_ELEMENTS", 1500)
    monkeypatch.setattr(block_sparse_explicit, "CHUNK_ELEMENTS", 3000)
