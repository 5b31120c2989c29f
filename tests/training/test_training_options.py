"""Each option of training does what it says, by the command a user types."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

import tformer
from tests.quick import first_is_quick
from tformer.nn.classification_heads import HeadPooling
from tformer.optim.optimizers import OPTIMIZERS
from tformer.optim.schedules import SCHEDULES
from tformer.recipe.sections import Training
from tformer.support.device import has_bf16_instructions, resolve_precision
from tformer.training.options import TrainOptions
from tformer.training.parallel import Parallel
from tformer.training.prepare import COMPILED_MINUTES, COMPILED_STEPS, compiling_pays
from tformer.training.state import LossScaler

Cli = Callable[..., Any]


@pytest.fixture
def train(cli: Cli, tiny_recipe: Path, text_file: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`train(*flags)`: a run that must succeed; gives its metrics."""

    def run(*flags: str, data: Path | None = None) -> list[dict[str, Any]]:
        out = tmp_path / "run"
        outcome = cli("train", "--config", tiny_recipe, "--data", data or text_file, "--out", out, *flags)
        assert outcome.code == 0, outcome.err
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    return run


def losses(records: list[dict[str, Any]], split: str) -> list[float]:
    return [record["loss"] for record in records if record["split"] == split]


@first_is_quick("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_learns(precision: str, train: Callable[..., Any]) -> None:
    found = losses(train("--precision", precision, "--max-steps", "30"), "train")
    assert found[-1] < found[0]


@first_is_quick("kind", SCHEDULES, quick=2)
def test_every_schedule_trains(kind: str, train: Callable[..., Any]) -> None:
    points = ("--set", "schedule.points=[[4, 1.0], [12, 0.0]]") if kind == "timed" else ()
    rates = [each["lr"] for each in train("--set", f"schedule.kind={kind}", *points) if each["split"] == "train"]
    assert all(rate > 0 for rate in rates) or kind in ("linear", "wsd", "cosine")


@first_is_quick("kind", OPTIMIZERS)
def test_every_optimizer_learns(kind: str, train: Callable[..., Any]) -> None:
    found = losses(train("--set", f"optimizer.kind={kind}", "--max-steps", "30"), "train")
    assert found[-1] < found[0]


def test_the_option_of_pooling_names_every_kind() -> None:
    declared = get_type_hints(TrainOptions, include_extras=True)["pooling"].__metadata__[0]
    assert set(declared.metavar.split("|")) == set(get_args(HeadPooling))


PACKINGS, PADDINGS = ("concat", "documents", "none"), ("right", "left", "random")


@first_is_quick(
    ("packing", "padding"),
    [
        pytest.param(packing, padding, marks=() if row == column else pytest.mark.slow)
        for row, packing in enumerate(PACKINGS)
        for column, padding in enumerate(PADDINGS)
    ],
)
def test_packing_and_padding(packing: str, padding: str, train: Callable[..., Any], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "the cat sat on a mat " * (1 + n % 4)}) + "\n" for n in range(60)))
    flags = ("--set", f"data.packing={packing}", "--set", f"data.padding={padding}", "--set", "data.document_mask=true")
    rarely = ("--set", "training.eval_every=20", "--set", "training.save_every=40")
    found = losses(train(*flags, *rarely, "--max-steps", "40", data=rows), "valid")
    assert found[-1] < found[0]


def test_batches_by_tokens(train: Callable[..., Any]) -> None:
    records = train("--batch-tokens", "64", "--max-steps", "3")
    assert records[0]["tokens"] == 3 * 64


def test_batch_size_counts_sequences_and_accumulation_multiplies(train: Callable[..., Any]) -> None:
    records = train("--batch-size", "2", "--grad-accum", "3", "--max-steps", "3")
    assert records[0]["tokens"] == 3 * 2 * 3 * 16


def test_early_stopping(train: Callable[..., Any]) -> None:
    flags = ("--set", "training.early_stopping.patience=2", "--lr", "1e-30")  # no validation is better than the first
    records = train(*flags, "--set", "training.eval_every=2", "--max-steps", "100")
    assert records[-1]["step"] == 6  # the first validation is the best, two more are not


def test_label_smoothing_changes_the_losses(train: Callable[..., Any], tmp_path: Path) -> None:
    short = ("--lr", "1e-9", "--max-steps", "3")
    plain = losses(train(*short), "train")
    for kind in ("uniform", "off_target"):
        shutil.rmtree(tmp_path / "run")
        smoothed = train(
            *short, "--set", "objectives.0.label_smoothing=0.3", "--set", f"objectives.0.smoothing_kind={kind}",
            "--set", "model.init.std=0.5",
        )  # fmt: skip
        assert losses(smoothed, "train") != plain and losses(smoothed, "valid")[0] > 0


def test_first_step_loss_is_that_of_a_uniform_guess(train: Callable[..., Any]) -> None:
    records = train("--max-steps", "1", "--set", "training.log_every=1")
    vocabulary = 16  # the characters of the text and <unk>, counted below
    tokens = {"the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run"}
    vocabulary = len(set("".join(tokens)) | {" ", "\n"}) + 1
    assert losses(records, "train")[0] == pytest.approx(torch.tensor(float(vocabulary)).log().item(), rel=0.05)


