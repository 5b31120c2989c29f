"""What the options of `tformer generate` mean: who searches and who samples, their settings, compilation, ensembles."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tformer.build import build_model
from tformer.decoding import compilation
from tformer.decoding.options import GenerateOptions
from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.decoding.writers import names_of_models
from tformer.recipe.model import Model
from tformer.recipe.sections import Generation
from tformer.support.errors import InputError

GIVEN = {
    "max_new_tokens": 9,
    "min_new_tokens": 2,
    "repetition_penalty": 1.5,
    "no_repeat_ngram": 3,
    "at_limit": "end",
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.75,
    "min_p": 0.25,
    "seed": 4,
    "num_samples": 2,
    "logprobs": True,
    "context": "error",
    "beam_size": 6,
    "n_best": 3,
    "length_penalty": 0.5,
    "length_penalty_type": "gnmt",
    "stopping": "beam",
}
"""A value other than the default for every option that is a setting."""


@pytest.mark.parametrize("kind", [GenerationSettings, BeamSettings])
def test_every_option_reaches_the_setting_of_its_name(kind: type) -> None:
    names = {field.name for field in fields(kind)} & {field.name for field in fields(GenerateOptions)}
    assert names <= GIVEN.keys()
    options, of_recipe = GenerateOptions(**{name: GIVEN[name] for name in names}), Generation(top_k=1, beam_size=2)  # type: ignore[arg-type]
    if kind is BeamSettings:
        settings: Any = options.beam_settings(of_recipe, eos_id=5)
    else:
        settings = options.sampling_settings(of_recipe, eos_id=5, encoder_decoder=False)
    assert {name: getattr(settings, name) for name in names} == {name: GIVEN[name] for name in names}
    assert (settings.eos_id, settings.stop_tokens) == (5, ())


def test_the_settings_have_the_defaults_of_the_recipe() -> None:
    for kind in (GenerationSettings, BeamSettings):
        for name in ({field.name for field in fields(kind)} & Generation.model_fields.keys()) - {"beam_size"}:
            assert getattr(kind(), name) == getattr(Generation(), name)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def way_of(options: GenerateOptions, one: Any, device: torch.device) -> str:
    """How steps run; the note on it goes to the model's notes."""
    way, note = compilation.decide_way(one.model, device, options.compile, quantize=options.quantize)
    one.notes += [] if note is None else [note]
    return way


def loaded(kind: str = "full") -> Any:
    side = {"num_layers": 1, "num_heads": 2, "attention": {"kind": kind}}
    section = Model.model_validate({"d_model": 8, "max_seq_len": 16, "vocab_size": 11, "decoder": side})
    recipe = SimpleNamespace(generation=Generation(max_new_tokens=100))
    return SimpleNamespace(model=build_model(section, device="meta"), recipe=recipe, notes=[])


@pytest.fixture(autouse=True)
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "missing_compiler", lambda device: None)


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, CPU, "plain"),
        ({"compile": "on"}, CPU, "compiled"),
        ({}, CUDA, "recorded"),
        ({"compile": "on"}, CUDA, "compiled"),
        ({"compile": "off"}, CUDA, "plain"),
        ({"quantize": "int8"}, CUDA, "plain"),
    ],
)
def test_auto_records_on_a_gpu_and_compiles_nowhere(
    options: dict[str, Any], device: torch.device, expected: str
) -> None:
    assert way_of(GenerateOptions(**options), loaded(), device) == expected


def test_a_kind_that_cannot_be_compiled_is_told_once_and_decoded_as_it_is() -> None:
    one = loaded("sliding_window")
    assert way_of(GenerateOptions(compile="on"), one, CPU) == "plain"
    assert [note for note in one.notes if note.startswith("decoded uncompiled: layer 0 of the decoder")] == one.notes


def test_without_a_compiler_steps_are_recorded_and_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "missing_compiler", lambda device: "Triton")
    one = loaded()
    assert way_of(GenerateOptions(), one, CUDA) == "recorded" and not one.notes
    with pytest.raises(InputError, match="found no Triton"):
        way_of(GenerateOptions(compile="on"), one, CUDA)


