"""Is a checkpoint whole? Every sort of damage is found, told in one line each, and nothing else is complained of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import LETTERS
from tests.random_runs import letters_tokenizer, random_contents
from tformer.build import build_model
from tformer.checkpoint.manifest import content_sha256
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.save import save_checkpoint
from tformer.recipe import recipe_from_yaml
from tformer.support.errors import InputError
from tformer.workflows.inspect.verify import Verdict, verify

RECIPE = """
schema: 1
model: {d_model: 8, max_seq_len: 16, decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}}
"""
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def make_run(folder: Path, *, recipe: str = RECIPE, letters: str = LETTERS, change: Change = lambda w: w) -> Path:
    """A run of two checkpoints, the weights of which went through `change`."""
    contents, tokenizer = random_contents(RECIPE, letters=LETTERS), letters_tokenizer(letters, "none")
    with RunDirectory.create(folder / "run", arch="gpt", preset="tiny") as run:
        for step in (1, 2):
            stored = replace(
                contents,
                weights=change({name: tensor.clone() for name, tensor in contents.weights.items()}),
                recipe_yaml=recipe,
                tokenizer_json=tokenizer.to_json(),
                tokenizer_sha256=tokenizer.sha256,
                trainer={"step": step},
            )
            save_checkpoint(run, step, stored)
    return run.path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def problems(path: Path) -> list[str]:
    return [problem for verdict in verify(path) for problem in verdict.problems]


def test_a_whole_run_has_no_problems(run: Path) -> None:
    verdicts = verify(run)
    assert [verdict.path for verdict in verdicts] == steps(run)
    assert all(not verdict.problems and verdict.tensors > 5 and verdict.bytes > 1000 for verdict in verdicts)
    assert problems(steps(run)[0]) == [] == problems(run / "checkpoints") == problems(run / "checkpoints" / "latest")


def test_a_flipped_bit_is_found_in_its_file_and_others_are_read_on(run: Path) -> None:
    first, second = steps(run)
    for name in ("model.safetensors", "tokenizer.json"):
        content = bytearray((first / name).read_bytes())
        content[-2] ^= 1
        (first / name).write_bytes(bytes(content))
    damaged, whole = verify(run)
    assert len(damaged.problems) == 2 and whole == Verdict(second, (), whole.tensors, whole.bytes)
    assert all("is damaged: sha256" in problem for problem in damaged.problems)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "recipe.yaml").unlink(), "recipe.yaml cannot be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "has 5 bytes, expected"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json"),
    ],
)
def test_missing_and_cut_files(run: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(steps(run)[0])
    [problem] = problems(run)
    assert words in problem and "\n" not in problem


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    def poison(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights["decoder.final_norm.weight"][0] = float("nan")
        return weights

    found = problems(make_run(tmp_path, change=poison))
    assert len(found) == 2 and all("hold NaN or infinity (decoder.final_norm.weight)" in one for one in found)


def test_names_and_shapes_that_are_not_the_recipes(tmp_path: Path) -> None:
    def rename(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights["stranger"] = weights.pop("decoder.final_norm.weight")
        weights["decoder.final_norm.bias"] = torch.zeros(3)
        return weights

    found = problems(make_run(tmp_path, change=rename))
    for words in (
        "missing decoder.final_norm.weight",
        "unexpected stranger",
        "of another shape decoder.final_norm.bias",
    ):
        assert sum(words in problem for problem in found) == 2, found


def test_a_recipe_that_builds_nothing(tmp_path: Path) -> None:
    found = problems(make_run(tmp_path, recipe=RECIPE.replace("num_heads: 2", "num_heads: 3")))
    assert all("3 heads do not divide d_model 8" in problem for problem in found) and len(found) == 2


def test_a_tokenizer_with_more_ids_than_the_table(tmp_path: Path) -> None:
    found = problems(make_run(tmp_path, letters=LETTERS + "xyzw"))
    assert len(found) == 2 and all("ids, the model's table only" in problem for problem in found)


def test_a_tokenizer_that_another_model_was_trained_with(run: Path, tmp_path: Path) -> None:
    """Its file agrees with the manifest, whose record of what the model was trained with does not."""
    folder = steps(run)[0]
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tokenizer_sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": content_sha256(manifest)}))
    [problem] = problems(run)
    assert "tokenizer is not the one that the model was trained with" in problem


def test_pointers_and_the_runs_own_recipe(run: Path) -> None:
    (run / "checkpoints" / "latest").write_text("step-00000009\n")
    (run / "recipe.yaml").write_text("modle: {}\n")
    found = problems(run)
    assert any("latest points at no checkpoint" in problem for problem in found)
    assert any("modle" in problem for problem in found)


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        verify(tmp_path / "none")
    shutil.rmtree(tmp_path / "empty", ignore_errors=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="neither a run"):
        verify(tmp_path / "empty")


def test_tied_tensors_that_were_stored_apart_and_differ(tmp_path: Path) -> None:
    def part(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**weights, "heads.lm.weight": weights["embedding.weight"] + 1}

    def copy(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**weights, "heads.lm.weight": weights["embedding.weight"].clone()}

    found = problems(make_run(tmp_path, change=part))
    assert len(found) == 2 and all("heads.lm.weight and embedding.weight are tied, but differ" in one for one in found)
    assert problems(make_run(tmp_path / "copied", change=copy)) == []


BODY = "d_model: 8, max_seq_len: 16, encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}"
ELECTRA = f"""
schema: 1
model: {{{BODY}, heads: [{{kind: replaced_token}}]}}
generator: {{{BODY}, heads: [{{kind: masked_lm}}]}}
objectives: [{{kind: replaced_token}}]
"""


def test_a_generator_has_no_copy_of_a_shared_table_and_averages_have_every_parameter(tmp_path: Path) -> None:
    contents, tokenizer = random_contents(ELECTRA, letters=LETTERS), letters_tokenizer(LETTERS, "bert")
    model = build_model(recipe_from_yaml(ELECTRA, name="test").generator, vocab_size=tokenizer.vocab_size)
    generator = {name: weight for name, weight in model.state_dict().items() if name != "embedding.weight"}
    averages = dict(contents.weights)
    with RunDirectory.create(tmp_path / "run", arch="electra", preset="tiny") as run:
        save_checkpoint(run, 1, replace(contents, generator=generator, ema=averages, trainer={"step": 1}))
        del averages["embedding.weight"]
        save_checkpoint(run, 2, replace(contents, generator=generator, ema=averages, trainer={"step": 2}))
    whole, damaged = verify(run.path)
    assert whole.problems == ()
    assert len(damaged.problems) == 1 and "embedding.weight" in damaged.problems[0]


def test_a_checkpoint_that_a_training_removes_meanwhile_is_no_problem(run: Path) -> None:
    (steps(run)[0] / "manifest.json").unlink()  # as a training begins to remove it
    assert any("no manifest.json" in problem for problem in problems(run))
    with RunDirectory.open(run, lock=True):
        assert problems(run) == []
