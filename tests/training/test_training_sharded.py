"""`tformer train --devices N` with weights spread over the processes: the same run, resumed by any number of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.labelled_examples import sentences
from tests.training.pair_makers import RECIPE, english, german, metrics
from tests.training.test_training_devices import (
    TOLERANCE,
    _all_processes_end,
    assert_same_run,
    at_step,
    latest,
    records,
    stored,
    train,
)
from tformer.checkpoint import parts
from tformer.training.reporter import RunReporter

__all__ = ["_all_processes_end", "train"]  # fixtures

Cli = Callable[..., Any]
FSDP, DDP = (("--set", f"training.parallel.kind={kind}") for kind in ("fsdp", "ddp"))
ELECTRA = ("--arch", "electra", "--preset", "tiny", "--set", "model.d_model=16", "--set", "model.embedding.size=8",
           "--set", "generator.d_model=8", "--set", "generator.embedding.size=8")  # fmt: skip


def assert_same_state(run: str, other: str, *roles: str) -> None:
    """The same tensors of the latest checkpoints under the same names, within the tolerance."""
    for role in roles:
        own, others = (stored(run, role), stored(other, role))
        assert {key: (each.shape, each.dtype) for key, each in own.items()} == {
            key: (each.shape, each.dtype) for key, each in others.items()
        }
        assert max(float((own[key] - others[key]).abs().max()) for key in own) <= TOLERANCE


@pytest.mark.slow
def test_sharded_weights_make_the_run_and_the_files_of_one_process(train: Cli) -> None:
    """The quick twin is `test_training_saving.py::test_each_process_writes_whole_tensors_where_weights_are_spread`."""
    words = ("--set", "training.ema_decay=0.9", "--set", "optimizer.kind=muon", "--set", "optimizer.adam_lr=0.003")
    assert train("--out", "one", *words).code == 0
    assert train("--out", "two", *words, "--devices", 2, *FSDP).code == 0
    assert_same_run("two", "one")
    assert_same_state("two", "one", "optimizer", "ema")


@pytest.mark.slow
def test_sharded_layers_that_share_their_weights(train: Cli) -> None:
    shared = ("--set", "model.decoder.layer_groups=1")
    assert train("--out", "one", *shared).code == 0
    assert train("--out", "two", *shared, "--devices", 2, *FSDP).code == 0
    assert_same_run("two", "one")


@pytest.mark.slow
def test_a_table_that_layers_share_is_refused(train: Cli) -> None:
    """The quick twin is
    `cli/test_cli_workers.py::test_the_failure_of_a_worker_has_the_message_and_the_code_of_its_error`.
    """
    attention = ("--set", "model.decoder.attention={kind: disentangled, buckets: 8, max_distance: 30}")
    refused = train("--out", "two", *attention, "--devices", 2, *FSDP)
    assert refused.code == 2 and "blocks.0.self_attention.mechanism.table, and fsdp" in refused.err
    assert "--parallel ddp" in refused.err


@pytest.mark.slow
def test_sharded_models_translate_and_write_samples_as_in_one_process(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its quick twin is `test_training_saving.py::test_each_process_writes_whole_tensors_where_weights_are_spread`."""
    monkeypatch.chdir(tmp_path)
    texts = english(60)
    Path("pairs.en").write_text("\n".join(texts) + "\n")
    Path("pairs.de").write_text("\n".join(map(german, texts)) + "\n")
    Path("pairs.yaml").write_text(RECIPE.replace("dropout: 0.1", "dropout: 0"))
    common = ("--config", "pairs.yaml", "--source", "pairs.en", "--target", "pairs.de", "--max-steps", 12,
              "--set", "training.valid_beam_size=2", "--set", "training.ema_decay=0.9", "--set", "optimizer.eps=1e-5",
              "--set", "training.eval_every=6", "--set", "generation.max_new_tokens=8")  # fmt: skip
    for name, more in (("one", ()), ("two", ("--devices", 2, *FSDP))):
        outcome = cli("train", *common, "--out", name, *more)
        assert outcome.code == 0, outcome.err
    assert_same_run("two", "one")
    assert Path("two/samples.txt").read_text() == Path("one/samples.txt").read_text() != ""
    for found, expected in zip(metrics(Path("two")), metrics(Path("one")), strict=True):
        assert found["bleu"] == pytest.approx(expected["bleu"]) and found["is_best"] == expected["is_best"]


