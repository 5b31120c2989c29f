"""Errors and notes about recipes: what was found, what was expected, contradictions between keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.recipe import load_recipe, recipe_from_yaml
from tformer.support.errors import InputError

pytestmark = pytest.mark.usefixtures("own_presets")
Write = Callable[[str], Path]


def refused(**named: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        load_recipe(**named)
    assert caught.value.exit_code == 2
    return caught.value


def test_unknown_arch_suggests_the_nearest(write: Write) -> None:
    error = refused(arch="gtp")
    assert error.message == "--arch: unknown arch 'gtp'"
    assert error.hint == "did you mean 'gpt'? (known: gpt, llama)"
    file = write("seed: 1\narch: lama\n")
    assert refused(config=file).message == f"{file}:2: unknown arch 'lama'"


def test_unknown_preset_suggests_the_nearest(write: Write) -> None:
    error = refused(arch="gpt", preset="smal")
    assert error.message == "--preset: unknown preset 'smal' of gpt"
    assert error.hint is not None and error.hint.startswith("did you mean 'small'?")
    assert refused(arch="gpt", preset="8b").hint == "llama has one: --arch llama --preset 8b"
    assert refused(arch="gpt", preset="../../etc/passwd").exit_code == 2
    file = write("preset: tinny\n")
    assert refused(config=file).message == f"{file}:1: unknown preset 'tinny' of gpt"


# The file's second line is at fault in each; the message after "my.yaml:2: ".
IN_FILES = {
    "unknown section": ("optimzer: {lr: 1}", "optimzer: unknown key, did you mean 'optimizer'?"),
    "key at the wrong level": ("lr: 0.1", "lr: unknown key, did you mean 'optimizer.lr'?"),
    "key of another section": ("training: {lr: 0.1}", "training.lr: unknown key, did you mean 'optimizer.lr'?"),
    "unknown key": ("training: {max_step: 3}", "training.max_step: unknown key, did you mean 'max_steps'?"),
    "key of another kind": (
        "model: {decoder: {positions: {kind: learned, base: 9}}}",
        "model.decoder.positions.base: unknown key for this kind, expected with kind sinusoidal, rope, patch2d",
    ),
    "unknown kind": (
        "model: {decoder: {positions: {kind: rop}}}",
        "model.decoder.positions.kind: found the text 'rop', expected one of none, sinusoidal, learned, rope, alibi, "
        "t5_bias, learned_t5_bias, shaw, patch2d, did you mean 'rope'?",
    ),
    "no kind": ("model: {heads: [{bias: true}]}", "model.heads.0.kind: missing, expected one of lm, masked_lm, "),
    "unknown objective": (
        "objectives: [{kind: causal}]",
        "objectives.0.kind: found the text 'causal', expected one of causal_lm",
    ),
    "unknown choice": (
        "training: {precision: bf15}",
        "training.precision: found the text 'bf15', expected 'auto', 'fp32', 'bf16' or 'fp16', did you mean 'bf16'?",
    ),
    "boolean as choice": ("training: {compile: true}", "training.compile: found true, expected 'auto', 'on' or 'off'"),
    "text for an integer": ("seed: '7'", "seed: found the text '7', expected an integer"),
    "word for an integer": ("seed: on", "seed: found the text 'on', expected an integer"),
    "boolean for an integer": ("seed: true", "seed: found true, expected an integer"),
    "float for an integer": ("training: {max_steps: 3.0}", "training.max_steps: found 3.0, expected an integer"),
    "too many threads": ("training: {threads: 5000}", "training.threads: found 5000, expected at most 4096"),
    "list for an integer": ("seed: [1]", "seed: found a list of 1, expected an integer"),
    "null for an integer": ("seed: null", "seed: found null, expected an integer"),
    "text for a number": ("optimizer: {lr: '1e-3'}", "optimizer.lr: found the text '1e-3', expected a number"),
    "boolean for a number": ("optimizer: {lr: true}", "optimizer.lr: found true, expected a number"),
    "integer for a boolean": (
        "model: {decoder: {final_norm: 1}}",
        "model.decoder.final_norm: found 1, expected true or false",
    ),
    "yes for a boolean": (
        "model: {decoder: {final_norm: yes}}",
        "model.decoder.final_norm: found the text 'yes', expected true or false",
    ),
    "number for text": ("tokenizer: {path: 7}", "tokenizer.path: found 7, expected text"),
    "number for a section": ("training: 7", "training: found 7, expected a mapping"),
    "mapping for a list": ("objectives: {kind: causal_lm}", "objectives: found a mapping, expected a list"),
    "text for number or word": (
        "model: {decoder: {attention: {scale: fast}}}",
        "model.decoder.attention.scale: found the text 'fast', expected 'auto' or a number",
    ),
    "too few": ("optimizer: {betas: [0.9]}", "optimizer.betas.1: missing"),
    "too many": (
        "optimizer: {betas: [0.9, 0.9, 0.9]}",
        "optimizer.betas: found a list of 3, expected at most 2 values",
    ),
    "missing": ("data: {train: [{weight: 2}]}", "data.train.0.path: missing"),
    "zero": ("training: {max_steps: 0}", "training.max_steps: found 0, expected more than 0"),
    "negative": ("training: {eval_every: -5}", "training.eval_every: found -5, expected more than 0"),
    "negative seed": ("seed: -1", "seed: found -1, expected at least 0"),
    "negative rate": ("optimizer: {lr: -1.0e-3}", "optimizer.lr: found -0.001, expected more than 0"),
    "negative dropout": ("model: {decoder: {dropout: -0.1}}", "model.decoder.dropout: found -0.1, expected at least 0"),
    "too much dropout": ("model: {decoder: {dropout: 1}}", "model.decoder.dropout: found 1, expected less than 1"),
    "negative option": (
        "model: {decoder: {positions: {kind: shaw, clip: -3}}}",
        "model.decoder.positions.clip: must be greater than 0, found -3",
    ),
    "not a number": ("optimizer: {lr: .nan}", "optimizer.lr: found nan, expected a finite number"),
    "not a number in options": (
        "model: {decoder: {positions: {kind: rope, base: .NaN}}}",
        "model.decoder.positions.base: found nan, expected a finite number",
    ),
    "infinite": ("optimizer: {lr: .inf}", "optimizer.lr: found inf, expected a finite number"),
    "overflowing": ("optimizer: {lr: 1e999}", "optimizer.lr: found inf, expected a finite number"),
    "huge": ("training: {max_steps: 100000000000000000000}", "training.max_steps: found a number of 21 digits"),
    "half a character": ('tokenizer: {path: "\\ud800"}', "tokenizer.path: found the text "),
    "bad layer number": (
        "model: {decoder: {layers: {first: {}}}}",
        "model.decoder.layers.first: found the text 'first', expected an integer",
    ),
    "no objective": ("objectives: []", "objectives: must name at least one objective"),
    "duplicate key": ("preset: tiny", "duplicate key 'preset', expected once (first at line 1)"),
}


@pytest.mark.parametrize(("line", "message"), IN_FILES.values(), ids=IN_FILES)
def test_a_mistake_in_a_file_is_one_line_that_names_file_line_and_key(line: str, message: str, write: Write) -> None:
    file = write(f"preset: tiny\n{line}\n")
    error = refused(config=file)
    assert error.message.startswith(f"{file}:2: {message}")
    assert "\n" not in error.message


IN_SETS = {
    "lr": "--set: found 'lr', expected key=value",
    "=3": "--set: found '=3', expected key=value",
    "optimizer.lr=fast": "--set: optimizer.lr: found the text 'fast', expected a number",
    "optimizer.lr=nan": "--set: optimizer.lr: found the text 'nan', expected a number",
    "optimizer.lr=.nan": "--set: optimizer.lr: found nan, expected a finite number",
    "modle.d_model=3": "--set: modle: unknown key, did you mean 'model'?",
    "model.decoder.num_layer=3": "--set: model.decoder.num_layer: unknown key, did you mean 'num_layers'?",
    "model.d_model.x=3": "--set: model.d_model.x: model.d_model is 16, expected a mapping or a list",
    "objectives.4.weight=1": "--set: objectives.4: found position '4' in a list of 1, expected a number from 0 to 1",
    "objectives.first.weight=1": "--set: objectives.first: found position 'first' in a list of 1",
    "arch=llama": "--set: arch cannot be set: choose it with --arch",
    "preset=small": "--set: preset cannot be set: choose it with --preset",
    "seed=[1": "--set seed:1: not valid YAML",
    "seed=[*x]": "--set seed:1: found the alias '*x'",
}


@pytest.mark.parametrize(("text", "message"), IN_SETS.items(), ids=IN_SETS)
def test_a_mistake_in_set_is_one_line(text: str, message: str) -> None:
    assert refused(arch="gpt", sets=[text]).message.startswith(message)


def test_a_mistake_in_a_flag_names_the_flag() -> None:
    error = refused(arch="gpt", flags={"optimizer.lr": float("nan")})
    assert error.message == "--lr: optimizer.lr: found nan, expected a finite number"
    assert refused(arch="gpt", flags={"training.max_steps": -3}).message.startswith(
        "--max-steps: training.max_steps: found -3"
    )
    error = refused(arch="gpt", flags={"objectives": [{"kind": "seq2sq"}]})
    assert error.message.startswith("--objective: objectives.0.kind: found the text 'seq2sq'")


def test_a_mistake_in_a_preset_names_the_preset(own_presets: Path) -> None:
    (own_presets / "gpt" / "tiny.yaml").write_text("# broken\nmodel:\n  d_modle: 3\n  decoder: {}\n")
    assert refused(arch="gpt").message == "preset gpt/tiny:3: model.d_modle: unknown key, did you mean 'd_model'?"


def test_several_mistakes_are_all_told_up_to_five(write: Write) -> None:
    file = write("preset: tiny\nseed: -1\noptimizer:\n  lr: 0\n  eps: x\n")
    lines = refused(config=file).message.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        [f"{file}:4", "optimizer.lr"],
        [f"{file}:5", "optimizer.eps"],
        [f"{file}:2", "seed"],
    ]
    file = write("preset: tiny\n" + "".join(f"unknown_{n}: 1\n" for n in range(8)))
    lines = refused(config=file).message.splitlines()
    assert len(lines) == 6
    assert lines[5] == "and 3 more"


def test_a_model_without_a_stack_says_what_to_do(write: Write) -> None:
    file = write("model: {d_model: 24}\n")
    error = refused(config=file)
    assert error.message == f"{file}:1: model: a model needs an encoder, a decoder, or both"
    assert error.hint is not None and "--preset" in error.hint


def test_missing_empty_and_wrong_files_are_reported(tmp_path: Path, write: Write) -> None:
    assert refused(config=tmp_path / "none.yaml").message == f"{tmp_path / 'none.yaml'}: no such file"
    assert refused(config=tmp_path).message == f"{tmp_path}: found a folder, expected a YAML file"
    assert "found an empty file, expected a mapping of sections" in refused(config=write("")).message
    assert refused(config="gpt/small").hint == "the preset of that name: --arch gpt --preset small"


def test_a_mistake_leaves_no_traceback_of_pydantic(write: Write) -> None:
    error = refused(config=write("seed: x\n"))
    assert "pydantic" not in error.message and "validation" not in error.message


def test_a_stored_recipe_is_checked_as_strictly() -> None:
    with pytest.raises(InputError, match=r"recipe\.yaml:2: seed: found the text '7', expected an integer"):
        recipe_from_yaml("model: {decoder: {}}\nseed: '7'\n", name="recipe.yaml")
    with pytest.raises(InputError, match=r"recipe\.yaml: model: missing"):
        recipe_from_yaml("seed: 7\n", name="recipe.yaml")


@pytest.mark.parametrize("part", ["encoder: {num_layers: 1, num_heads: 2}", "patches: {image_size: 32}"])
def test_causal_lm_refuses_an_encoder_and_patches(write: Write, part: str) -> None:
    file = write(f"arch: gpt\npreset: tiny\nmodel: {{{part}}}\n")
    assert f"causal_lm needs a model without model.{part.split(':')[0]}, found one" in refused(config=file).message
