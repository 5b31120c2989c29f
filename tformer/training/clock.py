"""A training that ends by the clock: when its rate decays, and at which step it ends (`training.minutes`).

The learning rate is constant after the warm-up. The decay begins as soon as the steps that fit into the time left are
at most `schedule.decay_fraction` of all steps; then the last step is fixed, too:

    factor 1  ------------------.
                                 \\            the rest of the time: steps, validations, samples, checkpoints
    min_ratio                     \\_.
              0            begin   end   finished steps

From then on the run is a function of steps again: the points of the line are written into its recipe, so a resumed run
follows the same line, and a run of that recipe repeats it. Where the machine becomes slower or faster during the decay,
the line is bent once more, towards the step that now fits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tformer.optim.schedules import line_at
from tformer.workers.work import Report, Work

Points = tuple[tuple[int, float], ...]

RECENT_STEPS = 40
"""Number of last steps whose mean time is expected of the next ones."""

RECENT_GROUPS = 6
"""The same where steps are measured in groups, from log line to log line."""

NOTICED, CHANGED = 8, 1.4
"""If the mean time of this number of last groups differs by this factor from the mean before, the machine changed."""

RESERVE_SECONDS = 2.0
"""For the end of the command, after the last checkpoint."""

LATE_SHARE, LATE_SECONDS = 0.025, 5.0
"""Part of the whole time, and least number of seconds, after its end when steps and validations are broken off."""

TOLERANCE = 0.015
"""Part of the whole time by which the expected end may be off before the line is bent."""

LEAST_TOLERANCE = 2.0
"""Seconds of the expected end that never bend the line."""

TRIAL_SECONDS, SHORT_SECONDS = 1.0, 4.0
"""A part of a validation that is tried out ends after the first, unless it is shorter than the second in all."""

MOST_VALIDATING = 0.15
"""Part of the time that all validations may take together: they read less, or only the last one takes place."""

LEAST_SHARE = 0.05
"""Minimum of the share of the held-out data to which a trial reduces validations."""

NEVER = 10**9
"""A number of steps that no training reaches, as of a training that only its epochs limit."""


@dataclass
class Pace:
    """Measured seconds of a training's parts: steps, and the last validation, sample and checkpoint.

    Attributes:
        seconds: of the last time, by part: validation (with its sample), checkpoint; expected of `end`, a validation on
            all data after the last step.
        counts_each_step: False on a device that runs asynchronously: then `flush` closes a group of steps.
    """

    counts_each_step: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    now: Callable[[], float] = time.monotonic
    _open: tuple[int, float] = (0, 0.0)
    _first: bool = True

    def __post_init__(self) -> None:
        most = RECENT_STEPS if self.counts_each_step else RECENT_GROUPS
        self._groups: deque[tuple[int, float]] = deque(maxlen=most)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Measure a validation or a checkpoint."""
        began = self.now()
        yield
        self.seconds[part] = self.now() - began

    @contextmanager
    def of_step(self, *, counted: int = 1) -> Iterator[None]:
        """Measure a step (`counted` 1), or what belongs to the steps before it (0), such as a log line."""
        began = self.now()
        yield
        steps, seconds = self._open
        self._open = steps + counted, seconds + self.now() - began
        if self.counts_each_step or not counted:
            self.flush()

    def flush(self) -> None:
        """Close a group of steps whose work is done."""
        if self._open[0] and self._first:
            self._first = False  # the first step also allocates, compiles and fills caches
        elif self._open[0]:
            self._groups.append(self._open)
        self._open = (0, 0.0)
        groups = list(self._groups)
        before, last = _mean(groups[:-NOTICED]), _mean(groups[-NOTICED:])
        if before and last and len(groups) >= 2 * NOTICED and not 1 / CHANGED < last / before < CHANGED:
            self._groups.clear()
            self._groups.extend(groups[-NOTICED:])

    def step_seconds(self) -> float | None:
        """Mean seconds of the last steps; None before the second one."""
        return _mean(self._groups)

    def to_come(self, step: int, last_step: int, *, eval_every: int, save_every: int) -> float:
        """Expected seconds from finished step `step` to the end of the training."""
        steps = (last_step - step) * (self.step_seconds() or 0.0)
        validations = _times(step, last_step, eval_every) * self.seconds.get("validation", 0.0)
        saves = max(_times(step, last_step, save_every), _times(step, last_step, eval_every))
        end = self.seconds.get("end", 0.0)
        return steps + validations + saves * self.seconds.get("checkpoint", 0.0) + end

    def steps_within(self, seconds: float, step: int, *, eval_every: int, save_every: int) -> int:
        """Number of steps after finished step `step` that fit into this time with validations and checkpoints."""
        of_step = self.step_seconds()
        if not of_step:
            return 0
        steps = seconds / of_step
        for _ in range(3):  # fewer steps leave out validations, which leaves room for steps
            others = self.to_come(step, step + max(1, int(steps)), eval_every=eval_every, save_every=save_every)
            steps = (seconds - others) / of_step + max(1, int(steps))
        return max(0, int(steps))


