"""One, two and four processes: the same losses, weights and counts, and ranks that are equal to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent

from tests.quick import first_is_quick
from tests.test_presets_build import read
from tests.training.small_steps import PRESETS
from tests.training.worlds import Training, in_processes, largest_difference, recipe_of, samples_of
from tformer.evaluation.predict import tally_objective
from tformer.optim.shards import local
from tformer.recipe.load import load_recipe
from tformer.recipe.sections import Parallelism
from tformer.support.device import DTYPES
from tformer.support.errors import InputError, OtherProcessError
from tformer.training import assemble
from tformer.training.parallel import DataParallel, Parallel, parallel_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its processes")

STEPS = 4
TOLERANCE = 1.0e-5

LAYERDROP, LEARNED = {"layerdrop": 0.4}, {"layerdrop": {"rate": 0.4, "learned": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{preset: (preset, {}) for preset in PRESETS},
    "next sentence": ("bert/tiny", {"objectives": [{"kind": "masked_lm"}, {"kind": "next_sentence"}]}),
    "word dropout, swapped pairs": (
        "bert/classify",
        {"objectives": [{"kind": "classification", "word_dropout": 0.2, "swap_pairs": True}]},
    ),
    "distillation": ("gpt/small", {}),
    "distillation of pairs": ("transformer/tiny", {}),
    "distillation of masked LM": ("bert/tiny", {}),
    "distillation of images": ("vit/tiny", {}),
    "random padding": ("gpt/small", {"data": {"padding": "random"}}),
    "left padding": ("gpt/small", {"data": {"padding": "left"}}),
    "pairs by tokens": ("transformer/tiny", {"training": {"batch_size": None, "batch_tokens": 40}}),
    "a micro-batch of one row": ("gpt/small", {"training": {"batch_size": 1, "grad_accum": 5}}),
    "no accumulation": ("gpt/small", {"training": {"grad_accum": 1}}),
    "no clipping": ("gpt/small", {"optimizer": {"clip_grad_norm": None}}),
    "averaged weights": ("gpt/small", {"training": {"ema_decay": 0.9}}),
    "muon": ("gpt/small", {"optimizer": {"kind": "muon"}}),
    "normuon": ("gpt/small", {"optimizer": {"kind": "normuon"}}),
    "n-grams": ("gpt/small", {"model": {"embedding": {"ngram": 3, "ngram_rows": 50}}}),
    "adafactor": ("t5/tiny", {"optimizer": {"kind": "adafactor"}}),
    "adam": ("gpt/small", {"optimizer": {"kind": "adam"}}),
    "layerdrop": ("bert/tiny", {"model": {"encoder": LAYERDROP}}),
    "layerdrop of images": ("vit/tiny", {"model": {"encoder": LAYERDROP}}),
    "layerdrop of both sides": ("bart/tiny", {"model": {"encoder": LAYERDROP, "decoder": LAYERDROP}}),
    "learned layerdrop": ("gpt/small", {"model": {"decoder": LEARNED}}),
    "drophead": ("llama/tiny", {"model": {"decoder": {"drophead": 0.4}}}),
    "layerdrop, drophead, electra": ("electra/tiny", {"model": {"encoder": {**LAYERDROP, "drophead": 0.4}}}),
    "drophead, checkpointing": (
        "gpt/small",
        {"model": {"decoder": {"drophead": 0.4}}, "training": {"activation_checkpointing": True}},
    ),
    "checkpointing": ("bert/tiny", {"training": {"activation_checkpointing": True}}),
    "untied": ("gpt/small", {"model": {"tie": {"output": False}}}),
    "frozen groups": ("gpt/small", {"optimizer": {"groups": [{"match": "decoder.blocks.0.*", "frozen": True}]}}),
    "convolutions, attention pooling, mixed images": (
        "vit/tiny",
        {
            "model": {
                "patches": {"stem": "convolutions", "stem_depth": 1},
                "heads": [{"kind": "classifier", "pooling": "attention"}],
            },
            "objectives": [{"kind": "classification", "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}],
        },
    ),
    "shifted patches": ("vit/tiny", {"model": {"patches": {"stem": "shifted"}}}),
    "convolution over tokens": (
        "bert/classify",
        {
            "model": {"embedding": {"convolution": 3}, "heads": [{"kind": "classifier", "pooling": "attention"}]},
        },
    ),
    "a head that is not trained": ("bert/classify", {"model": {"heads": [{"kind": "classifier"}, {"kind": "pooler"}]}}),
}


OWN = {f"{preset}, its epsilon": (preset, {"optimizer": {"eps": read(preset).optimizer.eps}}) for preset in PRESETS}
"""With the epsilon of the presets, which may magnify the rounding of gradients to other weights, but not losses."""


def compared(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Losses, terms, weights and averages; gradient norms relative to themselves."""
    sums = found["sums"].clone()
    sums[:, 1] = sums[:, 1].log()
    return {name: value for name, value in found.items() if name != "moved"} | {"sums": sums}


