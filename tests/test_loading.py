"""`tformer.load`: a checkpoint becomes the model it was, and parts that do not belong together are named."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tformer
from tformer.build import build_model
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.save import CheckpointContents, save_checkpoint
from tformer.loading import load, load_weights
from tformer.model import Transformer
from tformer.recipe.load import recipe_from_yaml
from tformer.support.errors import InputError, NotFiniteError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

RECIPE = """
schema: 1
model:
  d_model: 8
  max_seq_len: 16
  tie: {output: true}
  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    options = TokenizerOptions(model="char", template="gpt", min_frequency=1)
    return train_tokenizer(lambda: iter(["hello world, again and again\n"]), options)


def test_roles_that_the_recipe_names_hold_wherever_they_are_asked_for(run: RunDirectory, tokenizer: Tokenizer) -> None:
    named = RECIPE + "tokenizer: {special_ids: {eos: 5, mask: 6}}\n"
    folder = save(run, make_model(tokenizer), tokenizer, recipe_yaml=named)
    loaded = load(folder)
    assert (loaded.text_tokenizer.special.eos, loaded.text_tokenizer.special.mask) == (5, 6)
    assert loaded.text_tokenizer.special.bos == tokenizer.special.bos
    assert loaded.text_tokenizer.sha256 == tokenizer.sha256
    wrong = save(run, make_model(tokenizer), tokenizer, step=2, recipe_yaml=named.replace("5", "555"))
    with pytest.raises(InputError, match=r"tokenizer\.special_ids\.eos: found 555, expected an id of the tokenizer"):
        load(wrong)


def make_model(tokenizer: Tokenizer, recipe: str = RECIPE) -> Transformer:
    torch.manual_seed(0)
    return build_model(recipe_from_yaml(recipe, name="test").model, vocab_size=tokenizer.vocab_size)


