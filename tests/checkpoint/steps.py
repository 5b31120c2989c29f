"""What the tests of checkpoints share."""

from __future__ import annotations

from tformer.checkpoint.run import RunDirectory


def steps(run: RunDirectory) -> list[int]:
    return [entry.step for entry in run.checkpoints()]
