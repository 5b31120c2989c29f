"""Recipes of the shipped presets: all valid and described; contradictions, notes and heads by objective."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tformer.objectives import OBJECTIVES
from tformer.recipe import DEFAULT_PRESETS, list_presets, load_recipe, preset_summary
from tformer.recipe.presets import BUILTIN_PRESETS
from tformer.recipe.recipe import Recipe
from tformer.support import shipped
from tformer.support.errors import InputError
from tformer.tokenizer import train_tokenizer

SHIPPED = [(arch, preset) for arch, names in list_presets().items() for preset in names]


@pytest.mark.parametrize(("arch", "preset"), SHIPPED)
def test_every_shipped_preset_loads_and_says_what_it_is_for(arch: str, preset: str) -> None:
    resolved = load_recipe(arch=arch, preset=preset)
    assert (resolved.recipe.arch, resolved.recipe.preset) == (arch, preset)
    assert resolved.notes == []
    assert len(preset_summary(arch, preset)) > 10


def test_every_arch_has_a_default_that_is_shipped() -> None:
    assert DEFAULT_PRESETS.keys() == list_presets().keys()
    for arch, preset in (*DEFAULT_PRESETS.items(), *BUILTIN_PRESETS.items()):
        assert preset in list_presets()[arch]


def test_the_default_of_gpt_is_tiny() -> None:
    assert load_recipe(arch="gpt").recipe.preset == "tiny"


def test_presets_are_found_inside_an_installed_package_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "tformer"
    for folder in (package / "configs" / "gpt", package.parent / "configs" / "other"):
        folder.mkdir(parents=True)
    (package / "configs" / "gpt" / "mine.yaml").write_text("# Mine\nmodel: {decoder: {}}\n")
    monkeypatch.setattr(shipped, "__file__", str(package / "support" / "shipped.py"))
    assert shipped.preset_folder() == package / "configs"
    assert list_presets() == {"gpt": ["mine"]}
    assert preset_summary("gpt", "mine") == "Mine"


BOTH = "data.train=[{path: a, target_path: b}]"

CONTRADICTIONS = {
    ("transformer", "data.target_seq_len=9999"): "data.target_seq_len: found 9999, expected at most model.max_seq_len",
    ("transformer", "model.max_target_len=8", "data.target_seq_len=9"): "found 9, expected at most "
    "model.max_target_len (8)",
    ("transformer", "training.best_metric=chrf", "training.valid_beam_size=0"): "training.best_metric: found 'chrf', "
    "expected accuracy, loss: with training.valid_beam_size 0 validation does not decode",
    ("transformer", "tokenizer.separate=true", "tokenizer.path=a.json"): "tokenizer.path: found a.json, expected null",
    ("transformer", "tokenizer.path=a", "tokenizer.source_path=b", "tokenizer.target_path=c"): "tokenizer.path: excl",
    ("t5", BOTH): "data.train.0.target_path: found b, but span_corruption does not read pairs: expected null",
    ("bert", "data.valid=[{path: a, target_path: b}]"): "data.valid.0.target_path: found b, but masked_lm",
    ("gpt", "data.train=[{path: a, prefix: x}]"): "data.train.0.prefix: found 'x', but causal_lm has no prefixes",
}


@pytest.mark.parametrize(("given", "message"), CONTRADICTIONS.items(), ids=map("-".join, CONTRADICTIONS))
def test_what_pairs_cannot_mean_is_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(arch=given[0], preset="tiny", sets=list(given[1:]))
    assert message in caught.value.message


def test_data_of_both_sides_names_the_objective_that_would_read_it() -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(arch="t5", preset="tiny", sets=[BOTH])
    assert "--objective seq2seq" in str(caught.value.hint)
    recipe = load_recipe(arch="t5", preset="tiny", sets=[BOTH], flags={"objectives": [{"kind": "seq2seq"}]}).recipe
    assert recipe.data.train[0].target_path == "b"


def test_metrics_of_own_outputs_need_them_and_others_do_not() -> None:
    sets = ["training.valid_beam_size=0", "training.best_metric=accuracy"]
    assert load_recipe(arch="transformer", preset="tiny", sets=sets).recipe.training.valid_beam_size == 0


@pytest.mark.parametrize(("arch", "objective"), [("bart", "denoising"), ("t5", "span_corruption"), ("bart", "seq2seq")])
def test_a_forced_end_is_read(arch: str, objective: str) -> None:
    flags = {"objectives": [{"kind": objective}]}
    plain, forced = (
        load_recipe(arch=arch, preset="tiny", flags=flags, sets=sets).notes
        for sets in ([], ["tokenizer.special_ids.forced_eos=2"])
    )
    assert forced == plain


WHOLE_TEXT = ("classification", "multi_label", "regression")


def recipe_of(arch: str, objective: str, *sets: str) -> Recipe:
    return load_recipe(arch=arch, preset="tiny", flags={"objectives": [{"kind": objective}]}, sets=sets).recipe


@pytest.mark.parametrize("objective", WHOLE_TEXT)
@pytest.mark.parametrize(("arch", "pooling"), [("bart", "eos"), ("t5", "eos"), ("transformer", "eos"), ("bert", "cls")])
def test_a_new_head_reads_the_last_position_of_a_decoder(arch: str, pooling: str, objective: str) -> None:
    (head,) = recipe_of(arch, objective).model.heads
    assert getattr(head, "pooling", None) == pooling


@pytest.mark.parametrize("objective", WHOLE_TEXT)
def test_the_first_position_of_a_decoder_is_refused(objective: str) -> None:
    with pytest.raises(InputError) as caught:
        recipe_of("bart", objective, "model.heads.0.pooling=cls")
    assert "model.heads.0.pooling: found cls" in caught.value.message
    assert "expected eos, mean or max" in caught.value.message and "eos" in str(caught.value.hint)


def test_what_is_set_goes_before_the_head_that_an_objective_brings() -> None:
    (head,) = recipe_of("bart", "classification", "model.heads.0.pooling=mean").model.heads
    assert getattr(head, "pooling", None) == "mean"


LEARNABLE = [(arch, kind) for arch in list_presets() for kind in OBJECTIVES if not OBJECTIVES[kind].companion_of]


@pytest.mark.parametrize(("arch", "objective"), LEARNABLE)
def test_a_tokenizer_that_will_be_trained_has_the_special_tokens_of_the_objective(arch: str, objective: str) -> None:
    try:
        train = recipe_of(arch, objective).tokenizer.train
    except InputError:  # of another body
        return
    texts = ["the cat sat on the mat"] * 20
    special = train_tokenizer(lambda: iter(texts), replace(train, vocab_size=500, min_frequency=1)).special
    assert all(getattr(special, role) not in (None, ()) for role in OBJECTIVES[objective].special_tokens)


@pytest.mark.parametrize(
    ("arch", "objective", "key"), [("t5", "denoising", "template: gpt"), ("bart", "span_corruption", "sentinels: 0")]
)
def test_special_tokens_that_a_file_or_set_states_are_kept(arch: str, objective: str, key: str, tmp_path: Path) -> None:
    flags, config, name = {"objectives": [{"kind": objective}]}, tmp_path / "own.yaml", key.split(": ")
    config.write_text(f"tokenizer: {{train: {{{key}}}}}\n")
    for given in ({"config": config}, {"sets": [f"tokenizer.train.{name[0]}={name[1]}"]}):
        train = load_recipe(arch=arch, preset="tiny", flags=flags, **given).recipe.tokenizer.train  # type: ignore[arg-type]
        assert str(getattr(train, name[0])) == name[1]
