"""The tuned lens: begins as the logit lens, comes nearer to the model's answer, and is a file that knows its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.inside.lens_models import inputs_of, loaded_of
from tests.inside.test_inside_lens import lens_of
from tests.viz.attention_models import TEXT
from tformer.inside.tuned import TunedLens, file_of, fit, read, save
from tformer.support.errors import InputError

SHA = "ab" * 32


def tuned_lens(steps: int = 60) -> TunedLens:
    loaded = loaded_of("llama")
    ids = loaded.text_tokenizer.encode(" ".join([TEXT] * 12))
    return fit(loaded.model, ids, seq_len=16, sha256=SHA, steps=steps)


@pytest.fixture(scope="module")
def tuned() -> TunedLens:
    return tuned_lens()


def test_training_lowers_the_kl_of_every_layer_on_held_out_text(tuned: TunedLens) -> None:
    before, after = tuned.kl.tolist()
    assert len(before) == 2 and all(new < old for old, new in zip(before, after, strict=True))


def test_the_lens_of_a_text_it_was_trained_on_comes_nearer_and_its_last_row_stays(tuned: TunedLens) -> None:
    loaded = loaded_of("llama")
    plain, better = lens_of(loaded), lens_of(loaded, translate=tuned)
    assert (better.kl[:-1].mean(1) < plain.kl[:-1].mean(1)).all()
    np.testing.assert_array_equal(better.probability[-1], plain.probability[-1])


def test_a_map_is_h_plus_a_h_plus_b(tuned: TunedLens) -> None:
    states = torch.randn(3, 5, 16)
    for row in range(2):
        expected = states[row] + states[row] @ tuned.weights[row].T + tuned.biases[row]
        torch.testing.assert_close(tuned(states)[row], expected)
    assert torch.equal(tuned(states)[2], states[2])
    still = replace(tuned, weights=torch.zeros(2, 16, 16), biases=torch.zeros(2, 16))
    assert torch.equal(still(states), states)


def test_the_model_stays_and_training_repeats(tuned: TunedLens) -> None:
    model = loaded_of("llama").model
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert torch.equal(tuned_lens().weights, tuned.weights)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_file_gives_the_same_lens_and_knows_its_weights(tuned: TunedLens, tmp_path: Path) -> None:
    loaded, path = loaded_of("llama"), tmp_path / "lens.safetensors"
    save(tuned, path)
    found = read(path, loaded.model, SHA)
    states = torch.randn(3, 4, 16)
    assert torch.equal(found(states), tuned(states)) and torch.equal(found.kl, tuned.kl)
    with pytest.raises(InputError, match="was trained for other weights"):
        read(path, loaded.model, "cd" * 32)
    with pytest.raises(InputError, match="is no tuned lens of this model"):
        read(path, loaded_of("bart").model, SHA)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"lens\.safetensors"):
        read(path, loaded.model, SHA)


def test_a_text_that_is_too_short_is_refused() -> None:
    loaded = loaded_of("llama")
    with pytest.raises(InputError, match="the text has 9 tokens, a tuned lens needs at least 20"):
        fit(loaded.model, inputs_of(loaded)["input_ids"][0].tolist(), seq_len=16, sha256=SHA)


def test_the_file_stands_in_the_run_or_beside_another_folder(tmp_path: Path) -> None:
    run = tmp_path / "runs/x/checkpoints/step-00000003"
    assert file_of(run) == tmp_path / "runs/x/tuned-lens-step-00000003.safetensors"
    assert file_of(tmp_path / "hf") == tmp_path / "hf-tuned-lens.safetensors"
