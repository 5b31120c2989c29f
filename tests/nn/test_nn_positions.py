"""Position kinds: formulas against plain loops and published code, and the properties that make them what they are."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tformer.nn.positions import POSITIONS, Positions, PositionSizes
from tformer.nn.positions.base import LearnedOptions, NoPositionsOptions
from tformer.nn.positions.biases import AlibiOptions, LearnedT5BiasOptions, T5BiasOptions, alibi_slopes, t5_bucket
from tformer.nn.positions.fixed import MAX_ROWS, Patch2dOptions, SinusoidalOptions, sinusoids
from tformer.nn.positions.rope import RopeOptions, RopeScaling, scale_frequencies
from tformer.nn.positions.shaw import ShawOptions

SIZES: dict[str, Any] = {
    "d_model": 16,
    "num_heads": 4,
    "head_dim": 6,
    "value_dim": 5,
    "max_seq_len": 12,
    "bidirectional": False,
    "grid": (3, 2, True),
}

ALL_OPTIONS = [
    NoPositionsOptions(), SinusoidalOptions(), LearnedOptions(), RopeOptions(), AlibiOptions(), T5BiasOptions(),
    ShawOptions(clip=3), Patch2dOptions(), LearnedT5BiasOptions(),
]  # fmt: skip


def make(options: Any, **sizes: Any) -> Any:
    return options.build(PositionSizes(**{**SIZES, **sizes}))


def arange(length: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + length).unsqueeze(0)


def randomize(module: nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)


def test_every_kind_is_in_the_table() -> None:
    assert set(POSITIONS) == {options.kind for options in ALL_OPTIONS}


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=lambda options: options.kind)
def test_the_size_of_what_is_added_is_stated(options: Any) -> None:
    """Kinds that add vectors of a fixed size say so; those of the others are drawn by the initialization."""
    module = make(options, grid=(3, 4, False))
    drawn = any(True for _ in module.parameters())
    added = module.embed(torch.zeros(1, 12, SIZES["d_model"]), arange(12)).detach()
    size = None if drawn or not module.has_embed else float(added.square().mean().sqrt())
    assert module.added_size == (size and pytest.approx(size, rel=1e-5))


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=lambda options: options.kind)
def test_flags_name_the_overridden_hooks(options: Any) -> None:
    module = make(options)
    hooks = {"has_embed": "embed", "has_rotate": "rotate", "has_bias": "bias", "has_score": "score", "has_mix": "mix"}
    for flag, hook in hooks.items():
        assert getattr(module, flag) == (getattr(type(module), hook) is not getattr(Positions, hook))
    assert module.per_layer == (options.kind == "shaw")
    assert module.trained == any(True for _ in module.parameters())


def test_neutral_hooks_change_nothing() -> None:
    module = make(NoPositionsOptions())
    x, q, k = torch.randn(2, 3, 16), torch.randn(2, 4, 3, 6), torch.randn(2, 4, 3, 6)
    assert module.embed(x, arange(3)) is x
    assert module.rotate(q, k, arange(3), arange(3)) == (q, k)


# --- sinusoidal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["interleaved", "halves", "fairseq"])
def test_sinusoids_follow_the_formula(layout: str) -> None:
    dim, base = 10, 500.0
    table = sinusoids(torch.arange(7), dim, layout=layout, base=base)
    for position in range(7):
        for i in range(dim // 2):
            exponent = i / (dim // 2 - 1) if layout == "fairseq" else 2 * i / dim
            angle = position / base**exponent
            sine, cosine = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + dim // 2)
            assert table[position, sine].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[position, cosine].item() == pytest.approx(math.cos(angle), abs=1e-12)


@pytest.mark.parametrize("layout", ["interleaved", "halves", "fairseq"])
def test_sinusoids_with_an_offset_begin_with_a_later_position(layout: Any) -> None:
    plain, later = (make(SinusoidalOptions(layout=layout, offset=offset)) for offset in (0, 3))
    x, pos = torch.zeros(1, 5, SIZES["d_model"]), arange(5)
    assert torch.equal(later.embed(x, pos), plain.embed(x, pos + 3))


def test_interleaved_and_halves_are_a_permutation_of_columns() -> None:
    interleaved, halves = (
        sinusoids(torch.arange(9), 8, layout=layout, base=1e4) for layout in ("interleaved", "halves")
    )
    assert torch.equal(torch.cat([interleaved[:, 0::2], interleaved[:, 1::2]], dim=1), halves)


def test_fairseq_layout_agrees_with_its_published_code() -> None:
    """fairseq's get_embedding, transcribed: frequencies exp(-i log(10000) / (half - 1)), then [sin | cos]."""
    half = 8
    rates = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(12, dtype=torch.float).unsqueeze(1) * rates.unsqueeze(0)
    expected = torch.cat([angles.sin(), angles.cos()], dim=1)
    found = make(SinusoidalOptions(layout="fairseq")).embed(torch.zeros(1, 12, 16), arange(12))[0]
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0.0)


