"""Values that follow others: limits of the length, sizes in proportion to the width, embeddings of a tied output."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tformer.build import build_model, count_parameters
from tformer.recipe import Resolved, load_recipe, recipe_from_yaml, recipe_to_yaml
from tformer.recipe.followers import UNLIMITED_STEPS, fitting_heads, nearest_divisor
from tformer.recipe.model import Stack
from tformer.recipe.presets import list_presets
from tformer.support.errors import InputError

EPOCHS = "bert/classify"  # max_steps 100000 and max_epochs 3
STEPS = "gpt/tiny"


def limits(resolved: Resolved) -> tuple[int, float | None, float | None]:
    training = resolved.recipe.training
    return training.max_steps, training.max_epochs, training.max_minutes


def decoder_of(preset: str, *sets: str) -> Stack:
    decoder = load_recipe(preset=preset, sets=sets).recipe.model.decoder
    assert decoder is not None
    return decoder


# --- the length of a training ----------------------------------------------------------------------------------------

DROPPED = "training.max_steps 60 ({}) is the limit: training.max_epochs 3 (preset bert/classify) is dropped"


@pytest.mark.parametrize(
    ("preset", "given", "expected", "said"),
    [
        (EPOCHS, {"flags": {"training.max_steps": 60}}, (60, None, None), DROPPED.format("flag --max-steps")),
        (EPOCHS, {"sets": ["training.max_steps=60"]}, (60, None, None), DROPPED.format("--set")),
        (STEPS, {"flags": {"training.max_epochs": 2.0}}, (UNLIMITED_STEPS, 2.0, None), "max_epochs 2.0 (flag --max-ep"),
        (EPOCHS, {"flags": {"training.max_epochs": 2.0}, "sets": ["training.max_steps=9"]}, (9, 2.0, None), None),
        (EPOCHS, {"flags": {"training.max_minutes": 1.0}}, (100000, 3.0, 1.0), None),  # the schedule needs a length
        (EPOCHS, {}, (100000, 3.0, None), None),
        (EPOCHS, {"sets": ["training.max_epochs=null"]}, (100000, None, None), None),
    ],
)
def test_an_explicit_length_drops_those_of_the_layers_below_and_says_so(
    preset: str, given: dict[str, Any], expected: tuple[Any, ...], said: str | None
) -> None:
    resolved = load_recipe(preset=preset, **given)
    assert limits(resolved) == expected
    notes = [note for note in resolved.notes if "is the limit" in note]
    assert notes == [] if said is None else said in notes[0]


def test_explicit_steps_drop_the_minutes_of_a_file(write: Callable[[str], Path]) -> None:
    file = write("arch: gpt\npreset: tiny\ntraining: {max_minutes: 5, max_epochs: 1}\n")
    assert limits(load_recipe(config=file)) == (UNLIMITED_STEPS, 1.0, 5.0)
    assert limits(load_recipe(config=file, flags={"training.max_steps": 7})) == (7, None, None)


# --- sizes in proportion ---------------------------------------------------------------------------------------------


def test_feed_forward_and_heads_follow_the_width() -> None:
    resolved = load_recipe(preset="gpt/tiny", sets=["model.d_model=48"])
    decoder = resolved.recipe.model.decoder
    assert decoder is not None and (decoder.feedforward.d_ff, decoder.num_heads) == (192, 1)
    assert any("feedforward.d_ff 768 -> 192, num_heads 3 -> 1" in note for note in resolved.notes)
    origin = resolved.origins["model.decoder.feedforward.d_ff"]
    assert origin == "preset gpt/tiny, in proportion to d_model"


@pytest.mark.parametrize("order", [1, -1], ids=["width first", "width last"])
def test_what_is_set_stays_in_either_order(order: int) -> None:
    sets = ["model.d_model=48", "model.decoder.feedforward.d_ff=100", "model.decoder.num_heads=4"][::order]
    decoder = decoder_of("gpt/tiny", *sets)
    assert (decoder.feedforward.d_ff, decoder.num_heads) == (100, 4)


def test_ratios_other_than_four_and_shared_heads_follow() -> None:
    decoder = decoder_of("llama/8b", "model.d_model=1024")  # 4096: 14336, 32 heads that share 8
    assert (decoder.feedforward.d_ff, decoder.num_heads, decoder.num_kv_heads) == (3584, 8, 2)


def test_a_stated_size_of_a_head_is_kept() -> None:
    recipe = load_recipe(preset="t5/v1_1-small", sets=["model.d_model=256"]).recipe  # 512: 6 heads of 64
    for stack in recipe.model.stacks.values():
        assert (stack.num_heads, stack.head_dim, stack.feedforward.d_ff) == (3, 64, 512)
    assert decoder_of("gpt/tiny", "model.d_model=96", "model.decoder.head_dim=24").num_heads == 4


def test_a_file_over_a_preset_scales_and_a_run_does_not(write: Callable[[str], Path]) -> None:
    file = write("arch: gpt\npreset: tiny\nmodel: {d_model: 96}\n")
    recipe = load_recipe(config=file).recipe
    assert recipe.model.decoder is not None and recipe.model.decoder.feedforward.d_ff == 384
    again = load_recipe(config=write(recipe_to_yaml(recipe)))
    assert again.recipe == recipe and not again.notes


def test_the_width_of_one_stack_scales_that_stack() -> None:
    sets = ["model.tie.source_target=false", "model.encoder.d_model=128"]
    model = load_recipe(preset="transformer/modern", sets=sets).recipe.model
    before = load_recipe(preset="transformer/modern").recipe.model
    assert model.decoder == before.decoder and model.encoder is not None and before.encoder is not None
    assert model.encoder.feedforward.d_ff == (before.encoder.feedforward.d_ff or 0) * 128 // before.d_model


@pytest.mark.parametrize(
    ("wanted", "width", "head_dim", "expected"),
    [
        (1.33, 64, None, 1),
        (8, 512, None, 8),
        (3.2, 100, None, 5),
        (1, 7, None, 1),
        (0.2, 16, None, 1),
        (2.6, 50, 64, 3),
    ],
)
def test_heads_divide_the_width_into_even_sizes(wanted: float, width: int, head_dim: int | None, expected: int) -> None:
    assert fitting_heads(wanted, width, head_dim) == expected


def test_the_nearest_divisor_is_nearest_by_ratio() -> None:
    assert [nearest_divisor(12, wanted) for wanted in (0.1, 2.4, 4.5, 100)] == [1, 2, 4, 12]


@pytest.mark.parametrize("width", [16, 48, 64, 100, 96])
@pytest.mark.parametrize("preset", ["gpt/tiny", "bert/classify", "transformer/modern", "t5/tiny", "llama/8b"])
def test_every_even_width_builds(preset: str, width: int) -> None:
    recipe = load_recipe(preset=preset, sets=[f"model.d_model={width}", "model.vocab_size=50"]).recipe
    assert count_parameters(recipe.model, num_labels=2) > 0


@pytest.mark.parametrize("size", ["wide", "0"])
def test_a_wrong_size_of_a_head_beside_a_new_width_is_the_usual_error(size: str) -> None:
    with pytest.raises(InputError, match=r"--set: model\.decoder\.head_dim: found "):
        load_recipe(preset="gpt/tiny", sets=["model.d_model=48", f"model.decoder.head_dim={size}"])


def test_no_preset_changes_by_itself() -> None:
    for arch, names in list_presets().items():
        for name in names:
            resolved = load_recipe(arch=arch, preset=name)
            assert not any(
                "in proportion" in origin or "changed with" in origin for origin in resolved.origins.values()
            )
            assert recipe_from_yaml(recipe_to_yaml(resolved.recipe), name="again") == resolved.recipe


# --- a tied output ---------------------------------------------------------------------------------------------------


def first_loss(*sets: str) -> float:
    """The loss of a new gpt/tiny of 600 tokens on random tokens."""
    torch.manual_seed(0)
    recipe = load_recipe(preset="gpt/tiny", sets=["model.vocab_size=600", *sets]).recipe
    model = build_model(recipe.model).eval()
    ids = torch.randint(0, 600, (4, 65))
    with torch.no_grad():
        return F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def test_a_newly_tied_output_is_warned_about_with_what_starts_near_equal_probabilities() -> None:
    resolved = load_recipe(preset="gpt/tiny", sets=["model.tie.output=true"])
    assert any("model.init.embedding_std (0.5) suits a separate output" in note for note in resolved.notes)
    assert first_loss("model.tie.output=true") > log(600) + 3
    assert first_loss("model.tie.output=true", "model.init.embedding_std=null") < log(600) + 0.2
    assert first_loss() == pytest.approx(log(600), abs=1e-4)


def test_no_shipped_preset_is_warned_about() -> None:
    for arch, names in list_presets().items():
        for name in names:
            assert not any("embedding_std" in note for note in load_recipe(arch=arch, preset=name).notes), (arch, name)


# --- another kind ----------------------------------------------------------------------------------------------------

POSITIONS_OF_BOTH = (
    "another kind of model.encoder.positions and model.decoder.positions: {layout: fairseq} of sinusoidal"
)


@pytest.mark.parametrize("kind", ["learned", "rope", "alibi", "t5_bias", "shaw", "none"])
def test_another_kind_drops_the_options_of_the_former_one_and_says_so_once(kind: str) -> None:
    sets = [f"model.{side}.positions.kind={kind}" for side in ("encoder", "decoder")]
    resolved = load_recipe(preset="transformer/tiny", sets=sets)
    default = load_recipe(arch="gpt", sets=[f"model.decoder.positions={{kind: {kind}}}"]).recipe.model.decoder
    assert default is not None
    assert all(stack.positions == default.positions for stack in resolved.recipe.model.stacks.values())
    assert [note for note in resolved.notes if "dropped" in note] == [
        f"{POSITIONS_OF_BOTH} (preset transformer/tiny) is dropped"
    ]


def test_a_file_drops_them_too(write: Callable[[str], Path]) -> None:
    file = write("model: {decoder: {positions: {kind: rope}}}\noptimizer: {kind: muon}\n")
    resolved = load_recipe(preset="transformer/tiny", config=file)
    dropped = [note for note in resolved.notes if "dropped" in note]
    assert dropped == [
        "another kind of model.decoder.positions: {layout: fairseq} of sinusoidal (preset transformer/tiny) is dropped",
        "another kind of optimizer: {lr: 0.005, betas: [0.9, 0.98], weight_decay: 0.0, clip_grad_norm: null} of adam "
        "(preset transformer/tiny) is dropped",
    ]


def test_what_all_kinds_of_attention_have_stays() -> None:
    resolved = load_recipe(preset="gpt/tiny", sets=["model.decoder.attention.kind=sliding_window"])
    decoder = resolved.recipe.model.decoder
    assert decoder is not None and decoder.attention.kind == "sliding_window"
    assert decoder.attention.qk_norm and not decoder.attention.qkv_bias and not resolved.notes


def test_an_option_of_the_same_name_is_not_taken_for_the_same_option() -> None:
    """The base of Llama's rotations says nothing about wavelengths of sinusoids."""
    resolved = load_recipe(preset="llama/8b", sets=["model.decoder.positions.kind=sinusoidal"])
    assert resolved.recipe.model.decoder is not None
    assert getattr(resolved.recipe.model.decoder.positions, "base", None) == 10000
    [note] = [note for note in resolved.notes if "dropped" in note]
    assert "base: 500000" in note and "scaling: {factor: 8.0" in note


