"""`inspect`: tree of parameters, operations, memory and cache."""

from __future__ import annotations

import pytest
import torch

from tformer.build import build_model
from tformer.cost.flops import module_flops
from tformer.cost.memory import cache_size
from tformer.workflows.inspect.report import Node, build_tree, report_on
from tformer.workflows.inspect.subject import InspectRequest, read_subject

SMALL = ["model.d_model=32", "model.decoder.num_layers=3", "model.decoder.num_heads=4", "model.max_seq_len=16"]


def node(tree: Node, *path: str) -> Node:
    for name in path:
        [tree] = [child for child in tree.children if child.name == name]
    return tree


def test_published_counts_and_ties() -> None:
    report = report_on(read_subject(InspectRequest(arch="gpt", preset="small")))
    assert report.parameters == report.trees[0].parameters == 124_439_808
    assert report.tied == {"heads.lm.weight": "embedding.weight"}
    head = node(report.trees[0], "heads", "lm")
    assert head.parameters == 0 and head.tied == {"heads.lm.weight": "embedding.weight"} and head.flops > 0
    layers = node(report.trees[0], "decoder", "blocks", "0-11")
    assert layers.count == 12 and layers.parameters == 12 * sum(child.parameters for child in layers.children)


def test_the_largest_takes_no_memory() -> None:
    subject = read_subject(InspectRequest(arch="gpt", preset="gpt3-175b"))
    assert all(parameter.is_meta for parameter in subject.model.parameters())
    assert report_on(subject).parameters == 174_604_259_328


def test_layers_that_differ_are_not_folded() -> None:
    sets = [*SMALL, "model.decoder.head_dim=8", "model.decoder.layers={1: {num_heads: 2}}"]
    report = report_on(read_subject(InspectRequest(arch="gpt", preset="tiny", sets=sets)))
    assert report.heads == {"decoder": [4, 2, 4]}
    assert [child.name for child in node(report.trees[0], "decoder", "blocks").children] == ["0", "1", "2"]


@pytest.mark.parametrize("preset", ["gpt/small", "llama/8b", "t5/small"])
def test_cache_of_keys_and_values_is_what_decoding_allocates(preset: str) -> None:
    arch, name = preset.split("/")
    subject = read_subject(InspectRequest(arch=arch, preset=name))
    found = cache_size(subject.model, torch.bfloat16)
    assert found is not None
    cache = subject.model.new_cache(1, 100, device="meta", dtype=torch.bfloat16)
    held = sum((layer.keys.numel() + layer.values.numel()) * 2 for layer in cache.layers)  # type: ignore[attr-defined]
    assert found.per_token * 100 == held and found.constant == 0


def test_cache_of_performer_does_not_grow() -> None:
    sets = [*SMALL, "model.decoder.attention={kind: performer, features: 24}"]
    subject = read_subject(InspectRequest(arch="gpt", preset="tiny", sets=sets))
    found = cache_size(subject.model, torch.bfloat16)
    assert found is not None and found.per_token == 0 and found.at(10, 0) == found.at(10_000, 0)
    model = build_model(subject.recipe.model).eval()
    cache = model.new_cache(1, 8)
    model(torch.zeros(1, 8, dtype=torch.long), cache=cache)
    sums = [layer.sums for layer in cache.layers]  # type: ignore[attr-defined]
    assert found.constant == sum(tensor.numel() * tensor.element_size() for part in sums for tensor in part)


def test_an_encoder_has_no_cache_and_a_decoder_beside_one_reads_the_source() -> None:
    assert report_on(read_subject(InspectRequest(arch="bert", preset="tiny"))).cache is None
    both = report_on(read_subject(InspectRequest(arch="transformer", preset="tiny"))).cache
    assert both is not None and both.per_source_token > 0
    assert both.at(3, 5) == 3 * both.per_token + 5 * both.per_source_token


def test_what_was_assumed_is_said() -> None:
    assert any(
        "96 tokens are assumed" in note for note in read_subject(InspectRequest(arch="gpt", preset="char")).notes
    )
    assert read_subject(InspectRequest(arch="gpt", preset="char", vocab_size=65)).recipe.model.vocab_size == 65
    assert any(
        "labels: 2 are assumed" in note for note in read_subject(InspectRequest(arch="vit", preset="mnist")).notes
    )
    assert not read_subject(InspectRequest(arch="gpt", preset="small")).notes


def test_steps_and_batches_follow_the_recipe_and_the_question() -> None:
    report = report_on(
        read_subject(InspectRequest(arch="gpt", preset="tiny", sets=["training.grad_accum=3"], batch_size=5))
    )
    assert report.examples_per_step == 15
    document = report.to_json()
    assert document["flops"]["training_per_step"] == pytest.approx(15 * document["flops"]["training_per_example"])
    assert document["memory"]["total_bytes"] == report.memory.total


def test_sizes_of_a_tree_without_operations() -> None:
    tree = build_tree(torch.nn.Linear(2, 3), {})
    assert (tree.parameters, tree.flops, tree.children) == (9, 0.0, ())


def test_a_table_that_the_generator_shares_is_counted_once() -> None:
    report = report_on(read_subject(InspectRequest(arch="electra", preset="tiny")))
    assert sum(tree.parameters for tree in report.trees) == report.parameters + report.generator_parameters
    assert node(report.trees[1], "embedding").tied["generator.embedding.weight"] == "embedding.weight"
    assert report.tied["generator.embedding.weight"] == "embedding.weight"


def test_layers_that_share_their_weights_are_counted_once_and_cost_as_much() -> None:
    sets = ["model.encoder.layer_groups=1", "model.embedding.size=64"]
    shared, separate = (
        report_on(read_subject(InspectRequest(arch="bert", preset="tiny", sets=found))) for found in (sets, sets[1:])
    )
    layer = node(separate.trees[0], "encoder", "blocks").parameters // 2
    assert shared.parameters == separate.parameters - layer == shared.trees[0].parameters
    assert shared.trees[0].flops == separate.trees[0].flops
    assert shared.tied["encoder.blocks.1.feedforward.up.weight"] == "encoder.blocks.0.feedforward.up.weight"


def test_the_tree_adds_up() -> None:
    subject = read_subject(InspectRequest(arch="transformer", preset="base"))
    flops = module_flops(subject.model, source_length=8, target_length=4)
    tree = build_tree(subject.model, flops)
    assert tree.parameters == subject.model.num_parameters() == 63_082_496
    assert tree.flops == pytest.approx(sum(flops.values()))
