"""Peak memory: what was held before does not count, what has been freed since does."""

from __future__ import annotations

import pytest
import torch

from tformer.bench import memory
from tformer.bench.memory import CLEAR_REFS, PeakMemory, peak_of_process

MEBI = 2**20
CPU = torch.device("cpu")


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="only Linux lets a process set its peak back")
def test_a_peak_counts_from_when_counting_began() -> None:
    earlier = torch.ones(64 * MEBI, dtype=torch.uint8)
    freed = torch.ones(96 * MEBI, dtype=torch.uint8)
    del freed
    counted = PeakMemory(CPU)
    assert counted.bytes() < 8 * MEBI
    for _ in range(2):  # one after the other: not together
        passing = torch.ones(32 * MEBI, dtype=torch.uint8)
        del passing
    assert 30 * MEBI < counted.bytes() < 44 * MEBI
    assert earlier.numel() == 64 * MEBI


def test_where_the_system_keeps_no_status_the_peak_comes_from_its_accounts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    known = peak_of_process()
    monkeypatch.setattr(memory, "STATUS", memory.Path(str(tmp_path)) / "none")
    monkeypatch.setattr(memory.sys, "platform", "linux")
    assert known / 2 < peak_of_process() < known * 8
