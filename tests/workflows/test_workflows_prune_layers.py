"""Pruned layers: which ones are chosen, and models that equal the full one with those layers skipped."""

from __future__ import annotations

from itertools import combinations, cycle, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workflows.prune_runs import EFFICIENT, make, output, output_without_layers, recipe_text
from tformer.checkpoint.read import read_checkpoint
from tformer.loading import load
from tformer.support.errors import InputError, Interrupted
from tformer.workers.work import Work
from tformer.workflows.prune.heads import choose_heads
from tformer.workflows.prune.layers import (
    evenly_spaced,
    every_other,
    lowest_rates,
    named_layers,
    num_kept,
    num_trials,
    search_layers,
)
from tformer.workflows.prune.plan import PrunePlan
from tformer.workflows.prune.pruning import check_plan, cost, only_layers, prune

# Every other


@pytest.mark.parametrize(
    ("num_layers", "kept", "dropped"),
    [
        (12, 6, (0, 2, 4, 6, 8, 10)),  # p = 1/2: every other
        (12, 8, (0, 3, 6, 9)),
        (12, 9, (0, 4, 8)),
        (12, 10, (0, 6)),
        (12, 11, (0,)),
        (6, 3, (0, 2, 4)),
        (16, 12, (0, 4, 8, 12)),
    ],
)
def test_every_other_is_the_published_formula(num_layers: int, kept: int, dropped: tuple[int, ...]) -> None:
    choice = every_other(num_layers, kept)
    assert choice.dropped == dropped and not choice.note and len(choice.kept) == kept
    step = int(1 / (1 - kept / num_layers) + 1e-9)
    assert dropped == tuple(depth for depth in range(num_layers) if depth % step == 0)


