"""Training curves: metrics.jsonl of runs as columns, and the panels and series that every format draws.

Smoothing is a debiased exponential average, as in Adam (1412.6980):
    m_t = w m_{t-1} + (1 - w) y_t,    shown: m_t / (1 - w^t)
It applies to what training logs every few steps; validation and the learning rate are drawn as logged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tformer.support.errors import InputError, nearest
from tformer.support.formatting import finite_number, unique_names
from tformer.viz.plots import PALETTE, Numbers

METRICS_FILE = "metrics.jsonl"
SPLITS = ("train", "valid")  # these come first
# Keys of a record that are not measurements.
NOT_METRICS = frozenset({"split", "step", "tokens", "seconds", "bytes", "examples", "is_best"})


@dataclass(frozen=True)
class Track:
    """One split of a run, in the order of the steps; all columns are [n], NaN where a number is missing.

    Attributes:
        step: optimizer steps done.
        tokens, seconds: tokens trained on, and time spent in training steps, until then.
        values: column of each metric.
    """

    step: Numbers
    tokens: Numbers
    seconds: Numbers
    values: Mapping[str, Numbers]


@dataclass(frozen=True)
class PlottedRun:
    """A run, with a name that is unique in the plot."""

    name: str
    path: Path
    tracks: Mapping[str, Track]

    @property
    def place(self) -> str:
        """The path as valid UTF-8."""
        return _text(str(self.path))


def read_runs(paths: Iterable[Path], read: Callable[[Path], dict[str, Track]] | None = None) -> list[PlottedRun]:
    """Every run once, in the given order; a run without numbers has no tracks. read: `read_tracks`."""
    distinct: dict[str, Path] = {}
    for path in paths:
        distinct.setdefault(os.path.realpath(path), path)
    kept = list(distinct.values())
    read = read or read_tracks
    return [PlottedRun(_text(name), path, read(path)) for name, path in zip(unique_names(kept), kept, strict=True)]


def _text(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")  # a file's name may be any bytes


def read_tracks(path: Path) -> dict[str, Track]:
    """The splits of a run's metrics. Raises InputError for a file that is too large."""
    # Imports pydantic, which pictures of other data do not need.
    from tformer.checkpoint.logs import MAX_SHOWN_BYTES, read_metrics

    records: dict[str, dict[float, dict[str, Any]]] = {}
    for record in read_metrics(path / METRICS_FILE, max_bytes=MAX_SHOWN_BYTES):
        split, step = record.get("split"), _number(record.get("step"))
        if isinstance(split, str) and split != "final" and np.isfinite(step):  # that one is no curve
            records.setdefault(split, {})[step] = record  # of two records at one step the later one
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
    """Progress at each step, interpolated: 0 at step 0, then the known values, then the average pace."""
    known = np.isfinite(progress) & (known_steps > 0)
    if not known.any():
        return np.full(len(step), np.nan)
    x, y = known_steps[known], progress[known]
    return np.interp(step, [0.0, *x, 2 * x[-1]], [0.0, *y, 2 * y[-1]])


def _number(value: object) -> float:
    """The value as a float; NaN for anything but a finite number."""
    found = finite_number(value)
    return np.nan if found is None else float(found)


Choices = Mapping[str, tuple[str, ...]]
"""Metrics, and the splits of each."""

Axis = Literal["step", "tokens", "time"]
AXES: tuple[Axis, ...] = ("step", "tokens", "time")
ALL = "all"
FIRST = ("loss", "perplexity", "bits_per_byte", "bits_per_character", "accuracy")
# Of the training, not of the model: they have no best value.
LAST = ("lr", "tokens_per_second", "grad_norm", "peak_share")
WORDS = {
    "lr": "learning rate",
    "tokens_per_second": "tokens per second",
    "grad_norm": "gradient norm",
    "peak_share": "share of the machine's peak",
}
LOWER_IS_BETTER = ("loss", "perplexity", "bits", "error")  # in a metric's name; of all other metrics higher is better
MARKED_POINTS = 60  # series with at most this number of values mark each: a single point would be invisible
UNITS = (("hours", 3600.0, 7200.0), ("minutes", 60.0, 180.0), ("seconds", 1.0, 0.0))


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        label: its name in the legend: run and split, where they differ between lines.
        x: [n] along the axis. y: [n] as drawn. raw: [n] as logged, where that differs from y.
        spread: [n] half the width of a band around y, for example a standard deviation.
        colour, dash: indices into the palette and the line styles; both wrap around.
        run, split: names of what logged it.
    """

    label: str
    x: Numbers
    y: Numbers
    colour: int
    dash: int
    raw: Numbers | None = None
    spread: Numbers | None = None
    run: str = ""
    split: str = ""

    @property
    def marked(self) -> bool:
        return int(np.isfinite(self.y).sum()) <= MARKED_POINTS


def make_series(
    number: int, label: str, points: Sequence[tuple[float, float]], spread: Sequence[float] | None = None
) -> Series:
    """Line `number` of a picture of (x, y) points; up to 60 lines differ in colour, dash and mark together."""
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    name = label if points else f"{label} (no points)"
    return Series(name, x, y, colour=number, dash=number, spread=None if spread is None else np.array(spread))


@dataclass(frozen=True)
class MetricPanel:
    """All series of one metric, whose name labels the axis."""

    metric: str
    series: Sequence[Series]


def label_of(metric: str) -> str:
    """The label of a metric."""
    return WORDS.get(metric, metric.replace("_", " "))


def better(metric: str) -> Literal["lower", "higher"] | None:
    """The better direction of a metric; None for metrics of the training itself."""
    if metric in LAST:
        return None
    return "lower" if any(word in metric for word in LOWER_IS_BETTER) else "higher"


def is_noisy(metric: str, split: str) -> bool:
    """Whether smoothing applies: not to the learning rate, which follows the schedule, nor to validation."""
    return split == "train" and metric != "lr"


def metrics_of(runs: Iterable[PlottedRun]) -> Choices:
    """{metric: splits with it}: the model's metrics first, the training's last."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for split, track in run.tracks.items():
            for metric in track.values:
                found.setdefault(metric, {})[split] = None

    def rank(metric: str) -> tuple[int, int, str]:
        if metric in FIRST:
            return 0, FIRST.index(metric), metric
        return (2, LAST.index(metric), metric) if metric in LAST else (1, 0, metric)

    return {metric: tuple(found[metric]) for metric in sorted(found, key=rank)}


