"""Fewer heads: importance is the gradient of a gate, and the pruned model is the full one with those heads silent."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workflows.prune_runs import EFFICIENT, make, output, output_without_heads, recipe_text
from tformer.data.shards.corpus import Example
from tformer.data.shards.pair_tokens import PairExample
from tformer.loading import Loaded, load
from tformer.objectives import build_objective
from tformer.objectives.base import Objective, total_loss
from tformer.support.errors import InputError
from tformer.tasks.base import HeldOut
from tformer.tasks.tokenizers import decoder_context, text_context
from tformer.workflows.prune.heads import attention_modules, gate_gradients, head_importance
from tformer.workflows.prune.plan import PrunePlan
from tformer.workflows.prune.pruning import Pruned, check_plan, prune

BASE = "num_layers: 3, num_heads: 4"
MODELS = {
    "gpt": recipe_text(decoder=f"{BASE}, positions: {{kind: learned}}"),
    "rope": recipe_text(decoder=f"{BASE}, head_dim: 6, value_dim: 5, positions: {{kind: rope}}"),
    "shaw": recipe_text(decoder=f"{BASE}, positions: {{kind: shaw, clip: 3}}, attention: {{qkv_bias: false}}"),
    "bert": recipe_text(encoder=f"{BASE}, norm: {{place: post}}, final_norm: false, attention: {{qk_norm: true}}"),
    "own heads": recipe_text(decoder=f"{BASE}, head_dim: 4, layers: {{1: {{num_heads: 2, dropout: 0.1}}}}"),
    "seq2seq": recipe_text(encoder=BASE, decoder=BASE),
}


class Samples:
    """A dozen texts, or pairs, of several lengths."""

    seq_len = 16
    lengths: np.ndarray | None

    def __init__(self, *, pairs: bool) -> None:
        draw = np.random.default_rng(0)
        self.lengths = draw.integers(4, 12, 12)
        texts = [draw.integers(5, 9, length) for length in self.lengths]
        self._examples: list[Any] = [PairExample(text, text[::-1].copy()) if pairs else Example(text) for text in texts]

    def __len__(self) -> int:
        return len(self._examples)

    def examples(self, epoch: int, indices: Any) -> list[Any]:
        return [self._examples[index] for index in indices]


def held_out(loaded: Loaded) -> HeldOut:
    pairs = loaded.model.encoder is not None and loaded.model.decoder is not None
    context = (decoder_context if pairs else text_context)(loaded.recipe, loaded.text_tokenizer)
    objective = build_objective(loaded.recipe.objectives, context)
    return HeldOut("texts", Samples(pairs=pairs), objective, loaded.recipe, batch_size=5)


def pruned(path: Path, out: Path, plan: PrunePlan) -> Pruned:
    loaded = load(path)
    return prune(loaded, plan, out, held_out=held_out(loaded), evaluate=False)


def silent(made: Pruned, before: Path) -> dict[str, list[int]]:
    """The heads that are gone, by attention, as `output_without_heads` takes them."""
    assert made.heads is not None
    gone = {}
    for name, module in attention_modules(load(before).model).items():
        side, _, layer, attention = name.split(".")
        kept = made.heads.layers[side][int(layer)].of(attention) if side in made.heads.layers else None
        gone[name] = [head for head in range(module.num_heads) if kept is not None and head not in kept]
    return gone


@pytest.mark.parametrize(
    ("name", "heads", "per_layer"),
    [(name, *way) for name, way in zip(MODELS, cycle([(0.5, "even"), (0.34, "free"), (4, "free")]))],
)
def test_the_pruned_model_is_the_full_one_with_those_heads_silent(
    name: str, heads: float, per_layer: str, tmp_path: Path
) -> None:
    full = make(tmp_path / "full", MODELS[name])
    made = pruned(full, tmp_path / "small", PrunePlan(heads=str(heads), heads_per_layer=per_layer))
    gone = silent(made, full)
    assert made.heads is not None and made.heads.after < made.heads.before and any(gone.values())
    expected = output_without_heads(full, gone)
    assert torch.allclose(output(made.path), expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))
    assert not torch.allclose(output(full), expected, rtol=1e-2)
    assert made.after["parameters"] < made.before["parameters"]
    assert made.after["flops_per_token"] < made.before["flops_per_token"]


@pytest.mark.parametrize("kind", list(EFFICIENT))
def test_heads_of_other_attentions_are_silent_too_or_refused(kind: str, tmp_path: Path) -> None:
    full = make(tmp_path / "full", recipe_text(encoder=f"{BASE}, {EFFICIENT[kind]}"))
    try:
        made = pruned(full, tmp_path / "small", PrunePlan(heads="0.5"))
    except InputError as error:
        assert f"model.encoder.attention.kind is {kind.split()[0]}" in error.message
        return
    expected = output_without_heads(full, silent(made, full))
    assert torch.allclose(output(made.path), expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


def test_weights_of_heads_that_stay_are_copied_exactly(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["seq2seq"])
    made = pruned(full, tmp_path / "small", PrunePlan(heads="0.5"))
    assert made.heads is not None
    old, new = (dict(load(path).model.state_dict()) for path in (full, made.path))
    [first, *_] = made.heads.layers["decoder"]
    assert first.cross_attention is not None
    rows = [head * 3 + row for head in first.cross_attention for row in range(3)]
    prefix = "decoder.blocks.0.cross_attention"
    assert torch.equal(new[f"{prefix}.q.weight"], old[f"{prefix}.q.weight"][rows])
    both = rows + [12 + row for row in rows]
    assert torch.equal(new[f"{prefix}.kv.weight"], old[f"{prefix}.kv.weight"][both])
    assert torch.equal(new[f"{prefix}.kv.bias"], old[f"{prefix}.kv.bias"][both])
    assert torch.equal(new[f"{prefix}.out.weight"], old[f"{prefix}.out.weight"][:, rows])
    assert torch.equal(new[f"{prefix}.out.bias"], old[f"{prefix}.out.bias"])


def test_even_heads_are_one_number_in_the_recipe_and_free_ones_belong_to_layers(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["gpt"])
    even = load(pruned(full, tmp_path / "even", PrunePlan(heads="0.5")).path).recipe.model.decoder
    assert (even.num_heads, even.head_dim, even.layers) == (2, 3, {})
    made = pruned(full, tmp_path / "free", PrunePlan(heads="5", heads_per_layer="free"))
    assert made.metric is None, "nothing was evaluated"
    free = load(made.path).recipe.model.decoder
    assert made.heads is not None and free.head_dim == 3
    counts = [len(layer.self_attention) for layer in made.heads.layers["decoder"]]
    assert sum(counts) == 7
    assert [free.layers.get(layer, {}).get("num_heads", free.num_heads) for layer in range(3)] == counts


def test_layers_and_heads_together(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["gpt"])
    both = pruned(full, tmp_path / "both", PrunePlan(drop_layers="1", heads="0.5"))
    shallow = prune(load(full), PrunePlan(drop_layers="1"), tmp_path / "shallow", evaluate=False).path
    assert torch.equal(output(both.path), output(pruned(shallow, tmp_path / "then", PrunePlan(heads="0.5")).path))


# Importance


def gated_loss(loaded: Loaded, objective: Objective, batch: Any, gates: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss with a gate [B, H] on every head, put in by hand."""
    handles = []
    for name, module in attention_modules(loaded.model).items():

        def gate(_module: Any, given: tuple[torch.Tensor], name: str = name, heads: int = module.num_heads) -> Any:
            return ((given[0].unflatten(-1, (heads, -1)) * gates[name][:, None, :, None]).flatten(2),)

        handles.append(module.out.register_forward_pre_hook(gate))
    try:
        return total_loss(objective.loss(loaded.model, batch).terms)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ["gpt", "rope", "bert", "seq2seq", "own heads"])
