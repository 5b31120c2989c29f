"""Performer's random features: near softmax, unbiased, drawn and redrawn from streams of their own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.nn.test_nn_performer import call, draw, mechanism
from tformer.nn.attention.mechanism import Call, Reach
from tformer.nn.attention.performer import PerformerOptions
from tformer.nn.attention.performer_features import default_features, draw_directions, mixed_seed
from tformer.nn.step import Step


def squared_error(features: int, *, draws: int, std: float) -> float:
    """Mean squared difference to exact softmax attention, over tables."""
    q, k, v = (x.detach() for x in draw(t=48, b=1, h=2, k=2, dim=16, v=16))
    q, k, scale = q * std, k * std, 16**-0.5
    exact = (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v
    layer, errors = mechanism(head_dim=16, features=features).double(), []
    for seed in range(draws):
        layer.directions.copy_(draw_directions(features, 16, seed=seed))
        errors.append(float((layer(q, k, v, call(48, causal=False, scale=scale))[0] - exact).square().mean()))
    return float(np.mean(errors))


def test_squared_error_to_softmax_falls_as_one_over_the_features() -> None:
    """Queries and keys of standard deviation 0.4 in 16 dimensions: 8.8e-4 at 32 features, 3e-5 at 1024, slope -0.94.

    The variance grows as exp(|q + k|^2): with unit variance 1024 features are too few for the law to have set in.
    """
    sizes = [32, 64, 128, 256, 512, 1024]
    errors = [squared_error(features, draws=24, std=0.4) for features in sizes]
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert -1.3 <= slope <= -0.7, (slope, errors)
    assert errors[-1] < errors[0] / 12 and errors[0] < 2e-3


def test_rows_are_orthogonal_in_blocks_and_long_as_gaussian_vectors() -> None:
    table = draw_directions(40, 16, seed=1).double()
    for start in (0, 16, 32):
        block = table[start : start + 16]
        gram = block @ block.T
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-5
    lengths = torch.cat([draw_directions(64, 16, seed=seed) for seed in range(50)]).norm(dim=1)
    assert float(lengths.square().mean()) == pytest.approx(16, rel=0.05)
    assert float(lengths.square().var()) == pytest.approx(32, rel=0.15)  # chi-squared with 16 degrees of freedom


def test_every_direction_is_as_likely_as_its_opposite() -> None:
    rows = torch.stack([draw_directions(4, 4, seed=seed) for seed in range(4000)])
    assert rows.mean(0).abs().max() < 0.08  # of a standard deviation of 1
    assert float((rows[:, 0].sign() > 0).float().mean()) == pytest.approx(0.5, abs=0.03)


def test_the_kernel_has_no_bias() -> None:
    torch.manual_seed(0)
    q, k = 0.5 * torch.randn(8, dtype=torch.float64), 0.5 * torch.randn(8, dtype=torch.float64)
    rows = torch.cat([draw_directions(64, 8, seed=seed) for seed in range(800)]).double()
    found = ((rows @ q - q @ q / 2).exp() * (rows @ k - k @ k / 2).exp()).mean()
    assert float(found) == pytest.approx(math.exp(float(q @ k)), rel=0.03)


def test_default_number_of_features() -> None:
    assert [default_features(d) for d in (1, 2, 32, 64, 128)] == [1, 1, 110, 266, 621]
    assert PerformerOptions().keys_per_query(10**6) == 2 * 266
    assert PerformerOptions(features=50).keys_per_query(10**6) == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 0}, "features must be greater than 0, found 0"),
        ({"features": -3}, "features must be greater than 0, found -3"),
        ({"redraw_steps": -1}, "redraw_steps must be at least 0, found -1"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerformerOptions(**options)


def test_documents_cannot_be_kept_apart() -> None:
    reach = Reach(True, None, torch.zeros(2, 5, dtype=torch.long))
    pos = torch.arange(5).unsqueeze(0)
    with pytest.raises(ValueError, match="document_ids: performer"):
        mechanism()(*draw(t=5), Call(torch.empty(0), pos, pos, 1.0, reach=reach))


# New draws of the table


def step(number: int, seed: int = 7) -> Step:
    return Step(number=number, max_steps=100, warmup_steps=0, seed=seed + number)


def test_the_table_is_redrawn_every_so_many_steps_and_only_then() -> None:
    layer = mechanism(redraw_steps=4)
    changed = []
    for number in range(1, 14):
        table = layer.directions.clone()
        layer.begin_step(step(number))
        changed.append(not torch.equal(table, layer.directions))
    assert [number for number, is_new in enumerate(changed, start=1) if is_new] == [5, 9, 13]


def test_a_table_follows_from_the_step_alone_and_moves_no_stream() -> None:
    layers = [
        mechanism(redraw_steps=1, layer=0),
        mechanism(redraw_steps=1, layer=0),
        mechanism(redraw_steps=1, layer=1),
    ]
    layers[0].begin_step(step(2))
    state = torch.get_rng_state()
    for layer in layers:
        layer.begin_step(step(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(layers[0].directions, layers[1].directions)
    assert not torch.equal(layers[0].directions, layers[2].directions)


def test_seeds_of_near_places_are_unrelated() -> None:
    seeds = {mixed_seed(seed, layer, causal) for seed in range(20) for layer in range(20) for causal in (0, 1)}
    assert len(seeds) == 800 and all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed % 1024 for seed in seeds}) > 500


def test_without_redraws_the_table_stays() -> None:
    layer = mechanism(redraw_steps=0)
    table = layer.directions.clone()
    for number in (1, 2, 1001):
        layer.begin_step(step(number))
    assert torch.equal(table, layer.directions)


def test_the_table_is_saved_and_depends_on_the_seed_of_the_model() -> None:
    torch.manual_seed(1)
    one, same = mechanism(), mechanism()
    torch.manual_seed(2)
    other = mechanism()
    assert torch.equal(one.directions, same.directions) and not torch.equal(one.directions, other.directions)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.directions, other.directions)
    assert not list(one.parameters())