def test_a_long_training_by_epochs_is_validated_about_twenty_times(train: Callable[..., Any], tmp_path: Path) -> None:
    train("--set", "training.max_epochs=1000", "--set", "training.eval_every=null", "--stop-at-step", "1")
    training = tformer.load(tmp_path / "run").recipe.training
    assert training.max_steps >= 1000 and training.eval_every == math.ceil(training.max_steps / 20)


def test_checkpoints_are_kept_as_asked(train: Callable[..., Any], tmp_path: Path) -> None:
    train("--set", "training.save_every=1", "--set", "training.keep_last=3", "--set", "training.eval_every=12")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000010",
        "step-00000011",
        "step-00000012",
    ]


def test_samples_are_written_at_each_validation(train: Callable[..., Any], tmp_path: Path) -> None:
    train()
    text = (tmp_path / "run" / "samples.txt").read_text()
    assert text.count("=== step ") == 2 and "=== step 12 ===\n" in text


def test_the_recipe_of_a_run_has_nothing_left_to_choose(train: Callable[..., Any], tmp_path: Path) -> None:
    import yaml

    train("--precision", "auto", "--max-steps", "1")
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["training"]["precision"] in ("fp32", "bf16")
    assert recipe["training"]["compile"] in ("on", "off")
    assert recipe["training"]["threads"] >= 1 and recipe["model"]["vocab_size"] > 1


@pytest.mark.parametrize(
    ("fp32", "bf16", "name", "reason"),
    [
        (41e9, 4.17e9, "fp32", "10 times as fast as bf16 on this machine"),
        (1.234e8, 1.234e8, "fp32", "as fast as bf16 on this machine"),
        (1e9, 1.5e9, "bf16", "1.5 times as fast as fp32 on this machine"),
    ],
)
def test_a_number_format_says_how_much_faster_it_is_here(
    fp32: float, bf16: float, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {torch.float32: fp32, torch.bfloat16: bf16}
    monkeypatch.setattr("tformer.support.device.matmul_flops_per_second", lambda dtype, *rest, **shape: rates[dtype])
    monkeypatch.setattr("tformer.support.device.has_bf16_instructions", lambda: False)
    chosen = resolve_precision("auto", torch.device("cpu"), rows=1, d_model=1, d_ff=1)
    assert (chosen.name, chosen.reason) == (name, reason)


def test_auto_precision_chooses_bf16_where_the_cpu_has_it() -> None:
    chosen = resolve_precision("auto", torch.device("cpu"), rows=256, d_model=64, d_ff=256)
    if has_bf16_instructions():
        assert (chosen.name, chosen.reason) == ("bf16", "this CPU has bf16 instructions")


def test_arch_without_a_preset_says_what_it_chose_and_why(cli: Cli, text_file: Path, tmp_path: Path) -> None:
    outcome = cli("train", "--arch", "gpt", "--data", text_file, "--dry-run", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "tiny" in outcome.err and "cpu" in outcome.err.lower()


@pytest.mark.parametrize(
    ("device", "values", "expected"),
    [
        ("cuda", {"max_steps": COMPILED_STEPS}, True),
        ("cuda", {"max_steps": COMPILED_STEPS - 1}, False),
        ("cuda", {"max_steps": 10**9, "minutes": COMPILED_MINUTES}, True),
        ("cuda", {"max_steps": 10**9, "minutes": COMPILED_MINUTES - 1}, False),
        ("cpu", {"max_steps": 10**9}, False),
    ],
)
def test_auto_compiles_long_trainings_on_a_gpu(device: str, values: dict[str, Any], expected: bool) -> None:
    training = Training(batch_size=8, eval_every=1, save_every=1, **values)
    assert compiling_pays(training, torch.device(device)) == expected


def test_a_gpu_with_bf16_instructions_trains_in_bf16_without_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    chosen = resolve_precision("auto", torch.device("cuda"), rows=1, d_model=1, d_ff=1)
    assert (chosen.name, chosen.reason) == ("bf16", "this GPU has bf16 instructions")


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler")
@pytest.mark.slow
def test_compiled_training_gives_the_same_losses(train: Callable[..., Any], tmp_path: Path) -> None:
    still = ("--set", "model.decoder.dropout=0", "--set", "model.embedding.dropout=0")
    still = (*still, "--set", "model.decoder.attention_dropout=0", "--set", "training.sample_every=0")
    eager = losses(train(*still), "train")
    shutil.rmtree(tmp_path / "run")
    assert losses(train(*still, "--compile", "on"), "train") == pytest.approx(eager, rel=1e-4)


def test_one_process_is_the_trivial_parallel() -> None:
    parallel, model = Parallel(), torch.nn.Linear(2, 2)
    assert (parallel.rank, parallel.world_size) == (0, 1)
    assert parallel.sum(torch.tensor(3.0)) == 3 and parallel.agree(True) and not parallel.agree(False)
    assert parallel.wrap(model)(lambda: model) is model


def test_the_loss_scaler_halves_after_overflow_and_grows_again() -> None:
    scaler = LossScaler(enabled=True)
    start = scaler.scale
    scaler.update(finite=False)
    assert scaler.scale == start / 2
    for _ in range(LossScaler.GROWTH_STEPS):
        scaler.update(finite=True)
    assert scaler.scale == start
    gradient = torch.ones(2) * scaler.scale
    scaler.unscale_([gradient])
    assert torch.equal(gradient, torch.ones(2))
