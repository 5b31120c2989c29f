"""Trainings that are followed while they run: curves, progress and the last sample of each, read from their files.

Nothing is written, and a run is read again only when its logs have changed. The next reading begins after `REST` times
as long as the last one took: watching takes a training at most a twentieth of one core.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tformer.checkpoint.logs import last_sample
from tformer.checkpoint.run import writer
from tformer.support.errors import InputError
from tformer.support.formatting import finite_or_none
from tformer.viz.plot.page import page_data, render_live
from tformer.viz.plot.series import Track, metrics_of, read_runs, read_tracks
from tformer.workflows.runs.summary import IN_USE, RunSummary, find_runs, summarize_run

REST = 20
LEAST_REST = 1.0  # seconds
MAX_VALUES = 200_000  # of all curves, sent at each change: about 2 MB


class Watch:
    """The page of `tformer watch` and its data, for the runs at or under some folders. Any thread may ask."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        """Raises InputError for a folder that is not there."""
        find_runs(folders)
        self._folders = folders
        self._known: dict[Path, tuple[object, RunSummary, dict[str, Track]]] = {}
        self._asking = threading.Lock()
        self._data: dict[str, Any] = {}
        self._next = 0.0

    def page(self) -> str:
        """The page; its script asks for `data` every two seconds."""
        return render_live(self._current())

    def data(self) -> bytes:
        """The data of the page as JSON."""
        return json.dumps(self._current(), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")

    def _current(self) -> Mapping[str, Any]:
        with self._asking:
            if (begun := time.monotonic()) >= self._next:
                self._data = self._gathered()
                ended = time.monotonic()
                self._next = ended + max(LEAST_REST, REST * (ended - begun))
            return self._data

    def _gathered(self) -> dict[str, Any]:
        paths = [path for path in find_runs(self._folders) if self._read(path)]
        self._known = {path: self._known[path] for path in paths}
        runs = read_runs(paths, lambda path: self._known[path][2])
        shown = [run for run in runs if run.tracks]
        first = dict(list(metrics_of(shown).items())[:1])
        data = page_data(shown, first, x="step", smooth=0.0, log_x=False, log_y=False, max_values=MAX_VALUES)
        return {**data, "progress": [{"name": run.name, **progress(self._known[run.path][1])} for run in runs]}

    def _read(self, path: Path) -> bool:
        """Read a run where it has changed; False for an imported model, which was not trained here."""
        written = [path / name for name in ("metrics.jsonl", "samples.txt", "recipe.yaml", "checkpoints")]
        try:
            mark = (writer(path), *(_mark(log) for log in written))
            if path not in self._known or self._known[path][0] != mark:
                self._known[path] = (mark, summarize_run(path), read_tracks(path))
        except InputError:  # unreadable, or removed meanwhile
            return False
        return self._known[path][1].state != "imported"


def _mark(file: Path) -> tuple[int, int] | None:
    """Size and time of a file, which differ after a write; None if it cannot be read."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def progress(run: RunSummary) -> dict[str, Any]:
    """Progress of a run, as JSON.

    `left`: seconds of training until the last step at the average pace, for a run that is trained at this moment;
    validations come on top. `sample`: what its model wrote last.
    """
    step, planned, seconds = run.step or 0, run.max_steps, run.seconds
    trains = run.state == IN_USE
    left = seconds / step * max(0, planned - step) if trains and step and planned and seconds else None
    state = "training" if trains else run.state
    sample = last_sample(run.path / "samples.txt")
    return dict(finite_or_none({**run.to_json(), "state": state, "left": left, "sample": sample}))  # of damaged logs
