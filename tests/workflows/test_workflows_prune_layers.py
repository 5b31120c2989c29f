"""Fewer layers: a pruned model says what the full one says with those layers skipped, and is an ordinary checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workflows.prune_runs import EFFICIENT, make, output, output_without_layers, recipe_text
from tformer.checkpoint import read_checkpoint
from tformer.errors import InputError, Interrupted
from tformer.loading import load
from tformer.workflows.prune import Plan, prune
from tformer.workflows.prune.quality import cost, only_layers

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


def pruned(path: Path, out: Path, plan: Plan) -> Path:
    return prune(load(path), plan, out, evaluate=False).path


def sides(path: Path) -> list[str]:
    model = load(path).recipe.model
    return [side for side in ("encoder", "decoder") if getattr(model, side) is not None]


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("dropped", [(0,), (1, 3), (0, 1, 2)])
def test_the_pruned_model_is_the_full_one_with_those_layers_skipped(
    name: str, dropped: tuple[int, ...], tmp_path: Path
) -> None:
    full = make(tmp_path / "full", MODELS[name])
    small = pruned(full, tmp_path / "small", Plan(drop_layers=dropped))
    expected = output_without_layers(full, dict.fromkeys(sides(full), dropped))
    assert torch.equal(output(small), expected)
    assert not torch.allclose(output(full), expected)


@pytest.mark.parametrize("kind", list(EFFICIENT))
@pytest.mark.parametrize("dropped", [(0,), (1, 3)])
def test_layers_of_other_attentions(kind: str, dropped: tuple[int, ...], tmp_path: Path) -> None:
    full = make(tmp_path / "full", recipe_text(encoder=f"{BASE}, {EFFICIENT[kind]}"))
    small = pruned(full, tmp_path / "small", Plan(drop_layers=dropped))
    assert torch.equal(output(small), output_without_layers(full, {"encoder": dropped}))


@pytest.mark.parametrize(("dropped", "told"), [((0,), "layers 1, 2, 3 have"), ((1,), "layers 2, 3 have"), ((3,), "")])
def test_random_blocks_that_a_new_number_redraws_are_told(dropped: tuple[int, ...], told: str, tmp_path: Path) -> None:
    attention = "attention: {kind: bigbird, block: 2, random_blocks: 1}"
    full = make(tmp_path / "full", recipe_text(encoder=f"{BASE}, {attention}"))
    made = prune(load(full), Plan(drop_layers=dropped), tmp_path / "small", evaluate=False)
    notes = [note for note in made.notes if "random blocks" in note]
    assert bool(notes) == bool(told) and all(told in note for note in notes)
    if not told:  # nothing moved
        assert torch.equal(output(made.path), output_without_layers(full, {"encoder": dropped}))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_one_stack_alone(stack: str, tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["seq2seq"])
    small = pruned(full, tmp_path / "small", Plan(keep_layers=(1, 2), stack=stack))
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
    small = pruned(full, tmp_path / "small", Plan(keep_layers=(2, 3)))
    assert load(small).recipe.model.decoder.layers == {
        0: {"attention": {"scale": 0.3}, "dropout": 0.2}, 1: {"norm": {"eps": 0.1}}
    }  # fmt: skip


def test_what_is_not_pruned_stays_to_the_byte(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["seq2seq"])
    small = pruned(full, tmp_path / "small", Plan(drop_layers=(0,)))
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
    made = prune(load(full), Plan(keep=2, strategy="learned"), tmp_path / "small", evaluate=False)
    kept = made.layers["decoder"].kept
    assert max(rates[layer] for layer in kept) < min(rates[layer] for layer in made.layers["decoder"].dropped)
    assert load(made.path).recipe.model.decoder.layerdrop == 0.2 and any("plain rate" in note for note in made.notes)
    assert not any("layerdrop" in name for name in read_checkpoint(made.path).weights())


def test_averaged_weights_are_what_is_pruned(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["gpt"], ema=True)
    small = pruned(full, tmp_path / "small", Plan(drop_layers=(2,)))
    assert not read_checkpoint(small).has("ema")
    assert torch.equal(output(small), output_without_layers(full, {"decoder": (2,)}))  # `load` takes the averages
    plain = make(tmp_path / "plain", MODELS["gpt"])
    assert not torch.allclose(output(small), output_without_layers(plain, {"decoder": (2,)}))


def test_a_pruned_model_can_be_pruned_again(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["shaw"])
    once = pruned(full, tmp_path / "once", Plan(drop_layers=(1,)))
    twice = pruned(once, tmp_path / "twice", Plan(drop_layers=(1,)))
    assert torch.equal(output(twice), output_without_layers(full, {"decoder": (1, 2)}))


# What is refused


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        ("gpt", Plan(drop_layers=(4,)), "--drop-layers: the decoder has no layer 4"),
        ("gpt", Plan(drop_layers=(0,), stack="encoder"), "--stack encoder: the model has no encoder"),
        ("gpt", Plan(drop_layers=(0,), stack="both"), "--stack both: the model has no encoder"),
        ("gpt", Plan(keep=4), "nothing would go: of layers the decoder has 4"),
        ("gpt", Plan(keep=5), "--keep 5: the decoder has 4 layers"),
        ("gpt", Plan(rate=0.1), "nothing would go"),
        ("gpt", Plan(keep=2, strategy="learned"), r"model\.decoder\.layerdrop of this model has no learned rates"),
        ("seq2seq", Plan(keep=2, strategy="learned"), r"model\.encoder\.layerdrop"),
    ],
)
def test_a_plan_that_does_not_fit_is_named_and_nothing_written(
    name: str, plan: Plan, message: str, tmp_path: Path
) -> None:
    full = make(tmp_path / "full", MODELS[name])
    with pytest.raises(InputError, match=message):
        pruned(full, tmp_path / "small", plan)
    assert not (tmp_path / "small").exists()


def test_a_single_layer_cannot_go(tmp_path: Path) -> None:
    full = make(tmp_path / "full", recipe_text(decoder="num_layers: 1, num_heads: 3"))
    for plan in (Plan(rate=0.5), Plan(keep=1)):
        with pytest.raises(InputError, match="nothing can be pruned: of layers the decoder has 1, and one must stay"):
            pruned(full, tmp_path / "small", plan)


def test_what_stands_at_out_stays(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["gpt"])
    with pytest.raises(InputError, match="full exists already"):
        pruned(full, full, Plan(drop_layers=(0,)))


def test_the_cost_is_that_of_each_layers_own_attention(tmp_path: Path) -> None:
    stack = "num_layers: 3, num_heads: 3, attention: {kind: sliding_window, window: 4}"
    texts = {"windows": stack, "mixed": f"{stack}, layers: {{1: {{attention: {{kind: full}}}}}}"}
    costs = {}
    for name, text in texts.items():
        loaded = load(make(tmp_path / name, recipe_text(decoder=text)))
        costs[name] = cost(loaded.model, loaded.recipe)["flops_per_token"]
    assert costs["mixed"] - costs["windows"] == 4 * 12 * (16 - 5)  # 4 H h for every key more: all 16, not 4 and one


def test_an_interruption_writes_nothing(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["gpt"])
    with pytest.raises(Interrupted):
        prune(load(full), Plan(drop_layers=(0,)), tmp_path / "small", evaluate=False, should_stop=lambda: True)
    assert not (tmp_path / "small").exists()
