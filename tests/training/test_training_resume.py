"""A run that is interrupted anywhere and resumed ends as if nothing had happened: same metrics, same bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.conftest import TINY_RECIPE
from tests.quick import first_is_quick
from tests.training import stopping
from tests.training.pair_makers import records, weights_of
from tests.training.small_steps import FIRST_WORD, LAST_WORD, Stepper, small_recipe
from tests.training.stopping import Polls
from tformer.checkpoint.read import read_checkpoint
from tformer.cli.app import main
from tformer.data.shards.pair_tokens import PairExample
from tformer.loading import load, load_body
from tformer.model import Transformer
from tformer.nn.structured_dropout import DropHead, LayerDrop, TrainingStep
from tformer.support.errors import InputError
from tformer.training.loop import score
from tformer.training.options import TrainOptions

SUBWORDS: dict[str, Any] = {
    "data": {"subword_sampling": 0.3, "packing": "none"},
    "tokenizer": {"train": {"model": "byte-bpe", "vocab_size": 300}},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32 with dropout": {},
    "bf16": {"training": {"precision": "bf16"}},
    "accumulation": {"training": {"grad_accum": 3, "batch_size": 2}},
    "muon": {"optimizer": {"kind": "muon", "lr": 0.02, "adam_lr": 0.005}},
    "adafactor": {"optimizer": {"kind": "adafactor"}, "schedule": {"kind": "truncated_rsqrt", "warmup_steps": 3}},
    "ema": {"training": {"ema_decay": 0.9}},
    "sampled subwords": SUBWORDS,
    "plateau": {"schedule": {"kind": "plateau", "patience": 0, "factor": 0.5, "warmup_steps": 0}},
    "modern": {
        "model": {
            "decoder": {
                "positions": {"kind": "rope"},
                "norm": {"kind": "rmsnorm"},
                "attention": {"kind": "full", "qkv_bias": False, "out_bias": False, "qk_norm": True},
                "feedforward": {"activation": "relu2", "bias": False},
            },
            "tie": {"output": False},
            "heads": [{"kind": "lm", "softcap": 15.0}],
            "init": {"zero_out": True},
        },
        "optimizer": {"kind": "normuon", "lr": 0.02},
        "schedule": {"kind": "wsd"},
        "training": {"ema_decay": 0.9, "precision": "bf16", "grad_accum": 2},
    },
    "fp16": {"training": {"precision": "fp16"}},
    "checkpointed activations": {"training": {"activation_checkpointing": True}},
    "several sources": {"data": {"train": "TWO"}},
    "several sources, plateau": {
        "data": {"train": "TWO"},
        "schedule": {"kind": "plateau", "patience": 0, "factor": 0.5, "warmup_steps": 0},
    },
}


def train(recipe: Path, out: Path, *, stop_at: int | None = None, resume: bool = False) -> Polls:
    return stopping.train(TrainOptions(config=recipe, out=out, resume=resume), stop_at=stop_at)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        result[key] = merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return result


def write_recipe(tmp_path: Path, text_file: Path, changes: dict[str, Any]) -> Path:
    values = merged(yaml.safe_load(TINY_RECIPE), {"data": {"train": [{"path": str(text_file)}]}})
    if changes.get("data", {}).get("train") == "TWO":
        other = tmp_path / "other.txt"
        other.write_text(text_file.read_text()[::-1])
        changes = {"data": {"train": [{"path": str(text_file), "weight": 3}, {"path": str(other)}]}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(merged(values, changes)))
    return path


QUICK = ("modern", "several sources, plateau", "sampled subwords")
"""`modern` has NorMuon, averages, bf16 and accumulation together; the slow tests take each alone."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_interrupted_and_resumed_equals_uninterrupted(name: str, tmp_path: Path, text_file: Path) -> None:
    """Its quick twin is `test_a_run_that_is_cut_and_resumed_equals_one_that_was_not`."""
    recipe = write_recipe(tmp_path, text_file, VARIANTS[name])
    polls = train(recipe, tmp_path / "whole").count
    expected = records(tmp_path / "whole"), weights_of(tmp_path / "whole")
    assert len(expected[0]) == 6  # four training lines, two validations
    stops = range(2, polls, max(1, polls // 4))
    for number, stop_at in enumerate(stops):
        run = tmp_path / f"cut-{number}"
        train(recipe, run, stop_at=stop_at)
        train(recipe, run, stop_at=max(2, stop_at // 2), resume=True)
        train(recipe, run, resume=True)
        assert (records(run), weights_of(run)) == expected, f"stopped at poll {stop_at} of {polls}"


@pytest.mark.slow
def test_every_single_step_can_be_the_one_that_is_interrupted(tmp_path: Path, text_file: Path) -> None:
    recipe = write_recipe(tmp_path, text_file, {"training": {"sample_every": 0}})
    assert_resumes(recipe, tmp_path, stops=lambda polls: range(1, polls + 1))


def assert_resumes(recipe: Path, folder: Path, *, stops: Callable[[int], Iterable[int]]) -> None:
    """A run that is cut at any of these polls and resumed ends as one that was not."""
    polls = train(recipe, folder / "whole").count
    expected = records(folder / "whole"), weights_of(folder / "whole")
    for stop_at in stops(polls):
        run = folder / f"cut-{stop_at}"
        train(recipe, run, stop_at=stop_at)
        train(recipe, run, resume=True)
        assert (records(run), weights_of(run)) == expected, f"stopped at poll {stop_at} of {polls}"


def test_accumulated_micro_batches_give_the_loss_of_one_big_batch(tmp_path: Path, text_file: Path) -> None:
    no_dropout = {"model": {"decoder": {"dropout": 0.0, "attention_dropout": 0.0}, "embedding": {"dropout": 0.0}}}
    whole = write_recipe(tmp_path, text_file, merged(no_dropout, {"training": {"batch_size": 4}}))
    train(whole, tmp_path / "whole")
    parts = write_recipe(tmp_path, text_file, merged(no_dropout, {"training": {"batch_size": 1, "grad_accum": 4}}))
    train(parts, tmp_path / "parts")
    one, many = records(tmp_path / "whole"), records(tmp_path / "parts")
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in many], rel=2e-5)


def test_micro_batches_of_unequal_length_count_by_their_tokens() -> None:
    recipe = small_recipe("transformer/tiny", dropout=False)
    draw = np.random.default_rng(0)
    rows = [PairExample(*draw.integers(FIRST_WORD, LAST_WORD, (2, length))) for length in (24, 20, 3, 2)]
    found = []
    for parts in ([rows], [rows[:2], rows[2:]]):
        stepper = Stepper(recipe)
        stepper.step(*(stepper.objective.collate(part, rng=draw) for part in parts))
        found.append([float(value) for value in stepper.trainer._sums[-1][:2]])  # loss, gradient norm
    assert found[1] == pytest.approx(found[0], rel=2e-5)


def test_the_best_checkpoint_has_the_highest_accuracy_and_the_lowest_loss() -> None:
    training = small_recipe("gpt/tiny", dropout=False).training
    values = [{"loss": 2.0, "accuracy": 0.6}, {"loss": 1.0, "accuracy": 0.5}]
    for metric, best in (("accuracy", 0), ("loss", 1)):
        by_metric = training.model_copy(update={"best_metric": metric})
        scores = [score(each, by_metric) for each in values]  # lower is better
        assert scores.index(min(scores)) == best


def test_an_average_that_was_not_kept_so_far_begins_with_the_weights_of_the_resumed_step(
    tmp_path: Path, text_file: Path
) -> None:
    run = tmp_path / "run"
    train(write_recipe(tmp_path, text_file, {"training": {"ema_decay": None}}), run)
    before = read_checkpoint(run / "checkpoints" / "step-00000012").weights()
    others = ("--max-steps", "13", "--set", "training.ema_decay=0.9")
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--resume", "--out", str(run), *others])
    checkpoint = read_checkpoint(run / "checkpoints" / "step-00000013")
    after, averages = checkpoint.weights(), checkpoint.ema()
    assert averages
    for name, average in averages.items():
        assert torch.allclose(average, before[name] + (after[name] - before[name]) * 9 / 23, atol=1e-7), name


def test_a_resumed_run_refuses_other_data(tmp_path: Path, text_file: Path) -> None:
    recipe = write_recipe(tmp_path, text_file, {})
    train(recipe, tmp_path / "run", stop_at=12)
    text_file.write_text(text_file.read_text() + "more\n")
    with pytest.raises(InputError, match="data has changed"):
        train(recipe, tmp_path / "run", resume=True)


@pytest.mark.parametrize("kind", ["labelled", "pairs"])
def test_a_resumed_run_refuses_a_large_table_whose_middle_changed_and_whose_time_was_set_back(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of version 0.1.0, which recorded no samples of their data, go on."""
    from tformer.data.sources import files
    from tformer.recipe import load_recipe
    from tformer.tasks.base import TrainingData, TrainingStart
    from tformer.tasks.table import task_of
    from tformer.training.prepare import _check_fingerprint
    from tformer.workers.work import Work

    monkeypatch.setattr(files, "EDGE_BYTES", 100)
    path = tmp_path / "rows.tsv"
    content = "text\tother\n" + "".join(f"words {number}\t{'xy'[number % 2]}\n" for number in range(200))
    path.write_text(content)
    columns = {"text": "text", "label": "other"} if kind == "labelled" else {"source": "text", "target": "other"}
    arch, preset = ("bert", "classify") if kind == "labelled" else ("transformer", "tiny")
    flags = {"data.train": [{"path": str(path)}], "tokenizer.train.vocab_size": 300}
    flags |= {f"data.columns.{role}": name for role, name in columns.items()}
    recipe = load_recipe(arch=arch, preset=preset, flags=flags).recipe

    def data() -> TrainingData:
        return task_of(recipe).training_data(TrainingStart(recipe=recipe), Work(cache_dir=tmp_path / "cache"))[1]

    recorded, time = data().fingerprint, path.stat().st_mtime_ns
    of_version_1, plus, samples = recorded.partition("+")
    assert len(of_version_1) == len(samples) == 64 and plus
    for known in (recorded, of_version_1, ""):
        _check_fingerprint(data(), known)
    path.write_text(content.replace("words 100", "WORDS 100"))
    os.utime(path, ns=(time, time))
    assert data().fingerprint.partition("+")[2] != samples
    with pytest.raises(InputError, match="data has changed since this run began"):
        _check_fingerprint(data(), recorded)
    monkeypatch.setattr(files, "EDGE_BYTES", 1 << 20)
    assert len(data().fingerprint) == 64, "a small file is compared as a whole"


def test_resuming_a_directory_without_a_checkpoint_starts_it(tmp_path: Path, text_file: Path) -> None:
    recipe = write_recipe(tmp_path, text_file, {})
    train(recipe, tmp_path / "run", resume=True)
    assert records(tmp_path / "run")[-1]["step"] == 12


def test_training_does_not_touch_the_global_generators_of_evaluation(tmp_path: Path, text_file: Path) -> None:
    """Validating more often changes no training line: evaluation never draws from training's streams."""
    rare = write_recipe(tmp_path, text_file, {"training": {"eval_every": 12}})
    train(rare, tmp_path / "rare")
    often = write_recipe(tmp_path, text_file, {"training": {"eval_every": 1, "keep_last": 1}})
    train(often, tmp_path / "often")
    lines = [[line for line in records(tmp_path / name) if line["split"] == "train"] for name in ("rare", "often")]
    assert lines[0] == lines[1]
    assert weights_of(tmp_path / "rare") == weights_of(tmp_path / "often")
    assert torch.isfinite(torch.tensor(lines[0][-1]["loss"]))


# --- what changes with the step, is learned beside the weights, or is kept in buffers ---------------------------------

V_SHAPE = {"rate": 0.4, "start": 0.5}
LEARNED = {"rate": 0.3, "learned": True}
BATCHNORM = {"kind": "batchnorm"}

RESUMED: dict[str, dict[str, Any]] = {
    "drophead schedule": {"model": {"decoder": {"drophead": V_SHAPE}}},
    "learned layerdrop": {"model": {"decoder": {"layerdrop": LEARNED}}, "optimizer": {"lr": 0.05}},
    "learned layerdrop, muon": {"model": {"decoder": {"layerdrop": LEARNED}}, "optimizer": {"kind": "muon"}},
    "layerdrop, accumulation": {"model": {"decoder": {"layerdrop": 0.5}}, "training": {"grad_accum": 2}},
    "batchnorm": {"model": {"decoder": {"norm": BATCHNORM}}},
    "batchnorm, averages": {"model": {"decoder": {"norm": BATCHNORM}}, "training": {"ema_decay": 0.9}},
    "everything": {
        "model": {"decoder": {"norm": BATCHNORM, "layerdrop": LEARNED, "drophead": V_SHAPE}},
        "objectives": [{"kind": "causal_lm", "word_dropout": 0.2}],
        "training": {"ema_decay": 0.9, "precision": "bf16", "activation_checkpointing": True},
    },
}

QUICK_RESUMED = ("learned layerdrop, muon", "layerdrop, accumulation", "everything")


@first_is_quick(
    "name", [name if name in QUICK_RESUMED else pytest.param(name, marks=pytest.mark.slow) for name in RESUMED]
)
def test_a_run_that_is_cut_and_resumed_equals_one_that_was_not(name: str, tmp_path: Path, text_file: Path) -> None:
    recipe = write_recipe(tmp_path, text_file, RESUMED[name])
    assert_resumes(recipe, tmp_path, stops=lambda polls: (2 * polls // 5, 3 * polls // 4))


def test_every_listener_hears_of_each_step_once_before_its_forwards(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[TrainingStep] = []
    forwards: list[int] = []
    plain_begin, plain_forward = DropHead.begin_step, DropHead.forward

    def begin(self: DropHead, step: TrainingStep) -> None:
        told.append(step)
        plain_begin(self, step)

    def forward(self: DropHead, *args: Any) -> Any:
        forwards.append(len(told))
        return plain_forward(self, *args)

    monkeypatch.setattr(DropHead, "begin_step", begin)
    monkeypatch.setattr(DropHead, "forward", forward)
    recipe = write_recipe(tmp_path, text_file, {"training": {"grad_accum": 2}, "model": {"decoder": {"drophead": 0.1}}})
    train(recipe, tmp_path / "run")
    assert forwards
    assert [step.number for step in told] == [number for number in range(1, 13) for _ in range(2)]  # two layers
    assert {(step.max_steps, step.warmup_steps) for step in told} == {(12, 2)}
    assert len({step.seed for step in told}) == 12
    assert all(heard % 2 == 0 for heard in forwards)


def test_learned_rates_are_logged_average_to_theirs_and_part(tmp_path: Path, text_file: Path) -> None:
    changes = {
        "model": {"decoder": {"layerdrop": LEARNED, "num_layers": 3}},
        "optimizer": {"lr": 0.05},
        "training": {"max_steps": 30},
    }
    train(write_recipe(tmp_path, text_file, changes), tmp_path / "run")
    lines = [line for line in records(tmp_path / "run") if line["split"] == "train"]
    for line in lines:
        rates = line["layerdrop_rates"]["decoder"]
        assert len(rates) == 3 and sum(rates) / 3 == pytest.approx(0.3, abs=1e-3)
    assert len(set(lines[-1]["layerdrop_rates"]["decoder"])) == 3
    loaded = load(tmp_path / "run", which="latest").model
    assert loaded.decoder is not None
    assert loaded.decoder.layerdrop_rates() == pytest.approx(lines[-1]["layerdrop_rates"]["decoder"], abs=1e-6)


def test_fixed_rates_are_not_logged(tmp_path: Path, text_file: Path) -> None:
    train(write_recipe(tmp_path, text_file, {"model": {"decoder": {"layerdrop": 0.3}}}), tmp_path / "run")
    assert not any("layerdrop_rates" in line for line in records(tmp_path / "run"))


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_running_statistics_are_saved_and_loaded_beside_averaged_weights(
    ema_decay: float | None, tmp_path: Path, text_file: Path
) -> None:
    changes = {"model": {"decoder": {"norm": BATCHNORM}}, "training": {"ema_decay": ema_decay}}
    train(write_recipe(tmp_path, text_file, changes), tmp_path / "run")
    loaded = load(tmp_path / "run", which="latest")
    checkpoint = read_checkpoint(loaded.path)
    stored, averages = checkpoint.weights(), checkpoint.ema() or {}
    buffers = {name for name, _ in loaded.model.named_buffers() if "running" in name}
    assert len(buffers) == 2 * 5 and not buffers & averages.keys()  # mean and variance of five norms
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, averages.get(name, stored[name])), name
    assert any(stored[name].abs().sum() > 0 for name in buffers if name.endswith("running_mean"))
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert torch.equal(loaded.model(ids).logits, loaded.model(ids).logits)


def rates_of(model: Transformer) -> torch.Tensor:
    assert model.decoder is not None and isinstance(model.decoder.layerdrop, LayerDrop)
    assert model.decoder.layerdrop.logits is not None
    return model.decoder.layerdrop.logits.detach()


def test_learned_rates_never_stand_in_the_way_of_fine_tuning(tmp_path: Path, text_file: Path) -> None:
    for name, layerdrop in (("learned", LEARNED), ("plain", 0.0)):
        changes = {"model": {"decoder": {"layerdrop": layerdrop}}, "optimizer": {"lr": 0.05}}
        train(write_recipe(tmp_path, text_file, changes), tmp_path / name)
    learned, plain = (load(tmp_path / name, which="latest") for name in ("learned", "plain"))
    expected = rates_of(learned.model).clone()
    assert load_body(plain.model, read_checkpoint(learned.path), keep_heads={"lm"}) == []
    assert load_body(learned.model, read_checkpoint(plain.path), keep_heads={"lm"}) == []
    assert torch.equal(rates_of(learned.model), expected)
    with torch.no_grad():
        rates_of(learned.model).zero_()
    load_body(learned.model, read_checkpoint(learned.path), keep_heads={"lm"})
    assert torch.equal(rates_of(learned.model), expected) and expected.abs().sum() > 0
