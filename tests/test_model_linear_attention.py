"""Linformer, Performer and additive attention in whole models: decoding, training, checkpoints, refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from tests.checkpoint.conftest import save
from tests.decoding.uncached import uncached_generate
from tests.quick import first_is_quick
from tests.training.pair_makers import records, weights_of
from tests.training.test_training_resume import train, write_recipe
from tformer.build import build_model
from tformer.checkpoint.average import average_checkpoints
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.decoding.beam_search import beam_search
from tformer.decoding.generate import generate
from tformer.decoding.settings import BeamSettings, Generated, GenerationSettings
from tformer.decoding.stepper import ModelStepper
from tformer.loading import load, load_weights
from tformer.model import Transformer
from tformer.nn.attention.performer import PerformerState
from tformer.recipe.checks import contradictions
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError

VOCAB, EOS = 23, 2
KINDS: dict[str, dict[str, Any]] = {
    "linformer": {"kind": "linformer", "rank": 4},
    "linformer-layerwise": {"kind": "linformer", "rank": 4, "sharing": "layerwise"},
    "performer": {"kind": "performer", "features": 16},
    "performer-relu": {"kind": "performer", "features": 16, "kernel": "relu"},
    "additive": {"kind": "additive"},
    "disentangled": {"kind": "disentangled", "buckets": 8, "max_distance": 20},
}
CAUSAL = ["performer", "performer-relu", "additive", "disentangled"]
PROMPTS = [[1, 3, 4, 5, 6, 7], [8], [9, 10, 11], [12, 13, 14, 15]]


def section(attention: dict[str, Any], *, sides: tuple[str, ...], max_seq_len: int = 40, **stack: Any) -> Model:
    side = {"num_layers": 2, "num_heads": 4, "feedforward": {"d_ff": 32}, "positions": {"kind": "rope"}, **stack}
    stacks = {name: {**side, "attention": attention} for name in sides}
    return Model.model_validate({"d_model": 16, "max_seq_len": max_seq_len, "vocab_size": VOCAB, **stacks})


def build(attention: dict[str, Any], **options: Any) -> Transformer:
    torch.manual_seed(4)
    model = build_model(section(attention, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


# Decoding


def flat(results: list[list[Generated]]) -> list[Generated]:
    return [completion for completions in results for completion in completions]


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("max_seq_len", [40, 10], ids=["within", "sliding"])
def test_cached_batched_sampling_equals_uncached(kind: str, max_seq_len: int) -> None:
    model = build(KINDS[kind], sides=("decoder",), max_seq_len=max_seq_len)
    for choice in ({"temperature": 0.0}, {"num_samples": 2, "seed": 3}):
        settings = GenerationSettings(max_new_tokens=15, logprobs=True, eos_id=EOS, **choice)
        cached, uncached = generate(model, PROMPTS, settings), uncached_generate(model, PROMPTS, settings)
        for one, other in zip(flat(cached), flat(uncached), strict=True):
            assert one.ids == other.ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def force_decoded(model: Transformer, source: list[int] | None, prefix: list[int], new: list[int]) -> float:
    ids = torch.tensor([[*prefix, *new][:-1]])
    inputs = {"input_ids": ids} if source is None else {"input_ids": torch.tensor([source]), "decoder_input_ids": ids}
    with torch.inference_mode():
        logprobs = model(**inputs).logits[0].log_softmax(-1)[-len(new) :]
    return float(logprobs[torch.arange(len(new)), new].sum())


@pytest.mark.parametrize("kind", CAUSAL)
def test_beam_search_sums_what_an_uncached_pass_finds(kind: str) -> None:
    model = build(KINDS[kind], sides=("decoder",))
    stepper = ModelStepper(model, PROMPTS, capacity=8)
    found = beam_search(stepper, BeamSettings(eos_id=EOS, max_new_tokens=8, beam_size=3), histories=PROMPTS)
    for prompt, hypotheses in zip(PROMPTS, found, strict=True):
        for hypothesis in hypotheses:
            expected = force_decoded(model, None, prompt, list(hypothesis.ids))
            assert hypothesis.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", CAUSAL)
def test_beam_search_beside_an_encoder(kind: str) -> None:
    model = build(KINDS[kind], sides=("encoder", "decoder"))
    prefixes = [[1], [1, 5], [1], [1, 6]]
    stepper = ModelStepper(model, prefixes, sources=PROMPTS, capacity=8)
    found = beam_search(stepper, BeamSettings(eos_id=EOS, max_new_tokens=8, beam_size=3), histories=prefixes)
    for source, prefix, hypotheses in zip(PROMPTS, prefixes, found, strict=True):
        for hypothesis in hypotheses:
            expected = force_decoded(model, source, prefix, list(hypothesis.ids))
            assert hypothesis.logprob == pytest.approx(expected, abs=1e-4)


def test_performer_remembers_sums_of_one_size() -> None:
    model = build(KINDS["performer"], sides=("decoder",))
    cache = model.new_cache(2, 40)
    for length in (3, 1, 20):
        model(torch.randint(3, VOCAB, (2, length)), cache=cache)
    for state in cache.layers:
        assert isinstance(state, PerformerState) and state.sums is not None
        assert state.length == 24 and state.sums.sums.shape == (2, 4, 16, 5)


# Training and checkpoints


@first_is_quick("changes", [{"ema_decay": 0.9}, {}, {"precision": "bf16", "activation_checkpointing": True}])
def test_a_run_with_redrawn_features_resumes_to_the_bit(changes: Any, tmp_path: Path, text_file: Path) -> None:
    decoder = {"attention": {"kind": "performer", "features": 8, "redraw_steps": 3}, "attention_dropout": 0.0}
    recipe = write_recipe(tmp_path, text_file, {"model": {"decoder": decoder}, "training": changes})
    polls = train(recipe, tmp_path / "whole").count
    expected = records(tmp_path / "whole"), weights_of(tmp_path / "whole")
    for stop_at in (2 * polls // 5, 3 * polls // 4):
        run = tmp_path / f"cut-{stop_at}"
        train(recipe, run, stop_at=stop_at)
        train(recipe, run, resume=True)
        assert (records(run), weights_of(run)) == expected, f"stopped at poll {stop_at} of {polls}"
    checkpoints = sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))
    name = "decoder.blocks.0.self_attention.mechanism.directions"
    tables = [read_checkpoint(path).weights()[name] for path in checkpoints]
    assert not torch.equal(tables[0], tables[-1])
    assert torch.equal(dict(load(tmp_path / "whole", which="latest").model.named_buffers())[name], tables[-1])


def test_layerwise_projections_are_stored_once() -> None:
    model = build(KINDS["linformer-layerwise"], sides=("encoder",))
    owner = "encoder.blocks.0.self_attention.mechanism.keys"
    tied = {name: of for name, of in model.tied_names().items() if "mechanism" in name}
    assert set(tied.values()) == {owner} and len(tied) == 3  # its values, and both of the other layer
    separate = build_model(section(KINDS["linformer"], sides=("encoder",)))
    assert separate.num_parameters() - model.num_parameters() == 3 * 4 * 40


def recipe_of(attention: dict[str, Any]) -> str:
    model = section(attention, sides=("decoder",)).model_dump(mode="json")
    return yaml.safe_dump({"model": model, "data": {"labels": []}, "seed": 1})


def run_of(tmp_path: Path, tables: list[Tensor]) -> tuple[Transformer, list[Path]]:
    model, paths = build(KINDS["performer"], sides=("decoder",)), []
    with RunDirectory.create(tmp_path / "run", arch="performer", preset="x", resume=False, runs_dir=tmp_path) as run:
        for step, table in enumerate(tables, start=1):
            for block in model.decoder.layers if model.decoder is not None else []:
                block.self_attention.mechanism.get_buffer("directions").copy_(table)
            with torch.no_grad():
                model.embedding.get_parameter("weight").fill_(float(step))
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            recipe = recipe_of(KINDS["performer"])
            paths.append(save(run, step, weights=weights, tied=model.tied_names(), recipe_yaml=recipe, keep_last=99))
    return model, paths


def test_an_average_has_the_last_table_and_the_mean_of_the_rest(tmp_path: Path) -> None:
    tables = [torch.randn(16, 4) for _ in range(3)]
    _, paths = run_of(tmp_path, tables)
    weights = read_checkpoint(average_checkpoints(paths[::-1], tmp_path / "mean").path).weights()
    for layer in (0, 1):
        assert torch.equal(weights[f"decoder.blocks.{layer}.self_attention.mechanism.directions"], tables[-1])
    assert torch.equal(weights["embedding.weight"], torch.full((VOCAB, 16), 2.0))


def test_a_checkpoint_brings_the_table_it_was_trained_with(tmp_path: Path) -> None:
    table = torch.randn(16, 4)
    _, [path] = run_of(tmp_path, [table])
    fresh = build_model(section(KINDS["performer"], sides=("decoder",)))
    load_weights(fresh, read_checkpoint(path))
    tables = {name: buffer for name, buffer in fresh.named_buffers() if name.endswith("mechanism.directions")}
    assert len(tables) == 2 and all(torch.equal(found, table) for found in tables.values())


# Refusals, each in one line that names the field


@pytest.mark.parametrize(
    ("attention", "sides", "stack", "message"),
    [
        ("linformer", ("decoder",), {}, "model.decoder.attention.kind: found linformer, which has no causal mode"),
        ("linformer", ("encoder", "decoder"), {}, "model.decoder.attention.kind: found linformer"),
        ({"kind": "linformer", "rank": 41}, ("encoder",), {}, r"model.encoder.attention.rank: found 41.*\(40\)"),
        ("linformer", ("encoder",), {"positions": {"kind": "alibi"}}, "model.encoder.positions.kind: found alibi"),
        ("performer", ("encoder",), {"positions": {"kind": "t5_bias"}}, "model.encoder.positions.kind: found t5_bias"),
        ("performer", ("decoder",), {"positions": {"kind": "shaw"}}, "model.decoder.positions.kind: found shaw"),
        (
            "performer",
            ("decoder",),
            {"attention_dropout": 0.1},
            "model.decoder.attention_dropout: found 0.1, expected 0",
        ),
        (
            "linformer-layerwise",
            ("encoder",),
            {"layers": {1: {"attention": {"rank": 5}}}},
            "model.encoder.attention.sharing: layerwise needs the same rank",
        ),
    ],
)
def test_what_a_kind_has_no_place_for_is_named(
    attention: str | dict[str, Any], sides: tuple[str, ...], stack: dict[str, Any], message: str
) -> None:
    options = KINDS[attention] if isinstance(attention, str) else attention
    with pytest.raises(InputError, match=message) as caught:
        build_model(section(options, sides=sides, **stack))
    assert "\n" not in str(caught.value)


def test_dropout_of_cross_attention_stays_allowed() -> None:
    model = section({"kind": "performer", "features": 8}, sides=("decoder",), attention_dropout=0.1).model_dump()
    model["encoder"] = {**model["decoder"], "attention": {"kind": "full"}}
    assert build_model(Model.model_validate(model)).decoder is not None


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"kind": "performer", "features": 0}, "features must be greater than 0, found 0"),
        ({"kind": "linformer", "rank": -2}, "rank must be greater than 0, found -2"),
    ],
)
def test_impossible_options_are_named(attention: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section(attention, sides=("encoder",))


@pytest.mark.parametrize("kind", ["linformer", "performer"])
def test_packed_documents_are_refused(kind: str) -> None:
    model = section(KINDS[kind], sides=("encoder",)).model_dump()
    model["heads"] = [{"kind": "masked_lm"}]
    values = {"arch": "x", "preset": "y", "model": model, "objectives": [{"kind": "masked_lm"}]}
    recipe = Recipe.model_validate({**values, "data": {"document_mask": True, "packing": "concat"}})
    [problem] = contradictions(recipe)
    assert problem.path == ("data", "document_mask")
    assert re.search(f"found true, expected false with .* {kind}", problem.text)
    assert not list(contradictions(Recipe.model_validate({**values, "data": {"packing": "concat"}})))