KINDS = {
    "ddp": Parallelism(kind="ddp"),
    "fsdp": Parallelism(kind="fsdp"),
    "fsdp, weights kept": Parallelism(kind="fsdp", reshard=False),
}


def training_of(case: str, parallel: Parallel) -> Training:
    """The training of a case; a student learns from a model of the same shape with other weights."""
    recipe = recipe_of(*(CASES | OWN)[case])
    if not case.startswith("distillation"):
        return Training(recipe, parallel)
    other = recipe.model_copy(update={"seed": recipe.seed + 1})
    teacher = assemble.make_models(other, torch.device("cpu"), dtype=torch.float32).main
    return Training(recipe, parallel, teacher=teacher)


def trained(names: list[str], options: Parallelism | None = None) -> Callable[[Parallel], dict[str, Tensor]]:
    """The results of several cases in one group of processes (None: in one process), by `case|name`."""

    def work(parallel: Parallel) -> dict[str, Tensor]:
        if options is not None:
            parallel = parallel_of(options)
        results = {name: training_of(name, parallel).run(STEPS) for name in names}
        return {f"{case}|{name}": value for case, found in results.items() for name, value in found.items()}

    return work


def of_case(found: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    return {name.split("|")[1]: value for name, value in found.items() if name.startswith(f"{case}|")}


def equalities(
    names: list[str],
    kind: str,
    world_size: int,
    folder: Path,
    of: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = compared,
) -> dict[str, float]:
    """The largest difference between one process and several, by case. `of`: what is compared of the results."""
    one = trained(names)(Parallel())
    many = in_processes(world_size, trained(names, KINDS[kind]), folder / str(world_size))
    differences = {}
    for case in names:
        expected, *found = (of_case(each, case) for each in (one, *many))
        for other in found[1:]:
            assert all(torch.equal(found[0][name], other[name]) for name in other), f"{case}: ranks differ"
        assert expected["moved"] > 20 * TOLERANCE, f"{case}: nothing was trained"
        assert torch.equal(expected["tokens"], found[0]["tokens"]), f"{case}: tokens"
        differences[case] = largest_difference(of(expected), of(found[0]))
    return differences


QUICK = [
    "gpt/tiny",
    "bert/classify",
    "convolutions, attention pooling, mixed images",
    "electra/tiny",
    "layerdrop, drophead, electra",
    "drophead, checkpointing",
]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.slow
def test_two_processes_train_as_one(kind: str, tmp_path: Path) -> None:
    """The quick twin is `test_training_devices.py::test_two_processes_make_the_run_of_one`."""
    differences = equalities(QUICK, kind, 2, tmp_path)
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)])
def test_every_family_and_option_trains_as_in_one_process(kind: str, world_size: int, tmp_path: Path) -> None:
    differences = equalities(list(CASES), kind, world_size, tmp_path)
    print(f"{kind}, {world_size} processes: {differences}")
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_losses_are_those_of_one_process_with_the_epsilon_of_the_presets(kind: str, tmp_path: Path) -> None:
    losses = equalities(list(OWN), kind, 2, tmp_path, of=lambda found: {"loss": found["sums"][:, 0]})
    print(f"{kind}, 2 processes, losses: {losses}")
    assert max(losses.values()) < TOLERANCE, losses


@pytest.mark.slow
def test_weights_may_stay_after_a_forward_pass(tmp_path: Path) -> None:
    differences = equalities(QUICK, "fsdp, weights kept", 2, tmp_path)
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.slow
def test_half_precision_and_its_loss_scale_are_those_of_one_process(precision: str, tmp_path: Path) -> None:
    """The quick twin is `test_training_options.py::test_every_precision_learns`."""

    def work(parallel: Parallel, kind: str = "fsdp") -> dict[str, Tensor]:
        if parallel.world_size > 1:
            parallel = parallel_of(KINDS[kind], compute_dtype=DTYPES[precision])
        training = Training(recipe_of("gpt/small"), parallel, precision=precision)
        return training.run(STEPS) | {"scale": torch.tensor(training.trainer.scaler.scale)}

    expected = work(Parallel())
    for kind in ("ddp", "fsdp"):
        found = in_processes(2, partial(work, kind=kind), tmp_path / kind)
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
        assert torch.equal(found[0]["scale"], expected["scale"])
        # 8 or 11 bits: a product of other rows may round each number the other way.
        assert torch.allclose(found[0]["sums"], expected["sums"], rtol=2e-2)


