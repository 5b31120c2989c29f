"""Recipes of pairs: what contradicts in them, and what is said of keys that nothing reads."""

from __future__ import annotations

import pytest

from tformer.errors import InputError
from tformer.recipe import load_recipe

BOTH = "data.train=[{path: a, target_path: b}]"

CONTRADICTIONS = {
    ("transformer", "data.target_seq_len=9999"): "data.target_seq_len: found 9999, expected at most model.max_seq_len",
    ("transformer", "training.best_metric=chrf", "training.valid_beam_size=0"): "training.best_metric: found 'chrf', "
    "expected accuracy, loss: with training.valid_beam_size 0 validation does not decode",
    ("transformer", "tokenizer.separate=true", "tokenizer.path=a.json"): "tokenizer.path: found a.json, expected null",
    ("transformer", "tokenizer.path=a", "tokenizer.source_path=b", "tokenizer.target_path=c"): "tokenizer.path: excl",
    ("t5", BOTH): "data.train.0.target_path: found b, but span_corruption does not read pairs: expected null",
    ("bert", "data.valid=[{path: a, target_path: b}]"): "data.valid.0.target_path: found b, but masked_lm",
    ("gpt", "data.train=[{path: a, prefix: x}]"): "data.train.0.prefix: found 'x', but causal_lm puts nothing",
}


@pytest.mark.parametrize(("given", "told"), CONTRADICTIONS.items(), ids=map("-".join, CONTRADICTIONS))
def test_what_pairs_cannot_mean_is_refused(given: tuple[str, ...], told: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(arch=given[0], preset="tiny", sets=list(given[1:]))
    assert told in caught.value.message


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