@pytest.mark.parametrize("order", [1, -1], ids=["kind first", "kind last"])
def test_options_given_beside_the_kind_stay(order: int) -> None:
    sets = ["model.decoder.positions.base=77", "model.decoder.positions.kind=rope"][::-order]
    decoder = decoder_of("transformer/tiny", *sets)
    assert recipe_to_yaml(load_recipe(preset="transformer/tiny", sets=sets).recipe).count("base: 77") == 1
    assert decoder.positions.kind == "rope"


def test_the_same_kind_and_lists_that_are_replaced_drop_nothing() -> None:
    same = load_recipe(preset="transformer/tiny", sets=["model.encoder.positions.kind=sinusoidal"])
    assert not same.notes and same.recipe.model == load_recipe(preset="transformer/tiny").recipe.model
    heads = load_recipe(preset="gpt/tiny", flags={"objectives": [{"kind": "classification"}]})
    assert not any("dropped" in note for note in heads.notes)


def test_an_unknown_kind_is_the_usual_error() -> None:
    with pytest.raises(InputError, match=r"--set: model\.encoder\.positions\.kind: found the text 'rop'.*did you mean"):
        load_recipe(preset="transformer/tiny", sets=["model.encoder.positions.kind=rop"])


# --- positions of a fixed size ---------------------------------------------------------------------------------------

