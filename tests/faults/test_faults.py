"""Every command that writes, under faults: whatever fails or stops, the old or the new state is there, and it goes on.

The quick test takes a few cases of a few commands, the slow one a sample of all. `TFORMER_FAULTS=1` makes the slow one
take every case, `TFORMER_FAULTS=5` every fifth.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.faults.crash import Disk, Operation
from tests.faults.harness import Trial, Workshop, faults_of
from tests.faults.scenarios import SCENARIOS, Preparation, Scenario

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(os.environ.get("CC", "cc").split()[0]) is None,
    reason="the shim needs Linux and a C compiler",
)
QUICK_CASES, SLOW_CASES = 2, 10  # of a command
QUICK = [scenario for scenario in SCENARIOS if scenario.quick]


@pytest.fixture(scope="module")
def preparation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preparation]:
    with Workshop(tmp_path_factory.mktemp("faults")) as shop:
        yield Preparation(shop)


def problems_of(scenario: Scenario, preparation: Preparation, *, cases: int | None = None, every: int = 1) -> list[str]:
    """The problems of a scenario under about `cases` cases, or every N-th; which ones depends on the name alone."""
    trial = Trial(preparation.shop, scenario, preparation.disk(scenario.needs))
    total = len(faults_of(trial.trace)) + 3 * len(trial.trace)
    every = every if cases is None else max(1, total // cases)
    return trial.problems(every=every, first=random.Random(scenario.name).randrange(every))


@pytest.mark.parametrize("scenario", QUICK, ids=[scenario.name for scenario in QUICK])
def test_nothing_is_lost_under_some_faults(scenario: Scenario, preparation: Preparation) -> None:
    assert problems_of(scenario, preparation, cases=QUICK_CASES) == []


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
def test_nothing_is_lost_under_faults_kills_and_crashes(scenario: Scenario, preparation: Preparation) -> None:
    every = int(os.environ.get("TFORMER_FAULTS", "0"))
    assert problems_of(scenario, preparation, cases=None if every else SLOW_CASES, every=every or 1) == []


def test_a_crash_keeps_only_what_was_synced() -> None:
    """The model of a disk: a rename without fsync of file and folder may lose the new file, or keep an empty one."""
    disk = Disk({"file": b"old"})
    for operation in (
        Operation("open", "new"),
        Operation("write", "new", data=b"new"),
        Operation("rename", "new", other="file"),
    ):
        disk.apply(operation)
    assert disk.survivor("everything") == {"file": b"new"}
    assert disk.survivor("synced") == {"file": b"old"}
    assert disk.survivor("names") == {"file": b""}
    disk.apply(Operation("fsync", "file"))
    assert disk.survivor("names") == {"file": b"new"}
    disk.apply(Operation("fsync", "."))
    assert disk.survivor("synced") == {"file": b"new"}


def test_a_writer_that_does_not_sync_is_found(preparation: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: without its syncs, a safe command is reported."""
    scenario = next(each for each in SCENARIOS if each.name == "train-tokenizer --force")
    trial = Trial(preparation.shop, scenario, preparation.disk(scenario.needs))
    trial.trace = [operation for operation in trial.trace if operation.name != "fsync"]
    assert any("neither the old nor the new" in str(trial.after_crash(*crash)) for crash in trial.crashes())
