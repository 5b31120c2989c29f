"""What a token costs: each layer by its own kind, options and heads; where all is full, exactly 12 L d T."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tformer.build import build_model
from tformer.data.batching.mixture import MixedPairs
from tformer.data.shards.pair_tokens import PairTokens, Ragged
from tformer.nn.attention import ENCODER_ONLY, FullAttentionOptions
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe
from tformer.training.assemble import matmul_parameters
from tformer.training.flops import attention_flops_per_token, head_parameters, mean_lengths, parameters_per_token
from tformer.training.prepare import training_flops_per_token

STACK = {"num_layers": 3, "num_heads": 4, "head_dim": 8, "feedforward": {"d_ff": 16}}


def model(**sections: Any) -> Model:
    return Model.model_validate({"d_model": 32, **sections})


def stack(**changes: Any) -> dict[str, Any]:
    return {**STACK, **changes}


@dataclass
class Samples:
    lengths: np.ndarray | None = None


def prepared(recipe_model: Model, *, lengths: list[int] | None = None, tokens_per_sample: int = 16) -> Any:
    samples = Samples(None if lengths is None else np.array(lengths))
    recipe = Recipe.model_validate({"model": recipe_model.model_dump()})
    return SimpleNamespace(
        recipe=recipe, material=SimpleNamespace(samples=samples, tokens_per_sample=tokens_per_sample)
    )


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("lengths", [None, [3, 5, 6]])
def test_full_attention_costs_exactly_what_it_always_did(side: str, lengths: list[int] | None) -> None:
    found = training_flops_per_token(prepared(model(**{side: stack()}), lengths=lengths), 12345)
    length = 16 if lengths is None else float(np.mean(lengths))
    assert found == 3 * (2.0 * 12345 + 4.0 * 3 * 32 * length)


def test_an_image_counts_with_all_its_patches() -> None:
    images = model(encoder=stack(), patches={"image_size": 8, "size": 4, "channels": 1}, heads=[{"kind": "classifier"}])
    found = training_flops_per_token(prepared(images, tokens_per_sample=5), 100)
    assert found == 5 * 3 * (2.0 * 100 + 4.0 * 3 * 32 * 5)


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
    assert training_flops_per_token(prepared(both, tokens_per_sample=20), 1001) == pytest.approx(
        3 * (2.0 * 500 + attention_flops_per_token(both, source_length=20, target_length=20))
    )


def ragged(lengths: list[int]) -> Ragged:
    sizes = np.array(lengths, dtype=np.int64)
    return Ragged(np.zeros(sizes.sum(), dtype=np.uint16), np.cumsum(sizes) - sizes, sizes)


def test_lengths_of_pairs_are_known_apart_also_when_mixed() -> None:
    pairs = PairTokens(
        "pairs", "f", 8, 8, ("",), (), ragged([2, 4]), ragged([5, 7]), ragged([1, 1]), ragged([1, 1]), np.zeros(2, int)
    )
    for samples in (pairs, MixedPairs([pairs, pairs], [1.0, 1.0])):
        assert mean_lengths(SimpleNamespace(samples=samples)) == (3.0, 6.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sliding_window", "bigbird", "linformer", "performer"])
def test_an_efficient_kind_costs_no_more_at_any_length_than_at_a_long_one(kind: str) -> None:
    side = "encoder" if kind in ENCODER_ONLY else "decoder"
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