SINUSOIDAL = "model.decoder.positions.kind=sinusoidal"


def test_small_token_vectors_are_scaled_beside_sinusoids() -> None:
    resolved = load_recipe(preset="gpt/char-cpu", sets=[SINUSOIDAL])
    assert resolved.recipe.model.embedding.scale
    [note] = resolved.notes
    assert "model.embedding.scale is true" in note and "size 0.71" in note and "standard deviation 0.02" in note


def test_a_file_that_chooses_sinusoids_scales_too(write: Callable[[str], Path]) -> None:
    file = write("arch: gpt\nmodel: {decoder: {positions: {kind: sinusoidal}}}\n")
    assert load_recipe(config=file).recipe.model.embedding.scale


@pytest.mark.parametrize(
    ("preset", "sets"),
    [
        ("gpt/char-cpu", [SINUSOIDAL, "model.embedding.scale=false"]),
        ("gpt/char-cpu", [SINUSOIDAL, "model.init.embedding_std=0.5"]),
        ("gpt/char-cpu", [SINUSOIDAL, "model.embedding.fixnorm=true"]),
        ("gpt/char-cpu", ["model.decoder.positions.kind=rope"]),
        ("gpt/tiny", [SINUSOIDAL]),  # its token vectors have 0.5
        ("vit/mnist", ["model.encoder.positions.kind=patch2d"]),
    ],
)
def test_other_token_vectors_stay(preset: str, sets: list[str]) -> None:
    assert not load_recipe(preset=preset, sets=sets).recipe.model.embedding.scale
