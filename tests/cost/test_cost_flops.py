"""Floating-point operations: nanoGPT's formula, every kind by its own keys, and torch's FlopCounterMode."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tformer.build import build_model
from tformer.cost.flops import (
    Flops,
    attention_flops,
    example_flops,
    mean_lengths,
    module_flops,
    product_shape,
    training_flops_per_token,
)
from tformer.data.batching.mixture import MixedPairs
from tformer.data.shards.pair_tokens import PairTokens, Ragged, SideTokens
from tformer.model import Transformer
from tformer.nn.attention import ATTENTION, Mechanism
from tformer.nn.heads import VocabularyHead
from tformer.nn.linear import Linear
from tformer.recipe.recipe import Recipe
from tformer.support.shipped import list_presets
from tformer.workflows.inspect.subject import InspectedModel, InspectRequest, read_subject

STACK = {"num_layers": 3, "num_heads": 4, "head_dim": 8, "feedforward": {"d_ff": 16}}


def recipe_of(**sections: Any) -> Recipe:
    own = {"objectives": sections.pop("objectives")} if "objectives" in sections else {}
    return Recipe.model_validate({"model": {"vocab_size": 50, "d_model": 32, **sections}, **own})


def stack(**changes: Any) -> dict[str, Any]:
    return {**STACK, **changes}


def built_of(recipe: Recipe) -> Transformer:
    return build_model(recipe.model, num_labels=3, device="meta")


def matmul_parameters(model: Transformer) -> int:
    """Parameters in matrix products: all matrices except lookup tables; a tied table counts as the output's product."""
    inside = {id(part) for module in model.modules() if isinstance(module, Mechanism) for part in module.modules()}
    products = (module for module in model.modules() if isinstance(module, Linear | VocabularyHead))
    return sum({id(module.weight): module.weight.numel() for module in products if id(module) not in inside}.values())


def training_flops(recipe: Recipe, source: float, target: float | None = None) -> float:
    lengths = {"source_length": source, "target_length": source if target is None else target}
    return training_flops_per_token(recipe, built_of(recipe), None, **lengths)


def attention_of(recipe: Recipe, source: float, target: float | None = None) -> float:
    lengths = {"source_length": source, "target_length": source if target is None else target}
    return sum(flops for _, flops in attention_flops(built_of(recipe), **lengths))


def test_full_attention_is_nanogpts_formula() -> None:
    """6 N + 12 L d T, exactly, also for a mean length that is no whole number."""
    recipe = recipe_of(decoder=stack())
    parameters = matmul_parameters(built_of(recipe))
    for length in (16.0, 14 / 3):
        assert training_flops(recipe, length) == pytest.approx(6.0 * parameters + 12.0 * 3 * 32 * length, rel=1e-12)


def test_an_image_counts_with_all_its_patches() -> None:
    patches = {"image_size": 8, "size": 4, "channels": 1}
    recipe = recipe_of(vocab_size=None, encoder=stack(), patches=patches, heads=[{"kind": "classifier"}],
                       objectives=[{"kind": "classification"}])  # fmt: skip
    parts = module_flops(built_of(recipe), source_length=5, target_length=5)
    stem = 2.0 * 4 * 16 * 32  # forward, and the gradient of the weights: pixels need none
    assert training_flops(recipe, 5) == 3 * sum(parts.values()) - stem


def test_layers_with_heads_of_their_own_count_with_those() -> None:
    mixed = recipe_of(encoder=stack(layers={1: {"num_heads": 2}}), heads=[{"kind": "masked_lm"}],
                      objectives=[{"kind": "masked_lm"}])  # fmt: skip
    assert attention_of(mixed, 10) == 10 * 4 * 10 * 8 * (4 + 2 + 4)


def test_query_and_value_sizes_count_apart() -> None:
    assert attention_of(recipe_of(decoder=stack(num_layers=1, value_dim=24)), 10) == 10 * 2 * 10 * 4 * (8 + 24)


