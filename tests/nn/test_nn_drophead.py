"""DropHead against its definition: gates, expectation, schedule."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tformer.build import build_model
from tformer.nn.drophead import DropHead, DropHeadSchedule, drop_heads, scheduled_rate
from tformer.nn.step import Step, begin_step
from tformer.recipe.model import Model

CPU = torch.device("cpu")


def at(number: int, *, max_steps: int = 100, warmup_steps: int = 20) -> Step:
    return Step(number=number, max_steps=max_steps, warmup_steps=warmup_steps, seed=0)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("heads", [1, 4])
def test_kept_heads_share_the_weight_of_all_and_one_is_always_kept(rate: float, heads: int) -> None:
    gates = drop_heads(5000, heads, rate, CPU).view(5000, heads)
    kept = gates > 0
    assert kept.any(dim=1).all()
    torch.testing.assert_close(gates.sum(dim=1), torch.full((5000,), float(heads)))
    for row, mask in zip(gates[:50], kept[:50], strict=True):
        torch.testing.assert_close(row[mask], torch.full_like(row[mask], heads / int(mask.sum())))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_expected_gate_of_every_head_is_one(rate: float) -> None:
    torch.manual_seed(0)
    count, heads = 40_000, 4
    gates = drop_heads(count, heads, rate, CPU).view(count, heads)
    spread = float(gates.std()) / math.sqrt(count)
    torch.testing.assert_close(gates.mean(dim=0), torch.ones(heads), atol=5 * spread, rtol=0.0)


@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_a_head_is_kept_with_probability_one_minus_rate_and_the_last_one_always(rate: float) -> None:
    torch.manual_seed(0)
    count, heads = 40_000, 4
    kept = (drop_heads(count, heads, rate, CPU) > 0).float().mean()
    expected = 1.0 - rate + rate**heads / heads  # of the samples that would lose all heads, one head stays
    assert float(kept) == pytest.approx(expected, abs=5 * math.sqrt(0.25 / (count * heads)))


def test_samples_draw_for_themselves() -> None:
    gates = drop_heads(64, 8, 0.5, CPU).view(64, 8)
    assert len({tuple(row.tolist()) for row in gates}) > 32


@pytest.mark.parametrize("make_quiet", [lambda: DropHead(0.5).eval(), lambda: DropHead(0.0)])
def test_evaluation_and_rate_zero_draw_nothing(make_quiet) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    assert make_quiet()(2, 4, CPU) is None
    assert torch.equal(torch.rand(()), expected)


def test_the_schedule_is_a_v_with_its_knots_where_the_paper_has_them() -> None:
    schedule = DropHeadSchedule(rate=0.3, start=0.5)
    rates = [scheduled_rate(schedule, at(number)) for number in range(1, 101)]
    assert rates[0] == pytest.approx(0.5 * 19 / 20)  # one step down from p_start
    assert rates[9] == pytest.approx(0.25)
    assert rates[19] == 0.0  # the end of the warm-up
    assert rates[59] == pytest.approx(0.15)
    assert rates[99] == pytest.approx(0.3)  # p_end at the last step
    falling, rising = rates[:20], rates[19:]
    assert falling == sorted(falling, reverse=True) and rising == sorted(rising)
    steps = {round(b - a, 12) for a, b in itertools.pairwise(rates)}
    assert steps == {round(-0.5 / 20, 12), round(0.3 / 80, 12)}


def test_the_schedule_may_have_a_warm_up_of_its_own_or_none() -> None:
    own = DropHeadSchedule(rate=0.3, start=0.5, warmup_steps=50)
    assert scheduled_rate(own, at(50)) == 0.0 and scheduled_rate(own, at(75)) == pytest.approx(0.15)
    assert scheduled_rate(own, at(50, warmup_steps=0)) == 0.0
    rising = DropHeadSchedule(rate=0.4, start=0.9)
    assert scheduled_rate(rising, at(25, warmup_steps=0)) == pytest.approx(0.1)
    falling = DropHeadSchedule(rate=0.4, start=0.8, warmup_steps=200)
    assert scheduled_rate(falling, at(100)) == pytest.approx(0.4)


def test_begin_step_moves_scheduled_rates_and_no_others() -> None:
    drops = torch.nn.ModuleList([DropHead(0.2), DropHead(DropHeadSchedule(rate=0.3, start=0.5))])
    assert [drop.rate for drop in drops] == [0.2, 0.5]
    begin_step(drops, at(10))
    assert [drop.rate for drop in drops] == [0.2, 0.25]
    begin_step(drops, at(100))
    assert [drop.rate for drop in drops] == [0.2, pytest.approx(0.3)]


@pytest.mark.parametrize("values", [{"rate": 1.0, "start": 0.1}, {"rate": 0.1, "start": -0.1}])
def test_probabilities_are_checked(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least 0 and below 1"):
        DropHeadSchedule(**values)
    with pytest.raises(ValueError, match="warmup_steps must be at least 0"):
        DropHeadSchedule(rate=0.1, start=0.1, warmup_steps=-1)


def test_every_attention_of_a_model_follows_the_schedule_and_evaluation_does_not_change() -> None:
    stack = {"num_layers": 2, "num_heads": 4, "drophead": {"rate": 0.6, "start": 0.6}}
    sections = {"d_model": 16, "vocab_size": 9, "max_seq_len": 8, "encoder": stack, "decoder": stack}
    torch.manual_seed(0)
    model = build_model(Model.model_validate(sections))
    begin_step(model, at(100))
    drops = [module for module in model.modules() if isinstance(module, DropHead)]
    assert len(drops) == 2 + 4 and all(drop.rate == pytest.approx(0.6) for drop in drops)
    ids = torch.randint(0, 9, (3, 6))
    torch.manual_seed(1)
    noisy = model(ids, decoder_input_ids=ids).logits
    begin_step(model, at(20))
    still = model(ids, decoder_input_ids=ids).logits
    assert torch.equal(still, model.eval()(ids, decoder_input_ids=ids).logits)
    assert not torch.allclose(noisy, still)
