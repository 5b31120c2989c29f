"""`train --dry-run`: memory of all trained models, on one of several devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quick import first_is_quick
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.resolve import resolve_checkpoint
from tformer.training.assemble import make_models, make_optimizer
from tformer.workflows.inspect.report import report_on
from tformer.workflows.inspect.subject import InspectRequest, read_subject

Cli = Callable[..., Any]


@pytest.fixture
def report(cli: Cli, text_file: Path) -> Callable[..., dict[str, Any]]:
    """`report("--arch", "gpt", ...)`: the JSON of a dry run on a few words."""

    def run(*words: object) -> dict[str, Any]:
        outcome = cli("train", "--dry-run", "--json", "--data", text_file, *words)
        assert outcome.code == 0, outcome.err
        return dict(json.loads(outcome.out))

    return run


def test_what_the_process_holds_already_is_part_of_the_memory(report: Callable[..., Any], tiny_recipe: Path) -> None:
    memory = report("--config", tiny_recipe, "--device", "cpu")["memory"]
    assert memory["process_bytes"] > 50e6  # Python and PyTorch
    assert memory["total_bytes"] == sum(size for name, size in memory.items() if name != "total_bytes")


def test_rows_are_counted_as_long_as_the_longest_of_the_data(cli: Cli, tmp_path: Path) -> None:
    """And not as long as the recipe would allow."""

    def activations(words: int, *flags: object) -> int:
        rows = "".join(f"{'go ' * words}{number}\t{number % 2}\n" for number in range(40))
        (tmp_path / "rows.tsv").write_text("text\tlabel\n" + rows)
        command = ("train", "--dry-run", "--json", "--arch", "bert", "--preset", "classify", "--device", "cpu")
        sizes = ("--set", "tokenizer.train={model: char, template: bert}", *flags)
        outcome = cli(*command, "--data", tmp_path / "rows.tsv", *sizes)
        assert outcome.code == 0, outcome.err
        return int(json.loads(outcome.out)["memory"]["activations_bytes"])

    few, same, many = activations(2), activations(2, "--set", "data.seq_len=64"), activations(8)
    assert few == same and many > 1.5 * few


def test_memory_is_that_of_one_of_several_devices(report: Callable[..., Any], tiny_recipe: Path) -> None:
    one, two = (report("--config", tiny_recipe, *flags) for flags in ((), ("--devices", 2)))
    assert {key: two[key] for key in two if key != "memory"} == {key: one[key] for key in one if key != "memory"}
    assert two["memory"]["weights_bytes"] == one["memory"]["weights_bytes"]
    assert two["memory"]["activations_bytes"] < one["memory"]["activations_bytes"]


def test_a_dry_run_of_fsdp_says_that_the_memory_is_of_ddp(cli: Cli, text_file: Path, tiny_recipe: Path) -> None:
    words = ("train", "--dry-run", "--config", tiny_recipe, "--data", text_file, "--parallel", "fsdp")
    said = "memory: estimated with ddp"
    assert said in cli(*words, "--devices", 2).err
    assert said not in cli(*words).err and said not in cli(*words[:-2], "--devices", 2).err


def test_a_norm_over_rows_is_refused_for_several_devices(cli: Cli, text_file: Path, tiny_recipe: Path) -> None:
    flags = ("--config", tiny_recipe, "--data", text_file, "--set", "model.decoder.norm.kind=batchnorm")
    assert cli("train", "--dry-run", *flags).code == 0
    outcome = cli("train", "--dry-run", *flags, "--devices", 2)
    assert outcome.code == 2 and "batchnorm" in outcome.err


def test_memory_counts_the_generator_of_electra(report: Callable[..., Any]) -> None:
    flags = ("--arch", "electra", "--preset", "tiny", "--set", "tokenizer.train.vocab_size=60")
    found = report(*flags)
    assert found["memory"]["weights_bytes"] > 4 * found["parameters"]


@first_is_quick("kind", ["adamw", "adam", "muon", "normuon"])
@first_is_quick("preset", ["gpt/tiny", "t5/tiny", "electra/tiny", "bart/mini"])
def test_memory_of_the_optimizer_is_that_of_its_state(preset: str, kind: str) -> None:
    """What Muon leaves to AdamW, embeddings and heads, has two moments."""
    arch, name = preset.split("/")
    sets = [f"optimizer.kind={kind}", "optimizer.adam_lr=null"]
    subject = read_subject(InspectRequest(arch=arch, preset=name, sets=sets))
    models = make_models(subject.recipe, torch.device("cpu"), dtype=torch.float32)
    optimizer = make_optimizer(subject.recipe, models, torch.device("cpu"))
    for parameter in models.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = sum(tensor.nbytes for tensor in optimizer.state_by_name().values())
    assert report_on(subject).memory.optimizer == pytest.approx(state, rel=0.01)


@pytest.mark.parametrize(("form", "matrices", "table"), [("fp32", 4, 4), ("bf16", 2, 2), ("int8", 1, 2)])
def test_a_rounded_base_counts_as_it_is_held_and_has_no_gradients(
    form: str, matrices: int, table: int, cli: Cli, report: Callable[..., Any], tiny_recipe: Path, text_file: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    base = tmp_path / "base"
    assert cli("train", "--config", tiny_recipe, "--data", text_file, "--max-steps", 1, "--out", base).code == 0
    whole, found = (report("--init-from", base, *more) for more in ((), ("--lora", 2, "--lora-weights", form)))
    adapters, d_model, d_ff = found["parameters"] - whole["parameters"], 16, 32
    stacks = 2 * (4 * d_model**2 + 2 * d_model * d_ff)
    tokens = read_checkpoint(resolve_checkpoint(base)).specs("weights")["embedding.weight"].shape[0] * d_model
    others = whole["parameters"] - stacks - tokens
    memory = found["memory"]
    assert memory["weights_bytes"] == matrices * stacks + table * tokens + 4 * (others + adapters)
    assert memory["gradients_bytes"] == 4 * adapters and memory["optimizer_bytes"] == 8 * adapters
    assert memory["activations_bytes"] == whole["memory"]["activations_bytes"] - 4 * tokens  # no gradient of the table
