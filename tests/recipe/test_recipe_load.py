"""Resolving recipes from arch, preset, file, flags and --set; the shipped presets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tformer.nn.positions.rope import RopeOptions
from tformer.recipe import load_recipe, recipe_from_yaml, recipe_to_yaml
from tformer.recipe.load import leaves, recipe_to_data
from tformer.support.errors import InputError

pytestmark = pytest.mark.usefixtures("own_presets")
Write = Callable[[str], Path]
OWN_MODEL = "model: {d_model: 24, decoder: {num_layers: 3}}\n"


def test_precedence_is_defaults_preset_file_flags_set(write: Write) -> None:
    file = write("arch: gpt\noptimizer: {lr: 3.0e-4, weight_decay: 0.3}\ntraining: {max_steps: 7}\n")
    resolved = load_recipe(
        preset="small",
        config=file,
        flags={"optimizer.weight_decay": 0.4, "training.max_steps": 8},
        sets=["training.max_steps=9"],
    )
    optimizer, origins = resolved.recipe.optimizer, resolved.origins
    assert (optimizer.momentum, origins["optimizer.momentum"]) == (0.95, "default")
    assert (optimizer.eps, origins["optimizer.eps"]) == (1e-7, "preset gpt/small")
    assert (optimizer.lr, origins["optimizer.lr"]) == (3e-4, f"file {file}:2")
    assert (optimizer.weight_decay, origins["optimizer.weight_decay"]) == (0.4, "flag --weight-decay")
    assert (resolved.recipe.training.max_steps, origins["training.max_steps"]) == (9, "--set")
    assert origins["preset"] == "flag --preset"


def test_values_that_numpy_computed_are_pythons_in_the_recipe() -> None:
    recipe = load_recipe(arch="gpt", preset="tiny").recipe
    given = {
        "final_validation": np.float64(2.0) <= 3,
        "valid_share": np.float32(0.5),
        "max_steps": np.int64(7),
        "eval_every": np.arange(3)[2],
    }
    changed = recipe.model_copy(update={"training": recipe.training.model_copy(update=given)})
    assert recipe_from_yaml(recipe_to_yaml(changed), name="written") == changed
    assert changed.model_dump_json(include={"training"})
    assert changed.training.final_validation is True and type(changed.training.max_steps) is int


def test_every_leaf_has_an_origin() -> None:
    resolved = load_recipe(arch="gpt", preset="tiny", sets=["data.train.0.path=a.txt"])
    assert set(resolved.origins) == {".".join(path) for path in leaves(recipe_to_data(resolved.recipe))}
    assert resolved.origins["data.train.0.path"] == "--set"
    assert resolved.origins["data.train.0.weight"] == "default"
    assert resolved.origins["model.decoder.positions.offset"] == "preset gpt/tiny"
    assert resolved.origins["model.decoder.positions.ids"] == "default"


def test_flag_origins_are_called_as_the_flag_is() -> None:
    flags: dict[str, Any] = {
        "optimizer.lr": 0.1,
        "training.batch_size": 3,
        "data.train": [{"path": "a"}],
        "tokenizer.path": "t.json",
        "data.columns.text": "body",
        "seed": 5,
    }
    origins = load_recipe(arch="gpt", flags=flags).origins
    assert origins["optimizer.lr"] == "flag --lr"
    assert origins["training.batch_size"] == "flag --batch-size"
    assert origins["data.train.0.path"] == "flag --data"
    assert origins["tokenizer.path"] == "flag --tokenizer"
    assert origins["data.columns.text"] == "flag --text-column"
    assert origins["seed"] == "flag --seed"


def test_mappings_merge_and_lists_replace(write: Write) -> None:
    file = write(
        "preset: small\nmodel: {decoder: {dropout: 0.0}, heads: [{kind: lm, softcap: 5.0}, {kind: classifier}]}\n"
        "optimizer: {betas: [0.5, 0.6]}\n"
    )
    recipe = load_recipe(config=file).recipe
    assert recipe.model.d_model == 32
    assert recipe.model.decoder is not None
    assert (recipe.model.decoder.dropout, recipe.model.decoder.num_layers) == (0.0, 2)
    assert [head.kind for head in recipe.model.heads] == ["lm", "classifier"]
    assert recipe.optimizer.betas == (0.5, 0.6)
    assert recipe.optimizer.eps == 1e-7


def test_a_mapping_of_another_kind_replaces_the_whole_mapping(write: Write) -> None:
    file = write("preset: small\nmodel: {decoder: {positions: {kind: rope}}}\noptimizer: {kind: muon}\n")
    resolved = load_recipe(config=file)
    assert resolved.recipe.model.decoder is not None
    assert resolved.recipe.model.decoder.positions == RopeOptions()
    assert resolved.recipe.optimizer.eps == 1e-8  # the preset's adamw message nothing about muon
    assert resolved.origins["optimizer.eps"] == "default"
    assert resolved.origins["model.d_model"] == "preset gpt/small", "values elsewhere keep theirs"


def test_a_mapping_of_the_same_kind_merges(write: Write) -> None:
    file = write(
        "preset: small\noptimizer: {kind: adamw, lr: 1}\nmodel: {decoder: {positions: {ids: nonpad_cumsum}}}\n"
    )
    recipe = load_recipe(config=file).recipe
    assert (recipe.optimizer.lr, recipe.optimizer.eps) == (1.0, 1e-7)
    assert recipe.model.decoder is not None
    assert recipe_to_data(recipe)["model"]["decoder"]["positions"] == {
        "kind": "learned",
        "offset": 2,
        "ids": "nonpad_cumsum",
    }


def test_null_takes_a_section_away_and_a_mapping_brings_it_back(write: Write) -> None:
    file = write("preset: tiny\nmodel: {decoder: null, encoder: {num_layers: 1}}\n")
    with pytest.raises(InputError, match=r"causal_lm needs model\.decoder, found null"):
        load_recipe(config=file)
    sets = ["training.early_stopping={}", "training.early_stopping.patience=2"]
    stopping = load_recipe(arch="gpt", sets=sets).recipe.training.early_stopping
    assert stopping is not None and stopping.patience == 2
    assert load_recipe(arch="gpt", sets=[*sets, "training.early_stopping=null"]).recipe.training.early_stopping is None


def test_set_reaches_list_items_also_of_defaults() -> None:
    recipe = load_recipe(
        arch="gpt", sets=["objectives.0.weight=2", "optimizer.betas.1=0.99", "model.heads.0.bias=true"]
    ).recipe
    assert recipe.objectives[0].weight == 2.0
    assert recipe.optimizer.betas == (0.9, 0.99)
    assert recipe_to_data(recipe)["model"]["heads"][0]["bias"] is True


def test_set_reaches_per_layer_overrides() -> None:
    decoder = load_recipe(arch="gpt", sets=["model.decoder.layers.0.dropout=0.5"]).recipe.model.decoder
    assert decoder is not None and decoder.layers == {0: {"dropout": 0.5}}


def test_setting_a_kind_drops_only_what_the_new_kind_lacks() -> None:
    base = ["model.decoder.positions={kind: sinusoidal, layout: halves, base: 500.0}"]
    rope = load_recipe(arch="gpt", sets=[*base, "model.decoder.positions.kind=rope"])
    assert rope.recipe.model.decoder is not None
    assert rope.recipe.model.decoder.positions == RopeOptions(layout="halves", base=500.0)
    assert rope.origins["model.decoder.positions.base"] == "--set"
    alibi = load_recipe(arch="gpt", sets=[*base, "model.decoder.positions.kind=alibi"])
    assert recipe_to_data(alibi.recipe)["model"]["decoder"]["positions"] == {"kind": "alibi", "rounded": False}


def test_a_union_without_a_kind_is_of_the_default_kind(write: Write) -> None:
    file = write("model: {decoder: {positions: {offset: 3}}}\n")
    recipe = load_recipe(config=file).recipe
    assert recipe_to_data(recipe)["model"]["decoder"]["positions"] == {"kind": "learned", "offset": 3, "ids": "arange"}


@pytest.mark.parametrize("one_way", ["file", "flag", "set"])
def test_the_higher_of_batch_size_and_batch_tokens_wins(one_way: str, write: Write) -> None:
    by_tokens = {
        "file": lambda: load_recipe(config=write("preset: small\ntraining: {batch_tokens: 900}\n")),
        "flag": lambda: load_recipe(arch="gpt", flags={"training.batch_tokens": 900}),
        "set": lambda: load_recipe(arch="gpt", sets=["training.batch_tokens=900"]),
    }[one_way]()
    assert (by_tokens.recipe.training.batch_size, by_tokens.recipe.training.batch_tokens) == (None, 900)
    back = load_recipe(preset="token-batches", flags={"training.batch_size": 4})
    assert (back.recipe.training.batch_size, back.recipe.training.batch_tokens) == (4, None)
    assert back.origins["training.batch_tokens"] == "flag --batch-size"


def test_batch_size_and_batch_tokens_in_one_layer_are_refused(write: Write) -> None:
    with pytest.raises(InputError, match="found 4 and 900, expected one of the two"):
        load_recipe(config=write("preset: tiny\ntraining: {batch_size: 4, batch_tokens: 900}\n"))
    with pytest.raises(InputError, match="--batch-size and --batch-tokens exclude each other"):
        load_recipe(arch="gpt", flags={"training.batch_size": 4, "training.batch_tokens": 900})
    with pytest.raises(InputError, match="found 4 and 900, expected one of the two"):
        load_recipe(arch="gpt", sets=["training.batch_size=4", "training.batch_tokens=900"])
    with pytest.raises(InputError, match="found neither"):
        load_recipe(arch="gpt", sets=["training.batch_size=null"])


def test_arch_alone_chooses_a_preset_and_says_so() -> None:
    chosen = load_recipe(arch="gpt")
    assert chosen.recipe.preset == "tiny"
    assert chosen.notes[0] == "model size: preset gpt/tiny (--preset NAME for another)"
    assert load_recipe().recipe == chosen.recipe
    assert load_recipe(arch="gpt", preset="tiny").notes == []


def test_a_preset_may_be_named_with_its_arch() -> None:
    recipe = load_recipe(preset="llama/8b").recipe
    assert (recipe.arch, recipe.preset, recipe.model.d_model) == ("llama", "8b", 64)
    with pytest.raises(InputError, match="--preset llama/8b disagrees with --arch gpt"):
        load_recipe(arch="gpt", preset="llama/8b")


def test_a_file_with_a_model_stands_on_the_defaults(write: Write) -> None:
    resolved = load_recipe(config=write(OWN_MODEL), arch="llama")
    assert (resolved.recipe.arch, resolved.recipe.preset, resolved.recipe.model.d_model) == ("llama", None, 24)
    assert resolved.notes == []


def test_a_file_without_a_model_stands_on_the_default_preset(write: Write) -> None:
    resolved = load_recipe(config=write("training: {max_steps: 3}\n"))
    assert (resolved.recipe.preset, resolved.recipe.training.max_steps) == ("tiny", 3)
    assert "model size: preset gpt/tiny" in resolved.notes[0]


def test_arch_or_preset_that_disagrees_with_the_file_is_refused(write: Write) -> None:
    file = write("seed: 1\narch: llama\npreset: tiny\n")
    with pytest.raises(InputError, match=rf"--arch gpt disagrees with {file}:2, where arch is 'llama'"):
        load_recipe(arch="gpt", config=file)
    with pytest.raises(InputError, match=rf"--preset 8b disagrees with {file}:3, where preset is 'tiny'"):
        load_recipe(preset="8b", config=file)
    assert load_recipe(arch="llama", preset="tiny", config=file).recipe.arch == "llama"


def test_a_complete_file_stands_alone(write: Write, own_presets: Path) -> None:
    recipe = load_recipe(preset="small", sets=["model.decoder.layers.0.dropout=0.5"]).recipe
    file = write(recipe_to_yaml(recipe))
    (own_presets / "gpt" / "small.yaml").unlink()  # renamed in a later version
    assert load_recipe(config=file).recipe == recipe
    assert load_recipe(config=file).notes == []


def test_recipe_to_yaml_and_back_is_the_identity() -> None:
    sets = [
        "tokenizer.path='on: \"x\"\\n #'",
        "optimizer.lr=1.2345678901234567e-05",
        "data.columns.text='0'",
        "data.columns.label=0",
        "generation.stop=['1e-3', 'null', '']",
        "model.decoder.layers={0: {attention: {qk_norm: true}}, 1: {dropout: 0.5}}",
    ]
    resolved = load_recipe(arch="gpt", sets=sets)
    text = recipe_to_yaml(resolved.recipe)
    assert recipe_from_yaml(text, name="x") == resolved.recipe
    assert recipe_from_yaml(recipe_to_yaml(resolved.recipe, origins=resolved.origins), name="x") == resolved.recipe
    assert recipe_to_yaml(recipe_from_yaml(text, name="x")) == text


def test_yaml_has_the_sections_in_the_designs_order_and_short_mappings_on_one_line() -> None:
    text = recipe_to_yaml(load_recipe(arch="gpt").recipe)
    sections = [line.split(":")[0] for line in text.splitlines() if not line.startswith(" ")]
    designed = ["tokenizer", "data", "model", "objectives", "optimizer", "schedule", "training", "generation", "seed"]
    assert [name for name in sections if name in designed] == designed
    assert sections[0] == "schema"
    assert "    positions: {kind: learned, offset: 2, ids: arange}\n" in text
    assert "  betas: [0.9, 0.95]\n" in text


def test_notes_tell_what_does_nothing() -> None:
    notes = load_recipe(
        preset="tiny",
        arch="gpt",
        sets=[
            "schedule.warmup_steps=50",
            "training.max_steps=20",
            "training.early_stopping={}",
            "optimizer.adam_lr=0.1",
        ],
    ).notes
    assert [note.split()[0] for note in notes] == [
        "schedule.warmup_steps",
        "training.early_stopping",
        "optimizer.adam_lr",
    ]


CONTRADICTIONS = {
    "data.seq_len=33": "--set: data.seq_len: found 33, expected at most model.max_seq_len (32)",
    "tokenizer.source_path=a.json": "tokenizer.target_path: missing",
    "training.best_metric=bleu": "found 'bleu', expected a metric of the objectives: accuracy, loss",
    "model.heads=[{kind: classifier}]": "causal_lm needs a head of kind lm, found classifier",
}


@pytest.mark.parametrize(("text", "message"), CONTRADICTIONS.items(), ids=CONTRADICTIONS)
def test_contradictions_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(arch="gpt", sets=[text])
    assert message in caught.value.message


def test_two_tokenizers_share_a_table_only_where_both_have_all_of_its_rows(write: Write) -> None:
    stack = "{num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}"
    file = write(
        f"model: {{d_model: 8, max_seq_len: 8, vocab_size: 60, encoder: {stack}, decoder: {stack}}}\n"
        "objectives: [{kind: seq2seq}]\ntokenizer: {source_path: a.json, target_path: b.json}\n"
    )
    sets = ["model.tie.source_target=true", "model.target_vocab_size=60"]
    assert load_recipe(config=file, sets=sets).recipe.model.tie.source_target
    with pytest.raises(InputError, match=r"model\.tie\.source_target: found true, expected false"):
        load_recipe(config=file, sets=[*sets, "model.target_vocab_size=50"])


def test_a_stored_recipe_loads_even_if_it_would_be_refused_today() -> None:
    text = recipe_to_yaml(load_recipe(arch="gpt").recipe).replace("seq_len: null", "seq_len: 4000")
    assert recipe_from_yaml(text, name="checkpoint").data.seq_len == 4000


def test_a_stored_recipe_can_take_the_place_of_the_preset(write: Write) -> None:
    stored = recipe_to_yaml(load_recipe(preset="small", sets=["seed=5", "training.batch_tokens=600"]).recipe)
    resolved = load_recipe(
        base_yaml=stored,
        base_name="run/recipe.yaml",
        config=write("arch: gpt\noptimizer: {lr: 0.5}\n"),
        flags={"training.max_steps": 8},
        sets=["training.batch_size=2"],
    )
    recipe, origins = resolved.recipe, resolved.origins
    assert (recipe.preset, recipe.model.d_model, recipe.seed, recipe.optimizer.lr) == ("small", 32, 5, 0.5)
    assert (recipe.training.max_steps, recipe.training.batch_size, recipe.training.batch_tokens) == (8, 2, None)
    assert origins["seed"].startswith("file run/recipe.yaml:")
    assert load_recipe(base_yaml=stored).recipe == recipe_from_yaml(stored, name="x")
    with pytest.raises(InputError, match=r"my\.yaml:1: preset 'tiny' disagrees with the checkpoint's, 'small'"):
        load_recipe(base_yaml=stored, config=write("preset: tiny\n"))
    with pytest.raises(InputError, match="--arch: arch 'llama' disagrees with the checkpoint's, 'gpt'"):
        load_recipe(base_yaml=stored, arch="llama")


def test_notes_tell_what_the_objective_does_not_read() -> None:
    sets = {
        "data.max_length_ratio=2.0": "data.max_length_ratio (2.0) is not used by causal_lm",
        "tokenizer.special_ids.forced_bos=3": "tokenizer.special_ids.forced_bos (3) is not used by causal_lm",
        "generation.length_margin=2": "generation.length_margin (2) is not used by causal_lm",
        "data.columns.label=1": "data.columns.label (1) is not used by causal_lm",
    }
    for key, expected in sets.items():
        [note] = load_recipe(arch="gpt", preset="tiny", sets=[key]).notes
        assert note.startswith(expected)
    read = ["tokenizer.special_ids.eos=3", "tokenizer.special_ids.pad=1"]
    assert load_recipe(arch="gpt", preset="tiny", sets=read).notes == []


def test_the_note_on_a_mask_without_packing_is_true() -> None:
    [note] = load_recipe(arch="gpt", preset="tiny", sets=["data.document_mask=true", "data.packing=none"]).notes
    assert "documents never see each other anyway" in note