def test_every_kind_counts_its_own_products_also_in_a_single_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's options decide, not the stack's: here full attention stands in for a kind that costs its scale."""
    monkeypatch.setattr(Mechanism, "flops", lambda self, queries, keys, training=False: queries * self.options.scale)
    layers = {0: {"attention": {"scale": 0.5}}, 2: {"attention": {"scale": 3.0}}}
    mixed = recipe_of(decoder=stack(attention={"kind": "full", "scale": 1.0}, layers=layers))
    assert attention_of(mixed, 10) == 10 * (0.5 + 1.0 + 3.0)


def test_both_sides_have_their_own_length_and_the_decoder_looks_at_the_source() -> None:
    both = recipe_of(encoder=stack(), decoder=stack(num_layers=2), objectives=[{"kind": "seq2seq"}])
    source, target = 30.0, 10.0
    attention = 4 * 3 * 32 * source * source + 4 * 2 * 32 * target * target + 4 * 2 * 32 * target * source
    assert attention_of(both, source, target) == attention


@pytest.mark.parametrize(("source", "target"), [(162, 10), (10, 162), (40, 40)])
def test_products_of_an_encoder_decoder_count_by_the_positions_of_their_side(source: int, target: int) -> None:
    """Half of all parameters, whatever the lengths, was a third too many or a fifth too few."""
    both = recipe_of(encoder=stack(), decoder=stack(), objectives=[{"kind": "seq2seq"}])
    of = {
        name: weight.numel()
        for name, weight in built_of(both).named_parameters()
        if "blocks" in name and weight.ndim == 2
    }
    encoder = sum(count for name, count in of.items() if name.startswith("encoder"))
    read = sum(count for name, count in of.items() if name.endswith("cross_attention.kv.weight"))
    decoder = sum(count for name, count in of.items() if name.startswith("decoder")) - read
    head = 50 * 32
    products = 2.0 * ((encoder + read) * source + (decoder + head) * target)
    expected = 3 * (products + attention_of(both, source, target)) / (source + target)
    assert training_flops(both, source, target) == pytest.approx(expected)


def ragged(lengths: list[int]) -> Ragged:
    sizes = np.array(lengths, dtype=np.int64)
    return Ragged(np.zeros(sizes.sum(), dtype=np.uint16), np.cumsum(sizes) - sizes, sizes)


@pytest.mark.parametrize(
    ("training", "rows"), [({"batch_size": 4}, 40), ({"batch_size": None, "batch_tokens": 70}, 70)]
)
def test_the_largest_product_has_the_rows_of_a_batch(training: dict[str, Any], rows: int) -> None:
    recipe = Recipe.model_validate({"model": {"vocab_size": 50, "d_model": 32, "decoder": STACK}, "training": training})
    assert product_shape(recipe, 10) == (rows, 32, 16)


def test_mean_lengths_of_pairs_are_separate_also_in_a_mixture() -> None:
    sources, targets = (SideTokens(ragged(lengths), ragged([1, 1])) for lengths in ([2, 4], [5, 7]))
    pairs = PairTokens("pairs", "f", 8, 8, ("",), (), sources, targets, np.zeros(2, int))
    for samples in (pairs, MixedPairs([pairs, pairs], [1.0, 1.0])):
        assert mean_lengths(samples, 16) == (3.0, 6.0)
    assert mean_lengths(SimpleNamespace(lengths=None), 16) == (16, 16)
    assert mean_lengths(SimpleNamespace(lengths=np.array([3, 5, 6])), 16) == (14 / 3, 14 / 3)


KINDS = ("sliding_window", "bigbird", "linformer", "performer")


@pytest.mark.parametrize("kind", KINDS)
def test_an_efficient_kind_costs_no_more_for_a_token_at_any_length_than_at_a_long_one(kind: str) -> None:
    side = "decoder" if ATTENTION[kind].mechanism.causal else "encoder"
    of_encoder = {"heads": [{"kind": "masked_lm"}], "objectives": [{"kind": "masked_lm"}]} if side == "encoder" else {}
    kinds, full = (
        recipe_of(max_seq_len=65536, **{side: stack(**changes)}, **of_encoder)
        for changes in ({"attention": {"kind": kind}}, {})
    )
    longest, long = (attention_of(kinds, length) / length for length in (65536, 16384))
    assert longest <= 1.1 * long < 0.2 * attention_of(full, 16384) / 16384


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_a_kind_are_counted_with_its_attention_and_not_again(kind: str) -> None:
    def products(attention: dict[str, Any]) -> int:
        masked = {"heads": [{"kind": "masked_lm"}], "objectives": [{"kind": "masked_lm"}]}
        return matmul_parameters(built_of(recipe_of(encoder=stack(attention=attention), **masked)))

    assert products({"kind": kind}) == products({"kind": "full"})


@pytest.mark.parametrize(
    ("head", "objective", "positions"),
    [
        ("masked_lm", {"kind": "masked_lm", "mask_share": 0.25}, 5),
        ("replaced_token", {"kind": "replaced_token"}, 20),
        ("classifier", {"kind": "classification"}, 1),
        ("next_sentence", {"kind": "next_sentence"}, 1),
    ],
)
def test_a_head_counts_for_the_positions_that_it_is_asked_for(
    head: str, objective: dict[str, Any], positions: int
) -> None:
    recipe = recipe_of(
        encoder=stack(), heads=[{"kind": head, **({"num_labels": 3} if head == "classifier" else {})}],
        objectives=[{"kind": "masked_lm"} | objective],
    )  # fmt: skip
    model, length = built_of(recipe), 20
    of_head = sum(parameter.numel() for parameter in model.heads[head].parameters() if parameter.ndim >= 2)
    rest = 2.0 * (matmul_parameters(model) - of_head) * length + attention_of(recipe, length)
    assert of_head > 0
    assert training_flops(recipe, length) * length == pytest.approx(3 * (rest + 2.0 * of_head * positions))


# --- against torch's counter -----------------------------------------------------------------------------------------


def flops_of(subject: InspectedModel) -> Flops:
    lengths = {"source_length": subject.source_length, "target_length": subject.target_length}
    return example_flops(subject.recipe, subject.model, subject.generator, **lengths)


def _sum_of_products(total: Any, left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    return 2 * left[0] * left[1] * left[2] * right[2]


IN_PLACE = {torch.ops.aten.baddbmm_: _sum_of_products}
"""The counter knows `baddbmm`, and not the same in place."""


def counted(subject: InspectedModel, *, training: bool) -> float:
    """Of the model and the generator beside it, see `counted_of`."""
    models = [subject.model] if subject.generator is None else [subject.model, subject.generator]
    return sum(counted_of(subject, each, training=training) for each in models)


def counted_of(subject: InspectedModel, model: Transformer, *, training: bool) -> float:
    """By FlopCounterMode, on the meta device; attention by plain products, which the counter knows."""
    model, batch = model.train(training), 1
    inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, subject.source_length, dtype=torch.long, device="meta")}
    if subject.recipe.model.patches is not None:
        p = subject.recipe.model.patches
        inputs = {"pixel_values": torch.zeros(batch, p.channels, p.image_size, p.image_size, device="meta")}
    if subject.has_both:
        length = subject.target_length
        inputs["decoder_input_ids"] = torch.zeros(batch, length, dtype=torch.long, device="meta")
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stack.checkpointing = training and subject.recipe.training.activation_checkpointing
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        output = model(**inputs)
        losses = []
        for name, head in model.heads.items():
            if training and isinstance(head, VocabularyHead) and name == "masked_lm":
                # As many positions as the objective masks; which ones does not matter.
                hidden = output.hidden[:, : round(0.15 * subject.source_length)]
                losses.append(head(hidden).sum())
            elif training and isinstance(head, VocabularyHead):
                labels = torch.zeros(output.hidden.shape[:2], dtype=torch.long, device="meta")
                losses.append(output.loss_terms(name, labels).loss)
            else:
                losses.append(F.log_softmax(output.head(name), dim=-1).sum())
        if training:
            sum(losses[1:], losses[0]).backward()
    return float(counter.get_total_flops())


def require_agreement(preset: str, *, sets: Sequence[str] = ()) -> None:
    arch, name = preset.split("/")
    subject = read_subject(InspectRequest(arch=arch, preset=name, sets=list(sets)))
    found = flops_of(subject)
    assert found.forward == pytest.approx(counted(subject, training=False), rel=0.01)
    assert found.training == pytest.approx(counted(subject, training=True), rel=0.01)


@pytest.mark.parametrize(
    "preset",
    ["gpt/tiny", "bert/mini", "transformer/dates", "vit/mnist", "llama/tiny", "t5/mini", "bart/mini", "electra/mini",
     "performer/char", "longformer/classify", "bigbird/classify", "linformer/classify"],
)  # fmt: skip
def test_forward_and_training_agree_with_the_flop_counter(preset: str) -> None:
    require_agreement(preset)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [f"{arch}/{name}" for arch, names in list_presets().items() for name in names])
def test_every_preset_agrees_with_the_flop_counter(preset: str) -> None:
    require_agreement(preset)


@pytest.mark.parametrize(("kind", "length"), [("sliding_window, window: 64", 256), ("sliding_window, window: 64", 1024),
                                              ("sliding_window, window: 32, dilation: 2", 1000), ("performer", 300),
                                              ("linformer", 200), ("additive", 64), ("disentangled", 96),
                                              ("bigbird, block: 8, dense_up_to: 512, implementation: blocks", 400),
                                              ("disentangled, share_projections: false, buckets: 16", 40)])  # fmt: skip
def test_every_kind_of_attention_agrees_at_other_lengths(kind: str, length: int) -> None:
    preset = "gpt/tiny" if kind.startswith(("sliding", "performer")) else "bert/mini"
    side = "decoder" if preset == "gpt/tiny" else "encoder"
    positions = f"model.{side}.positions={{kind: learned}}"
    sets = [f"model.{side}.attention={{kind: {kind}}}", f"model.max_seq_len={length}", positions]
    require_agreement(preset, sets=[*sets, f"data.seq_len={length}"])


def test_recomputation_agrees_with_the_flop_counter() -> None:
    small = ["model.d_model=64", "model.decoder.num_layers=2", "model.decoder.num_heads=2", "data.seq_len=32"]
    for place in ("pre", "post"):
        sets = [*small, "training.activation_checkpointing=true", f"model.decoder.norm.place={place}"]
        require_agreement("gpt/tiny", sets=sets)
        require_agreement("gpt/tiny", sets=[*sets, "model.decoder.dropout=0.1"])


def test_heads_of_single_layers_shaw_and_kv_heads_count() -> None:
    sets = ["model.d_model=32", "model.max_seq_len=16", "model.decoder.num_layers=2", "model.decoder.num_heads=4",
            "model.decoder.head_dim=8", "model.decoder.positions={kind: shaw, clip: 4}",
            "model.decoder.layers={1: {num_heads: 2}}"]  # fmt: skip
    subject = read_subject(InspectRequest(arch="gpt", preset="tiny", sets=sets))
    assert flops_of(subject).forward == pytest.approx(counted(subject, training=False), rel=0.01)
    assert flops_of(subject).training == pytest.approx(counted(subject, training=True), rel=0.01)


def test_recomputing_layers_costs_another_forward() -> None:
    plain = flops_of(read_subject(InspectRequest(arch="gpt", preset="tiny")))
    again = flops_of(
        read_subject(InspectRequest(arch="gpt", preset="tiny", sets=["training.activation_checkpointing=true"]))
    )
    assert plain.forward == again.forward and plain.training < again.training < plain.training * 4 / 3


def test_the_generator_of_electra_counts() -> None:
    subject = read_subject(InspectRequest(arch="electra", preset="tiny"))
    alone = sum(
        module_flops(subject.model, source_length=subject.source_length, target_length=subject.target_length).values()
    )
    assert subject.generator is not None and flops_of(subject).forward > alone
