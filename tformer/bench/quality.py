"""`bench quality`: how many seconds `tformer train` takes to a validation loss, by the clock, over seeds.

Each seed is the command as a person types it, in a process and with a cache of its own: starting Python, training the
tokenizer, tokenising and validating count. The loss is that of the whole validation data. With a target the training
ends at the first validation that reaches it; its schedule is that of the recipe all the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tformer.bench.quality_process import Watched, watch_training
from tformer.data.sources import STANDARD_INPUT, open_sources
from tformer.errors import InputError
from tformer.recipe import load_recipe


@dataclass(frozen=True)
class QualityBench:
    """What to train, and how often. target: validation loss; None: trained to the end.

    max_seconds: of one training. threads: None: as `tformer train` has it.
    """

    preset: str
    data: str
    valid: str
    arch: str = "gpt"
    target: float | None = None
    seeds: tuple[int, ...] = (1, 2, 3)
    sets: tuple[str, ...] = ()
    device: str = "auto"
    threads: int | None = None
    max_seconds: float = 3600.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def words(self, seed: int, out: str) -> list[str]:
        """The command line of one training, without the program's name."""
        own = [] if self.threads is None else [f"training.threads={self.threads}"]
        sets = [word for text in (*self.sets, *own) for word in ("--set", text)]
        named = ["--arch", self.arch, "--preset", self.preset, "--data", self.data, "--valid", self.valid]
        return ["train", *named, "--seed", str(seed), "--device", self.device, "--out", out, *sets]


@dataclass(frozen=True)
class QualityRow:
    """One seed.

    Attributes:
        seconds: from the start of the process to the validation that reached the target, or to its end.
        loss: of the last validation; None: there was none. reached: whether it is the target or below; None: no target.
        steps: optimizer steps; training_seconds: spent in them.
        tokens_per_second, step_ms: of these steps.
        share_of_peak: of the matrix-product rate that training measures at its start, its mean.
        peak_rss_bytes: of the process; None: nobody told.
    """

    seed: int
    seconds: float | None = None
    loss: float | None = None
    reached: bool | None = None
    steps: int | None = None
    training_seconds: float | None = None
    tokens_per_second: float | None = None
    step_ms: float | None = None
    share_of_peak: float | None = None
    peak_rss_bytes: int | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n - 1; None of one seed) over the seeds that did not fail."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class _Spec:
    path: str
    weight: float = 1.0


Told = Callable[[QualityRow], None]
"""Called with each row when it is known."""


def check(bench: QualityBench) -> None:
    """Raise InputError for a preset, a key or text that is not there or cannot be read; all of it is."""
    device = "cuda" if bench.device.startswith("cuda") else "cpu"
    recipe = load_recipe(arch=bench.arch, preset=bench.preset, sets=bench.sets, device=device).recipe
    for option, path in (("--data", bench.data), ("--valid", bench.valid)):
        if path == STANDARD_INPUT:
            raise InputError(f"{option}: found '{path}', expected a file: every seed reads it")
        for source in open_sources([_Spec(path)], columns=recipe.data.columns, errors=recipe.data.errors):
            for _ in source.documents():
                pass


def run_quality(bench: QualityBench, *, told: Told, should_stop: Callable[[], bool]) -> list[QualityRow] | None:
    """A row for each seed, one after another; None when stopped."""
    rows: list[QualityRow] = []
    for seed in bench.seeds:
        watched = watch_training(
            partial(bench.words, seed),
            target=bench.target,
            max_seconds=bench.max_seconds,
            should_stop=should_stop,
        )
        if watched is None:
            return None
        row = _row(seed, bench.target, watched)
        told(row)
        rows.append(row)
    return rows


def _row(seed: int, target: float | None, watched: Watched) -> QualityRow:
    if watched.failed is not None:
        return QualityRow(seed, failed=watched.failed)
    records = watched.records
    trained = [record for record in records if record["split"] == "train"]
    losses = [record["loss"] for record in records if record["split"] == "valid" and record["loss"] is not None]
    loss = losses[-1] if losses else None
    shares = [record["peak_share"] for record in trained if record.get("peak_share") is not None]
    worked = trained[-1]["seconds"] if trained else None
    return QualityRow(
        seed,
        seconds=watched.seconds,
        loss=loss,
        reached=None if target is None else loss is not None and loss <= target,
        steps=trained[-1]["step"] if trained else None,
        training_seconds=worked,
        tokens_per_second=trained[-1]["tokens"] / worked if worked else None,
        step_ms=1000 * worked / trained[-1]["step"] if worked else None,
        share_of_peak=statistics.fmean(shares) if shares else None,
        peak_rss_bytes=watched.peak_bytes,
    )


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Of the numbers among them; None where there are none."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    if not found:
        return None
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None)
