"""Loggers of a training beside metrics.jsonl: TensorBoard, Weights & Biases.

Each receives the recipe, the environment, every record of metrics.jsonl and every sample. What a resumed run needs to
go on with its logs is kept in `loggers.json` of the run directory. A logger that fails is left out from then on; the
training goes on.
"""

from __future__ import annotations

import importlib.util
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from tformer.support.errors import InputError, did_you_mean, require_package
from tformer.support.files import parse_object, read_bounded, write_text
from tformer.support.formatting import json_text, shortened

LOGGERS_FILE = "loggers.json"
MAX_FILE_BYTES = 1 << 20
PROJECT = "tformer"
"""Default project of Weights & Biases."""

Status = Literal["finished", "stopped", "failed"]
"""How a training ended; `stopped`: it can be resumed."""


@dataclass(frozen=True)
class LoggedRun:
    """A run as its loggers see it.

    Attributes:
        first_step: 0 for a new run, else the step that it is resumed from.
        recipe: as plain data; `recipe_yaml` is the same as text.
        environment: content of environment.json.
    """

    path: Path
    first_step: int
    recipe: Mapping[str, Any]
    recipe_yaml: str
    environment: Mapping[str, Any]


class Logger(ABC):
    """A log of one run. Any method may fail.

    Attributes:
        package: that it needs; the extra of tformer that installs it has the name of the logger in `LOGGERS`.
        place: where the log is, for the user.
        state: with which a later process continues this log.
    """

    package: ClassVar[str]
    place: str
    state: dict[str, str]

    @abstractmethod
    def __init__(self, run: LoggedRun, state: Mapping[str, str] | None) -> None:
        """Open the log; `state`: of the log to continue, None for a new one."""

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by name, such as `train/loss`."""

    @abstractmethod
    def sample(self, step: int, text: str) -> None:
        """Log what the model wrote."""

    @abstractmethod
    def close(self, status: Status) -> None:
        """Complete the log."""


class TensorBoard(Logger):
    """Event files in the run directory: `tensorboard --logdir runs`."""

    package = "tensorboard"

    def __init__(self, run: LoggedRun, state: Mapping[str, str] | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.path / "tensorboard"
        self.place, self.state = f"{folder}; show it with: tensorboard --logdir {run.path.parent}", {}
        # Steps after the one that is resumed are trained again: readers drop them.
        self._writer: Any = SummaryWriter(str(folder), purge_step=run.first_step + 1 if run.first_step else None)
        self._writer.add_text("recipe", _as_code(run.recipe_yaml), run.first_step)
        self._writer.add_text("environment", _as_code(json.dumps(run.environment, indent=1)), run.first_step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def sample(self, step: int, text: str) -> None:
        self._writer.add_text("sample", _as_code(text), step)

    def close(self, status: Status) -> None:
        self._writer.close()


class WeightsAndBiases(Logger):
    """A run of Weights & Biases, which reads WANDB_MODE and WANDB_PROJECT; without a key it logs offline."""

    package = "wandb"

    def __init__(self, run: LoggedRun, state: Mapping[str, str] | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: Any = wandb
        mode = os.environ.get("WANDB_MODE") or (None if wandb.setup().settings.api_key else "offline")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.path.name,
            id=None if state is None else state["id"],
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            dir=str(run.path),
            config={**run.recipe, "environment": dict(run.environment)},
            settings=wandb.Settings(console="off", silent=True),
        )
        # An axis of our own: wandb's never goes back, as a resumed run does to its checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.state = {"id": self._run.id}
        folder = Path(self._run.dir).parent
        self.place = f"{folder}; upload it with: wandb sync {folder}" if self._run.offline else str(self._run.url)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def sample(self, step: int, text: str) -> None:
        self._run.log({"step": step, "sample": self._wandb.Table(columns=["step", "text"], data=[[step, text]])})

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def logger_names(given: Sequence[str]) -> tuple[str, ...]:
    """The loggers of --log-to, each once. Raises InputError for an unknown one and for a package that is missing."""
    names = tuple(dict.fromkeys(name.strip() for text in given for name in text.split(",")))
    for name in names:
        if name not in LOGGERS:
            raise InputError(
                f"--log-to: found '{name}', expected {', '.join(LOGGERS)}", hint=did_you_mean(name, LOGGERS)
            )
        require_package(LOGGERS[name].package, extra=name, user=f"--log-to {name}")
    return names


class Loggers:
    """The open loggers of a run. A logger that fails gets no further calls, and one note says so."""

    def __init__(
        self, names: Sequence[str], run: LoggedRun, note: Callable[[str], None], *, enabled: bool = True
    ) -> None:
        """Open the named loggers and a resumed run's loggers; none unless `enabled`."""
        self._note = note
        self._open: dict[str, Logger] = {}
        if not enabled:
            return
        states = self._stored(run.path / LOGGERS_FILE) if run.first_step else {}
        for name in dict.fromkeys([*names, *(name for name in states if name in LOGGERS)]):
            if importlib.util.find_spec(LOGGERS[name].package) is None:
                note(f"{name} is not installed: this run's log there ends (pip install 'tformer[{name}]')")
                continue
            try:
                logger = LOGGERS[name](run, states.get(name))
            except Exception as error:
                self._give_up(name, error)
                continue
            self._open[name] = logger
            states[name] = logger.state
            note(f"logging to {name}: {logger.place}")
        if self._open:
            write_text(run.path / LOGGERS_FILE, json_text(states, indent=1))

    def record(self, values: Mapping[str, Any]) -> None:
        """Log a record of metrics.jsonl: its numbers under `train/`, `valid/` or `final/`."""
        numbers = {
            f"{values['split']}/{name}": float(value)
            for name, value in values.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        self._each(lambda logger: logger.metrics(values["step"], numbers))

    def sample(self, step: int, text: str) -> None:
        """Log what the model wrote at a step."""
        self._each(lambda logger: logger.sample(step, text))

    def close(self, status: Status) -> None:
        """Complete the logs."""
        self._each(lambda logger: logger.close(status))
        self._open.clear()

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, logger in list(self._open.items()):
            try:
                call(logger)
            except Exception as error:
                del self._open[name]
                self._give_up(name, error)

    def _stored(self, file: Path) -> dict[str, dict[str, str]]:
        """The states of the run's loggers; {} where the file is missing, or damaged, which a note says."""
        try:
            return parse_object(read_bounded(file, max_bytes=MAX_FILE_BYTES), name=str(file)) if file.is_file() else {}
        except InputError as error:
            self._note(f"{error.message}: the run's logs are not continued")
            return {}

    def _give_up(self, name: str, error: Exception) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        self._note(f"{name} failed and logs no more, the training goes on: {shortened(reason, 300)}")


def _as_code(text: str) -> str:
    """Text as an indented block of Markdown, in which nothing is markup."""
    return "".join(f"    {line}\n" for line in text.splitlines())
