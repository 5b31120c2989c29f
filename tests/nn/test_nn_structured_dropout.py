"""DropHead, LayerDrop and the training step that schedules follow."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tformer.build import build_model
from tformer.model import Transformer
from tformer.nn.structured_dropout import (
    DropHead,
    DropHeadSchedule,
    LayerDrop,
    LayerDropOptions,
    StepAware,
    TrainingStep,
    constrained_rates,
    drop_heads,
    scheduled_rate,
    solve_offset,
    step_listeners,
)
from tformer.recipe.model import Model

CPU = torch.device("cpu")


def begin_step(model: nn.Module, step: TrainingStep) -> None:
    for listener in step_listeners(model):
        listener.begin_step(step)


def at(number: int, *, max_steps: int = 100, warmup_steps: int = 20) -> TrainingStep:
    return TrainingStep(number=number, max_steps=max_steps, warmup_steps=warmup_steps, seed=0)


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
    heads = torch.ones(2, 4, 3, 5)
    assert make_quiet()(heads) is heads
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


IDS = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))


def make(layers: int = 3, **stack: object) -> Transformer:
    torch.manual_seed(0)
    decoder = {"num_layers": layers, "num_heads": 2, **stack}
    return build_model(Model.model_validate({"d_model": 16, "max_seq_len": 8, "vocab_size": 11, "decoder": decoder}))


def randomized(drop: LayerDrop, seed: int = 0) -> LayerDrop:
    with torch.no_grad():
        drop.logits.copy_(torch.randn(len(drop.fixed), generator=torch.Generator().manual_seed(seed)))
    return drop


def test_a_layer_is_kept_when_u_exceeds_its_rate() -> None:
    drop = LayerDrop([0.2, 0.5, 0.0, 0.9])
    assert drop.decide([0.3, 0.3, 0.0, 0.3]).keep == [True, False, True, False]
    assert drop.decide([0.2, 0.51, 0.5, 0.95]).keep == [False, True, True, True]


def test_the_share_of_skipped_layers_is_the_rate_of_each() -> None:
    torch.manual_seed(0)
    drop, count = LayerDrop([0.1, 0.5, 0.8]), 3000
    skipped = torch.tensor([[not keep for keep in drop().keep] for _ in range(count)]).float().mean(dim=0)
    assert skipped.tolist() == pytest.approx([0.1, 0.5, 0.8], abs=4 * math.sqrt(0.25 / count))


def test_nothing_is_drawn_at_rate_zero_and_in_evaluation() -> None:
    torch.manual_seed(3)
    expected = torch.rand(())
    for drop in (LayerDrop([0.0, 0.0]), LayerDrop([0.5, 0.5]).eval()):
        torch.manual_seed(3)
        assert drop() is None
        assert torch.equal(torch.rand(()), expected)


@pytest.mark.parametrize("mean", [0.01, 0.2, 0.5, 0.93])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 500.0])
def test_learned_rates_average_to_their_mean(mean: float, spread: float) -> None:
    drop = randomized(LayerDrop([mean] * 7, learned=True))
    with torch.no_grad():
        drop.logits.mul_(spread)
    rates = drop.rates()
    assert sum(rates) / 7 == pytest.approx(mean, abs=1e-9)
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    tensor = constrained_rates(drop.logits, mean)
    assert tensor.mean().item() == pytest.approx(mean, abs=1e-5)
    assert tensor.tolist() == pytest.approx(rates, abs=1e-5)
    (gradient,) = torch.autograd.grad(tensor.square().sum(), drop.logits)
    assert torch.isfinite(gradient).all()


def test_rates_keep_the_order_of_their_logits() -> None:
    drop = randomized(LayerDrop([0.3] * 5, learned=True))
    order = sorted(range(5), key=drop.logits.tolist().__getitem__)
    rates = drop.rates()
    assert [rates[i] for i in order] == sorted(rates) and len(set(rates)) == 5


def test_the_gradient_of_constrained_rates_is_that_of_the_exact_solution() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    probe = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)

    def value(at: Tensor) -> float:
        return float((torch.sigmoid(at + solve_offset(at.tolist(), 0.3)) * probe).sum())

    (gradient,) = torch.autograd.grad((constrained_rates(logits, 0.3) * probe).sum(), logits)
    for layer, step in enumerate(torch.eye(4, dtype=torch.float64) * 1e-5):
        numeric = (value(logits.detach() + step) - value(logits.detach() - step)) / 2e-5
        assert gradient[layer].item() == pytest.approx(numeric, rel=1e-6)
    assert gradient.sum().item() == pytest.approx(0.0, abs=1e-12)  # a shift of all logits changes nothing


def forward(drop: LayerDrop, blocks: list[nn.Module], x: Tensor, keep: list[bool]) -> Tensor:
    draw = drop.decide([1.0 if kept else 0.0 for kept in keep])
    assert draw.keep == keep
    for layer, block in enumerate(blocks):
        x = draw.gated(layer, x, partial(block, x), block)
    return x


def exact_and_estimated(drop: LayerDrop, loss_of_mask) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """Over all 2^L masks: the gradient of the expected loss, and the expectation of the estimator's gradient."""
    layers, expected_loss, estimated = len(drop.fixed), torch.zeros(()), torch.zeros(len(drop.fixed))
    rates = constrained_rates(drop.logits, drop.fixed[0])
    for keep in itertools.product([False, True], repeat=layers):
        chances = [1.0 - rates[layer] if kept else rates[layer] for layer, kept in enumerate(keep)]
        chance = torch.stack(chances).prod()
        loss = loss_of_mask(list(keep))
        expected_loss = expected_loss + chance * loss.detach()
        estimated += chance.detach() * torch.autograd.grad(loss, drop.logits)[0]
    (exact,) = torch.autograd.grad(expected_loss, drop.logits)
    return exact, estimated