def test_importance_is_the_gradient_of_a_gate_at_one(name: str, tmp_path: Path) -> None:
    loaded = load(make(tmp_path / "full", MODELS[name]))
    data = held_out(loaded)
    examples = data.samples.examples(0, range(6))
    batch = data.objective.collate(examples, rng=np.random.default_rng(0), training=False)
    found = gate_gradients(loaded.model, data.objective, batch)
    gates = {
        name: torch.ones(6, module.num_heads, requires_grad=True)
        for name, module in attention_modules(loaded.model).items()
    }
    loss = gated_loss(loaded, data.objective, batch, gates)
    expected = dict(zip(gates, torch.autograd.grad(loss, list(gates.values())), strict=True))
    assert found.keys() == expected.keys()
    for key, gates_BH in expected.items():
        assert torch.allclose(found[key], 6 * gates_BH, rtol=1e-4, atol=1e-5), key


def test_importance_is_the_mean_of_absolute_gradients_over_examples_normalized(tmp_path: Path) -> None:
    loaded = load(make(tmp_path / "full", MODELS["gpt"]))
    data = held_out(loaded)
    samples = Samples(pairs=False)
    one_by_one: dict[str, torch.Tensor] = {}
    for index in range(len(samples)):
        batch = data.objective.collate(samples.examples(0, [index]), rng=np.random.default_rng(0), training=False)
        for name, gates_BH in gate_gradients(loaded.model, data.objective, batch).items():
            one_by_one[name] = one_by_one.get(name, torch.zeros(4)) + gates_BH.abs().sum(0)
    found = head_importance(loaded.model, data.objective, samples, batch_size=1)
    for name, total in one_by_one.items():
        assert torch.allclose(found[name].float(), total / total.norm(), rtol=1e-4)
        assert abs(float(found[name].norm()) - 1) < 1e-9


