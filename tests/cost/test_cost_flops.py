"""Floating-point operations: nanoGPT's formula, every kind by its own keys, and torch's FlopCounterMode."""

from __future__ import annotations

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
    attention_flops_per_token,
    example_flops,
    head_parameters,
    matmul_parameters,
    mean_lengths,
    module_flops,
    parameters_per_token,
    training_flops_per_token,
)
from tformer.data.batching.mixture import MixedPairs
from tformer.data.shards.pair_tokens import PairTokens, Ragged, SideTokens
from tformer.nn.attention import ATTENTION, FullAttentionOptions
from tformer.nn.heads import VocabularyHead
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe
from tformer.workflows.inspect.subject import Question, Subject, read_subject

STACK = {"num_layers": 3, "num_heads": 4, "head_dim": 8, "feedforward": {"d_ff": 16}}


def model(**sections: Any) -> Model:
    return Model.model_validate({"d_model": 32, **sections})


def stack(**changes: Any) -> dict[str, Any]:
    return {**STACK, **changes}


def training_flops(section: Model, parameters: float, source: float, target: float | None = None) -> float:
    return training_flops_per_token(
        section, parameters=parameters, source_length=source, target_length=source if target is None else target
    )


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_full_attention_is_nanogpts_formula(side: str) -> None:
    """6 N + 12 L d T, exactly, also for a mean length that is no whole number."""
    for length in (16.0, 14 / 3):
        assert training_flops(model(**{side: stack()}), 12345, length) == 3 * (2.0 * 12345 + 4.0 * 3 * 32 * length)


def test_an_image_counts_with_all_its_patches() -> None:
    images = model(encoder=stack(), patches={"image_size": 8, "size": 4, "channels": 1}, heads=[{"kind": "classifier"}])
    assert training_flops(images, 100, 5) == 5 * 3 * (2.0 * 100 + 4.0 * 3 * 32 * 5)


def test_equal_layers_are_one_product_and_others_a_sum() -> None:
    assert attention_flops([(96, 100 / 3)] * 7) == 4.0 * 7 * 96 * (100 / 3)
    assert attention_flops([(8, 100), (8, 10), (16, 10)]) == 4 * (8 * 100 + 8 * 10 + 16 * 10)
    assert attention_flops([]) == 0


def test_layers_with_heads_of_their_own_count_with_those() -> None:
    mixed = model(encoder=stack(layers={1: {"num_heads": 2}}))
    assert attention_flops_per_token(mixed, source_length=10, target_length=10) == 4 * 10 * 8 * (4 + 2 + 4)


def test_query_and_value_sizes_count_apart() -> None:
    wide = model(encoder=stack(num_layers=1, value_dim=24))
    assert attention_flops_per_token(wide, source_length=10, target_length=10) == 2 * 10 * 4 * (8 + 24)