@pytest.mark.parametrize("loss", [lambda y, probe: (y * probe).sum(), lambda y, probe: (y - probe).square().mean()])
def test_the_estimator_is_unbiased_for_a_loss_at_most_quadratic_in_each_gate(loss) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    blocks = [nn.Linear(3, 3) for _ in range(4)]
    drop, x, probe = randomized(LayerDrop([0.4] * 4, learned=True)), torch.randn(5, 3), torch.randn(5, 3)
    exact, estimated = exact_and_estimated(drop, lambda keep: loss(forward(drop, blocks, x, keep), probe))
    assert exact.abs().max() > 1e-3
    torch.testing.assert_close(estimated, exact, rtol=1e-4, atol=1e-5)


def test_the_estimator_points_along_the_exact_gradient_in_a_transformer_trained_with_layerdrop() -> None:
    model = make(layers=4, layerdrop={"rate": 0.3, "learned": True})
    drop, plain_forward = model.decoder.layerdrop, model.decoder.layerdrop.forward
    weights = [parameter for name, parameter in model.named_parameters() if "layerdrop" not in name]
    optimizer = torch.optim.AdamW(weights, lr=3e-3)

    def loss_of(keep: list[bool] | None) -> Tensor:
        drop.forward = plain_forward if keep is None else lambda: drop.decide([float(kept) for kept in keep])
        logits = model(IDS).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())

    for _ in range(50):
        loss_of(None).backward()
        optimizer.step()
        optimizer.zero_grad()
    exact, estimated = exact_and_estimated(drop, loss_of)
    assert torch.nn.functional.cosine_similarity(exact, estimated, dim=0) > 0.8


def test_learned_rates_leave_the_values_of_plain_layerdrop_as_they_are() -> None:
    plain, learned = make(layerdrop=0.4), make(layerdrop={"rate": 0.4, "learned": True})
    gradients = []
    for model in (plain, learned):
        torch.manual_seed(5)
        logits = model(IDS).logits
        logits.square().sum().backward()
        gradients.append((logits.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert torch.equal(gradients[0][0], gradients[1][0])
    for name, expected in gradients[0][1].items():
        found = gradients[1][1][name]
        assert (expected is None) == (found is None)
        assert expected is None or torch.equal(found, expected), name
    assert gradients[1][1]["decoder.layerdrop.logits"].abs().sum() > 0


def test_layers_that_do_nothing_for_the_loss_learn_to_be_skipped() -> None:
    """Two of four layers move the stream towards the target; the others do next to nothing."""
    torch.manual_seed(0)
    useful = [True, False, True, False]
    drop = LayerDrop([0.4] * 4, learned=True)
    optimizer = torch.optim.AdamW(drop.parameters(), lr=0.05, weight_decay=0.0)
    for _ in range(300):
        draw, x = drop(), torch.ones(())
        for layer, helps in enumerate(useful):
            x = draw.gated(layer, x, partial(torch.add, x, 1.0 if helps else 1e-3), nn.Identity())
        optimizer.zero_grad()
        ((3.0 - x) ** 2).backward()
        optimizer.step()
    rates = drop.rates()
    assert min(rates[1], rates[3]) > 0.5 > 0.3 > max(rates[0], rates[2])
    assert sum(rates) / 4 == pytest.approx(0.4, abs=1e-9)


def test_a_dropped_layer_is_looked_at_without_drawing_and_without_leaving_a_trace() -> None:
    model = make(dropout=0.5, norm={"kind": "batchnorm"}, layerdrop={"rate": 0.9, "learned": True})
    drop = model.decoder.layerdrop
    drop.forward = lambda: drop.decide([0.0] * 3)
    before = {name: buffer.clone() for name, buffer in model.decoder.blocks.named_buffers()}
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    model(IDS).logits.sum().backward()
    assert torch.equal(torch.rand(()), expected)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.decoder.blocks.named_buffers())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.decoder.blocks.parameters())
    assert drop.logits.grad.abs().sum() > 0


def test_learned_rates_need_a_rate_above_zero() -> None:
    with pytest.raises(ValueError, match="rate must be greater than 0 to be learned"):
        LayerDropOptions(rate=0.0, learned=True)
    with pytest.raises(ValueError, match="rate must be at least 0 and below 1"):
        LayerDropOptions(rate=1.0)


STEP = TrainingStep(number=3, max_steps=10, warmup_steps=2, seed=7)


class Listener(nn.Module):
    def __init__(self, told: list[tuple[str, TrainingStep]], name: str) -> None:
        super().__init__()
        self.told, self.name = told, name

    def begin_step(self, step: TrainingStep) -> None:
        self.told.append((self.name, step))


def test_every_module_with_the_method_is_told_in_the_order_of_modules() -> None:
    told: list[tuple[str, TrainingStep]] = []
    model = nn.Sequential(nn.Linear(2, 2), Listener(told, "first"), nn.Sequential(Listener(told, "second")))
    model.append(model[1])  # shared: told once
    begin_step(model, STEP)
    assert told == [("first", STEP), ("second", STEP)]
    assert [type(listener) for listener in step_listeners(model)] == [Listener, Listener]


def test_a_model_may_itself_listen_and_one_without_listeners_is_fine() -> None:
    told: list[tuple[str, TrainingStep]] = []
    begin_step(Listener(told, "model"), STEP)
    assert told == [("model", STEP)]
    assert step_listeners(nn.Linear(2, 2)) == [] and not isinstance(nn.Linear(2, 2), StepAware)


def test_a_step_is_what_it_was_made() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        STEP.number = 4  # type: ignore[misc]
