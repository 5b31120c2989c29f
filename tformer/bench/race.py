"""The order of rounds: every contender in a process of its own, prepared and warmed up, their rounds in turn (A B A B).

What disturbs a machine for a while (another program, a hot processor) disturbs all of them alike; what one of them sets
in its process, or the end of it, leaves the others alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from tformer.bench.isolate import OUT_OF_MEMORY
from tformer.bench.runner import Runner, Stopped
from tformer.bench.timing import ENOUGH_SECONDS, MOST_REPEATS, summarise

SHARE_FOR_ROUNDS = 0.6
"""Of the time limit, for the turns of all: no further one begins after it."""

Row = dict[str, Any]


def race(
    contenders: Sequence[Mapping[str, Any]], *, repeats: int, max_seconds: float, should_stop: Callable[[], bool]
) -> list[Row] | None:
    """A row for each contender, in order; None when stopped.

    A row is a timing, the tokens of a round and the peak `memory` of the process, or {"failed": why}. A contender for
    whom memory was too small beside the others is measured again, alone: its row has {"alone": True}.

    Args:
        contenders: the arguments of `contend.contend` for each.
        repeats: rounds of each at least; quick ones go on until each has had `ENOUGH_SECONDS`.
        max_seconds: of each process; one that takes longer fails. One turn is always timed.
    """

    def take(some: Sequence[Mapping[str, Any]]) -> tuple[list[Row], list[int]]:
        return _together(some, repeats=repeats, max_seconds=max_seconds, should_stop=should_stop)

    try:
        rows, crowded = take(contenders)
        for index in crowded:
            [again], _ = take([contenders[index]])
            rows[index] = again if "failed" in again else {**again, "alone": True}
    except Stopped:
        return None
    return rows


def _together(
    contenders: Sequence[Mapping[str, Any]], *, repeats: int, max_seconds: float, should_stop: Callable[[], bool]
) -> tuple[list[Row], list[int]]:
    """A row for each, and the places of those for whom memory was too small while others held some."""
    runners: list[Runner] = []
    crowded: list[int] = []

    def do(runner: Runner, part: Callable[[Runner], None]) -> None:
        part(runner)
        if runner.failed is not None and runner.failed.startswith(OUT_OF_MEMORY) and _able(runners):
            crowded.append(runners.index(runner))

    try:
        for arguments in contenders:
            runners.append(Runner(arguments, max_seconds=max_seconds, should_stop=should_stop))
            do(runners[-1], Runner.prepare)
        began = time.monotonic()
        while (able := _able(runners)) and not _enough(able, repeats):
            for runner in able:
                do(runner, Runner.round)
            if time.monotonic() - began >= SHARE_FOR_ROUNDS * max_seconds:
                break
        for runner in _able(runners):
            do(runner, Runner.tell_peak)
    finally:
        for runner in runners:
            runner.end()
    return [_row(runner) for runner in runners], crowded


def _able(runners: Sequence[Runner]) -> list[Runner]:
    return [runner for runner in runners if runner.failed is None]


def _enough(able: Sequence[Runner], repeats: int) -> bool:
    """Whether the turns that were taken will do, or somebody has no time for another."""
    turns = len(able[0].seconds)
    if turns == 0:
        return False
    long_enough = turns >= repeats and min(sum(runner.seconds) for runner in able) >= ENOUGH_SECONDS
    return long_enough or turns >= max(repeats, MOST_REPEATS) or not all(runner.has_time for runner in able)


def _row(runner: Runner) -> Row:
    if runner.failed is not None:
        return {"failed": runner.failed}
    return {**asdict(summarise(runner.seconds)), "tokens": round(mean(runner.tokens)), "memory": runner.memory}
