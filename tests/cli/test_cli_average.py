"""`tformer average` as a user runs it: of the last checkpoints, of named ones, and every way to get it wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.checkpoint import average as checkpoints

Cli = Callable[..., Any]
TRANSLATOR = """
arch: transformer
model:
  d_model: 8
  max_seq_len: 16
  tie: {source_target: false}
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
objectives: [{kind: seq2seq}]
"""
STEPS = (3, 6, 9)  # 3 is what `make_run` saves


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Path]) -> Path:
    """A run with three checkpoints, whose weights are those of the first and more."""
    from tformer.checkpoint.read import read_checkpoint
    from tformer.checkpoint.save import CheckpointContents, write_checkpoint

    path = make_run(seed=5)
    first = read_checkpoint(path / "checkpoints" / "step-00000003")
    for step in STEPS[1:]:
        write_checkpoint(
            path / "checkpoints" / f"step-{step:08d}",
            step,
            CheckpointContents.derived(
                first,
                weights={name: tensor + step for name, tensor in first.weights().items() if name not in first.tied},
                trainer={"step": step},
            ),
        )
    return path


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def refused(done: Any, *words: str) -> None:
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("error: ") and len(done.err.splitlines()) <= 2
    for word in words:
        assert word in done.err, done.err


def test_the_last_checkpoints_of_a_run(cli: Cli, run: Path, tmp_path: Path) -> None:
    import torch

    import tformer

    done = cli("average", "--last", 3, run, "--out", tmp_path / "average")
    assert done.code == 0 and done.out == f"{tmp_path / 'average'}\n"
    assert "average of 3 checkpoints: step 3, 6, 9" in done.err
    found = tformer.load(tmp_path / "average")
    first = tformer.load(checkpoint(run, 3)).model.state_dict()
    assert found.step == 9
    for name, tensor in found.model.state_dict().items():
        if name in dict(found.model.named_parameters()):
            assert torch.allclose(tensor, first[name] + 5, atol=1e-5)  # the mean of 0, 6 and 9


def test_a_best_checkpoint_from_earlier_is_none_of_the_last(
    cli: Cli, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """As `keep_last: 2` leaves it, with a best model of step 12 and saves at every fourth step."""
    from tformer.checkpoint.read import read_checkpoint
    from tformer.checkpoint.save import CheckpointContents, write_checkpoint

    run = make_run(seed=6)
    first = read_checkpoint(checkpoint(run, 3))
    for step in (12, 20, 24):
        write_checkpoint(
            checkpoint(run, step),
            step,
            CheckpointContents.derived(
                first,
                weights=first.weights(),
                recipe_yaml=first.recipe_text.replace("training: {", "training: {save_every: 4, keep_last: 2, "),
                trainer={"step": step},
                score=1.0 if step == 12 else 2.0,
            ),
        )
    shutil.rmtree(checkpoint(run, 3))
    message = cli("average", "--last", 3, run, "--out", tmp_path / "average")
    refused(message, "--last 3", "2 checkpoints (step 20, 24)", "apart from these (step 12)", "training.keep_last")
    assert not (tmp_path / "average").exists()
    assert "step 20, 24" in cli("average", "--last", 2, run, "--out", tmp_path / "average").err


def test_named_checkpoints_in_any_order(cli: Cli, run: Path, tmp_path: Path) -> None:
    paths = [checkpoint(run, 9), run / "checkpoints" / "latest"]
    (run / "checkpoints" / "latest").write_text("step-00000009\n")
    refused(cli("average", *paths, "--out", tmp_path / "twice"), "named twice")
    one = cli("average", checkpoint(run, 3), checkpoint(run, 6), "--out", tmp_path / "one")
    two = cli("average", checkpoint(run, 6), checkpoint(run, 3), "--out", tmp_path / "two")
    assert one.code == two.code == 0
    names = ("model.safetensors", "manifest.json", "trainer.json")
    assert all((tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in names)


def test_checkpoints_that_a_training_removes_meanwhile_are_chosen_anew(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(run, tmp_path / "run")

    average, removed = checkpoints.average_checkpoints, []

    def remove_one_first(paths: list[Path], *arguments: Any, **options: Any) -> Any:
        if not removed:
            removed.append(shutil.rmtree(paths[-1]))
        return average(paths, *arguments, **options)

    monkeypatch.setattr(checkpoints, "average_checkpoints", remove_one_first)
    done = cli("average", "--last", 1, run, "--out", tmp_path / "average")
    assert done.code == 0 and "average of 1 checkpoint: step 6" in done.err


def test_json_is_one_document(cli: Cli, run: Path, tmp_path: Path) -> None:
    done = cli("average", "--last", 2, run, "--out", tmp_path / "average", "--json")
    assert done.code == 0 and done.out.count("\n") == 1
    document = json.loads(done.out)
    assert document["path"] == str(tmp_path / "average") and document["step"] == 9
    assert document["averaged"] == [{"path": str(checkpoint(run, step)), "step": step} for step in (6, 9)]
    assert document["parameters"] > 0 and document["notes"] == []


def test_without_a_run_the_newest(cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[1])
    done = cli("average", "--last", 2, "--out", tmp_path / "average")
    assert done.code == 0 and "step 6, 9" in done.err


def test_the_result_is_used_like_any_checkpoint(cli: Cli, run: Path, tmp_path: Path) -> None:
    average = cli("average", "--last", 2, run, "--out", tmp_path / "average").out.strip()
    text = tmp_path / "text.txt"
    text.write_text("abc def gh\n" * 40)
    written = cli("generate", average, "--prompt", "abc", "--greedy", "--max-new-tokens", 3, "--precision", "fp32")
    assert written.code == 0, written.err
    measured = cli("evaluate", average, "--data", text, "--json")
    assert measured.code == 0 and json.loads(measured.out)["loss"] > 0, measured.err


def test_training_starts_from_the_result(cli: Cli, run: Path, tmp_path: Path) -> None:
    average = cli("average", "--last", 2, run, "--out", tmp_path / "average").out.strip()
    text = tmp_path / "text.txt"
    text.write_text("abc def gh\n" * 40)
    tuned = cli(
        "train", "--init-from", average, "--data", text, "--valid", text, "--out", tmp_path / "tuned", "--max-steps", 1,
        "--device", "cpu", "--batch-size", 2,
    )  # fmt: skip
    assert tuned.code == 0, tuned.err


def test_separate_vocabularies_go_through(cli: Cli, tmp_path: Path) -> None:
    import torch

    import tformer
    from tformer.build import build_model
    from tformer.checkpoint.save import CheckpointContents, write_checkpoint
    from tformer.recipe.load import recipe_from_yaml
    from tformer.tokenizer import TokenizerOptions, train_tokenizer

    options = TokenizerOptions(model="char", template="seq2seq", min_frequency=1)
    source, target = (train_tokenizer(lambda text=text: iter([text]), options) for text in ("abc", "vwxyz"))
    model = recipe_from_yaml(TRANSLATOR, name="test").model
    paths = []
    for step in (1, 2):
        torch.manual_seed(step)
        built = build_model(model, vocab_size=source.vocab_size, target_vocab_size=target.vocab_size)
        paths.append(tmp_path / f"step-{step}")
        write_checkpoint(
            paths[-1],
            step,
            CheckpointContents(
                weights=built.state_dict(),
                tied=built.tied_names(),
                recipe_yaml=TRANSLATOR,
                tokenizer_json=source.to_json(),
                tokenizer_sha256=source.sha256,
                trainer={},
                target_tokenizer_json=target.to_json(),
                target_tokenizer_sha256=target.sha256,
            ),
        )
    assert cli("average", *paths, "--out", tmp_path / "average").code == 0
    loaded = tformer.load(tmp_path / "average")
    assert loaded.text_tokenizer.sha256 == source.sha256
    assert loaded.target_tokenizer.sha256 == target.sha256 != source.sha256
    (tmp_path / "average" / "tokenizer.target.json").unlink()
    refused(
        cli("average", paths[0], tmp_path / "average", "--out", tmp_path / "more"), "of the target side, is missing"
    )


def test_fewer_than_asked_for(cli: Cli, run: Path, tmp_path: Path) -> None:
    done = cli("average", "--last", 5, run, "--out", tmp_path / "average")
    refused(done, "has 3 checkpoints (step 3, 6, 9)", "training.keep_last decides how many a run keeps")


def test_usage_is_checked_before_anything_is_read(cli: Cli, run: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "average")
    refused(cli("average", run, *out), "at least two checkpoints", "--last 5", str(run))
    refused(cli("average", *out), "at least two checkpoints", "found none")
    refused(cli("average", "--last", 2, run, "other", *out), "--last 2 takes one run, found 2")
    refused(cli("average", "--last", 0, run, *out), "--last must be at least 1, found 0")
    refused(cli("average", "--last", 2, checkpoint(run, 3), *out), "is one checkpoint (step 3)")
    refused(cli("average", checkpoint(run, 3), tmp_path / "absent", *out), "absent does not exist")
    assert list(tmp_path.iterdir()) == []


def test_what_stands_at_out_is_never_replaced(cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    refused(cli("average", "--last", 2, run, "--out", tmp_path / "mine"), "mine exists already")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    refused(cli("average", "--last", 2, run, "--out", run / "checkpoints" / "mean"), "among the checkpoints of a run")


def test_another_model_is_refused(cli: Cli, run: Path, make_run: Callable[..., Path], tmp_path: Path) -> None:
    from tests.cli.conftest import RECIPE

    other = make_run(RECIPE.replace("d_ff: 16", "d_ff: 32"))
    done = cli("average", run, other, "--out", tmp_path / "average")
    refused(done, "recipe.yaml: model.decoder.feedforward.d_ff is")
    assert list(tmp_path.iterdir()) == []


def test_two_runs_may_be_averaged_with_a_warning(
    cli: Cli, run: Path, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    done = cli("average", run, make_run(seed=6), "--out", tmp_path / "average")
    assert done.code == 0 and "note: they come from 2 runs" in done.err