def _mean(groups: Iterable[tuple[int, float]]) -> float | None:
    steps = sum(steps for steps, _ in groups)
    return sum(seconds for _, seconds in groups) / steps if steps else None


@dataclass
class _Trial:
    """A trial of some work: the running part, its progress, and the expected seconds of all parts."""

    now: Callable[[], float]
    began: float = 0.0
    done: float = 0.0
    total: float | None = None
    seconds: float = 0.0

    @property
    def expected(self) -> float:
        """Seconds of the whole part that runs."""
        elapsed = self.now() - self.began
        return elapsed * max(1.0, self.total / self.done) if self.done and self.total else elapsed

    def should_stop(self) -> bool:
        return self.now() - self.began > TRIAL_SECONDS and self.expected > SHORT_SECONDS

    def report(self, done: float, total: float | None = None) -> None:
        self.done, self.total = done, total or self.total

    @contextmanager
    def progress(self, description: str, total: float | None = None, unit: str = "") -> Iterator[Report]:
        self.began, self.done, self.total = self.now(), 0.0, total
        yield self.report
        self.seconds += self.expected


def expected_seconds(run: Callable[[Work], object], *, now: Callable[[], float] = time.monotonic) -> float:
    """Expected seconds of some work, from the first second of each part that reports its progress."""
    trial = _Trial(now, began=now())
    run(Work(trial.progress, trial.should_stop, is_trial=True))
    return trial.seconds


def _times(step: int, last_step: int, every: int) -> int:
    """Number of events after `step` that occur every `every` steps and at the last step."""
    return 0 if last_step <= step else (last_step - 1) // every - step // every + 1


@dataclass
class Clock:
    """Chooses the steps at which the decay of a training begins and ends. No other code reads the time.

    Args:
        end: on the pace's clock, when the command has to end.
        total: seconds of the whole training, of earlier commands too.
        fraction: of the steps in which the rate decays.
        floor: factor of the rate at the end.
        most_steps: a limit that the recipe sets, too.
        planned_steps: expected number of steps, before any is measured.
        points: of a resumed run whose decay has begun.

    Attributes:
        every: steps between two decisions, the same in all processes: few enough that none comes too late.
        deadline: on the pace's clock, when what still runs is broken off; also where the end has passed already.
    """

    pace: Pace
    end: float
    total: float
    fraction: float
    floor: float
    planned_steps: int
    most_steps: int = NEVER
    points: Points = ()

    def __post_init__(self) -> None:
        self.every = max(1, min(50, min(self.planned_steps, self.most_steps) // 200))
        self.deadline = max(self.end, self.pace.now()) + max(LATE_SECONDS, LATE_SHARE * self.total)

    @property
    def last_step(self) -> int:
        """The last step, as far as it is decided; before, the limit of the recipe."""
        return self.points[-1][0] if self.points else self.most_steps

    @property
    def expected_steps(self) -> int:
        return self.points[-1][0] if self.points else min(self.planned_steps, self.most_steps)

    def decide(self, step: int, *, eval_every: int, save_every: int) -> Points | None:
        """The new points of the schedule's line after finished step `step`; None if they stay."""
        if self.pace.step_seconds() is None:
            return None
        left = self.end - RESERVE_SECONDS - self.pace.now()
        every = {"eval_every": eval_every, "save_every": save_every}
        fitting = step + self.pace.steps_within(left, step, **every)
        last = max(step + 1, min(fitting, self.most_steps))
        if not self.points:
            self.planned_steps = last
            if last - step > self.fraction * last:
                return None
            self.points = ((step, 1.0), (last, self.floor))
            return self.points
        late = self.pace.to_come(step, self.last_step, **every) - left
        if last == self.last_step or abs(late) <= max(LEAST_TOLERANCE, TOLERANCE * self.total):
            return None
        if step - self.points[-2][0] < NOTICED < (self.last_step - step) / 4:
            return None  # the new speed is not known yet, and there is time
        kept = tuple(point for point in self.points[:-1] if point[0] < step)
        self.points = (*kept, (step, line_at(self.points, step)), (last, self.floor))
        return self.points

    def share_of_validations(self, step: int, seconds: float, *, eval_every: int) -> float:
        """The share of the held-out data that leaves the others enough time; seconds: of a validation on all."""
        number = _times(step, self.expected_steps, eval_every)
        return max(LEAST_SHARE, min(1.0, MOST_VALIDATING * self.total / max(number * seconds, 1e-9)))

    def leaves_time(self, step: int, *, eval_every: int) -> bool:
        """Whether the validations before the last one may all take place."""
        number = _times(step, self.expected_steps, eval_every) - 1
        return number * self.pace.seconds.get("validation", 0.0) <= MOST_VALIDATING * self.total
