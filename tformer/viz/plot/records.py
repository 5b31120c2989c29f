"""What runs logged: metrics.jsonl as columns of numbers, one track for each split.

Shapes: n = records of a split.
Half and foreign lines are passed over, as resuming does. A record of validation tells neither how many tokens nor how
many seconds of training came before it: both are read off the training records around its step.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tformer.checkpoint.logs import read_metrics
from tformer.viz.plots import Numbers

METRICS_FILE = "metrics.jsonl"
SPLITS = ("train", "valid")  # these first, others as they come
# Numbers of a record that count or order it, and are not measured.
NOT_METRICS = frozenset({"split", "step", "tokens", "seconds", "bytes", "examples", "is_best"})


@dataclass(frozen=True)
class Track:
    """One split of a run, in the order of the steps; all columns are [n], and NaN is a number that is not there.

    Attributes:
        step: optimizer steps done.
        tokens, seconds: trained on, and spent in training steps, until then.
        values: each metric's column.
    """

    step: Numbers
    tokens: Numbers
    seconds: Numbers
    values: Mapping[str, Numbers]


@dataclass(frozen=True)
class Run:
    """A run by a name that no other run of the plot has."""

    name: str
    path: Path
    tracks: Mapping[str, Track]

    @property
    def place(self) -> str:
        """The path as text that any file can hold."""
        return _text(str(self.path))


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Every run once, in the order given; one without any number has no tracks."""
    distinct: dict[str, Path] = {}
    for path in paths:
        distinct.setdefault(os.path.realpath(path), path)
    kept = list(distinct.values())
    return [Run(_text(name), path, _tracks(path)) for name, path in zip(unique_names(kept), kept, strict=True)]


def unique_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, and as many before it as it takes to tell the paths apart."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    depths = [1] * len(parts)
    while True:
        names = ["/".join(part[-depth:]) for part, depth in zip(parts, depths, strict=True)]
        taken = Counter(names)
        clashing = [n for n, name in enumerate(names) if taken[name] > 1 and depths[n] < len(parts[n])]
        if not clashing:
            return names
        for n in clashing:
            depths[n] += 1


def _text(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")  # a file's name may be any bytes


def _tracks(path: Path) -> dict[str, Track]:
    records: dict[str, dict[float, dict[str, Any]]] = {}
    for record in read_metrics(path / METRICS_FILE):
        split, step = record.get("split"), _number(record.get("step"))
        if isinstance(split, str) and np.isfinite(step):
            records.setdefault(split, {})[step] = record  # of two at one step the later one
    order = [*(split for split in SPLITS if split in records), *(split for split in records if split not in SPLITS)]
    tracks: dict[str, Track] = {}
    for split in order:
        track = _track(records[split], tracks.get("train"))
        if track.values:
            tracks[split] = track
    return tracks


def _track(records: Mapping[float, Mapping[str, Any]], training: Track | None) -> Track:
    steps = sorted(records)
    names = dict.fromkeys(key for step in steps for key in records[step] if key not in NOT_METRICS)

    def column(name: str) -> Numbers:
        return np.array([_number(records[step].get(name)) for step in steps])

    step = np.array(steps)
    columns = {name: column(name) for name in names}
    values = {name: numbers for name, numbers in columns.items() if np.isfinite(numbers).any()}
    if training is None:
        return Track(step, column("tokens"), column("seconds"), values)
    tokens, seconds = (_at(step, training.step, progress) for progress in (training.tokens, training.seconds))
    return Track(step, tokens, seconds, values)


def _at(step: Numbers, known_steps: Numbers, progress: Numbers) -> Numbers:
    """What had been done at a step: from nothing at 0, through what is known, and on at the average pace after it."""
    known = np.isfinite(progress) & (known_steps > 0)
    if not known.any():
        return np.full(len(step), np.nan)
    x, y = known_steps[known], progress[known]
    return np.interp(step, [0.0, *x, 2 * x[-1]], [0.0, *y, 2 * y[-1]])


def _number(value: object) -> float:
    """NaN for whatever is no finite number: the file may be anybody's."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return np.nan
    try:
        number = float(value)
    except OverflowError:
        return np.nan
    return number if np.isfinite(number) else np.nan