def save(run: RunDirectory, model: nn.Module, tokenizer: Tokenizer, *, step: int = 1, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "weights": model.state_dict(),
        "recipe_yaml": RECIPE,
        "tokenizer_json": tokenizer.to_json(),
        "tokenizer_sha256": tokenizer.sha256,
        "trainer": {"step": step},
    }
    return save_checkpoint(run, step, CheckpointContents(**(values | changes)), keep_last=9)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(arch="gpt", preset="tiny", runs_dir=tmp_path / "runs")


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_save_then_load_gives_the_same_model(run: RunDirectory, tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer).eval()
    path = save(run, model, tokenizer, step=7)
    loaded = tformer.load(run.path)
    assert_equal(loaded.model.state_dict(), model.state_dict())
    assert (loaded.path, loaded.step, loaded.notes) == (path, 7, []) and not loaded.model.training
    assert loaded.recipe.model.d_model == 8
    ids = loaded.tokenizer.encode("hello again")
    assert loaded.tokenizer.decode(ids) == "hello again"
    with torch.no_grad():
        assert torch.equal(loaded.model(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)


def test_tied_weights_stay_one_tensor(run: RunDirectory, tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer)
    save(run, model, tokenizer, tied=model.tied_names())
    loaded = load(run.path).model
    assert loaded.tied_names() == model.tied_names() == {"heads.lm.weight": "embedding.weight"}
    assert loaded.num_parameters() == model.num_parameters()


def test_loading_draws_no_random_numbers(run: RunDirectory, tokenizer: Tokenizer) -> None:
    save(run, make_model(tokenizer), tokenizer)
    before = torch.get_rng_state()
    load(run.path)
    assert torch.equal(torch.get_rng_state(), before)


def test_absent_path_is_the_run_saved_to_last(run: RunDirectory, tokenizer: Tokenizer) -> None:
    runs = run.path.parent
    save(run, make_model(tokenizer), tokenizer)
    other = RunDirectory.create(arch="gpt", preset="tiny", runs_dir=runs)
    os.utime(save(other, make_model(tokenizer), tokenizer) / "manifest.json", (1, 1))
    RunDirectory.create(arch="gpt", preset="tiny", runs_dir=runs)  # without a checkpoint
    assert load(runs_dir=runs).path.parents[1] == run.path


def test_absent_path_skips_runs_of_another_kind(run: RunDirectory, tokenizer: Tokenizer) -> None:
    save(run, make_model(tokenizer), tokenizer)
    os.utime(run.checkpoints_path / "step-00000001" / "manifest.json", (1, 1))
    other = RunDirectory.create(arch="bert", preset="tiny", runs_dir=run.path.parent)
    save(other, make_model(tokenizer), tokenizer, recipe_yaml=RECIPE + "  heads: [{kind: classifier}]\n")
    assert load(runs_dir=run.path.parent, kinds={"lm"}).path.parents[1] == run.path
    suited = load(runs_dir=run.path.parent, usable=lambda recipe: recipe.model.heads[0].kind == "lm")
    assert suited.path.parents[1] == run.path
    with pytest.raises(InputError, match="found classifier, expected lm"):
        load(other.path, kinds={"lm"})
    with pytest.raises(InputError, match="suits this command"):
        load(runs_dir=run.path.parent, kinds={"regression"})


def test_which_chooses_the_checkpoint(run: RunDirectory, tokenizer: Tokenizer) -> None:
    for step, score in ((1, 2.0), (2, 1.0), (3, 3.0)):
        save(run, make_model(tokenizer), tokenizer, step=step, score=score)
    assert load(run.path).step == 2
    assert load(run.path, which="latest").step == 3 and load(run.path, which="step-1").step == 1


def test_averaged_weights_are_preferred_and_said(run: RunDirectory, tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer)
    ema = {name: torch.full_like(p, 0.5) for name, p in model.named_parameters()}
    save(run, model, tokenizer, ema=ema)
    loaded = load(run.path)
    assert_equal(dict(loaded.model.named_parameters()), ema)
    assert loaded.notes == ["averaged weights are used"]


def test_averages_of_some_weights_are_completed_by_the_plain_ones(run: RunDirectory, tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer)
    save(run, model, tokenizer, ema={"embedding.weight": torch.zeros_like(model.state_dict()["embedding.weight"])})
    found = load(run.path).model.state_dict()
    assert not found["embedding.weight"].any() and found["decoder.final_norm.weight"].all()


def test_nan_weights_are_refused_by_name(run: RunDirectory, tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer)
    with torch.no_grad():
        model.state_dict()["decoder.final_norm.weight"][0] = float("nan")
    save(run, model, tokenizer)
    with pytest.raises(NotFiniteError, match=r"NaN or infinity \(decoder\.final_norm\.weight\)"):
        load(run.path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_parameters_and_activations(run: RunDirectory, tokenizer: Tokenizer, dtype: torch.dtype) -> None:
    model = make_model(tokenizer)
    save(run, model, tokenizer)
    loaded = load(run.path, dtype=dtype).model
    assert {p.dtype for p in loaded.parameters()} == {dtype} and loaded.compute_dtype == dtype
    assert_equal(loaded.state_dict(), {name: t.to(dtype) for name, t in model.state_dict().items()})
    assert loaded.tied_names() == model.tied_names()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_stored_in_half_load_into_fp32(run: RunDirectory, tokenizer: Tokenizer, dtype: torch.dtype) -> None:
    model = make_model(tokenizer).to(dtype)
    save(run, model, tokenizer)
    assert_equal(load(run.path).model.state_dict(), {name: t.float() for name, t in model.state_dict().items()})


def test_saving_over_the_loaded_checkpoint_changes_nothing_loaded(run: RunDirectory, tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer)
    path = save(run, model, tokenizer)
    loaded = load(path).model
    for name in os.listdir(path):
        (path / name).write_bytes(b"\0" * (path / name).stat().st_size)
    assert_equal(loaded.state_dict(), model.state_dict())


# What does not belong together


def test_missing_and_unexpected_and_misshapen_weights_are_listed(run: RunDirectory, tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer)
    weights = dict(model.state_dict())
    weights["decoder.extra"] = weights.pop("decoder.final_norm.weight")
    weights["decoder.positions.weight"] = torch.zeros(4, 8)
    path = save(run, model, tokenizer, weights=weights)
    with pytest.raises(InputError) as caught:
        load(path)
    message = caught.value.message
    assert "recipe and weights disagree" in message and str(path) in message and "\n" not in message
    assert "missing decoder.final_norm.weight" in message and "unexpected decoder.extra" in message
    assert "of another shape decoder.positions.weight [4, 8] (expected [16, 8])" in message


def test_an_edited_recipe_disagrees_with_the_weights(run: RunDirectory, tokenizer: Tokenizer) -> None:
    recipe = RECIPE.replace("num_layers: 1", "num_layers: 3")
    path = save(run, make_model(tokenizer), tokenizer, recipe_yaml=recipe)
    with pytest.raises(InputError, match=r"missing decoder\.blocks\.1\..* and \d+ more"):
        load(path)


def test_a_failed_load_leaves_the_model_alone(run: RunDirectory, tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer)
    weights = {name: torch.ones_like(t) for name, t in model.state_dict().items() if "final_norm" not in name}
    checkpoint = read_checkpoint(save(run, model, tokenizer, weights=weights))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InputError):
        load_weights(model, checkpoint)
    assert_equal(model.state_dict(), before)


def test_two_tensors_for_one_tied_parameter_are_refused(run: RunDirectory, tokenizer: Tokenizer) -> None:
    untied = make_model(tokenizer, RECIPE.replace("output: true", "output: false"))
    path = save(run, untied, tokenizer)
    with pytest.raises(InputError, match=r"heads\.lm\.weight and embedding\.weight are tied in the recipe"):
        load(path)


def test_tied_weights_load_into_an_untied_model(run: RunDirectory, tokenizer: Tokenizer) -> None:
    recipe = RECIPE.replace("output: true", "output: false")
    path = save(run, make_model(tokenizer), tokenizer, recipe_yaml=recipe)
    found = load(path).model.state_dict()
    assert torch.equal(found["heads.lm.weight"], found["embedding.weight"])


def test_a_tokenizer_whose_hash_differs_is_refused(run: RunDirectory, tokenizer: Tokenizer) -> None:
    path = save(run, make_model(tokenizer), tokenizer, tokenizer_sha256="0" * 64)
    with pytest.raises(InputError, match=r"tokenizer\.json is not the tokenizer this model was trained with") as caught:
        load(path)
    assert caught.value.exit_code == 2
    (path / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_json()) | {"version": "2.0"}))
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        load(path)


