"""`bench quality`: wall-clock seconds of `tformer train` to a validation loss, over seeds.

Each seed is the command as a user types it, in a separate process with an empty cache: starting Python, training the
tokenizer, tokenising and validating count. The loss is that of the whole validation data. With a target, training ends
at the first validation that reaches it; the schedule stays that of the recipe. The run goes to a temporary folder.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from tformer.bench.options import QualityOptions
from tformer.bench.processes import over_limit
from tformer.bench.report import Table, markdown
from tformer.checkpoint.logs import read_metrics
from tformer.data.sources.text import open_sources
from tformer.metrics import Stat
from tformer.recipe import load_recipe
from tformer.support.device import peak_resident_bytes, resolve_device
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT
from tformer.support.formatting import binary_bytes
from tformer.support.processes import ScratchFolder, python_command

POLL_SECONDS = 0.02
"""Longest delay until a validation is noticed."""

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class TimedTraining:
    """One training, followed through the log that it writes.

    Attributes:
        records: of the run's log.
        seconds: from the start of the process to the validation that reached the target, or to its end.
        peak_bytes: of its resident set; None: unknown.
        failed: why there is no result.
    """

    records: tuple[dict[str, Any], ...]
    seconds: float
    peak_bytes: int | None
    failed: str | None = None


def time_training(
    words: Callable[[str], Sequence[str]],
    *,
    target: float | None,
    max_seconds: float,
    should_stop: Callable[[], bool],
) -> TimedTraining | None:
    """Train until a validation loss of `target` or less, or to the end; None when stopped.

    The process never outlives this call. words: the command line for a run directory.
    """
    with ScratchFolder("quality") as folder, tempfile.TemporaryFile() as messages:
        run = folder / "run"
        began = time.monotonic()
        child = subprocess.Popen(
            python_command("tformer", *words(str(run))),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            env={**os.environ, "TFORMER_CACHE": str(folder / "cache")},
            process_group=0,  # Ctrl-C reaches the parent alone, which ends the child
        )
        try:
            return _follow(child, run / METRICS, began, target, max_seconds, should_stop, lambda: _last_error(messages))
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _follow(
    child: subprocess.Popen[bytes],
    log: Path,
    began: float,
    target: float | None,
    max_seconds: float,
    should_stop: Callable[[], bool],
    last_error: Callable[[], str],
) -> TimedTraining | None:
    records: tuple[dict[str, Any], ...] = ()
    size, peak = -1, None
    while True:
        ended = child.poll() is not None
        seconds = time.monotonic() - began
        peak = peak_resident_bytes(child.pid) or peak
        written = log.stat().st_size if log.is_file() else 0
        if written != size:
            size, records = written, tuple(read_metrics(log))
            if target is not None and _reached(records, target):
                return TimedTraining(records, seconds, peak)
        if ended:
            failed = None if child.returncode == 0 else f"training ended with {child.returncode}: {last_error()}"
            return TimedTraining(records, seconds, peak, failed)
        if should_stop():
            return None
        if seconds >= max_seconds:
            return TimedTraining(records, seconds, peak, over_limit(max_seconds))
        time.sleep(POLL_SECONDS)


def _reached(records: Sequence[dict[str, Any]], target: float) -> bool:
    losses = (record.get("loss") for record in records if record.get("split") == "valid")
    return any(loss is not None and loss <= target for loss in losses)


def _last_error(messages: Any) -> str:
    """The line of stderr that begins with `error:`, or the last."""
    messages.seek(0)
    lines = messages.read().decode("utf-8", "replace").strip().splitlines() or ["no message"]
    return next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: ")


@dataclass(frozen=True)
class QualityBench:
    """What to train, and how often.

    Attributes:
        target: validation loss; None: train to the end.
        max_seconds: of one training.
        threads: None: the default of `tformer train`.
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
        loss: of the last validation; None: none took place.
        reached: whether the loss is the target or less; None: no target.
        steps: optimizer steps; training_seconds: spent in them.
        tokens_per_second, step_ms: of these steps.
        share_of_peak: mean share of the matrix-product rate that training measures at its start.
        peak_rss_bytes: of the process; None: unknown.
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
class _Spec:
    path: str
    weight: float = 1.0


def check(bench: QualityBench) -> None:
    """Read all text; raise InputError for text that cannot be read, and for an unknown preset or key."""
    device = "cuda" if bench.device.startswith("cuda") else "cpu"
    recipe = load_recipe(arch=bench.arch, preset=bench.preset, sets=bench.sets, device=device).recipe
    for option, path in (("--data", bench.data), ("--valid", bench.valid)):
        if path == STANDARD_INPUT:
            raise InputError(f"{option}: found '{path}', expected a file: every seed reads it")
        for source in open_sources([_Spec(path)], columns=recipe.data.columns, errors=recipe.data.errors):
            for _ in source.documents():
                pass


def run_quality(
    bench: QualityBench, *, on_row: Callable[[QualityRow], None], should_stop: Callable[[], bool]
) -> list[QualityRow] | None:
    """Train each seed, one after another; None when stopped. on_row: called with each row."""
    rows: list[QualityRow] = []
    for seed in bench.seeds:
        training = time_training(
            partial(bench.words, seed),
            target=bench.target,
            max_seconds=bench.max_seconds,
            should_stop=should_stop,
        )
        if training is None:
            return None
        row = _row(seed, bench.target, training)
        on_row(row)
        rows.append(row)
    return rows