def test_every_kind_counts_its_own_keys_also_in_a_single_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's options decide, not the stack's: here full attention stands in for a kind that costs its scale."""
    monkeypatch.setattr(FullAttentionOptions, "keys_per_query", lambda self, length: length * self.scale)
    layers = {0: {"attention": {"scale": 0.5}}, 2: {"attention": {"scale": 3.0}}}
    mixed = model(decoder=stack(attention={"scale": 1.0}, layers=layers))
    assert attention_flops_per_token(mixed, source_length=0, target_length=10) == 4 * 32 * 10 * (0.5 + 1.0 + 3.0)


def test_both_sides_have_their_own_length_and_the_decoder_looks_at_the_source() -> None:
    both = model(encoder=stack(), decoder=stack(num_layers=2))
    source, target = 30.0, 10.0
    encoder, decoder = 4 * 3 * 32 * source, 4 * 2 * 32 * target + 4 * 2 * 32 * source
    found = attention_flops_per_token(both, source_length=source, target_length=target)
    assert found == pytest.approx((source * encoder + target * decoder) / (source + target))
    assert training_flops(both, 1001, 20) == pytest.approx(
        3 * (2.0 * 500 + attention_flops_per_token(both, source_length=20, target_length=20))
    )


def ragged(lengths: list[int]) -> Ragged:
    sizes = np.array(lengths, dtype=np.int64)
    return Ragged(np.zeros(sizes.sum(), dtype=np.uint16), np.cumsum(sizes) - sizes, sizes)


def test_mean_lengths_of_pairs_are_separate_also_in_a_mixture() -> None:
    sources, targets = (SideTokens(ragged(lengths), ragged([1, 1])) for lengths in ([2, 4], [5, 7]))
    pairs = PairTokens("pairs", "f", 8, 8, ("",), (), sources, targets, np.zeros(2, int))
    for samples in (pairs, MixedPairs([pairs, pairs], [1.0, 1.0])):
        assert mean_lengths(samples, 16) == (3.0, 6.0)
    assert mean_lengths(SimpleNamespace(lengths=None), 16) == (16, 16)
    assert mean_lengths(SimpleNamespace(lengths=np.array([3, 5, 6])), 16) == (14 / 3, 14 / 3)


@pytest.mark.parametrize("kind", ["sliding_window", "bigbird", "linformer", "performer"])
def test_an_efficient_kind_costs_no_more_at_any_length_than_at_a_long_one(kind: str) -> None:
    side = "decoder" if ATTENTION[kind].mechanism.causal else "encoder"
    kinds = model(max_seq_len=65536, **{side: stack(attention={"kind": kind})})
    full = model(max_seq_len=65536, **{side: stack()})

    def cost(of: Model, length: int) -> float:
        return attention_flops_per_token(of, source_length=length, target_length=length)

    assert cost(kinds, 65536) <= 1.1 * cost(kinds, 16384) < 0.2 * cost(full, 16384)


@pytest.mark.parametrize("kind", ["sliding_window", "bigbird", "linformer", "performer"])
def test_parameters_of_a_kind_are_counted_with_its_keys_and_not_again(kind: str) -> None:
    def products(attention: dict[str, Any]) -> int:
        built = build_model(model(encoder=stack(attention=attention)), vocab_size=5, device="meta")
        return matmul_parameters(built)

    assert products({"kind": kind}) == products({"kind": "full"})


@pytest.mark.parametrize(
    ("head", "objective", "share"),
    [
        ("masked_lm", {"kind": "masked_lm", "mask_share": 0.25}, 0.25),
        ("replaced_token", {"kind": "replaced_token"}, 1.0),
        ("classifier", {"kind": "classification"}, 1 / 20),
        ("next_sentence", {"kind": "next_sentence"}, 1 / 20),
    ],
)
def test_a_head_counts_for_the_tokens_that_it_is_asked_for(head: str, objective: dict[str, Any], share: float) -> None:
    options = {"num_labels": 3} if head == "classifier" else {}
    encoder = {"vocab_size": 50, "d_model": 32, "encoder": stack(), "heads": [{"kind": head, **options}]}
    recipe = Recipe.model_validate({"model": encoder, "objectives": [{"kind": "masked_lm"} | objective]})
    built = build_model(recipe.model, device="meta")
    of_head = head_parameters(built.heads[head])
    found = parameters_per_token(built, recipe, length=20)
    assert of_head > 0 and found == pytest.approx(matmul_parameters(built) - (1 - share) * of_head)


def test_the_head_of_a_causal_model_counts_for_every_token() -> None:
    recipe = Recipe.model_validate({"model": {"vocab_size": 50, "d_model": 32, "decoder": stack()}})
    built = build_model(recipe.model, device="meta")
    assert parameters_per_token(built, recipe, length=20) == matmul_parameters(built)


# --- against torch's counter -----------------------------------------------------------------------------------------


def flops_of(subject: Subject) -> Flops:
    lengths = {"source_length": subject.source_length, "target_length": subject.target_length}
    return example_flops(subject.recipe, subject.model, subject.generator, **lengths)


def counted(subject: Subject, *, training: bool) -> float:
    """By FlopCounterMode, on the meta device; attention by plain products, which the counter knows."""
    model, batch = subject.model.train(training), 1
    inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, subject.source_length, dtype=torch.long, device="meta")}
    if subject.recipe.model.patches is not None:
        p = subject.recipe.model.patches
        inputs = {"pixel_values": torch.zeros(batch, p.channels, p.image_size, p.image_size, device="meta")}
    if subject.has_both:
        length = subject.target_length
        inputs["decoder_input_ids"] = torch.zeros(batch, length, dtype=torch.long, device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
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


@pytest.mark.parametrize(
    "arch",
    ["gpt/small", "bert/base", "transformer/base", "vit/small", "llama/tiny", "t5/small", "bart/tiny", "vit/mnist"],
)
@pytest.mark.parametrize("training", [False, True])
def test_agrees_with_the_flop_counter(arch: str, training: bool) -> None:
    name, preset = arch.split("/")
    layers = [f"model.{side}.num_layers=2" for side in ("encoder", "decoder")]
    sides = {"gpt": layers[1:], "llama": layers[1:], "bert": layers[:1], "vit": layers[:1]}.get(name, layers)
    subject = read_subject(Question(arch=name, preset=preset, sets=sides))
    found = flops_of(subject)
    assert (found.training if training else found.forward) == pytest.approx(
        counted(subject, training=training), rel=0.01
    )


@pytest.mark.parametrize("preset", ["gpt/small", "bert/base", "transformer/base", "vit/small"])
def test_agrees_at_full_depth(preset: str) -> None:
    arch, name = preset.split("/")
    subject = read_subject(Question(arch=arch, preset=name))
    assert flops_of(subject).forward == pytest.approx(counted(subject, training=False), rel=0.01)


def test_heads_of_single_layers_shaw_and_kv_heads_count() -> None:
    sets = ["model.d_model=32", "model.max_seq_len=16", "model.decoder.num_layers=2", "model.decoder.num_heads=4",
            "model.decoder.head_dim=8", "model.decoder.positions={kind: shaw, clip: 4}",
            "model.decoder.layers={1: {num_heads: 2}}"]  # fmt: skip
    subject = read_subject(Question(arch="gpt", preset="tiny", sets=sets))
    assert flops_of(subject).forward == pytest.approx(counted(subject, training=False), rel=0.01)


def test_recomputing_layers_costs_another_forward() -> None:
    plain = flops_of(read_subject(Question(arch="gpt", preset="tiny")))
    again = flops_of(read_subject(Question(arch="gpt", preset="tiny", sets=["training.activation_checkpointing=true"])))
    assert plain.forward == again.forward and plain.training < again.training < plain.training * 4 / 3


def test_the_generator_of_electra_counts() -> None:
    subject = read_subject(Question(arch="electra", preset="tiny"))
    alone = sum(
        module_flops(
            subject.model,
            subject.recipe.model,
            source_length=subject.source_length,
            target_length=subject.target_length,
        ).values()
    )
    assert subject.generator is not None and flops_of(subject).forward > alone
