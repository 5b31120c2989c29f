"""Averaging: a mean in the mathematical sense, of what is the same model, whole on disk or not there at all."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.averages import RECIPE, TARGET_TOKENIZER, keep, random_weights
from tests.checkpoint.conftest import TOKENIZER, tree
from tformer.checkpoint.average import RunningMean, average_checkpoints
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.resolve import last_checkpoints
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.tensor_files import read_specs
from tformer.support.errors import InputError
from tformer.workers.work import Work


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("copies", [1, 2, 3, 7, 20])
def test_the_average_of_copies_is_the_identity(dtype: torch.dtype, copies: int) -> None:
    tensor = (torch.randn(500) * torch.logspace(-6, 2, 500)).to(dtype)
    mean = RunningMean(tensor)
    for _ in range(copies - 1):
        mean.add(tensor.clone())
    assert mean.value().dtype == dtype and torch.equal(mean.value().float(), tensor.float())


def test_the_average_of_two_is_their_mean() -> None:
    a, b = torch.randn(2, 500)
    mean = RunningMean(a)
    mean.add(b)
    assert torch.equal(mean.value(), ((a.double() + b.double()) / 2).float())


def test_sums_do_not_lose_what_the_stored_type_would() -> None:
    """In fp16, 2048 + 1 is 2048: a sum in the stored type would give 1024.0 for the mean of these."""
    mean = RunningMean(torch.tensor([2048.0], dtype=torch.float16))
    for _ in range(3):
        mean.add(torch.tensor([1.0], dtype=torch.float16))
    assert mean.value().item() == torch.tensor(2051 / 4, dtype=torch.float16).item()
    large = RunningMean(torch.tensor([60000.0], dtype=torch.float16))
    large.add(torch.tensor([60000.0], dtype=torch.float16))
    assert large.value().item() == 60000  # the sum is beyond fp16


def test_the_first_tensor_is_not_written_to() -> None:
    for dtype in (torch.float32, torch.float64):
        first = torch.ones(3, dtype=dtype)
        mean = RunningMean(first)
        mean.add(torch.zeros(3, dtype=dtype))
        assert torch.equal(first, torch.ones(3, dtype=dtype)) and mean.value().tolist() == [0.5] * 3


@pytest.mark.parametrize("values", [torch.tensor([1, 2]), torch.tensor([True, False])])
def test_whole_numbers_must_be_equal(values: Tensor) -> None:
    mean = RunningMean(values)
    mean.add(values.clone())
    assert torch.equal(mean.value(), values) and mean.value().dtype == values.dtype
    with pytest.raises(ValueError, match="whole numbers"):
        mean.add(values.flip(0))


def test_the_result_is_an_ordinary_checkpoint(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, step, score=float(step)) for step in (1, 2, 3)]
    made = average_checkpoints(paths, tmp_path / "new" / "folder" / "average")
    assert [step for _, step in made.sources] == [1, 2, 3] and made.step == 3
    assert sorted(os.listdir(made.path)) == [
        "manifest.json", "model.safetensors", "recipe.yaml", "tokenizer.json", "trainer.json",
    ]  # fmt: skip
    found = read_checkpoint(made.path)
    expected = {
        name: torch.stack([random_weights(step)[name].double() for step in (1, 2, 3)]).mean(0)
        for name in random_weights(1)
    }
    assert found.weights().keys() == expected.keys()
    for name, tensor in found.weights().items():
        assert tensor.dtype == random_weights(1)[name].dtype
        assert torch.allclose(tensor.double(), expected[name], rtol=0, atol=float(torch.finfo(torch.bfloat16).eps))
    assert torch.allclose(found.weights()["norm.gain"].double(), expected["norm.gain"], rtol=0, atol=1e-7)
    assert found.step == 3 and found.manifest.score is None and found.recipe_text == RECIPE
    assert found.tokenizer_json == TOKENIZER and found.tokenizer_sha256 == read_checkpoint(paths[0]).tokenizer_sha256
    assert made.num_parameters == sum(t.numel() for name, t in random_weights(1).items() if name != "heads.lm.weight")


def test_the_trainer_says_which_steps_and_no_place(run: RunDirectory, tmp_path: Path) -> None:
    made = average_checkpoints([keep(run, step) for step in (5, 6)], tmp_path / "average")
    assert read_checkpoint(made.path).trainer == {
        "step": 6,
        "averaged": [
            {"name": "step-00000005", "run": "run", "step": 5},
            {"name": "step-00000006", "run": "run", "step": 6},
        ],
    }
    assert str(tmp_path) not in (made.path / "trainer.json").read_text()


def test_tied_tensors_stay_tied_and_stored_once(run: RunDirectory, tmp_path: Path) -> None:
    made = average_checkpoints([keep(run, step) for step in (1, 2)], tmp_path / "average")
    names = [spec.name for spec in read_specs(made.path / "model.safetensors")]
    assert "embedding.weight" in names and "heads.lm.weight" not in names
    weights = read_checkpoint(made.path).weights()
    assert weights["heads.lm.weight"] is weights["embedding.weight"]


def test_order_does_not_matter_to_the_byte(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, step) for step in (1, 2, 3)]
    trees = [
        tree(average_checkpoints(order, tmp_path / f"average-{number}").path)
        for number, order in enumerate(itertools.permutations(paths))
    ]
    assert all(one == trees[0] for one in trees)


def test_checkpoints_of_equal_step_in_two_runs(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        with RunDirectory.create(tmp_path / name, arch="gpt", preset="tiny") as run:
            paths.append(keep(run, 4, weights=random_weights(ord(name))))
    first, second = (average_checkpoints(paths[::way], tmp_path / f"out{way}") for way in (1, -1))
    assert tree(first.path) == tree(second.path)
    assert any("2 runs" in note for note in first.notes)


def test_an_average_of_copies_has_the_same_weights_file(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, step, weights=random_weights(9)) for step in (1, 2, 3)]
    made = average_checkpoints(paths, tmp_path / "average")
    assert (made.path / "model.safetensors").read_bytes() == (paths[0] / "model.safetensors").read_bytes()


def test_averages_can_be_averaged(run: RunDirectory, tmp_path: Path) -> None:
    a = average_checkpoints([keep(run, 1), keep(run, 2)], tmp_path / "a").path
    b = average_checkpoints([keep(run, 3), keep(run, 4)], tmp_path / "b").path
    assert read_checkpoint(average_checkpoints([a, b], tmp_path / "c").path).step == 4


def test_optimizer_and_ema_are_left_out(run: RunDirectory, tmp_path: Path) -> None:
    ema = {"norm.gain": torch.ones(4)}
    made = average_checkpoints([keep(run, step, ema=ema) for step in (1, 2)], tmp_path / "average")
    found = read_checkpoint(made.path)
    assert not found.has("ema") and not found.has("optimizer") and any("EMA" in note for note in made.notes)
    with pytest.raises(InputError, match="no optimizer state"):
        found.optimizer()


def test_an_average_is_not_resumed_into_a_run(run: RunDirectory, tmp_path: Path) -> None:
    made = average_checkpoints([keep(run, 1), keep(run, 2)], tmp_path / "average")
    before = tree(made.path)
    with pytest.raises(InputError, match="is a checkpoint, not a run") as caught:
        RunDirectory.create(made.path, arch="gpt", preset="tiny", resume=True)
    assert "--init-from" in (caught.value.hint or "") and tree(made.path) == before


def test_an_electra_generator_is_averaged_too(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, step, generator={"g": torch.tensor([float(step), 0.0])}) for step in (1, 4)]
    made = average_checkpoints(paths, tmp_path / "average")
    generator = read_checkpoint(made.path).generator()
    assert generator is not None and generator["g"].tolist() == [2.5, 0.0]
    assert any("generator" in note for note in made.notes)
    with pytest.raises(InputError, match="has no tensor g among its generator"):
        average_checkpoints([*paths, keep(run, 5)], tmp_path / "other")


def test_both_tokenizers_come_along(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, step, target_tokenizer_json=TARGET_TOKENIZER) for step in (1, 2)]
    found = read_checkpoint(average_checkpoints(paths, tmp_path / "average").path)
    assert (found.tokenizer_json, found.target_tokenizer_json) == (TOKENIZER, TARGET_TOKENIZER)
    assert found.target_tokenizer_sha256 == read_checkpoint(paths[0]).target_tokenizer_sha256 is not None


def test_progress_counts_checkpoints(run: RunDirectory, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    work = Work(report=lambda *args: calls.append(args))
    average_checkpoints([keep(run, 1), keep(run, 2)], tmp_path / "a", work=work)
    assert calls == [(1, 2), (2, 2)]


def test_the_last_checkpoints_by_step(run: RunDirectory) -> None:
    paths = [keep(run, step, score=1.0 if step == 2 else 5.0) for step in (2, 9, 10, 100)]
    assert last_checkpoints(run.path, 3) == paths[1:]
    assert last_checkpoints(run.checkpoints_path, 1) == paths[3:]


BY_STEPS, BY_CLOCK = "save_every: 4", "save_every: 500, save_every_minutes: 1, keep_last: 2"


@pytest.mark.parametrize(
    ("rhythm", "steps", "best", "apart"),
    [
        (BY_STEPS, (12, 20, 24), 12, True),  # 16 was there between
        (BY_STEPS, (16, 20, 24), 16, False),  # the best is the save before
        (BY_STEPS, (12, 20, 24), 24, False),
        (BY_STEPS, (12, 20), 12, True),
        (BY_STEPS, (16, 20), 16, False),
        (BY_STEPS, (20,), 20, False),
        (BY_CLOCK, (12, 20, 24), 12, True),
        (BY_CLOCK, (16, 20, 24), 16, False),
        (BY_CLOCK, (12, 20, 24), 24, False),
    ],
)
def test_a_best_checkpoint_that_stands_apart_is_none_of_the_last(
    run: RunDirectory, rhythm: str, steps: tuple[int, ...], best: int, apart: bool
) -> None:
    """What the last N are follows from the rhythm of the saves, by steps, or where a clock gives it by their gaps."""
    recipe = f"{RECIPE}training: {{{rhythm}}}\n"
    for step in steps:
        keep(run, step, score=1.0 if step == best else 2.0, recipe_yaml=recipe)
    kept = [step for step in steps if not (apart and step == best)]
    assert [path.name for path in last_checkpoints(run.path, len(kept))] == [f"step-{step:08d}" for step in kept]
    with pytest.raises(InputError) as caught:
        last_checkpoints(run.path, len(kept) + 1)
    listed = ", ".join(map(str, kept))
    assert f"has {len(kept)} checkpoint" in str(caught.value) and f"(step {listed})" in str(caught.value)
    assert ("the best one apart from these (step 12)" in str(caught.value)) == apart
    assert "training.keep_last decides" in (caught.value.hint or "")


def test_fewer_checkpoints_than_asked_for_says_how_many_and_what_decides(run: RunDirectory) -> None:
    keep(run, 1), keep(run, 2)
    with pytest.raises(InputError, match=r"--last 5: .*run has 2 checkpoints \(step 1, 2\)") as caught:
        last_checkpoints(run.path, 5)
    assert "training.keep_last decides how many a run keeps" in (caught.value.hint or "")


def test_last_of_what_is_no_run(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 0 checkpoints"):
        last_checkpoints(run.path, 2)
    path = keep(run, 7)
    for single in (path, run.checkpoints_path / "latest"):
        with pytest.raises(InputError, match=r"needs a run, .* is one checkpoint \(step 7\)"):
            last_checkpoints(single, 2)
    with pytest.raises(InputError, match="does not exist"):
        last_checkpoints(tmp_path / "absent", 2)
    with pytest.raises(InputError, match="at least 1, found 0"):
        last_checkpoints(run.path, 0)


def test_manifest_of_an_average_lists_its_files(run: RunDirectory, tmp_path: Path) -> None:
    made = average_checkpoints([keep(run, 1), keep(run, 2)], tmp_path / "average")
    manifest = json.loads((made.path / "manifest.json").read_text())
    assert set(manifest["files"]) == set(os.listdir(made.path)) - {"manifest.json"}