def choose_metrics(runs: Sequence[PlottedRun], asked: Sequence[str]) -> Choices:
    """The named metrics: `loss` of every split, `valid.loss` of one, `all`; by default the loss.

    Raises:
        InputError: a metric that no run has.
    """
    offered = metrics_of(runs)
    if ALL in asked:
        return offered
    if not asked:
        metric = next(iter(offered))  # the loss, if there is one
        return {metric: offered[metric]}
    chosen: dict[str, dict[str, None]] = {}
    for word in asked:
        split, _, metric = word.partition(".")
        if word in offered:
            chosen.setdefault(word, {}).update(dict.fromkeys(offered[word]))
        elif split in offered.get(metric, ()):
            chosen.setdefault(metric, {})[split] = None
        else:
            known = [*offered, *(f"{split}.{metric}" for metric, splits in offered.items() for split in splits)]
            guess = nearest(word, known)
            raise InputError(
                f"--metric {word}: {'no run has it' if len(runs) > 1 else f'{runs[0].name} has no such metric'}, "
                f"expected one of {', '.join(offered)}, or {ALL}",
                hint=None if guess is None else f"did you mean '{guess}'?",
            )
    return {metric: tuple(splits) for metric, splits in chosen.items()}


def make_panels(runs: Sequence[PlottedRun], choices: Choices, *, x: Axis, smooth: float) -> list[MetricPanel]:
    """One panel for each metric, with a line for each run and split that has the metric.

    Args:
        smooth: weight of the past, 0 <= smooth < 1; 0: as logged.

    Raises:
        InputError: no run logged the numbers of the axis.
    """
    unit = time_unit(runs)[1]
    wanted = list(dict.fromkeys(split for splits in choices.values() for split in splits))
    splits = [*(split for split in SPLITS if split in wanted), *(split for split in wanted if split not in SPLITS)]
    panels = []
    for metric, chosen in choices.items():
        lines = []
        for number, run in enumerate(runs):
            for split, track in run.tracks.items():
                if split not in chosen or metric not in track.values:
                    continue
                raw = track.values[metric]
                smoothed = smooth_values(raw, smooth) if smooth > 0 and is_noisy(metric, split) else None
                if len(runs) == 1:  # splits of a single run differ in colour
                    label, dash = split, 0
                    colour = SPLITS.index(split) if split in SPLITS else len(SPLITS) + splits.index(split)
                else:  # several runs do, and their splits differ in dashes
                    label = f"{run.name} · {split}" if len(splits) > 1 else run.name
                    colour, dash = number, splits.index(split) + 2 * (number // len(PALETTE))
                lines.append(
                    Series(
                        label=label,
                        run=run.name,
                        split=split,
                        x={"step": track.step, "tokens": track.tokens, "time": track.seconds / unit}[x],
                        y=raw if smoothed is None else smoothed,
                        raw=None if smoothed is None else raw,
                        colour=colour,
                        dash=dash,
                    )
                )
        panels.append(MetricPanel(metric, lines))
    if not any(np.isfinite(series.x).any() for panel in panels for series in panel.series):
        raise InputError(
            f"--x {x}: no run logged its {'seconds' if x == 'time' else x}", hint="--x step is always there"
        )
    return panels


def axis_label(runs: Sequence[PlottedRun], x: Axis) -> str:
    """The label of the axis."""
    return f"training time ({time_unit(runs)[0]})" if x == "time" else x


def time_unit(runs: Iterable[PlottedRun]) -> tuple[str, float]:
    """(name, seconds) of the unit of time that suits the longest run."""
    ends = [track.seconds for run in runs for track in run.tracks.values()]
    longest = max((float(seconds[np.isfinite(seconds)].max(initial=0.0)) for seconds in ends), default=0.0)
    return next((name, seconds) for name, seconds, least in UNITS if longest >= least)


def smooth_values(values: Numbers, weight: float) -> Numbers:
    """The debiased exponential average up to each value, [n]; NaN stays NaN and is skipped."""
    smoothed = np.full(len(values), np.nan)
    mean, left = 0.0, 1.0
    for n, value in enumerate(values.tolist()):
        if value == value:
            mean, left = weight * mean + (1 - weight) * value, left * weight
            smoothed[n] = mean / (1 - left)
    return smoothed