@pytest.mark.slow
def test_a_process_holds_its_rows_of_models_that_are_divided_and_the_numbers_are_those_of_one(tmp_path: Path) -> None:
    """Its quick twin is `test_two_processes_train_as_one`."""

    def work(parallel: Parallel) -> dict[str, Tensor]:
        parallel = parallel_of(KINDS["fsdp"])
        found = {}
        for preset in ("gpt/small", "electra/tiny"):
            recipe, rows = recipe_of(preset), parallel.own_rows()
            models = assemble.make_models(recipe, torch.device("cpu"), dtype=torch.float32, rows=rows)
            assert all(parameter.is_meta for parameter in models.parameters())
            shards = parallel.shard(models, rows, torch.device("cpu"))
            assert shards is not None
            memory = {local(each).untyped_storage().data_ptr(): local(each) for each in models.parameters()}
            held = sum(each.untyped_storage().nbytes() for each in memory.values())
            found[f"{preset}|held"] = torch.tensor(held)
            for name, parameter in models.named_parameters():
                found[f"{preset}|{name}"] = shards.complete(local(parameter), parameter.shape)
        return found

    for found in in_processes(4, work, tmp_path / "world"):
        for preset in ("gpt/small", "electra/tiny"):
            whole = assemble.make_models(recipe_of(preset), torch.device("cpu"), dtype=torch.float32)
            expected = {name: each.detach() for name, each in whole.named_parameters()}
            own = of_case(found, preset)
            # One row of each tensor more than a fourth at most.
            share = sum(-(-len(each) // 4) * each[0].numel() for each in expected.values()) * 4
            assert int(own.pop("held")) <= share < 0.27 * sum(each.nbytes for each in expected.values())
            assert own.keys() == expected.keys()
            assert all(torch.equal(own[name], expected[name]) for name in own)


HALF = ["gpt/small", "llama/tiny", "bert/tiny", "t5/tiny"]


def losses_in(precision: str, name: str, parallel: Parallel) -> Tensor:
    """Losses of steps in this number format."""
    return Training(recipe_of(name), parallel, precision=precision).run(2 * STEPS)["sums"][:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_several_processes_differ_in_bf16_less_than_bf16_from_fp32(kind: str, tmp_path: Path) -> None:
    """FSDP2 gathers blocks in bf16: norms and biases in them are rounded too."""

    def work(parallel: Parallel) -> dict[str, Tensor]:
        several = parallel_of(KINDS[kind], compute_dtype=torch.bfloat16)
        return {name: losses_in("bf16", name, several) for name in HALF}

    found = in_processes(2, work, tmp_path / kind)[0]
    for name in HALF:
        full, half = (losses_in(precision, name, Parallel()) for precision in ("fp32", "bf16"))
        rounding, difference = float((half - full).abs().max()), float((found[name] - half).abs().max())
        print(f"{kind}, {name}: {difference:.1e} from one process in bf16, which is {rounding:.1e} from fp32")
        assert difference < 2 * rounding


@first_is_quick("kind", ["ddp", "fsdp"])
def test_gradients_may_be_added_up_in_bf16(kind: str, tmp_path: Path) -> None:
    def work(parallel: Parallel) -> dict[str, Tensor]:
        exact, rounded = (
            Training(recipe_of("gpt/small"), parallel_of(Parallelism(kind=kind, reduce=reduce))).run(STEPS)
            for reduce in ("fp32", "bf16")
        )
        return {"exact": exact["sums"], **{name: value for name, value in rounded.items() if name != "moved"}}

    one, other = in_processes(2, work, tmp_path / "world")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["sums"], one["exact"])
    assert torch.allclose(one["sums"], one["exact"], rtol=2**-8)


def test_muon_trains_the_stacks_and_the_residual_convolutions_of_a_stem() -> None:
    changes = {"data": {"labels": ["dark", "light"]}, "model": {"patches": {"stem_depth": 1}}}
    recipe = recipe_of("vit/cifar", changes)
    models = assemble.make_models(recipe, torch.device("cpu"), dtype=torch.float32)
    slots = assemble.make_optimizer(recipe, models, torch.device("cpu")).state_by_name()
    muon = {name.removesuffix(".momentum") for name in slots if name.endswith(".momentum")}
    assert muon == {
        name
        for name, weight in models.main.named_parameters()
        if name.startswith(("encoder.blocks.", "embedding.residuals.")) and weight.ndim == 2
    }
    assert "embedding.residuals.0" in muon and "embedding.kernels.0.exp_avg" in slots


def test_muon_iterates_in_the_number_format_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for has_products, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(assemble, "has_bf16_instructions", lambda has=has_products: has)
        assert assemble.muon_dtype(torch.bfloat16, cpu) == expected
        assert assemble.muon_dtype(torch.float32, cpu) == torch.float32
    assert assemble.muon_dtype(torch.float32, torch.device("cuda")) == torch.float32


def validation_loss(training: Training) -> dict[str, float]:
    """What an evaluation of the models in training measures, in inference mode as every validation."""
    data, main = samples_of(training.recipe), training.models.main
    training.models.eval()
    return tally_objective(main, training.trainer.objective, data, batch_size=4).metrics()


@pytest.mark.slow
def test_process_0_validates_spread_models_with_one_block_gathered_at_a_time(tmp_path: Path) -> None:
    """Its quick twin is `test_an_error_of_a_validation_leaves_spread_models_as_they_were`."""
    for kind in ("fsdp", "fsdp, weights kept"):
        folder = tmp_path / kind
        folder.mkdir()

        def work(parallel: Parallel, kind: str = kind) -> dict[str, Tensor]:
            several = parallel.world_size > 1
            parallel = parallel_of(KINDS[kind]) if several else parallel
            training, gathered = Training(recipe_of("gpt/small"), parallel), [0]
            blocks = training.models.blocks

            def count(*_: Any) -> None:
                whole = [not hasattr(each.feedforward.up.weight, "to_local") for each in blocks]
                gathered[0] = max(gathered[0], sum(whole))

            for block in blocks:
                block.feedforward.register_forward_pre_hook(count)
            # The first forward pass of all is one in inference mode, and training goes on after each.
            values = [parallel.in_first(training.models, partial(validation_loss, training))]
            training.run(2)
            values.append(parallel.in_first(training.models, partial(validation_loss, training)))
            assert all(hasattr(each, "to_local") for each in training.models.parameters()) or not several
            losses = [-1.0 if each is None else each["loss"] for each in values]
            return training.run(1) | {"losses": torch.tensor(losses), "gathered": torch.tensor(gathered)}

        expected, found = work(Parallel()), in_processes(2, work, folder / "world")
        assert torch.allclose(found[0]["losses"], expected["losses"], atol=TOLERANCE)
        assert found[1]["losses"].tolist() == [-1.0, -1.0]
        assert found[0].pop("gathered").tolist() == ([1] if kind == "fsdp" else [2])
        del expected["gathered"]
        assert largest_difference(compared(expected), compared(found[0])) < TOLERANCE


def test_an_error_of_a_validation_leaves_spread_models_as_they_were(tmp_path: Path) -> None:
    def work(parallel: Parallel) -> dict[str, Tensor]:
        parallel = parallel_of(KINDS["fsdp"])
        training = Training(recipe_of("gpt/small"), parallel)

        def failing() -> None:
            validation_loss(training)
            raise InputError("the file has gone")

        with pytest.raises(InputError) if parallel.rank == 0 else nullcontext():
            parallel.in_first(training.models, failing)
        return training.run(1)

    expected = Training(recipe_of("gpt/small"), Parallel()).run(1)
    assert largest_difference(compared(expected), compared(in_processes(2, work, tmp_path / "world")[0])) < TOLERANCE


def test_processes_add_and_agree(tmp_path: Path) -> None:
    def work(parallel: Parallel) -> dict[str, Tensor]:
        assert isinstance(parallel_of(Parallelism()), DataParallel)
        flags = [parallel.agree(parallel.rank == 1), parallel.agree(False)]
        own = torch.tensor([1.5, float(parallel.rank)])
        return {"flags": torch.tensor(flags), "sum": parallel.sum(own), "own": own}

    for found in in_processes(2, work, tmp_path / "world"):
        assert found["flags"].tolist() == [True, False]
        assert found["sum"].tolist() == [3.0, 1.0] and found["own"][0] == 1.5


def test_without_a_process_group_there_is_one_process() -> None:
    assert type(parallel_of(Parallelism(kind="fsdp"))) is Parallel


def test_a_failed_process_ends_the_others(tmp_path: Path) -> None:
    def work(parallel: Parallel) -> dict[str, Tensor]:
        assert parallel.rank == 0, "rank 1 fails"
        return {"never": parallel.sum(torch.zeros(1))}

    with pytest.raises(AssertionError, match=r"rank 1 fails|Connection|closed"):
        in_processes(2, work, tmp_path / "world", seconds=20.0)


def test_damaged_data_of_one_process_ends_all_before_the_same_step(tmp_path: Path) -> None:
    def work(parallel: Parallel) -> dict[str, Tensor]:
        training = Training(recipe_of("gpt/small"), parallel)
        training.run(2)

        def damaged() -> None:
            raise InputError("windows.bin is damaged")

        if parallel.rank == 1:
            training.trainer.batches.next = damaged
        with pytest.raises(InputError) as caught:
            training.run(1)
        expected = "windows.bin is damaged" if parallel.rank == 1 else "another process"
        assert expected in caught.value.message
        assert isinstance(caught.value, OtherProcessError) == (parallel.rank == 0)
        return {"step": torch.tensor(training.trainer.state.step)}

    assert [int(found["step"]) for found in in_processes(2, work, tmp_path / "world")] == [2, 2]


def test_batchnorm_is_refused_for_several_processes() -> None:
    recipe = recipe_of("gpt/small", {"model": {"decoder": {"norm": {"kind": "batchnorm", "place": "pre"}}}})
    models = assemble.make_models(recipe, torch.device("cpu"), dtype=torch.float32)
    assemble.require_separate_rows(models, 1)
    with pytest.raises(InputError, match=r"batchnorm .* 2 processes"):
        assemble.require_separate_rows(models, 2)


# --- a profile of DDP: gradients are exchanged while the backward pass computes others -------------------------------

ROWS, TOKENS = 8, 128
BACKWARD, EXCHANGE = "autograd::engine::evaluate_function", "gloo:all_reduce"


def exchange_and_overlap(events: list[FunctionEvent]) -> list[float]:
    """Microseconds in which a gradient was on its way, and those of them in which the backward pass was computing.

    The backward pass ends with its last operation: after it, DDP only waits.
    """
    ends = [event.time_range.end for event in events if event.name.startswith(BACKWARD)]
    exchanges = sorted((e.time_range.start, e.time_range.end) for e in events if e.name == EXCHANGE)
    total = overlap = last = 0.0
    for start, end in exchanges:
        begin = max(start, last)
        total += max(0.0, end - begin)
        overlap += max(0.0, min(end, max(ends)) - begin)
        last = max(last, end)
    return [total, overlap, max(ends) - min(start for start, _ in exchanges)]


def profiled(parallel: Parallel) -> dict[str, Tensor]:
    """[steps, 3] of steps of gpt/char: see `exchange_and_overlap`; the third is the time from the first exchange."""
    recipe = load_recipe(arch="gpt", preset="char").recipe
    section = recipe.model.model_copy(update={"vocab_size": 64})
    models = assemble.make_models(
        recipe.model_copy(update={"model": section}), torch.device("cpu"), dtype=torch.float32
    )
    run = parallel.wrap(models)
    ids = torch.randint(64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(parallel.rank))
    found = []
    for _ in range(STEPS):  # DDP orders its buckets in the first
        loss = run(lambda: models.main(input_ids=ids).loss_terms("lm", ids).loss)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
        models.zero_grad()
        found.append(exchange_and_overlap(list(profile.events())))
    return {"times": torch.tensor(found[1:])}


@pytest.mark.slow
def test_gradients_are_exchanged_while_the_backward_pass_goes_on(tmp_path: Path) -> None:
    for rank, found in enumerate(in_processes(2, profiled, tmp_path / "world")):
        times = found["times"]
        total, overlap, after_first = (times / 1000).tolist()[int(times[:, 1].argmax())]
        print(f"rank {rank}: {overlap:.0f} of {total:.0f} ms of exchange while the backward pass computes,")
        print(f"which goes on for {after_first:.0f} ms after the first gradients were sent")
        assert after_first > 0 and overlap > 0.25 * total