def test_batches_change_no_importance_of_examples_of_one_length(tmp_path: Path) -> None:
    loaded = load(make(tmp_path / "full", MODELS["gpt"]))
    data, samples = held_out(loaded), Samples(pairs=False)
    samples._examples = [Example(example.ids[:4]) for example in samples._examples]
    samples.lengths = None
    several, one = (head_importance(loaded.model, data.objective, samples, batch_size=size) for size in (12, 1))
    for name, importance in several.items():
        assert torch.allclose(importance, one[name], rtol=1e-4)


def test_a_head_that_says_nothing_matters_nothing_and_goes_first(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["bert"])
    loaded = load(full)
    with torch.no_grad():
        loaded.model.get_submodule("encoder.blocks.1.self_attention").out.weight[:, 3:6] = 0.0
    data = held_out(loaded)
    found = head_importance(loaded.model, data.objective, data.samples)
    assert float(found["encoder.blocks.1.self_attention"][1]) == 0.0
    assert all(float(importance.min()) > 0 for name, importance in found.items() if "blocks.1" not in name)


def test_measuring_leaves_no_trace_in_the_model(tmp_path: Path) -> None:
    loaded = load(make(tmp_path / "full", MODELS["seq2seq"]))
    before, random = output(loaded), torch.random.get_rng_state()
    data = held_out(loaded)
    head_importance(loaded.model, data.objective, data.samples)
    assert torch.equal(output(loaded), before) and torch.equal(torch.random.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
    assert not any(module.out._forward_pre_hooks for module in attention_modules(loaded.model).values())


# What is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (recipe_text(decoder=f"{BASE}, positions: {{kind: alibi}}"), r"model\.decoder\.positions\.kind is alibi"),
        (recipe_text(encoder=f"{BASE}, positions: {{kind: t5_bias}}"), r"model\.encoder\.positions\.kind is t5_bias"),
        (recipe_text(decoder=f"{BASE}, num_kv_heads: 2"), r"model\.decoder\.num_kv_heads is 2 for 4 query heads"),
    ],
)
def test_heads_that_cannot_leave_one_by_one_are_named(text: str, message: str, tmp_path: Path) -> None:
    full = make(tmp_path / "full", text)
    with pytest.raises(InputError, match=f"--drop-heads: {message}"):
        pruned(full, tmp_path / "small", PrunePlan(heads="0.5"))
    assert not (tmp_path / "small").exists()


def test_more_heads_than_can_go(tmp_path: Path) -> None:
    full = make(tmp_path / "full", MODELS["gpt"])
    with pytest.raises(InputError, match="at most 9 of 12 heads can be removed"):
        pruned(full, tmp_path / "small", PrunePlan(heads="10"))


def test_more_heads_than_can_go_are_refused_before_any_data_is_read(tmp_path: Path) -> None:
    loaded = load(make(tmp_path / "full", MODELS["gpt"]))
    with pytest.raises(InputError, match="at most 9 of 12 heads can be removed"):
        check_plan(loaded, PrunePlan(heads="1000000"))
    check_plan(loaded, PrunePlan(heads="9"))


def test_importance_of_nothing(tmp_path: Path) -> None:
    loaded = load(make(tmp_path / "full", MODELS["gpt"]))
    data = replace(held_out(loaded), samples=[])
    with pytest.raises(InputError, match="0 examples"):
        head_importance(loaded.model, data.objective, data.samples)
