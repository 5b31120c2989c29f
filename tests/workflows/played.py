"""Children of a sweep that are played: they write and print what `tformer train` and `tformer evaluate` would."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tformer.workers.work import ShouldStop
from tformer.workflows.sweep.cells import Ended, Slot

SUMMARY = {"parameters": 10, "flops_per_token": 60.0, "peak_device_bytes": None}
RECORDS = [
    {"split": "train", "step": 2, "loss": 2.0, "tokens": 10, "seconds": 1.0},
    {"split": "valid", "step": 2, "loss": 1.5, "accuracy": 0.5, "is_best": True},
]
WAITS = -1
"""Code of a training that goes on until it is stopped."""


@dataclass
class Children:
    """Plays `run_child`. codes: exit codes by the name of a run, or `evaluate`; together: trainings that wait for each
    other; figures: of the evaluation of a run; most: trainings that ran at the same time."""

    codes: dict[str, int] = field(default_factory=dict)
    together: int = 1
    figures: Callable[[str], dict[str, Any]] = lambda run: {"loss": 3.5, "run": "x"}
    commands: list[list[str]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    stop_at: str = ""
    stopping: bool = False
    running: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self.barrier, self.lock = threading.Barrier(self.together), threading.Lock()

    def __call__(self, words: list[str], log: Path, should_stop: ShouldStop, slot: Slot) -> Ended:
        trains = words[0] == "train"
        run = Path(words[words.index("--out") + 1] if trains else words[1])
        with self.lock:
            self.commands.append(list(words))
            self.slots.append(slot)
            self.running += trains
            self.most = max(self.most, self.running)
        try:
            if trains and self.together > 1:
                self.barrier.wait(timeout=20)
            self.stopping = self.stopping or run.name == self.stop_at
            code = 130 if self.stopping else self.codes.get(run.name if trains else words[0], 0)
            while code == WAITS:
                if should_stop():
                    self.stopped.append(run.name)
                    return Ended(130, "", "interrupted", 1, True)
            if trains and code != 2:
                run.mkdir(exist_ok=True)
                (run / "recipe.yaml").write_text("seed: 1\n")
                (run / "tokenizer.json").write_text("{}")
                (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
            found, error = SUMMARY if trains else self.figures(run.name), f"it went wrong with {code}" if code else ""
            return Ended(code, json.dumps(found), error, 2**20, self.stopping)
        finally:
            with self.lock:
                self.running -= trains

    @property
    def trained(self) -> list[str]:
        return [Path(words[words.index("--out") + 1]).name for words in self.commands if words[0] == "train"]