def test_positions_past_the_table_are_computed() -> None:
    for options in (SinusoidalOptions(), RopeOptions()):
        short, long = make(options), make(options, max_seq_len=50)
        pos = torch.tensor([[0, 11, 12, 49]])
        assert torch.equal(short.rows(pos), long.rows(pos))


def test_odd_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="d_model must be even for sinusoidal positions, found 7"):
        make(SinusoidalOptions(), d_model=7)
    with pytest.raises(ValueError, match="head_dim must be even for rope positions, found 5"):
        make(RopeOptions(), head_dim=5)
    with pytest.raises(ValueError, match="multiple of 4 for patch2d positions, found 6"):
        make(Patch2dOptions(), d_model=6)
    with pytest.raises(ValueError, match="grid"):
        make(Patch2dOptions(), grid=None)


@pytest.mark.parametrize("options", [SinusoidalOptions(), RopeOptions(), AlibiOptions(), Patch2dOptions()])
def test_tables_stay_fp32_and_survive_moves(options: Any) -> None:
    module = make(options)
    expected = module.table.clone()
    assert torch.equal(module.to(torch.bfloat16).table, expected)
    with torch.device("meta"):
        empty = make(options)
    assert empty.table.is_meta
    assert torch.equal(empty.to_empty(device="cpu").table, expected)
    assert not module.state_dict()


# --- learned and patch2d ----------------------------------------------------------------------------------------------


def test_learned_offset_selects_later_rows() -> None:
    module = make(LearnedOptions(offset=2))
    randomize(module)
    assert module.weight.shape == (14, 16)
    pos = torch.tensor([[0, 3], [1, 11]])
    torch.testing.assert_close(module.embed(torch.zeros(2, 2, 16), pos), module.weight[pos + 2])


@pytest.mark.parametrize("has_cls", [False, True])
def test_patch2d_is_a_sinusoid_of_column_then_row(has_cls: bool) -> None:
    rows, columns = 3, 2
    module = make(Patch2dOptions(), grid=(rows, columns, has_cls))
    count = rows * columns + has_cls
    table = module.embed(torch.zeros(1, count, 16), arange(count))[0]
    if has_cls:
        assert not table[0].any()
        table = table[1:]
    for patch in range(rows * columns):
        row, column = divmod(patch, columns)
        for i in range(4):
            rate = 10000.0 ** (-i / 4)
            expected = [math.sin(column * rate), math.cos(column * rate), math.sin(row * rate), math.cos(row * rate)]
            assert table[patch, i::4].tolist() == pytest.approx(expected, abs=1e-6)