@pytest.mark.slow
def test_an_interrupted_validation_of_sharded_models_is_repeated_on_resume(
    train: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its quick twin is `test_training_saving.py::test_each_process_writes_whole_tensors_where_weights_are_spread`."""
    assert train("--out", "whole").code == 0
    with monkeypatch.context() as patch:
        during_validation(patch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train("--out", "run", "--devices", 2, *FSDP).code == 143
    assert not json.loads((latest("run") / "trainer.json").read_text())["validated"]
    assert train("--out", "run", "--resume", "--devices", 2, *FSDP).code == 0
    assert_same_run("run", "whole")


def during_validation(patch: pytest.MonkeyPatch, step: int, act: Callable[[], Any]) -> None:
    """Act in the first process when it begins to validate at this step."""
    measure = RunReporter._measure

    def disturbed(self: RunReporter) -> Any:
        if self.trainer.state.step == step:
            act()
        return measure(self)

    patch.setattr(RunReporter, "_measure", disturbed)


def interrupted(train: Cli, monkeypatch: pytest.MonkeyPatch, step: int, *words: object) -> None:
    with monkeypatch.context() as patch:
        at_step(patch, step, 0, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train("--out", "run", *words).code == 143


@pytest.mark.slow
def test_sharded_models_start_from_the_weights_of_another_run(cli: Cli, tmp_path: Path) -> None:
    """Its quick twin is `test_training_saving.py::test_each_process_writes_whole_tensors_where_weights_are_spread`."""
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\tlabel\n" + "".join(f"{text}\t{number % 5 + 0.5}\n"
                                              for number, (_, text) in enumerate(sentences(80, 6))))  # fmt: skip
    tiny = ("--arch", "bert", "--preset", "classify", "--data", rows, "--batch-size", 8, "--precision", "fp32",
            "--set", "model.d_model=16", "--set", "optimizer.eps=1e-5", "--set", "data.seq_len=16")  # fmt: skip
    still = [word for key in ("encoder.dropout", "encoder.attention_dropout", "embedding.dropout")
             for word in ("--set", f"model.{key}=0")]  # fmt: skip
    first = cli(
        "train", *tiny, *still, "--max-steps", 2, "--out", tmp_path / "first", "--set", "training.ema_decay=0.9"
    )
    assert first.code == 0, first.err
    words = ("--init-from", tmp_path / "first", "--objective", "regression", "--max-steps", 3,
             "--set", "model.heads=[{kind: regression, dropout: 0}]")  # fmt: skip
    for name, more in (("one", ()), ("two", ("--devices", 2, *FSDP))):
        outcome = cli("train", *tiny, *still, *words, "--out", tmp_path / name, *more)
        assert outcome.code == 0, outcome.err
        assert "new head: regression" in outcome.err
    assert_same_run(str(tmp_path / "two"), str(tmp_path / "one"))


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_any_number_of_processes_and_any_kind(
    train: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without biases of keys: see the next test. Every process writes files.
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    for kind in ("muon", "normuon", "adafactor"):
        words = ("--set", "training.ema_decay=0.9", "--set", f"optimizer.kind={kind}", "--set", "optimizer.lr=0.003",
                 "--set", "model.decoder.attention.qkv_bias=false")  # fmt: skip
        assert train("--out", f"whole-{kind}", *words).code == 0
        interrupted(train, monkeypatch, 3, *words, "--devices", 2, *FSDP)
        interrupted(train, monkeypatch, 5, "--resume", *words, "--devices", 4, *FSDP)
        interrupted(train, monkeypatch, 7, "--resume", *words)
        interrupted(train, monkeypatch, 9, "--resume", *words, "--devices", 3, *FSDP)
        assert train("--out", "run", "--resume", *words, "--devices", 2, *DDP).code == 0
        assert_same_run("run", f"whole-{kind}")
        assert_same_state("run", f"whole-{kind}", "optimizer", "ema")
        Path("run").rename(f"run-{kind}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_sharded_runs_differ_from_one_process_in_biases_of_keys_alone(train: Cli, kind: str) -> None:
    """A bias of keys adds one number to all scores of a query, which softmax does not see: its gradient is rounding."""
    words = ("--set", f"optimizer.kind={kind}", "--set", "optimizer.lr=0.003", "--set", "optimizer.eps=1e-30")
    assert train("--out", "one", *words).code == 0
    assert train("--out", "two", *words, "--devices", 2, *FSDP).code == 0
    weights, others = stored("two", "weights"), stored("one", "weights")
    moments = stored("one", "optimizer")
    largest = {"keys": 0.0, "others": 0.0}
    for name, weight in weights.items():
        difference = (weight - others[name]).abs()
        if name.endswith("qkv.bias"):
            _, keys, values = difference.chunk(3)
            largest["keys"] = max(largest["keys"], float(keys.max()))
            square = moments.get(f"{name}.second", moments.get(f"{name}.exp_avg_sq"))
            _, of_keys, of_values = square.sqrt().chunk(3)
            assert of_keys.max() < 1e-5 * of_values.max(), (of_keys, of_values)
            difference = torch.cat([difference.chunk(3)[0], values])
        largest["others"] = max(largest["others"], float(difference.max()))
    print(kind, largest)
    assert largest["others"] <= TOLERANCE
    for one, two in zip(records("one"), records("two"), strict=True):
        assert abs(one["loss"] - two["loss"]) <= TOLERANCE


@pytest.mark.slow
def test_the_same_number_of_sharded_processes_resumes_to_the_bit(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--devices", 2, *FSDP, "--set", "model.decoder.dropout=0.1", "--set", "model.decoder.layerdrop=0.3")
    assert train("--out", "whole", *words).code == 0
    interrupted(train, monkeypatch, 6, *words)
    assert train("--out", "run", "--resume", *words).code == 0
    for name in ("model", "optimizer"):
        own, others = ((latest(run) / f"{name}.safetensors").read_bytes() for run in ("run", "whole"))
        assert own == others, name


@pytest.mark.slow
def test_electra_is_validated_and_saved_with_its_generator_when_sharded(cli: Cli, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(text for _, text in sentences(300, 6)) + "\n")
    still = [f"{part}.{key}=0" for part in ("model.encoder", "generator.encoder")
             for key in ("dropout", "attention_dropout")]  # fmt: skip
    still += ["model.embedding.dropout=0", "generator.embedding.dropout=0", "training.log_every=2"]
    still += ["model.encoder.layerdrop={rate: 0.3, learned: true}", "training.eval_every=2", "data.seq_len=16"]
    words = [word for value in still for word in ("--set", value)]
    common = (*ELECTRA, *words, "--data", text, "--max-steps", 4, "--batch-size", 8, "--precision", "fp32")
    for name, more in (("one", ()), ("two", ("--devices", 2, *FSDP))):
        outcome = cli("train", *common, "--out", tmp_path / name, *more)
        assert outcome.code == 0, outcome.err
    assert_same_run(str(tmp_path / "two"), str(tmp_path / "one"))
    assert_same_state(str(tmp_path / "two"), str(tmp_path / "one"), "generator", "optimizer")


@pytest.mark.slow
def test_a_training_in_bf16_is_that_of_one_process_within_its_rounding(train: Cli) -> None:
    """Blocks are gathered in bf16, also for validation and samples.

    Its quick twin is `test_training_saving.py::test_each_process_writes_whole_tensors_where_weights_are_spread`.
    """
    half = ("--precision", "bf16", "--max-steps", 4)
    assert train(*half, "--out", "one").code == 0
    outcome = train(*half, *FSDP, "--devices", 2, "--out", "two")
    assert outcome.code == 0, outcome.err
    one, two = ([each["loss"] for each in records(run)] for run in ("one", "two"))
    assert two == pytest.approx(one, rel=2e-3) and len(one) > 1
