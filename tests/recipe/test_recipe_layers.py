"""Options of single layers, and options that are a number or a mapping (`layerdrop`, `drophead`)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tformer.build import build_model, layer_sizes
from tformer.nn.attention import FullAttentionOptions
from tformer.nn.attention.performer import PerformerOptions
from tformer.nn.attention.sliding_window import SlidingWindowOptions
from tformer.nn.structured_dropout import DropHeadSchedule, LayerDropOptions
from tformer.recipe import load_recipe, recipe_from_yaml, recipe_to_yaml
from tformer.recipe.checks import contradictions
from tformer.recipe.model import Model, Stack, layer_sections
from tformer.recipe.schema import json_schema
from tformer.support.errors import InputError


def stack_with(*sets: str) -> Stack:
    recipe = load_recipe(preset="gpt/tiny", sets=[f"model.decoder.{text}" for text in sets]).recipe
    assert recipe.model.decoder is not None
    assert recipe_from_yaml(recipe_to_yaml(recipe), name="again") == recipe
    return recipe.model.decoder


def sections(**stack: Any) -> list[Stack]:
    return layer_sections(Stack.model_validate({"num_layers": 4, **stack}), path="model.decoder")


def test_a_number_or_a_mapping_may_be_set() -> None:
    assert stack_with("layerdrop=0.3").layerdrop == 0.3
    assert stack_with("layerdrop.rate=0.3").layerdrop == LayerDropOptions(rate=0.3)
    assert stack_with("layerdrop={rate: 0.3, learned: true}").layerdrop == LayerDropOptions(rate=0.3, learned=True)
    assert stack_with("drophead={rate: 0.2, start: 0.4}").drophead == DropHeadSchedule(rate=0.2, start=0.4)


def test_a_number_is_short_for_a_mapping_and_may_be_written_out_later() -> None:
    assert stack_with("layerdrop=0.3", "layerdrop.learned=true").layerdrop == LayerDropOptions(rate=0.3, learned=True)
    assert stack_with("layerdrop=0.3", "layerdrop.rate=0.4").layerdrop == LayerDropOptions(rate=0.4)
    assert stack_with("layerdrop={rate: 0.3, learned: true}", "layerdrop=0.1").layerdrop == 0.1
    expected = DropHeadSchedule(rate=0.2, start=0.5, warmup_steps=7)
    assert stack_with("drophead=0.2", "drophead.start=0.5", "drophead.warmup_steps=7").drophead == expected


def test_the_rate_reads_the_same_from_both_forms() -> None:
    assert [stack_with(text).layerdrop_rate for text in ("layerdrop=0.3", "layerdrop.rate=0.3")] == [0.3, 0.3]
    assert not stack_with("layerdrop.rate=0.3").learns_layerdrop


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "layerdrop={rate: 0.2, lerned: true}",
            r"model\.decoder\.layerdrop\.lerned: unknown key, did you mean 'learned'\?",
        ),
        ("layerdrop={rate: 0.1, rat: 3}", r"model\.decoder\.layerdrop\.rat: unknown key, did you mean 'rate'\?"),
        ("layerdrop.rate=1.5", r"model\.decoder\.layerdrop\.rate: must be at least 0 and below 1, found 1\.5"),
        ("layerdrop=1.5", r"model\.decoder\.layerdrop: found 1\.5, expected less than 1"),
        ("layerdrop=much", r"model\.decoder\.layerdrop: found the text 'much', expected a number or a mapping"),
        ("layerdrop={learned: true}", r"model\.decoder\.layerdrop\.rate: missing"),
        (
            "layerdrop={rate: 0, learned: true}",
            r"model\.decoder\.layerdrop\.rate: must be greater than 0 to be learned, found 0",
        ),
        (
            "drophead={rate: 0.1, start: 0.1, strat: 0.1}",
            r"model\.decoder\.drophead\.strat: unknown key, did you mean 'start'\?",
        ),
        (
            "drophead={rate: 0.1, start: 0.1, warmup_steps: 0.5}",
            r"model\.decoder\.drophead\.warmup_steps: found 0\.5, expected an integer",
        ),
    ],
)
def test_mistakes_inside_name_the_whole_path_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        stack_with(text)
    assert "\n" not in str(caught.value)


def test_the_json_schema_knows_both_forms() -> None:
    properties = json_schema()["$defs"]["Stack"]["properties"]
    assert {"$ref": "#/$defs/LayerDropOptions"} in properties["layerdrop"]["anyOf"]
    assert {"$ref": "#/$defs/DropHeadSchedule"} in properties["drophead"]["anyOf"]


def test_layers_override_rates_and_schedules() -> None:
    layers = {1: {"layerdrop": 0.5}, 2: {"drophead": {"rate": 0.3, "start": 0.1}}}
    found = sections(layerdrop=0.1, drophead=0.2, layers=layers)
    assert [section.layerdrop for section in found] == [0.1, 0.5, 0.1, 0.1]
    assert found[2].drophead == DropHeadSchedule(rate=0.3, start=0.1) and found[1].drophead == 0.2


def test_layers_override_heads_where_their_size_is_given() -> None:
    decoder = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "head_dim": 6, "layers": {1: {"num_heads": 5}}}
    model = Model.model_validate({"d_model": 16, "vocab_size": 9, "decoder": decoder})
    assert [(sizes.num_heads, sizes.num_kv_heads) for sizes in layer_sizes(model, "decoder")] == [
        (4, 4),
        (5, 5),
        (4, 4),
    ]
    built = build_model(model)
    assert [block.self_attention.qkv.weight.shape[0] for block in built.decoder.layers] == [72, 90, 72]
    assert [block.self_attention.out.weight.shape[1] for block in built.decoder.layers] == [24, 30, 24]


def test_a_layer_of_another_attention_kind_keeps_what_both_kinds_have() -> None:
    stack = {"attention": {"kind": "sliding_window", "window": 8, "qkv_bias": False}}
    layers = sections(**stack, layers={1: {"attention": {"kind": "full"}}, 2: {"attention": {"window": 16}}})
    assert layers[1].attention == FullAttentionOptions(qkv_bias=False)
    assert layers[2].attention == SlidingWindowOptions(window=16, qkv_bias=False)
    layers = sections(layers={0: {"attention": {"kind": "performer", "features": 8}}})
    assert layers[0].attention == PerformerOptions(features=8)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            {"layers": {1: {"attention": {"kind": "performer"}}}},
            r"data\.document_mask: found true, expected false with model\.decoder\.attention\.kind performer",
        ),
        (
            {"attention": {"kind": "sliding_window", "implementation": "flex"}, "attention_dropout": 0.1},
            r"implementation: found flex, expected auto or blocks with model\.decoder\.attention_dropout 0\.1",
        ),
        (
            {"attention": {"kind": "bigbird", "implementation": "flex"}, "positions": {"kind": "alibi"}},
            r"implementation: found flex, expected auto or blocks with model\.decoder\.positions\.kind alibi",
        ),
    ],
)
def test_what_an_attention_kind_cannot_do_is_refused_before_training(decoder: dict[str, Any], message: str) -> None:
    recipe = load_recipe(preset="gpt/tiny", sets=["data.document_mask=true"]).recipe
    model = recipe.model.model_dump()
    model["decoder"] |= {"attention_dropout": 0.0, **decoder}
    found = contradictions(recipe.model_copy(update={"model": Model.model_validate(model)}))
    assert any(re.search(message, f"{'.'.join(problem.path)}: {problem.text}") for problem in found)


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        (
            {"layers": {1: {"attention": {"kind": "full", "window": 8}}}},
            r"layers\.1\.attention\.window: unknown option",
        ),
        ({"layers": {1: {"attention": {"kind": "fulll"}}}}, r"layers\.1\.attention.*fulll"),
        ({"layers": {1: {"num_heads": 5}}}, r"decoder\.layers\.1\.num_heads: found no size of a head"),
        (
            {"head_dim": 8, "positions": {"kind": "alibi"}, "layers": {1: {"num_heads": 5}}},
            r"decoder\.layers\.1\.num_heads: every layer needs the 8 heads .* positions of kind alibi",
        ),
        (
            {"head_dim": 8, "positions": {"kind": "t5_bias"}, "layers": {1: {"num_heads": 5}}},
            r"decoder\.layers\.1\.num_heads: every layer needs the 8 heads .* positions of kind t5_bias",
        ),
        (
            {"head_dim": 8, "num_kv_heads": 2, "layers": {1: {"num_heads": 4}}},
            r"decoder\.layers\.1\.num_heads: every layer needs the 8 heads .* 2 key/value heads \(num_kv_heads\)",
        ),
        ({"head_dim": 8, "layers": {1: {"num_heads": 0}}}, r"decoder\.layers\.1\.num_heads: .*more than 0"),
        ({"layers": {9: {"dropout": 0.1}}}, r"decoder\.layers\.9: the stack has 4 layers"),
        ({"layers": {1: {"num_head": 4}}}, r"decoder\.layers\.1\.num_head: not an option of a single layer"),
        ({"layers": {1: {"layerdrop": 2}}}, r"decoder\.layers\.1\.layerdrop: .*less than 1"),
        ({"layers": {1: {"layerdrop": {"rate": 0.1}}}}, r"decoder\.layers\.1\.layerdrop: .*expected a number"),
        (
            {"layerdrop": {"rate": 0.1, "learned": True}, "layers": {1: {"layerdrop": 0.2}}},
            r"decoder\.layers\.1\.layerdrop: model\.decoder\.layerdrop learns the rate of every layer",
        ),
        ({"layers": {1: {"drophead": {"rate": 0.1, "strat": 1}}}}, r"decoder\.layers\.1\.drophead\.st"),
    ],
)
def test_what_a_single_layer_cannot_have_is_refused_by_name(stack: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        sections(**stack)
    assert "\n" not in str(caught.value)
