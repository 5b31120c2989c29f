"""Schedules against their formulas, nanoGPT's function and torch's plateau; continuity, monotony, odd warm-ups."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch

from tformer.optim.schedules import SCHEDULES, LrSchedule, build_schedule
from tformer.recipe.sections import Schedule as Section

DECAYING = ("cosine", "linear", "wsd")


def make(kind: str, *, total_steps: int = 100, d_model: int = 64, **options: Any) -> LrSchedule:
    return build_schedule(Section(kind=kind, **options), total_steps=total_steps, d_model=d_model)  # type: ignore[arg-type]


def test_every_kind_of_the_recipe_has_a_schedule() -> None:
    kinds = Section.model_json_schema()["properties"]["kind"]["enum"]
    assert set(kinds) == set(SCHEDULES)


def test_noam_formula() -> None:
    schedule = make("noam", warmup_steps=4000, d_model=512)
    for step in (1, 10, 3999, 4000, 4001, 100_000):
        assert schedule.scale(step) == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5), rel=1e-12)


def test_noam_without_warmup_decays_from_the_first_step() -> None:
    schedule = make("noam", warmup_steps=0, d_model=4)
    assert [schedule.scale(step) for step in (1, 4, 16)] == [0.5, 0.25, 0.125]


def test_truncated_rsqrt_is_adafactors_relative_step_and_t5s_rate() -> None:
    """min(1e-2, t^-1/2) = 1 / sqrt(max(t, 10^4)): arXiv 1804.04235, section 9, and 1910.10683, section 3.1.2."""
    schedule = make("truncated_rsqrt", warmup_steps=10_000)
    for step in (1, 2, 9_999, 10_000, 10_001, 40_000, 10**6):
        assert 0.01 * schedule.scale(step) == pytest.approx(min(1e-2, step**-0.5)) == max(step, 10_000) ** -0.5
    assert make("truncated_rsqrt", warmup_steps=0).scale(4) == 0.5


def test_inverse_sqrt_formula() -> None:
    schedule = make("inverse_sqrt", warmup_steps=10)
    assert schedule.scale(5) == 0.5 and schedule.scale(10) == 1.0 and schedule.scale(40) == 0.5
    assert make("inverse_sqrt", warmup_steps=0).scale(4) == 0.5


@pytest.mark.parametrize(("warmup", "decay", "lr", "min_lr"), [(100, 5000, 1e-3, 1e-4), (0, 40, 6e-4, 6e-5)])
def test_cosine_is_nanogpts(warmup: int, decay: int, lr: float, min_lr: float) -> None:
    def nanogpt(it: int) -> float:  # train.py's get_lr, iterations from 0
        if it < warmup:
            return lr * (it + 1) / (warmup + 1)
        if it > decay:
            return min_lr
        ratio = (it - warmup) / (decay - warmup)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (lr - min_lr)

    schedule = make("cosine", warmup_steps=warmup, decay_steps=decay, min_ratio=min_lr / lr, total_steps=7)
    for it in range(0, decay + 50, 3):
        assert lr * schedule.scale(it + 1) == pytest.approx(nanogpt(it), rel=1e-12)


def test_linear_formula() -> None:
    schedule = make("linear", warmup_steps=20, total_steps=100, min_ratio=0.1)
    for step in range(21, 101):
        assert schedule.scale(step) == pytest.approx(1 - 0.9 * (step - 21) / 80)


def test_constant_formula() -> None:
    schedule = make("constant", warmup_steps=4)
    assert [schedule.scale(step) for step in (1, 2, 4, 5, 1000)] == pytest.approx([0.2, 0.4, 0.8, 1, 1])


def test_wsd_is_flat_and_then_falls_in_its_last_part() -> None:
    schedule = make("wsd", warmup_steps=10, total_steps=100, decay_fraction=0.2, min_ratio=0.0)
    assert {schedule.scale(step) for step in range(11, 82)} == {1.0}
    for step in range(82, 102):
        assert schedule.scale(step) == pytest.approx(1 - (step - 81) / 20)


@pytest.mark.parametrize("kind", DECAYING)
def test_the_last_step_is_one_step_above_the_floor(kind: str) -> None:
    schedule = make(kind, total_steps=40, min_ratio=0.25)
    assert schedule.scale(39) > schedule.scale(40) > schedule.scale(41) == schedule.scale(99) == pytest.approx(0.25)


def test_decay_steps_fall_back_to_all_steps() -> None:
    assert make("cosine", total_steps=50).scale(30) == make("cosine", decay_steps=50, total_steps=999).scale(30)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd", "plateau"])
def test_warmup_is_a_straight_line_to_one(kind: str) -> None:
    schedule = make(kind, warmup_steps=9)
    assert [schedule.scale(step) for step in range(1, 11)] == pytest.approx([step / 10 for step in range(1, 11)])


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_schedules_rise_and_then_never_rise_again(kind: str) -> None:
    schedule = make(kind, warmup_steps=20)
    values = [schedule.scale(step) for step in range(1, 150)]
    assert values[:20] == sorted(values[:20])
    assert values[20:] == sorted(values[20:], reverse=True)
    assert min(values) > 0


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
@pytest.mark.parametrize("warmup", [0, 1, 100])
def test_schedules_have_no_jumps(kind: str, warmup: int) -> None:
    schedule = make(kind, warmup_steps=warmup, total_steps=1000)
    # From step 50 on: an inverse square root falls steeply at its very beginning, and ought to.
    values = [schedule.scale(step) for step in range(50, 1200)]
    largest_step = max(abs(after - before) for before, after in itertools.pairwise(values))
    assert largest_step < 0.011 * max(values)


@pytest.mark.parametrize("kind", DECAYING)
def test_the_floor_is_reached_and_kept(kind: str) -> None:
    schedule = make(kind, warmup_steps=5, min_ratio=0.25)
    assert schedule.scale(100) > 0.25
    assert [schedule.scale(step) for step in (101, 102, 5000)] == pytest.approx([0.25] * 3)


@pytest.mark.parametrize("kind", sorted(set(SCHEDULES) - {"noam"}))
def test_zero_warmup_starts_at_the_full_rate(kind: str) -> None:
    assert make(kind, warmup_steps=0).scale(1) == 1.0


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
@pytest.mark.parametrize("warmup", [99, 100, 250])
def test_warmup_as_long_as_the_training_or_longer_only_rises(kind: str, warmup: int) -> None:
    schedule = make(kind, warmup_steps=warmup, total_steps=100)
    values = [schedule.scale(step) for step in range(1, min(warmup, 100) + 1)]
    assert values == sorted(values)
    assert all(math.isfinite(schedule.scale(step)) for step in range(1, 400))


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="found 0"):
        make("cosine").scale(0)


def test_plateau_is_torchs_reduce_on_plateau() -> None:
    section = Section(kind="plateau", factor=0.5, patience=1, min_ratio=0.2)
    schedule = build_schedule(section, total_steps=100, d_model=1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=1, threshold=0.0, min_lr=0.2, eps=0.0
    )
    seen = set()
    for loss in [3.0, 2.0, 2.5, 2.4, 1.9, 2.0, 2.0, 1.9, 2.0, 2.0, 2.0, 1.0, 1.1, 1.2]:
        schedule.observe(loss)
        reference.step(loss)
        assert schedule.scale(50) == optimizer.param_groups[0]["lr"]
        seen.add(schedule.scale(50))
    assert seen == {1.0, 0.5, 0.25, 0.2}


def test_plateau_state_is_json_and_resumes() -> None:
    losses = [3.0, 3.1, 3.2, 2.0, 2.1, math.nan, 2.2, 2.3]
    for cut in range(len(losses) + 1):
        whole, first = (make("plateau", factor=0.5, patience=1, min_ratio=0.0) for _ in range(2))
        for loss in losses:
            whole.observe(loss)
        for loss in losses[:cut]:
            first.observe(loss)
        second = make("plateau", factor=0.5, patience=1, min_ratio=0.0)
        second.load_state(json.loads(json.dumps(first.state(), allow_nan=False)))
        for loss in losses[cut:]:
            second.observe(loss)
        assert second.state() == whole.state()
        assert second.scale(3) == whole.scale(3) < 1


def test_other_schedules_ignore_losses_and_have_no_state() -> None:
    schedule = make("cosine")
    before = schedule.scale(10)
    schedule.observe(5.0)
    schedule.load_state({})
    schedule.load_state(make("plateau").state())  # of a run that had another schedule
    assert schedule.state() == {} and schedule.scale(10) == before


def test_plateau_goes_on_without_the_state_of_another_schedule() -> None:
    schedule = make("plateau")
    schedule.observe(5.0)
    before = schedule.state()
    schedule.load_state(make("cosine").state())
    assert schedule.state() == before
