"""Memory and traffic of one of many ranks: against a fake process group, and the choice between DDP, HSDP and FSDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.cost.fake_ranks import Exchanges, measure
from tests.training.worlds import Training, in_processes, recipe_of
from tformer.build import build_model
from tformer.cost.memory import MemoryEstimate
from tformer.cost.parallel import (
    KINDS,
    Layout,
    RankPlan,
    Shards,
    choose_kind,
    idle_note,
    layout_of,
    plan_ranks,
    rank_memory,
    step_traffic,
)
from tformer.nn.init import tie_embeddings
from tformer.optim.optimizers import OPTIMIZERS
from tformer.recipe import sections
from tformer.recipe.load import load_recipe
from tformer.recipe.model import Model
from tformer.recipe.sections import Parallelism
from tformer.support.errors import InputError
from tformer.training.parallel import Parallel, parallel_of

GIB = 2**30
CLOSE = 0.10
PRESETS = {"gpt/xl": 1_557_611_200, "llama/8b": 8_030_261_248}
EMPTY = MemoryEstimate(0, 0, 0, 0)
ADAMW = OPTIMIZERS["adamw"]


def section(preset: str, layers: int | None = None) -> Model:
    arch, name = preset.split("/")
    sets = [] if layers is None else [f"model.decoder.num_layers={layers}"]
    return load_recipe(arch=arch, preset=name, sets=sets).recipe.model


def shards_of(model: Model, layout: Layout, frozen: str | None = None) -> Shards:
    built = build_model(model, device="meta")
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(frozen is None or not name.startswith(frozen))
    return Shards.of([built], layout)


def named(layout: Layout) -> str:
    formats = f"-{layout.weight_bytes}-{layout.gradient_bytes}" if layout.weight_bytes < 4 else ""
    return f"{layout.kind}-{layout.ranks}" + ("" if layout.reshard else "-kept") + formats


def check(model: Model, layout: Layout, *, frozen: str | None = None) -> None:
    """Compare every figure of the formulas with a step in a fake process group."""
    found = measure(model, layout, frozen=frozen)
    shards = shards_of(model, layout, frozen)
    memory = rank_memory(EMPTY, shards, ADAMW, ema=False)
    assert (memory.weights, memory.gradients, memory.optimizer) == (found.weights, found.gradients, found.optimizer)
    expected = memory.weights + memory.gradients + memory.gathered + memory.exchanged
    assert expected == pytest.approx(found.peak, rel=CLOSE)
    traffic = step_traffic(shards, ADAMW, micro_batches=1).collectives
    assert {name: each.calls for name, each in traffic.items()} == found.calls
    assert {name: each.tensor_bytes for name, each in traffic.items()} == pytest.approx(found.tensors, rel=0.01)


HALF = {"weight_bytes": 2}
FEW = [
    layout_of("fsdp", 256),
    layout_of("hsdp", 64),
    layout_of("fsdp", 8, reshard=False),
    layout_of("fsdp", 64, **HALF),
    layout_of("hsdp", 64, **HALF, gradient_bytes=2),
]
LAYOUTS = [
    layout_of(kind, ranks) for ranks in (8, 64, 256) for kind in ("fsdp", "hsdp") if (kind, ranks) != ("hsdp", 8)
] + [layout_of("fsdp", 64, **HALF)]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("layout", FEW, ids=named)
def test_few_blocks_allocate_and_send_in_a_fake_group_what_the_formulas_say(preset: str, layout: Layout) -> None:
    check(section(preset, layers=3), layout)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_whole_models_allocate_and_send_in_a_fake_group_what_the_formulas_say(preset: str, layout: Layout) -> None:
    check(section(preset), layout)


def test_frozen_blocks_are_gathered_and_neither_have_gradients_nor_send_them() -> None:
    model, layout = section("gpt/xl", layers=3), layout_of("fsdp", 8)
    check(model, layout, frozen="decoder.blocks.0.")
    free, fixed = (step_traffic(shards_of(model, layout, frozen), ADAMW, micro_batches=1).collectives
                   for frozen in (None, "decoder.blocks.0."))  # fmt: skip
    assert fixed["all_gather"] == free["all_gather"]
    assert fixed["reduce_scatter"].sent_bytes < free["reduce_scatter"].sent_bytes


@pytest.mark.parametrize(("preset", "parameters"), PRESETS.items())
def test_fsdp_divides_sixteen_bytes_a_parameter_by_the_ranks(preset: str, parameters: int) -> None:
    memory = rank_memory(EMPTY, shards_of(section(preset), layout_of("fsdp", 64)), ADAMW, ema=False)
    assert memory.weights + memory.gradients + memory.optimizer == pytest.approx(16 * parameters / 64, rel=0.02)


def test_ddp_needs_as_much_as_one_process_with_the_rows_of_a_rank() -> None:
    whole = MemoryEstimate(4, 4, 8, 1, copies=2)
    assert rank_memory(whole, shards_of(section("gpt/xl", 1), layout_of("ddp", 8)), ADAMW, ema=False) == whole


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its processes")
def test_ddp_exchanges_four_bytes_of_each_trained_parameter_once_a_step(tmp_path: Path) -> None:
    frozen = {"optimizer": {"groups": [{"match": "decoder.blocks.0.*", "frozen": True}]}}
    recipes = [recipe_of("gpt/small", {}), recipe_of("gpt/small", frozen), recipe_of("electra/tiny", {})]

    def count(parallel: Parallel) -> dict[str, torch.Tensor]:
        found = {}
        for number, recipe in enumerate(recipes):
            training = Training(recipe, parallel)
            expected = step_traffic(Shards.of(training.models.all, layout_of("ddp", 2)), ADAMW,
                                    micro_batches=2).collectives["all_reduce"].tensor_bytes  # fmt: skip
            training.run(2)  # DDP orders its buckets in the first step
            with Exchanges() as exchanges:
                training.run(1)
            found[str(number)] = torch.tensor([exchanges.tensors["all_reduce"], expected])
        return found

    for found in in_processes(2, count, tmp_path / "world"):
        for measured, expected in found.values():
            assert float(measured) == pytest.approx(float(expected), rel=0.01)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its processes")
def test_fsdp_gathers_and_scatters_in_the_number_formats_that_are_counted(tmp_path: Path) -> None:
    recipe, names = recipe_of("gpt/small", {}), ("all_gather", "reduce_scatter")

    def count(parallel: Parallel) -> dict[str, torch.Tensor]:
        found = {}
        for reduce, size in (("fp32", 4), ("bf16", 2)):
            options = Parallelism(kind="fsdp", reduce=reduce)
            training = Training(recipe, parallel_of(options, compute_dtype=torch.bfloat16), precision="bf16")
            layout = layout_of("fsdp", 2, weight_bytes=2, gradient_bytes=size)
            traffic = step_traffic(Shards.of(training.models.all, layout), ADAMW, micro_batches=2).collectives
            with Exchanges() as exchanges:
                training.trainer.train_step()
            sums = [[exchanges.tensors[name], traffic[name].tensor_bytes] for name in names]
            found[reduce] = torch.tensor(sums)
        return found

    for found in in_processes(2, count, tmp_path / "world"):
        for measured, expected in torch.cat([*found.values()]).tolist():
            assert measured == pytest.approx(expected, rel=0.01)


def test_tensors_that_are_updated_whole_have_owners_and_travel_there_and_back() -> None:
    shards, matrices = shards_of(section("gpt/xl", 1), layout_of("fsdp", 8)), 12 * 1600 * 1600
    plain, muon = (rank_memory(EMPTY, shards, OPTIMIZERS[kind], ema=False) for kind in ("adamw", "muon"))
    assert muon.weights - plain.weights == 4 * matrices / 8
    assert step_traffic(shards, OPTIMIZERS["muon"], micro_batches=4).collectives["all_to_all"].sent_bytes == (
        2 * 4 * matrices / 8 * 7 / 8
    )


def test_no_rank_has_a_copy_of_all_sharded_weights() -> None:
    model = section("llama/8b", 1)
    memory = rank_memory(EMPTY, shards_of(model, layout_of("fsdp", 64)), ADAMW, ema=False)
    assert (
        memory.total - memory.gathered - memory.exchanged
        == 16 * build_model(model, device="meta").num_parameters() / 64
    )


def test_averaged_weights_are_sharded_too() -> None:
    shards = shards_of(section("gpt/xl", 1), layout_of("fsdp", 8))
    plain, averaged = (rank_memory(EMPTY, shards, ADAMW, ema=ema) for ema in (False, True))
    assert averaged.weights == 2 * plain.weights


def test_ddp_sends_twice_the_gradients_and_sharding_three_times_the_bytes_of_the_weights() -> None:
    model, count = section("llama/8b", 2), build_model(section("llama/8b", 2), device="meta").num_parameters()

    def sent(kind: str, micro_batches: int = 1) -> int:
        return step_traffic(shards_of(model, layout_of(kind, 256)), ADAMW, micro_batches=micro_batches).sent

    assert sent("ddp") == sent("ddp", 8) == 2 * 4 * count * 255 // 256  # once a step
    root = 2 * 128256 * 4096 + 4096  # gathered once
    assert sent("fsdp") == pytest.approx(4 * (3 * count - root) * 255 / 256, rel=1e-6)
    assert sent("fsdp", 8) == pytest.approx(8 * sent("fsdp"), rel=1e-6)


def test_hsdp_sends_what_fsdp_sends_in_a_group_and_its_shard_of_the_gradients_between_groups() -> None:
    model = section("llama/8b", 2)
    inside = step_traffic(shards_of(model, layout_of("fsdp", 8)), ADAMW, micro_batches=4)
    across = step_traffic(shards_of(model, layout_of("hsdp", 64)), ADAMW, micro_batches=4)
    for name in ("all_gather", "reduce_scatter"):
        assert across.collectives[name] == inside.collectives[name]
    gradients = 4 * build_model(model, device="meta").num_parameters()
    assert across.collectives["all_reduce"].sent_bytes == pytest.approx(2 * gradients / 8 * 7 / 8, rel=1e-6)


def test_one_device_sends_nothing() -> None:
    for kind in ("ddp", "fsdp"):
        traffic = step_traffic(shards_of(section("gpt/xl", 1), layout_of(kind, 1)), ADAMW, micro_batches=1)
        assert traffic.to_json() == {"sent_bytes": 0, "received_bytes": 0}


def test_the_kinds_are_those_of_the_recipe() -> None:
    assert set(get_args(sections.Parallelism.model_fields["kind"].annotation)) == {"auto", *KINDS}


def test_layouts_of_the_kinds() -> None:
    assert [(each.replicas, each.shards) for each in (layout_of(kind, 64) for kind in KINDS)] == [
        (64, 1),
        (8, 8),
        (1, 64),
    ]
    assert layout_of("hsdp", 64, shard_size=16).replicas == 4


@pytest.mark.parametrize(
    ("kind", "ranks", "words"), [("zero", 8, "no kind 'zero'"), ("hsdp", 12, "8 devices do not divide 12")]
)
def test_a_kind_that_does_not_exist_or_fit_the_devices_is_refused_by_name(kind: str, ranks: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        layout_of(kind, ranks)


NEEDED = {"ddp": 100 * GIB, "hsdp": 40 * GIB, "fsdp": 10 * GIB}


@pytest.mark.parametrize(
    ("available", "kind", "words"),
    [
        (None, "ddp", "unknown"),
        (200 * GIB, "ddp", "fits into the 200 GiB"),
        (80 * GIB, "hsdp", "ddp needs 100 GiB"),
        (24 * GIB, "fsdp", "ddp needs 100 GiB"),
        (8 * GIB, "fsdp", "no kind fits"),
        (105 * GIB, "hsdp", "fits"),  # a part of the memory stays free
    ],
)
def test_auto_takes_the_first_kind_that_fits_and_says_why(available: int | None, kind: str, words: str) -> None:
    found, reason = choose_kind(NEEDED, available)
    assert found == kind and words in reason


def plan(ranks: int, *, rows: int = 16, available: int | None = None, kind: str = "auto") -> RankPlan:
    sets = ["model.decoder.num_layers=2", f"training.parallel.kind={kind}"]
    recipe = load_recipe(arch="gpt", preset="xl", sets=sets).recipe
    model = build_model(recipe.model, device="meta")
    count = model.num_parameters()
    whole = MemoryEstimate(weights=4 * count, gradients=4 * count, optimizer=8 * count, activations=0)
    return plan_ranks(recipe, [model], ranks, whole=whole, rows=rows, available=available)


def test_auto_tries_replicas_only_where_groups_divide_the_devices() -> None:
    ddp, hsdp = (plan(16, kind=kind).memory.total for kind in ("ddp", "hsdp"))
    assert hsdp < ddp
    available = (hsdp + ddp) // 2
    assert [plan(ranks, available=available).layout.kind for ranks in (16, 8, 12)] == ["hsdp", "fsdp", "fsdp"]


def test_a_device_has_its_share_of_the_rows_rounded_up() -> None:
    assert [plan(16, rows=rows).rows for rows in (16, 17, 32, 33)] == [1, 2, 2, 3]


def note(ranks: int, **training: Any) -> str | None:
    return idle_note(
        sections.Training.model_validate({"batch_size": None, **training}), training.get("batch_size") or 6, ranks
    )


def test_devices_without_rows_are_named_with_the_same_step_for_all() -> None:
    assert note(8, batch_size=8, grad_accum=4) is None
    found = note(16, batch_size=1, grad_accum=64)
    assert found is not None and "15 of 16 devices have none" in found and "--batch-size 16 --grad-accum 4" in found
    tokens = note(8, batch_tokens=3000, grad_accum=4)
    assert tokens is not None and "--batch-tokens 4000 --grad-accum 3" in tokens
    small = note(8, batch_size=2, grad_accum=3)
    assert small is not None and "a step has 6 rows, fewer than devices" in small


def test_a_table_of_two_models_is_counted_once() -> None:
    model = Model.model_validate({"d_model": 32, "max_seq_len": 16, "vocab_size": 50, "heads": [{"kind": "masked_lm"}],
                                  "encoder": {"num_layers": 1, "num_heads": 4}})  # fmt: skip
    main, generator = build_model(model, device="meta"), build_model(model, device="meta")
    alone = Shards.of([main], layout_of("ddp", 2)).held
    tie_embeddings(generator, main)
    both = Shards.of([main, generator], layout_of("ddp", 2))
    assert both.held < 2 * alone and both.root.reused == 50 * 32