# --- rope -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_rope_products_depend_on_distance_alone(layout: Any) -> None:
    torch.manual_seed(0)
    module = make(RopeOptions(layout=layout), max_seq_len=200)
    q, k = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 5, 6)
    products = []
    for start in (0, 1, 150):
        turned_q, turned_k = module.rotate(q, k, arange(5, start), arange(5, start))
        products.append(torch.einsum("bhtd,bkSd->bhktS", turned_q, turned_k))
    torch.testing.assert_close(products[1], products[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(products[2], products[0], atol=5e-5, rtol=1e-5)
    still, _ = module.rotate(q, k, arange(5), arange(5))
    torch.testing.assert_close(still[:, :, 0], q[:, :, 0])  # position 0 turns nothing
    assert not torch.allclose(still[:, :, 1], q[:, :, 1])


def test_rope_layouts_differ_by_a_permutation_of_rows() -> None:
    q, pos = torch.randn(2, 4, 5, 6), arange(5)
    order = torch.tensor([0, 2, 4, 1, 3, 5])  # [evens, odds]
    interleaved, _ = make(RopeOptions(layout="interleaved")).rotate(q, q, pos, pos)
    halves, _ = make(RopeOptions(layout="halves")).rotate(q[..., order], q[..., order], pos, pos)
    torch.testing.assert_close(interleaved[..., order], halves)


def test_rope_follows_positions_per_row() -> None:
    module = make(RopeOptions())
    q, pos = torch.randn(2, 4, 3, 6), torch.tensor([[0, 1, 2], [4, 0, 9]])
    together, _ = module.rotate(q, q, pos, pos)
    for row in range(2):
        alone, _ = module.rotate(q[row : row + 1], q[row : row + 1], pos[row : row + 1], pos[row : row + 1])
        torch.testing.assert_close(together[row], alone[0])


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("pos", [[[0, 1, 2]], [[0, 1, 2], [0, 0, 1]]], ids=["alike", "left padded"])
def test_rope_prepared_once_turns_as_rope_prepared_by_each_layer(layout: Any, pos: list[list[int]]) -> None:
    module = make(RopeOptions(layout=layout))
    where = torch.tensor(pos)
    q, k = (torch.randn(2, heads, 3, 6, requires_grad=True) for heads in (4, 2))
    prepared = module.prepare(q, where, heads=4)
    each, once = module.rotate(q, k, where, where), module.rotate(q, k, where, where, prepared)
    torch.testing.assert_close(once, each, atol=0, rtol=0)
    grads = [
        torch.autograd.grad(sum(x.square().sum() * x[..., 0].sum() for x in pair), (q, k)) for pair in (each, once)
    ]
    torch.testing.assert_close(grads[1], grads[0], atol=0, rtol=0)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_rope_prepared_outside_of_compiled_code_serves_inside(layout: Any) -> None:
    module, q, pos = make(RopeOptions(layout=layout)), torch.randn(2, 4, 3, 6), arange(3)
    prepared = module.prepare(q, pos, heads=4)
    turn = torch.compile(lambda x: module.rotate(x, x, pos, pos, prepared)[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(turn(q), module.rotate(q, q, pos, pos)[0])


def test_rope_agrees_with_llama_including_scaling() -> None:
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    parameters = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, head_dim=8, rope_parameters=parameters)
    pos, q = arange(10), torch.randn(1, 2, 10, 8)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, pos)
    expected, _ = llama.apply_rotary_pos_emb(q, q, cos, sin)
    options = RopeOptions(scaling=RopeScaling(original_max_seq_len=16))
    found, _ = make(options, head_dim=8).rotate(q, q, pos, pos)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_rope_scaling_keeps_fast_and_slows_slow_frequencies() -> None:
    frequencies = torch.tensor([1.0, 1e-6], dtype=torch.float64)
    torch.testing.assert_close(
        scale_frequencies(frequencies, RopeScaling()), torch.tensor([1.0, 1e-6 / 8.0], dtype=torch.float64)
    )


LONG = {"short_factors": (1.0, 1.2, 1.5), "long_factors": (1.0, 2.0, 5.0), "original_max_seq_len": 10}
SCALINGS = {
    "linear": RopeScaling(kind="linear", factor=3.0),
    "dynamic": RopeScaling(kind="dynamic", factor=3.0, original_max_seq_len=10),
    "llama3": RopeScaling(factor=3.0, original_max_seq_len=10),
    "yarn": RopeScaling(kind="yarn", factor=3.0, original_max_seq_len=60, beta_fast=8.0),
    "yarn, not truncated": RopeScaling(kind="yarn", factor=3.0, original_max_seq_len=60, beta_fast=8.0, truncate=False),
    "yarn, own factor": RopeScaling(kind="yarn", factor=3.0, original_max_seq_len=60, attention_factor=0.7),
    "longrope": RopeScaling(kind="longrope", factor=3.0, **LONG),
}


@pytest.mark.parametrize("length", [4, 10, 11, 25])
@pytest.mark.parametrize("case", SCALINGS)
def test_every_kind_of_scaling_agrees_with_transformers(case: str, length: int) -> None:
    """Half of each head of 12 is rotated; frequencies of dynamic and longrope follow the length."""
    phi = importlib.import_module("transformers.models.phi.modeling_phi")
    from transformers import PhiConfig

    scaling = SCALINGS[case]
    names = {"short_factors": "short_factor", "long_factors": "long_factor"}
    own = {names.get(key, key): value for key, value in vars(scaling).items() if value not in ((), None)}
    parameters = own | {"rope_type": scaling.kind, "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    parameters["original_max_position_embeddings"] = scaling.original_max_seq_len
    config = PhiConfig(hidden_size=24, num_attention_heads=2, max_position_embeddings=10)
    config.rope_parameters = parameters
    pos, q = arange(length), torch.randn(1, 2, length, 12)
    cos, sin = phi.PhiRotaryEmbedding(config)(q, pos)
    expected, _ = phi.apply_rotary_pos_emb(q[..., :6], q[..., :6], cos, sin)
    options = RopeOptions(base=500.0, share=0.5, scaling=scaling)
    found, _ = make(options, head_dim=12, max_seq_len=30).rotate(q, q, pos, pos)
    torch.testing.assert_close(found, torch.cat([expected, q[..., 6:]], dim=-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["dynamic", "longrope"])
def test_frequencies_by_length_are_those_of_the_longest_row(case: str) -> None:
    """Up to the original length they are one table; beyond, every row has those of the last position of the batch."""
    module = make(RopeOptions(scaling=SCALINGS[case]), max_seq_len=30)
    short, long = torch.arange(10), torch.arange(25)
    assert torch.equal(module.rows(torch.stack([short, short // 2]))[0], module.rows(short[None])[0])
    assert torch.equal(module.rows(torch.stack([long, long // 2]))[0], module.rows(long[None])[0])
    assert not torch.equal(module.rows(long[None])[0, 1], module.rows(short[None])[0, 1])


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_a_share_of_each_head_is_rotated_as_a_head_of_that_size(layout: Any) -> None:
    torch.manual_seed(0)
    module, small = (make(RopeOptions(layout=layout, share=s), head_dim=h) for s, h in ((0.4, 10), (1.0, 4)))
    q, k, pos = torch.randn(2, 4, 5, 10), torch.randn(2, 2, 5, 10), arange(5, 3)
    for heads, found in zip((q, k), module.rotate(q, k, pos, pos, module.prepare(q, pos, heads=4)), strict=True):
        expected, _ = small.rotate(heads[..., :4], heads[..., :4], pos, pos)
        torch.testing.assert_close(found, torch.cat([expected, heads[..., 4:]], dim=-1), atol=1e-6, rtol=0)


def test_a_share_that_is_a_fraction_of_whole_numbers_is_exact() -> None:
    for whole, part in itertools.product(range(1, 200), repeat=2):
        assert part > whole or RopeOptions(share=part / whole).width(whole) == part


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "linear", "beta_fast": 3.0}, "beta_fast must be left out: it belongs to yarn"),
        ({"kind": "yarn", "short_factors": (1.0,)}, "short_factors must be left out: it belongs to longrope"),
        (
            {"kind": "llama3", "attention_factor": 0.5},
            "attention_factor must be left out: it belongs to yarn and longrope",
        ),
        ({"kind": "yarn", "beta_slow": 40.0}, "beta_fast 32.0 must exceed beta_slow 40.0"),
        ({"factor": 0.0}, "factor must be greater than 0"),
        ({"original_max_seq_len": 1}, "original_max_seq_len must exceed 1, found 1"),
    ],
)
def test_options_of_scaling_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling(**values)


def test_options_of_rope_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
        RopeOptions(share=1.5)
    with pytest.raises(ValueError, match="base must exceed 1 with scaling yarn"):
        RopeOptions(base=1.0, scaling=SCALINGS["yarn"])
    with pytest.raises(ValueError, match=r"head_dim must be even .* found 6 of which 0\.5 are rotated"):
        make(RopeOptions(share=0.5))
    with pytest.raises(ValueError, match=r"scaling\.short_factors has 3 numbers, expected 4, one for each pair"):
        make(RopeOptions(scaling=SCALINGS["longrope"]), head_dim=8)


# --- alibi and t5_bias ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20])
def test_alibi_slopes_agree_with_bloom(heads: int) -> None:
    bloom = importlib.import_module("transformers.models.bloom.modeling_bloom")
    bias = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # slope * position of the key
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), bias[:, 0, 1])


def test_alibi_bias_against_loops() -> None:
    module = make(AlibiOptions())
    q_pos, k_pos = torch.tensor([[3, 4], [0, 9]]), torch.tensor([[0, 3, 4], [0, 2, 9]])
    bias = module.bias(q_pos, k_pos)
    for b, h, t, s in torch.cartesian_prod(*(torch.arange(n) for n in (2, 4, 2, 3))).tolist():
        expected = -(2.0 ** (-8 * (h + 1) / 4)) * abs(int(k_pos[b, s]) - int(q_pos[b, t]))
        assert bias[b, h, t, s].item() == pytest.approx(expected)


def test_rounded_alibi_is_the_papers_but_for_bf16_and_the_scale() -> None:
    """What is equal for all keys of a query changes nothing after the softmax."""
    later = torch.ones(12, 12).triu(1).bool()
    exact, rounded = (
        (make(options, head_dim=4).bias(arange(12), arange(12)) * scale).masked_fill(later, -1e9).softmax(-1)
        for options, scale in ((AlibiOptions(), 1.0), (AlibiOptions(rounded=True), 2.0))
    )
    torch.testing.assert_close(rounded, exact, atol=1e-2, rtol=0)
    with pytest.raises(ValueError, match="rounded must be false in an encoder"):
        make(AlibiOptions(rounded=True), bidirectional=True)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("buckets,max_distance", [(32, 128), (8, 20), (6, 16)])
def test_t5_buckets_agree_with_transformers(bidirectional: bool, buckets: int, max_distance: int) -> None:
    t5 = importlib.import_module("transformers.models.t5.modeling_t5")
    relative = torch.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(
        relative, bidirectional=bidirectional, num_buckets=buckets, max_distance=max_distance
    )
    found = t5_bucket(relative, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    assert torch.equal(found, expected)


def test_t5_buckets_follow_the_definition() -> None:
    """One distance per bucket up to half of them, then logarithmic, everything past the maximum in the last."""
    causal = t5_bucket(-torch.arange(200), buckets=32, max_distance=128, bidirectional=False).tolist()
    assert causal[:16] == list(range(16)) and causal == sorted(causal) and set(causal[128:]) == {31}
    assert t5_bucket(torch.tensor([1, 50]), buckets=32, max_distance=128, bidirectional=False).tolist() == [0, 0]
    both = t5_bucket(torch.tensor([-3, 0, 3]), buckets=32, max_distance=128, bidirectional=True).tolist()
    assert both == [3, 0, 19]


def test_t5_bias_looks_up_its_table_and_learns() -> None:
    module = make(T5BiasOptions())
    randomize(module)
    q_pos, k_pos = arange(2, 5), arange(7)
    bias = module.bias(q_pos, k_pos)
    for t in range(2):
        for s in range(7):
            bucket = t5_bucket(k_pos[0, s] - q_pos[0, t], buckets=32, max_distance=128, bidirectional=False)
            assert torch.equal(bias[0, :, t, s], module.weight[bucket])
    bias.sum().backward()
    assert module.weight.grad.sum() == 2 * 7 * 4


def test_t5_biases_of_every_layer_are_parameters_of_their_own() -> None:
    assert make(T5BiasOptions(per_layer=True)).per_layer and not make(T5BiasOptions()).per_layer


# --- shaw -------------------------------------------------------------------------------------------------------------


def test_shaw_terms_against_loops() -> None:
    module = make(ShawOptions(clip=2))
    randomize(module)
    batch, heads, queries, keys = 2, 4, 3, 5
    q = torch.randn(batch, heads, queries, 6)
    weights = torch.rand(batch, heads, queries, keys)
    q_pos = torch.tensor([[2, 3, 4], [0, 5, 9]])
    k_pos = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 4, 8, 9]])
    score, mix = module.score(q, q_pos, k_pos), module.mix(weights, q_pos, k_pos)
    expected_score, expected_mix = torch.zeros_like(score), torch.zeros_like(mix)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                for j in range(keys):
                    row = max(-2, min(2, int(k_pos[b, j] - q_pos[b, i]))) + 2
                    expected_score[b, h, i, j] = q[b, h, i] @ module.keys[row]
                    expected_mix[b, h, i] += weights[b, h, i, j] * module.values[row]
    torch.testing.assert_close(score, expected_score)
    torch.testing.assert_close(mix, expected_mix)


def test_shaw_values_can_be_off() -> None:
    module = make(ShawOptions(clip=2, values=False))
    assert not module.has_mix and [name for name, _ in module.named_parameters()] == ["keys"]


def test_shaw_value_sums_keep_small_weights_in_bf16() -> None:
    """A thousand weights of 1/1000 in one clipped row must sum to one."""
    module = make(ShawOptions(clip=1)).bfloat16()
    nn.init.ones_(module.values)
    mixed = module.mix(torch.full((1, 4, 1, 1000), 1e-3, dtype=torch.bfloat16), arange(1, 2000), arange(1000))
    assert mixed.float().mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("options", [RopeOptions(), SinusoidalOptions()])
def test_a_context_without_end_takes_no_memory_and_far_positions_are_as_exact(options: object) -> None:
    endless = make(options, max_seq_len=10**12)
    assert endless.table.shape[0] == MAX_ROWS
    far = torch.tensor([[0, MAX_ROWS - 1, MAX_ROWS, 10**6]])
    assert torch.equal(endless.rows(far), endless.formula(far).float())
    assert torch.equal(endless.rows(far[:, :2]), endless.formula(far[:, :2]).float())
