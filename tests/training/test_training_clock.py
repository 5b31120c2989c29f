"""A training by time on a machine that is simulated: it ends on time, its rate has fallen, and it can be repeated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.optim.schedules import build_schedule, line_at
from tformer.recipe.sections import Schedule
from tformer.training.clock import LEAST_SHARE, NEVER, Clock, Pace, expected_seconds
from tformer.workers.work import Work


@dataclass
class Machine:
    """A clock that work moves on: `slowness(time)` times the seconds of each piece of work."""

    slowness: Callable[[float], float] = lambda time: 1.0
    time: float = 0.0

    def work(self, seconds: float) -> None:
        self.time += seconds * self.slowness(self.time)


@dataclass
class Run:
    """A simulated training: the loop of `Trainer`, with work in place of steps, validations and checkpoints."""

    machine: Machine
    minutes: float
    step: float
    validation: float = 0.0
    checkpoint: float = 0.0
    start: float = 3.0
    planned: int | None = None
    fraction: float = 0.5
    most_steps: int = NEVER
    groups_of: int = 0  # steps between log lines of a device that is measured in groups
    bends: int = 0
    finished: int = 0
    points: tuple[tuple[int, float], ...] = field(default_factory=tuple)

    def train(self) -> float:
        """Train; the seconds after which it ended."""
        self.machine.work(self.start)
        total = 60 * self.minutes
        planned = self.planned or max(1, int(0.9 * (total - self.machine.time) / self.step))
        pace = Pace(counts_each_step=not self.groups_of, now=lambda: self.machine.time)
        clock = Clock(pace, end=total, total=total, fraction=self.fraction, floor=0.0, planned_steps=planned,
                      most_steps=self.most_steps)  # fmt: skip
        every = {"eval_every": max(1, planned // 4), "save_every": max(1, planned // 4)}
        while self.finished < clock.last_step:
            with pace.of_step():
                self.machine.work(self.step)
            self.finished += 1
            if self.groups_of and self.finished % self.groups_of == 0:
                with pace.of_step(counted=0):
                    pass
            last = self.finished >= clock.last_step
            if self.finished % every["eval_every"] == 0 or last:
                with pace.of("validation"):
                    self.machine.work(self.validation)
                if not clock.leaves_time(self.finished, eval_every=every["eval_every"]):
                    every["eval_every"] = NEVER
                with pace.of("checkpoint"):
                    self.machine.work(self.checkpoint)
            if self.finished % clock.every == 0 and self.finished < clock.last_step:
                self.bends += clock.decide(self.finished, **every) is not None
        self.points = clock.points
        return self.machine.time


def on_time(run: Run, seconds: float) -> bool:
    return abs(seconds - 60 * run.minutes) <= max(0.05 * 60 * run.minutes, 10.0)


steps_in_time = st.floats(60, 5_000)
minutes = st.floats(0.75, 60)


@given(minutes, steps_in_time, st.floats(0, 0.1), st.floats(0, 0.02), st.floats(0.2, 0.9))
def test_it_ends_on_time_with_its_rate_at_the_floor(
    minutes: float, steps: float, validation: float, checkpoint: float, fraction: float
) -> None:
    total = 60 * minutes
    run = Run(Machine(), minutes, total / steps, validation * total, checkpoint * total, fraction=fraction)
    assert on_time(run, run.train())
    assert run.points[-1] == (run.finished, 0.0)
    first = run.points[0][0]
    assert (run.finished - first) / run.finished == pytest.approx(fraction, abs=0.12)


@given(minutes, st.floats(200, 5_000), st.floats(0.02, 0.98), st.floats(0.4, 3.0))
def test_a_machine_that_changes_its_speed_gives_another_number_of_steps_not_another_end(
    minutes: float, steps: float, when: float, slowness: float
) -> None:
    total = 60 * minutes
    machine = Machine(lambda time: slowness if time > when * total else 1.0)
    run = Run(machine, minutes, total / steps, validation=0.01 * total)
    assert on_time(run, run.train())


@given(minutes, st.floats(0.1, 10.0))
def test_a_plan_that_is_wrong_by_far_still_ends_on_time(minutes: float, wrong: float) -> None:
    run = Run(Machine(), minutes, 60 * minutes / 1000, planned=max(1, int(1000 * wrong)))
    assert on_time(run, run.train())


@given(minutes, st.floats(0.3, 3.0), st.floats(0.1, 0.9))
def test_steps_that_are_measured_in_groups_end_on_time(minutes: float, slowness: float, when: float) -> None:
    machine = Machine(lambda time: slowness if time > when * 60 * minutes else 1.0)
    run = Run(machine, minutes, 60 * minutes / 3000, groups_of=10)
    assert on_time(run, run.train())


@given(minutes, st.floats(200, 5000), st.floats(0.1, 0.95), st.floats(0.5, 2.5))
def test_the_rate_never_rises_again_and_few_bends_suffice(
    minutes: float, steps: float, when: float, slowness: float
) -> None:
    machine = Machine(lambda time: slowness if time > when * 60 * minutes else 1.0)
    run = Run(machine, minutes, 60 * minutes / steps)
    run.train()
    assert all(later[0] > earlier[0] and later[1] <= earlier[1] for earlier, later in pairwise(run.points))
    assert run.bends <= 12


def test_a_steady_machine_never_bends_the_line() -> None:
    run = Run(Machine(), 5.0, 0.2, validation=4.0, checkpoint=1.0)
    run.train()
    assert run.bends == 1 and len(run.points) == 2


def test_long_validations_take_place_once() -> None:
    run = Run(Machine(), 2.0, 0.1, validation=20.0)
    assert on_time(run, run.train()) and run.finished > 600


def test_a_limit_of_steps_ends_it_earlier_with_the_same_decay() -> None:
    run = Run(Machine(), 5.0, 0.1, most_steps=400)
    assert run.train() < 60 and run.finished == 400 and run.points == ((200, 1.0), (400, 0.0))


def test_the_points_alone_repeat_the_rate_of_every_step() -> None:
    """A run of the recipe that the clock has written, and a resumed one, need no clock."""
    machine = Machine(lambda time: 2.0 if time > 90 else 1.0)
    run = Run(machine, 2.0, 0.3)
    run.train()
    section = Schedule(kind="timed", warmup_steps=5, points=run.points)
    schedule = build_schedule(section, total_steps=run.finished, d_model=8)
    rates = [schedule.scale(step) for step in range(1, run.finished + 1)]
    assert rates[5 : run.points[0][0]] == [1.0] * (run.points[0][0] - 5)
    assert rates == [min(1.0, step / 6) * line_at(run.points, step - 1) for step in range(1, run.finished + 1)]
    assert 0 < rates[-1] < 0.02


def test_the_time_of_a_validation_is_known_from_its_first_second() -> None:
    machine = Machine()
    stopped = []

    def validate(work: Work) -> None:
        assert work.is_trial
        with work.part("scoring", total=2000) as part:  # 2 s: runs to its end
            for done in range(0, 2000, 100):
                machine.work(0.1)
                part.report(done + 100, 2000)
                stopped.append(work.should_stop())
        with work.part("decoding", total=1000) as part:  # 40 s: is broken off
            for done in range(1000):
                if work.should_stop():
                    return
                machine.work(0.04)
                part.report(done + 1, 1000)

    seconds = expected_seconds(validate, now=lambda: machine.time)
    assert seconds == pytest.approx(42.0, rel=0.05) and machine.time < 4 and not any(stopped)


@pytest.mark.parametrize(
    ("seconds", "eval_every", "share"),
    [
        (1.0, 25, 1.0),  # 3 of 1 s are less than 9 s
        (10.0, 25, 0.3),  # 3 of 10 s: 30 s
        (10.0, 1000, 0.9),  # the last one alone
        (1000.0, 25, LEAST_SHARE),
        (0.0, 25, 1.0),
    ],
)
def test_validations_read_a_share_that_leaves_the_steps_their_time(
    seconds: float, eval_every: int, share: float
) -> None:
    clock = Clock(Pace(), end=60.0, total=60.0, fraction=0.5, floor=0.0, planned_steps=100)
    assert clock.share_of_validations(30, seconds, eval_every=eval_every) == pytest.approx(share)


@pytest.mark.parametrize(
    ("end", "total", "deadline"), [(60.0, 60.0, 65.0), (1200.0, 1200.0, 1230.0), (4.0, 60.0, 15.0)]
)
def test_what_runs_is_broken_off_in_half_of_what_the_command_may_take_longer(
    end: float, total: float, deadline: float
) -> None:
    """A command may take 10 s or 5 % longer; one whose time had passed before its first step gets as long."""
    clock = Clock(Pace(now=lambda: 10.0), end=end, total=total, fraction=0.5, floor=0.0, planned_steps=100)
    assert clock.deadline == deadline


def test_work_that_reports_nothing_counts_as_it_was() -> None:
    machine = Machine()
    assert expected_seconds(lambda work: machine.work(3.0), now=lambda: machine.time) in (0.0, pytest.approx(3.0))
    assert math.isfinite(machine.time)