def _row(seed: int, target: float | None, training: TimedTraining) -> QualityRow:
    if training.failed is not None:
        return QualityRow(seed, failed=training.failed)
    records = training.records
    trained = [record for record in records if record["split"] == "train"]
    losses = [record["loss"] for record in records if record["split"] == "valid" and record["loss"] is not None]
    loss = losses[-1] if losses else None
    shares = [record["peak_share"] for record in trained if record.get("peak_share") is not None]
    training_seconds = trained[-1]["seconds"] if trained else None
    return QualityRow(
        seed,
        seconds=training.seconds,
        loss=loss,
        reached=None if target is None else loss is not None and loss <= target,
        steps=trained[-1]["step"] if trained else None,
        training_seconds=training_seconds,
        tokens_per_second=trained[-1]["tokens"] / training_seconds if training_seconds else None,
        step_ms=1000 * training_seconds / trained[-1]["step"] if training_seconds else None,
        share_of_peak=statistics.fmean(shares) if shares else None,
        peak_rss_bytes=training.peak_bytes,
    )


def spread_of(values: Sequence[float | None]) -> Stat | None:
    """Mean and standard deviation of the finite numbers; None without any."""
    return Stat.of([value for value in values if value is not None and math.isfinite(value)])


SPREADS = ("seconds", "loss", "training_seconds", "tokens_per_second")


def quality_table(bench: QualityBench, rows: Sequence[QualityRow]) -> Table:
    """A row for each seed, and mean ± standard deviation."""
    headings = ("seed", "seconds from process start", "validation loss", "step", "in steps", "tokens/s", "peak memory")
    made = [_cells(row, len(headings)) for row in rows]
    if sum(row.failed is None for row in rows) > 1:
        of = {name: [getattr(row, name) for row in rows] for name in SPREADS}
        numbers = (
            _spread(of["seconds"], 1),
            _spread(of["loss"], 4),
            "",
            _spread(of["training_seconds"], 1),
            _spread(of["tokens_per_second"], 0),
            "",
        )
        made.append(("mean ± std", *numbers))
    return Table(f"bench quality: {settings_line(bench)}", headings, tuple(made))


def _cells(row: QualityRow, width: int) -> tuple[str, ...]:
    if row.failed is not None:
        return (str(row.seed), row.failed, *[""] * (width - 2))
    missed = "" if row.reached is not False else " (target not reached)"
    return (
        str(row.seed),
        _number(row.seconds, 1),
        _number(row.loss, 4) + missed,
        _number(row.steps, 0),
        _number(row.training_seconds, 1),
        _number(row.tokens_per_second, 0),
        "" if row.peak_rss_bytes is None else binary_bytes(row.peak_rss_bytes),
    )


def _number(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:,.{decimals}f}"


def _spread(values: Sequence[float | None], decimals: int) -> str:
    found = spread_of(values)
    if found is None:
        return ""
    return _number(found.mean, decimals) + (
        "" if found.deviation is None else f" ± {_number(found.deviation, decimals)}"
    )


def settings_line(bench: QualityBench) -> str:
    """Preset, overrides, target and device, in one line."""
    until = "to the end" if bench.target is None else f"to a loss of {bench.target:g}"
    return ", ".join([f"{bench.arch}/{bench.preset}", *bench.sets, until, bench.device])


def quality_title(bench: QualityBench) -> str:
    """Heading of the case in a report."""
    until = "" if bench.target is None else f" to a validation loss of {bench.target:g}"
    return f"Time to quality, {bench.arch}/{bench.preset}{until}"


def quality_section(bench: QualityBench, rows: Sequence[QualityRow]) -> str:
    """One case of a report as Markdown: heading, command, table."""
    return "\n\n".join(
        [f"## {quality_title(bench)}", f"    {quality_command(bench)}", markdown(quality_table(bench, rows))]
    )


def quality_document(
    bench: QualityBench, rows: Sequence[QualityRow], *, environment: dict[str, Any], command: str
) -> dict[str, Any]:
    """The JSON document of `--json`."""
    spreads = {name: spread_of([getattr(row, name) for row in rows]) for name in SPREADS}
    return {
        "command": command,
        "environment": environment,
        "settings": bench.to_json(),
        "rows": [asdict(row) for row in rows],
        "spread": {
            name: None if found is None else {"mean": found.mean, "std": found.deviation}
            for name, found in spreads.items()
        },
    }


def quality_command(bench: QualityBench) -> str:
    """The command line of a benchmark; defaults are left out."""
    seeds = ",".join(map(str, bench.seeds))
    return QualityOptions(**{**bench.to_json(), "seeds": seeds}).command


def resolve_quality(options: QualityOptions) -> QualityBench:
    """The benchmark. Raises InputError before anything is trained."""
    options.check()
    asked = {field.name: getattr(options, field.name) for field in fields(QualityBench)}
    bench = QualityBench(**{**asked, "seeds": options.seed_numbers, "device": str(resolve_device(options.device))})
    check(bench)
    return bench