def test_8_bits_are_not_compiled() -> None:
    assert way_of(GenerateOptions(quantize="int8"), loaded(), CUDA) == "plain"


@pytest.mark.parametrize(
    ("options", "recipe", "of_encoder_decoder", "of_decoder"),
    [
        ({}, {}, "beam", "sample"),
        ({}, {"beam_size": 4}, "beam", "beam"),
        ({"greedy": True}, {"beam_size": 4}, "beam", "sample"),
        ({"temperature": 0.0}, {"beam_size": 4}, "beam", "sample"),
        ({"temperature": 0.7}, {"beam_size": 4}, "sample", "sample"),
        ({"top_k": 0}, {}, "beam", "sample"),
        ({"num_samples": 2}, {"beam_size": 4}, "sample", "sample"),
        ({"beam_size": 1}, {}, "beam", "beam"),
        ({"n_best": 1}, {}, "beam", "beam"),
        ({"greedy": True, "min_new_tokens": 3}, {}, "beam", "sample"),
        ({"min_new_tokens": 3, "top_k": 5}, {}, "sample", "sample"),
        ({"stop": ("x",)}, {}, "sample", "sample"),
        ({"stop": ("x",), "greedy": True}, {"beam_size": 4}, "sample", "sample"),
    ],
)
def test_who_searches_and_who_samples(options, recipe, of_encoder_decoder, of_decoder):
    generation = Generation(**recipe)
    request = GenerateOptions(**options)
    request.check()
    assert request.engine(generation, encoder_decoder=True) == of_encoder_decoder
    assert request.engine(generation, encoder_decoder=False) == of_decoder


def test_an_encoder_decoder_never_samples_unasked():
    settings = GenerateOptions(stop=("x",)).sampling_settings(
        Generation(temperature=1.0), eos_id=3, encoder_decoder=True
    )
    assert settings.greedy
    settings = GenerateOptions(top_p=0.9).sampling_settings(Generation(temperature=0.8), eos_id=3, encoder_decoder=True)
    assert settings.temperature == 0.8


@pytest.mark.parametrize("how", [{"greedy": True}, {"temperature": 0.0}, {"top_k": 1}], ids=str)
def test_three_ways_to_be_greedy(how):
    options = GenerateOptions(**how)
    assert options.sampling_settings(Generation(temperature=1.5), eos_id=3, encoder_decoder=False).greedy


def test_a_stop_text_is_refused_by_a_beam():
    with pytest.raises(InputError, match="beam of 4"):
        GenerateOptions(stop=("x",)).engine(Generation(beam_size=4), encoder_decoder=True)


def test_the_recipe_gives_what_was_not_given():
    generation = Generation(beam_size=4, length_penalty=0.6, length_penalty_type="gnmt", min_new_tokens=2)
    settings = GenerateOptions(n_best=3, length_penalty=0.0).beam_settings(generation, eos_id=7)
    assert (settings.beam_size, settings.n_best, settings.length_penalty) == (4, 3, 0.0)
    assert (settings.length_penalty_type, settings.min_new_tokens, settings.eos_id) == ("gnmt", 2, 7)
    assert GenerateOptions(greedy=True).beam_settings(generation, eos_id=7).beam_size == 1


def test_models_after_ensemble_are_words_commas_and_repeats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names_of_models([], []) == [None]
    assert names_of_models(["run"], []) == ["run"]
    assert names_of_models(["b", "c"], ["a"]) == ["a", "b", "c"]
    assert names_of_models([], ["a,b", "c"]) == ["a", "b", "c"]
    assert names_of_models(["a"], ["a", "b"]) == ["a", "b"]
    assert names_of_models([], ["a,", "b"]) == ["a", "b"]
    (tmp_path / "x,y").mkdir()
    assert names_of_models([], ["x,y"]) == ["x,y"]
    with pytest.raises(InputError, match="unexpected argument 'b'"):
        names_of_models(["a", "b"], [])