def test_the_hash_computed_when_saving_is_the_tokenizers_own(run: RunDirectory, tokenizer: Tokenizer) -> None:
    path = save(run, make_model(tokenizer), tokenizer, tokenizer_sha256=None)
    assert read_checkpoint(path).tokenizer_sha256 == tokenizer.sha256


def test_a_vocabulary_larger_than_the_embedding_is_refused(run: RunDirectory, tokenizer: Tokenizer) -> None:
    rows = tokenizer.vocab_size - 3
    recipe = RECIPE + f"  vocab_size: {rows}\n"
    path = save(run, make_model(tokenizer, recipe), tokenizer, recipe_yaml=recipe)
    with pytest.raises(InputError, match=rf"the tokenizer has {tokenizer.vocab_size} ids, .* only {rows} rows"):
        load(path)


def test_a_vocabulary_smaller_than_the_embedding_is_fine(run: RunDirectory, tokenizer: Tokenizer) -> None:
    recipe = RECIPE + "  vocab_size: 64\n"
    path = save(run, make_model(tokenizer, recipe), tokenizer, recipe_yaml=recipe)
    assert load(path).model.state_dict()["embedding.weight"].shape[0] == 64


# Nothing to load


def test_nothing_to_load_says_what_to_do(run: RunDirectory, tmp_path: Path) -> None:
    runs = run.path.parent
    with pytest.raises(InputError, match="no checkpoint yet") as caught:
        load(run.path)
    assert "--resume" in (caught.value.hint or "")
    with pytest.raises(InputError, match="does not exist") as caught:
        load(tmp_path / "gpt-tiny-1", runs_dir=runs)
    assert str(runs / "gpt-tiny-1") in (caught.value.hint or "")
    with pytest.raises(InputError, match="neither a run"):
        load(tmp_path)
    with pytest.raises(InputError, match="there is no run") as caught:
        load(runs_dir=tmp_path / "none")
    assert "tformer train" in (caught.value.hint or "")
