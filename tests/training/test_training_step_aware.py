"""What changes with the training step, what is learned beside the weights, and what is kept in buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_training_resume import final_hash, metrics, train, write_recipe
from tformer.checkpoint.read import read_checkpoint
from tformer.loading import load, load_body
from tformer.model import Transformer
from tformer.nn.structured_dropout import DropHead, LayerDrop, Step

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


QUICK = ("learned layerdrop, muon", "layerdrop, accumulation", "everything")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RESUMED]
)
def test_a_run_that_is_cut_and_resumed_equals_one_that_was_not(name: str, tmp_path: Path, text_file: Path) -> None:
    recipe = write_recipe(tmp_path, text_file, RESUMED[name])
    polls = train(recipe, tmp_path / "whole").count
    expected = metrics(tmp_path / "whole"), final_hash(tmp_path / "whole")
    for stop_at in (2 * polls // 5, 3 * polls // 4):
        run = tmp_path / f"cut-{stop_at}"
        train(recipe, run, stop_at=stop_at)
        train(recipe, run, resume=True)
        assert (metrics(run), final_hash(run)) == expected, f"stopped at poll {stop_at} of {polls}"


def test_every_listener_hears_of_each_step_once_before_its_forwards(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Step] = []
    forwards: list[int] = []
    plain_begin, plain_forward = DropHead.begin_step, DropHead.forward

    def begin(self: DropHead, step: Step) -> None:
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
    lines = [line for line in metrics(tmp_path / "run") if line["split"] == "train"]
    for line in lines:
        rates = line["layerdrop_rates"]["decoder"]
        assert len(rates) == 3 and sum(rates) / 3 == pytest.approx(0.3, abs=1e-3)
    assert len(set(lines[-1]["layerdrop_rates"]["decoder"])) == 3
    loaded = load(tmp_path / "run", which="latest").model
    assert loaded.decoder is not None
    assert loaded.decoder.layerdrop_rates() == pytest.approx(lines[-1]["layerdrop_rates"]["decoder"], abs=1e-6)


def test_fixed_rates_are_not_logged(tmp_path: Path, text_file: Path) -> None:
    train(write_recipe(tmp_path, text_file, {"model": {"decoder": {"layerdrop": 0.3}}}), tmp_path / "run")
    assert not any("layerdrop_rates" in line for line in metrics(tmp_path / "run"))


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
