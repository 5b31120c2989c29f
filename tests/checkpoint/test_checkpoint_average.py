"""Averaging: a mean in the mathematical sense, of what is the same model, whole on disk or not there at all."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.conftest import TOKENIZER, Disk, Killed, rewrite_manifest, save, tree
from tformer.checkpoint.average import RunningMean, average_checkpoints
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.resolve import last_checkpoints
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.tensor_files import read_specs
from tformer.support.errors import InputError, Interrupted, NotFiniteError, StorageError, TformerError
from tformer.workers.work import Work

RECIPE = """
model: {d_model: 8, max_seq_len: 16, decoder: {num_layers: 1, num_heads: 2, dropout: 0.1}}
data: {labels: [no, yes]}
seed: 1
"""


TARGET_TOKENIZER = '{"model": {"type": "word"}}'


def random_weights(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    table = torch.randn(3, 2, generator=draw)
    return {
        "embedding.weight": table,
        "heads.lm.weight": table,
        "norm.gain": torch.randn(4, generator=draw),
        "half": torch.randn(5, generator=draw).to(torch.float16),
        "brain": torch.randn(5, generator=draw).to(torch.bfloat16),
        "table": torch.arange(4),
        "flags": torch.tensor([True, False]),
    }


def keep(run: RunDirectory, step: int, **changes: Any) -> Path:
    return save(run, step, **({"weights": random_weights(step), "recipe_yaml": RECIPE, "keep_last": 99} | changes))


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
    assert {record.name for record in found.manifest.files} == set(os.listdir(made.path)) - {"manifest.json"}
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


def test_last_of_what_is_no_run(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 0 checkpoints"):
        last_checkpoints(run.path, 2)
    path = keep(run, 7)
    for single in (path, run.checkpoints_path / "latest"):
        with pytest.raises(InputError, match=r"needs a run, .* is one checkpoint \(step 7\)"):
            last_checkpoints(single, 2)
    with pytest.raises(InputError, match="does not exist"):
        last_checkpoints(tmp_path / "absent", 2)


# --- refusals, interruptions and faults ------------------------------------------------------------------------------


def refused(message: str, paths: list[Path], out: Path, *, kind: type[TformerError] = InputError) -> TformerError:
    before = sorted(out.parent.iterdir())
    with pytest.raises(kind, match=message) as caught:
        average_checkpoints(paths, out)
    assert "\n" not in caught.value.message and sorted(out.parent.iterdir()) == before
    return caught.value


def test_naming_a_checkpoint_twice_is_an_error(run: RunDirectory, tmp_path: Path) -> None:
    first, second = keep(run, 1), keep(run, 2)
    refused("step-00000001 is named twice", [first, second, first], tmp_path / "out")
    (tmp_path / "link").symlink_to(first)
    refused(r"link is named twice \(also as .*step-00000001\)", [first, tmp_path / "link"], tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dropout: 0.1", "dropout: 0.3", r"model\.decoder\.dropout is 0\.3, in .*step-00000001 it is 0\.1"),
        ("num_heads: 2", "num_heads: 4", r"model\.decoder\.num_heads is 4"),
        ("[no, yes]", "[yes, no]", r"data\.labels is \['yes', 'no'\]"),
        ("data:", "generator: {d_model: 8, encoder: {num_layers: 1, num_heads: 2}}\ndata:", "generator is "),
    ],
)
def test_another_model_is_named(run: RunDirectory, tmp_path: Path, old: str, new: str, message: str) -> None:
    paths = [keep(run, 1), keep(run, 2, recipe_yaml=RECIPE.replace(old, new))]
    refused(r"step-00000002/recipe\.yaml: " + message, paths, tmp_path / "out")


def test_another_seed_is_no_hindrance(run: RunDirectory, tmp_path: Path) -> None:
    average_checkpoints([keep(run, 1), keep(run, 2, recipe_yaml=RECIPE.replace("seed: 1", "seed: 2"))], tmp_path / "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer_json": TARGET_TOKENIZER},
            r"step-00000002/tokenizer\.json is not the tokenizer of .*step-00000001",
        ),
        ({"tokenizer_json": None}, r"tokenizer\.json is not the tokenizer .* is missing, expected"),
        ({"target_tokenizer_json": TARGET_TOKENIZER}, "step-00000002 has 2 vocabularies, expected as in .*: 1"),
    ],
)
def test_another_tokenizer_is_named(run: RunDirectory, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refused(message, [keep(run, 1), keep(run, 2, **changes)], tmp_path / "out")


def test_another_target_tokenizer_is_named(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, 1, target_tokenizer_json=TARGET_TOKENIZER), keep(run, 2, target_tokenizer_json=TOKENIZER)]
    refused(r"step-00000002/tokenizer\.target\.json is not the tokenizer of", paths, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.gain": torch.ones(5)}, r"norm\.gain is float32 \[5\], in .*step-00000001 it is float32 \[4\]"),
        ({"norm.gain": torch.ones(4).to(torch.bfloat16)}, r"norm\.gain is bfloat16 \[4\]"),
        ({"more": torch.ones(1)}, r"step-00000001 has no tensor more among its weights, .*step-00000002 has"),
        ({"table": torch.arange(4) + 1}, "step-00000002: weights tensor table .* whole numbers"),
    ],
)
def test_other_tensors_are_named(run: RunDirectory, tmp_path: Path, change: dict[str, Tensor], message: str) -> None:
    paths = [keep(run, 1), keep(run, 2, weights=random_weights(2) | change)]
    refused(message, paths, tmp_path / "out")


def test_weights_that_are_not_finite_are_named(run: RunDirectory, tmp_path: Path) -> None:
    change = {"norm.gain": torch.tensor([1.0, float("nan"), 1.0, 1.0])}
    paths = [keep(run, 1), keep(run, 2, weights=random_weights(2) | change)]
    message = "step-00000002: 1 of 6 weights tensors hold NaN"
    assert refused(message, paths, tmp_path / "out", kind=NotFiniteError).exit_code == 4


def test_other_ties_are_named(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    rewrite_manifest(paths[1], lambda content: content.update(tied={}))
    refused(r"tensor heads\.lm\.weight is not tied as it is in", paths, tmp_path / "out")


def test_a_damaged_checkpoint_is_named(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    data = bytearray((paths[1] / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (paths[1] / "model.safetensors").write_bytes(data)
    refused(r"step-00000002/model\.safetensors is damaged: its sha256", paths, tmp_path / "out")


def test_what_stands_at_out_stays(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    for name, make in (("folder", Path.mkdir), ("file", Path.touch), ("gone", lambda p: p.symlink_to("nowhere"))):
        make(tmp_path / name)
        refused(f"{name} exists already", paths, tmp_path / name)
    refused("step-00000001 exists already", paths, paths[0])
    refused("lies among the checkpoints of a run", paths, run.checkpoints_path / "average")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file, expected a folder"):
        average_checkpoints(paths, tmp_path / "file" / "average")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("mode", ["kill", "kill_after", "enospc", "eio", "full"])
def test_a_fault_at_every_call_leaves_a_whole_checkpoint_or_none(
    run: RunDirectory, tmp_path: Path, disk: Disk, mode: str
) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    before = tree(run.path)
    folder = tmp_path / "averages"
    folder.mkdir()
    for call in range(1, 60):
        out = folder / "average"
        disk.arm(call, mode)
        try:
            average_checkpoints(paths, out)
        except (Killed, StorageError):
            if mode not in ("kill", "kill_after"):  # a process that is killed cannot tidy up: its next run does
                assert [path.name for path in folder.iterdir()] in ([], ["average"])
        finished = not disk.hit
        disk.arm(0, "none")
        assert tree(run.path) == before
        if out.exists():
            assert set(read_checkpoint(out).weights()) == set(random_weights(1))
            for path in out.iterdir():
                path.unlink()
            out.rmdir()
        average_checkpoints(paths, out)
        assert [path.name for path in folder.iterdir() if "probe" not in path.name] == ["average"]
        for path in (*out.iterdir(), *folder.glob(".tmp-probe*")):
            path.unlink()
        out.rmdir()
        if finished:
            assert call > 12
            return
    raise AssertionError("never finished")


def test_too_little_room_is_refused_before_reading(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    monkeypatch.setattr("tformer.support.files.free_bytes", lambda path: 100)
    with pytest.raises(StorageError, match=r"[\d,]+ bytes needed, 100 free"):
        average_checkpoints(paths, tmp_path / "average", work=Work(report=lambda *_: pytest.fail("was read")))
    assert not (tmp_path / "average").exists()


def test_an_interrupt_writes_nothing(run: RunDirectory, tmp_path: Path) -> None:
    paths = [keep(run, 1), keep(run, 2)]
    with pytest.raises(Interrupted):
        average_checkpoints(paths, tmp_path / "average", work=Work(should_stop=lambda: True))
    assert os.listdir(tmp_path) == ["run"]