@given(st.integers(1, 40), st.data())
def test_as_many_stay_as_asked_and_whatever_is_not_the_formula_is_told(num_layers: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, num_layers))
    choice = every_other(num_layers, kept)
    assert len(choice.kept) == kept and list(choice.kept) == sorted(set(choice.kept))
    assert set(choice.kept) | set(choice.dropped) == set(range(num_layers))
    by_formula = kept == num_layers or all((layer % (num_layers // (num_layers - kept))) for layer in choice.kept)
    assert by_formula or choice.kept == evenly_spaced(num_layers, kept)
    assert bool(choice.note) == (choice.kept != tuple(
        layer for layer in range(num_layers) if kept == num_layers or layer % (num_layers // (num_layers - kept))
    ))  # fmt: skip


@pytest.mark.parametrize("kept", [1, 2, 3, 4, 5])
def test_above_a_half_the_formula_would_drop_all_so_evenly_spaced_ones_stay(kept: int) -> None:
    choice = every_other(12, kept)
    assert choice.kept == evenly_spaced(12, kept) and "evenly spaced" in choice.note
    assert f"leaves 0 of 12 layers at p = {1 - kept / 12:.3g}" in choice.note


@given(st.integers(1, 60), st.data())
def test_evenly_spaced_layers_are_as_far_apart_as_can_be(num_layers: int, data: st.DataObject) -> None:
    kept = evenly_spaced(num_layers, data.draw(st.integers(1, num_layers)))
    gaps = {after - before for before, after in pairwise(kept)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert kept[0] >= 0 and kept[-1] < num_layers and abs(kept[0] - (num_layers - 1 - kept[-1])) <= 1


# How many, and by name


@pytest.mark.parametrize(("rate", "kept"), [(0.5, 6), (0.25, 9), (0.9, 1), (0.99, 1), (0.01, 12), (1 / 3, 8)])
def test_a_rate_is_a_share_that_goes(rate: float, kept: int) -> None:
    assert num_kept(12, keep=None, rate=rate, side="decoder") == kept


def test_named_layers_stay_or_go() -> None:
    assert named_layers(6, keep=[4, 0, 2], side="decoder").kept == (0, 2, 4)
    assert named_layers(6, drop=[1, 3], side="decoder").kept == (0, 2, 4, 5)


def test_the_lowest_learned_rates_stay() -> None:
    assert lowest_rates([0.4, 0.1, 0.3, 0.2], 2).kept == (1, 3)
    assert lowest_rates([0.2, 0.2, 0.2], 2).kept == (0, 1)  # of equal ones the earlier


# Search


def test_an_exhaustive_search_measures_every_subset_once_and_finds_the_best() -> None:
    seen: list[tuple[int, ...]] = []

    def measure(kept: tuple[int, ...]) -> tuple[float, ...]:
        seen.append(kept)
        return (0.0,) if kept == (1, 4) else (1.0,)

    choice = search_layers(6, 2, measure, max_trials=15)
    assert (choice.kept, choice.method, choice.evaluations) == ((1, 4), "exhaustive", 15)
    assert sorted(seen) == list(combinations(range(6), 2)) and num_trials(6, 2, max_trials=15) == 15


def test_more_subsets_than_trials_are_searched_greedily_and_that_is_told() -> None:
    worth = [5.0, 0.1, 3.0, 0.2, 4.0, 1.0]
    seen: list[tuple[int, ...]] = []

    def measure(kept: tuple[int, ...]) -> tuple[float, ...]:
        seen.append(kept)
        return (-sum(worth[layer] for layer in kept),)

    choice = search_layers(6, 3, measure, max_trials=19)
    assert (choice.kept, choice.method) == ((0, 2, 4), "greedy")
    assert choice.evaluations == len(seen) == 6 + 5 + 4 == num_trials(6, 3, max_trials=19)
    assert "20 subsets are more than --max-trials 19" in choice.note


def test_a_score_that_is_no_number_never_wins() -> None:
    choice = search_layers(3, 2, lambda kept: (float("nan"),) if kept == (0, 1) else (9.0,), max_trials=10)
    assert choice.kept == (0, 2)


def test_equal_scores_are_told_apart_by_the_second() -> None:
    choice = search_layers(3, 1, lambda kept: (1.0, -kept[0]), max_trials=10)
    assert choice.kept == (2,)


# Heads

FLAT = {"decoder": [{"self_attention": torch.tensor([0.1, 0.9, 0.5, 0.3])},
                    {"self_attention": torch.tensor([0.8, 0.7, 0.05, 0.6])}]}  # fmt: skip


def test_even_takes_as_many_out_of_every_layer() -> None:
    choice = choose_heads(FLAT, amount=0.5, per_layer="even")
    assert [layer.self_attention for layer in choice.layers["decoder"]] == [(1, 2), (0, 1)]
    assert (choice.before, choice.after, choice.note) == (8, 4, "")


def test_free_takes_the_least_important_of_all() -> None:
    choice = choose_heads(FLAT, amount=3, per_layer="free")
    assert [layer.self_attention for layer in choice.layers["decoder"]] == [(1, 2), (0, 1, 3)]


def test_even_says_when_it_takes_another_number() -> None:
    choice = choose_heads(FLAT, amount=3, per_layer="even")
    assert choice.after == 4 and "4 heads are removed, not 3" in choice.note


def test_one_head_a_layer_stays() -> None:
    importance = {
        "decoder": [{"self_attention": torch.tensor([9.0, 8.0])}, {"self_attention": torch.tensor([0.1, 0.2])}]
    }
    choice = choose_heads(importance, amount=2, per_layer="free")
    assert [layer.self_attention for layer in choice.layers["decoder"]] == [(0,), (1,)]
    with pytest.raises(InputError, match="at most 2 of 4 heads can be removed: every layer keeps one"):
        choose_heads(importance, amount=3, per_layer="free")


@given(st.integers(1, 5), st.integers(2, 6), st.data())
def test_free_takes_exactly_as_many_and_self_and_cross_lose_alike(layers: int, heads: int, data: st.DataObject) -> None:
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    importance = {
        "decoder": [
            {name: torch.rand(heads, generator=draw) for name in ("self_attention", "cross_attention")}
            for _ in range(layers)
        ]
    }
    gone = data.draw(st.integers(1, layers * (heads - 1)))
    choice = choose_heads(importance, amount=gone, per_layer="free")
    assert choice.before - choice.after == gone
    for scores, layer in zip(importance["decoder"], choice.layers["decoder"], strict=True):
        assert layer.cross_attention is not None and len(layer.self_attention) == len(layer.cross_attention) >= 1
        for attention, kept in (("self_attention", layer.self_attention), ("cross_attention", layer.cross_attention)):
            out = [head for head in range(heads) if head not in kept]
            assert all(scores[attention][head] <= scores[attention][list(kept)].min() for head in out)


BASE = "num_layers: 4, num_heads: 3"
OVERRIDES = "layers: {1: {feedforward: {d_ff: 20}}, 2: {attention: {scale: 0.3}, dropout: 0.2}, 3: {norm: {eps: 0.1}}}"
MODELS = {
    "gpt": recipe_text(decoder=f"{BASE}, positions: {{kind: learned}}"),
    "rope": recipe_text(decoder=f"{BASE}, positions: {{kind: rope}}, norm: {{kind: rmsnorm}}"),
    "shaw": recipe_text(decoder=f"{BASE}, positions: {{kind: shaw, clip: 3}}"),
    "alibi": recipe_text(decoder=f"{BASE}, positions: {{kind: alibi}}"),
    "t5_bias": recipe_text(encoder=f"{BASE}, positions: {{kind: t5_bias}}"),
    "kv": recipe_text(decoder="num_layers: 4, num_heads: 4, num_kv_heads: 2, head_dim: 4, positions: {kind: rope}"),
    "post-norm": recipe_text(encoder=f"{BASE}, norm: {{place: post}}, final_norm: false"),
    "overrides": recipe_text(decoder=f"{BASE}, {OVERRIDES}"),
    "own heads": recipe_text(decoder=f"{BASE}, head_dim: 4, layers: {{0: {{num_heads: 5}}, 3: {{num_heads: 1}}}}"),
    "batchnorm": recipe_text(encoder=f"{BASE}, norm: {{kind: batchnorm}}"),
    "seq2seq": recipe_text(encoder=BASE, decoder=f"{BASE}, norm: {{place: post}}, final_norm: false"),
    "seq2seq shaw": recipe_text(encoder=f"{BASE}, positions: {{kind: shaw}}, {OVERRIDES}",
                                decoder=f"{BASE}, positions: {{kind: shaw}}"),
    "learned": recipe_text(decoder=f"{BASE}, layerdrop: {{rate: 0.2, learned: true}}"),
}  # fmt: skip


def pruned(path: Path, out: Path, plan: PrunePlan) -> Path:
    return prune(load(path), plan, out, evaluate=False).path


def sides(path: Path) -> list[str]:
    model = load(path).recipe.model
    return [side for side in ("encoder", "decoder") if getattr(model, side) is not None]


@pytest.mark.parametrize(("name", "dropped"), list(zip(MODELS, cycle([(0,), (1, 3), (0, 1, 2)]))))
def test_the_pruned_model_is_the_full_one_with_those_layers_skipped(
    name: str, dropped: tuple[int, ...], tmp_path: Path
) -> None:
    full = make(tmp_path / "full", MODELS[name])
    small = pruned(full, tmp_path / "small", PrunePlan(drop_layers=",".join(map(str, dropped))))
    expected = output_without_layers(full, dict.fromkeys(sides(full), dropped))
    assert torch.equal(output(small), expected)
    assert not torch.allclose(output(full), expected)


@pytest.mark.parametrize(("kind", "dropped"), list(zip(EFFICIENT, cycle([(0,), (1, 3)]))))
def test_layers_of_other_attentions(kind: str, dropped: tuple[int, ...], tmp_path: Path) -> None:
    full = make(tmp_path / "full", recipe_text(encoder=f"{BASE}, {EFFICIENT[kind]}"))
    small = pruned(full, tmp_path / "small", PrunePlan(drop_layers=",".join(map(str, dropped))))
    assert torch.equal(output(small), output_without_layers(full, {"encoder": dropped}))


@pytest.mark.parametrize(("dropped", "told"), [((0,), "layers 1, 2, 3 have"), ((1,), "layers 2, 3 have"), ((3,), "")])
def test_random_blocks_that_a_new_number_redraws_are_told(dropped: tuple[int, ...], told: str, tmp_path: Path) -> None:
    attention = "attention: {kind: bigbird, block: 2, random_blocks: 1}"
    full = make(tmp_path / "full", recipe_text(encoder=f"{BASE}, {attention}"))
    made = prune(load(full), PrunePlan(drop_layers=",".join(map(str, dropped))), tmp_path / "small", evaluate=False)
    notes = [note for note in made.notes if "random blocks" in note]
    assert bool(notes) == bool(told) and all(told in note for note in notes)
    if not told:  # nothing moved
        assert torch.equal(output(made.path), output_without_layers(full, {"encoder": dropped}))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_one_stack_alone(stack: str, tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["seq2seq"])
    small = pruned(full, tmp_path / "small", PrunePlan(keep_layers="1,2", stack=stack))
    assert torch.equal(output(small), output_without_layers(full, {stack: (0, 3)}))
    model = load(small).recipe.model
    assert {side: getattr(model, side).num_layers for side in ("encoder", "decoder")} == {
        "encoder": 4, "decoder": 4, stack: 2
    }  # fmt: skip


@pytest.mark.parametrize("name", ["shaw", "seq2seq shaw", "rope", "overrides"])
def test_a_search_runs_the_very_model_that_it_would_write(name: str, tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS[name])
    loaded, before = load(full), output(full)
    with only_layers(loaded.model.decoder, (0, 2)):
        assert torch.equal(output(loaded), output_without_layers(full, {"decoder": (1, 3)}))
    assert torch.equal(output(loaded), before)


def test_overrides_follow_their_layer(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["overrides"])
    small = pruned(full, tmp_path / "small", PrunePlan(keep_layers="2,3"))
    assert load(small).recipe.model.decoder.layers == {
        0: {"attention": {"scale": 0.3}, "dropout": 0.2}, 1: {"norm": {"eps": 0.1}}
    }  # fmt: skip


def test_what_is_not_pruned_stays_to_the_byte(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["seq2seq"])
    small = pruned(full, tmp_path / "small", PrunePlan(drop_layers="0"))
    before, after = read_checkpoint(full), read_checkpoint(small)
    assert after.tokenizer_sha256 == before.tokenizer_sha256 and after.tokenizer_json == before.tokenizer_json
    assert after.step == before.step and not after.has("optimizer") and after.manifest.score is None
    assert after.tied == before.tied != {}
    old, new = before.weights(), after.weights()
    for name, tensor in new.items():
        side, kind, *rest = name.split(".")
        source = ".".join((side, kind, str(int(rest[0]) + 1), *rest[1:])) if kind == "blocks" else name
        assert torch.equal(tensor, old[source]), name
    assert load(small).recipe.model_copy(update={"model": None}) == load(full).recipe.model_copy(update={"model": None})


def test_learned_rates_choose_and_become_the_plain_rate(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["learned"])
    rates = load(full).model.decoder.layerdrop_rates()
    made = prune(load(full), PrunePlan(keep=2, strategy="learned"), tmp_path / "small", evaluate=False)
    kept = made.layers["decoder"].kept
    assert max(rates[layer] for layer in kept) < min(rates[layer] for layer in made.layers["decoder"].dropped)
    assert load(made.path).recipe.model.decoder.layerdrop == 0.2 and any("plain rate" in note for note in made.notes)
    assert not any("layerdrop" in name for name in read_checkpoint(made.path).weights())


def test_averaged_weights_are_what_is_pruned(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["gpt"], ema=True)
    small = pruned(full, tmp_path / "small", PrunePlan(drop_layers="2"))
    assert not read_checkpoint(small).has("ema")
    assert torch.equal(output(small), output_without_layers(full, {"decoder": (2,)}))  # `load` takes the averages
    plain = make(tmp_path / "plain", MODELS["gpt"])
    assert not torch.allclose(output(small), output_without_layers(plain, {"decoder": (2,)}))


def test_a_pruned_model_can_be_pruned_again(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["shaw"])
    once = pruned(full, tmp_path / "once", PrunePlan(drop_layers="1"))
    twice = pruned(once, tmp_path / "twice", PrunePlan(drop_layers="1"))
    assert torch.equal(output(twice), output_without_layers(full, {"decoder": (1, 2)}))


# What is refused


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        ("gpt", PrunePlan(drop_layers="4"), "--drop-layers: the decoder has no layer 4"),
        ("gpt", PrunePlan(drop_layers="0", stack="encoder"), "--stack encoder: the model has no encoder"),
        ("gpt", PrunePlan(drop_layers="0", stack="both"), "--stack both: the model has no encoder"),
        ("gpt", PrunePlan(keep=4), "nothing would be removed: the decoder has 4 layers"),
        ("gpt", PrunePlan(keep=5), "--keep 5: the decoder has 4 layers"),
        ("gpt", PrunePlan(rate=0.1), "nothing would be removed"),
        ("gpt", PrunePlan(keep=2, strategy="learned"), r"model\.decoder\.layerdrop of this model has no learned rates"),
        ("seq2seq", PrunePlan(keep=2, strategy="learned"), r"model\.encoder\.layerdrop"),
    ],
)
def test_a_plan_that_does_not_fit_is_named_and_nothing_written(
    name: str, plan: PrunePlan, message: str, tmp_path: Path
) -> None:
    full = make(tmp_path / "full", MODELS[name])
    with pytest.raises(InputError, match=message):
        pruned(full, tmp_path / "small", plan)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("plan", [PrunePlan(keep=2), PrunePlan(heads="1")], ids=["layers", "heads"])
def test_layers_that_share_their_weights_stay(plan: PrunePlan, tmp_path: Path) -> None:
    full = make(tmp_path / "full", recipe_text(decoder=f"{BASE}, layer_groups: 2"))
    with pytest.raises(InputError, match=r"model\.decoder\.layer_groups is 2: layers that share weights cannot be"):
        check_plan(load(full), plan)


def test_a_single_layer_cannot_go(tmp_path: Path) -> None:
    full = make(tmp_path / "full", recipe_text(decoder="num_layers: 1, num_heads: 3"))
    for plan in (PrunePlan(rate=0.5), PrunePlan(keep=1)):
        with pytest.raises(InputError, match="nothing can be pruned: the decoder has 1 layer, which must stay"):
            pruned(full, tmp_path / "small", plan)


def test_what_stands_at_out_stays(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["gpt"])
    with pytest.raises(InputError, match="full exists already"):
        pruned(full, full, PrunePlan(drop_layers="0"))


def test_the_cost_is_that_of_each_layers_own_attention(tmp_path: Path) -> None:
    stack = "num_layers: 3, num_heads: 3, attention: {kind: performer, features: 4}"
    texts = {"features": stack, "mixed": f"{stack}, layers: {{1: {{attention: {{kind: full}}}}}}"}
    costs, second = {}, {}
    for name, text in texts.items():
        loaded = load(make(tmp_path / name, recipe_text(decoder=text)))
        costs[name] = cost(loaded.model, loaded.recipe)["flops_per_token"]
        assert loaded.model.decoder is not None
        second[name] = loaded.model.decoder.layers[1].self_attention.mechanism.flops(16, 16) / 16
    assert second["mixed"] == 4 * 12 * 16 != second["features"]  # 4 H h a key
    assert costs["mixed"] - costs["features"] == pytest.approx(second["mixed"] - second["features"])


def test_an_interruption_writes_nothing(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["gpt"])
    with pytest.raises(Interrupted):
        prune(
            load(full),
            PrunePlan(drop_layers="0"),
            tmp_path / "small",
            evaluate=False,
            work=Work(should_stop=lambda: True),
        )
    assert not (tmp_path / "small").exists()
