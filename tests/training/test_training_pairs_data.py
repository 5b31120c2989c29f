"""Runs of pairs: columns, prefixes and vocabularies as they are asked for, and what a recipe keeps of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tformer
from tests.training.pair_makers import english, german, metrics, sides

Cli = Callable[..., Any]

SHORT = ("--max-steps", 2, "--set", "training.eval_every=2", "--set", "training.valid_sentences=4")
VOCABULARY = ("--vocabulary", "separate")


def table(path: Path, header: str, count: int = 30) -> Path:
    rows = [f"{text}\t{german(text)}" for text in english(count)]
    path.write_text("\n".join(([header] if header else []) + rows) + "\n")
    return path


# --- columns ----------------------------------------------------------------------------------------------------------


def test_columns_that_all_tables_share_are_written_down(train: Callable[..., Path], tmp_path: Path) -> None:
    first, second = table(tmp_path / "a.tsv", "source\ttarget"), table(tmp_path / "b.tsv", "source\ttarget", 9)
    columns = tformer.load(train("--data", first, "--valid", second, *SHORT)).recipe.data.columns
    assert (columns.source, columns.target) == ("source", "target")


def test_tables_with_other_headers_train_resume_and_are_evaluated(
    train: Callable[..., Path], tmp_path: Path, cli: Cli
) -> None:
    first, second = table(tmp_path / "a.tsv", "source\ttarget"), table(tmp_path / "b.tsv", "en\tde", 9)
    run = train("--data", first, "--valid", second, *SHORT)
    columns = tformer.load(run).recipe.data.columns
    assert (columns.source, columns.target) == (None, None)
    assert cli("train", "--resume", "--out", run, "--max-steps", 3).code == 0
    assert json.loads(cli("evaluate", run, "--json").out)["examples"] == 9


@pytest.mark.parametrize("header", ["source\ttarget", "en\tde", "", "question\tanswer"])
def test_the_runs_columns_are_not_imposed_on_a_table_without_them(
    train: Callable[..., Path], tmp_path: Path, cli: Cli, header: str
) -> None:
    run = train("--data", table(tmp_path / "a.tsv", "source\ttarget"), *SHORT)
    outcome = cli("evaluate", run, "--data", table(tmp_path / "test.tsv", header, 7), "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["examples"] == 7


def test_the_runs_columns_hold_where_a_table_has_them(train: Callable[..., Path], tmp_path: Path, cli: Cli) -> None:
    rows = [f"{n}\t{german(text)}\t{text}" for n, text in enumerate(english(30))]
    (tmp_path / "a.tsv").write_text("\n".join(["number\tafter\tbefore", *rows]) + "\n")
    asked = ("--source-column", "before", "--target-column", "after")
    run = train("--data", tmp_path / "a.tsv", *asked, *SHORT)
    found, named = (cli("evaluate", run, "--data", tmp_path / "a.tsv", *more, "--json") for more in ((), asked))
    assert found.code == 0 and json.loads(found.out)["loss"] == pytest.approx(json.loads(named.out)["loss"])


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_a_prefix_stands_before_every_source_of_the_command(
    train: Callable[..., Path], aligned: tuple[Path, Path], tmp_path: Path
) -> None:
    more = table(tmp_path / "more.tsv", "source\ttarget")
    run = train(*sides(aligned), "--data", more, "--valid", more, "--prefix", "to german: ", *SHORT)
    data = tformer.load(run).recipe.data
    assert {spec.prefix for spec in (*data.train, *data.valid)} == {"to german: "} and len(data.train) == 2
    assert (run / "samples.txt").read_text().count("to german: ") >= 2


def test_validation_data_takes_the_one_prefix_of_the_training_data(
    train: Callable[..., Path], tmp_path: Path, recipe: Path
) -> None:
    first, second = table(tmp_path / "a.tsv", "source\ttarget"), table(tmp_path / "b.tsv", "source\ttarget", 9)
    own = f"[{{path: {second}}}, {{path: {second}, prefix: other}}]"

    def prefixes(one: str, other: str) -> list[str]:
        entries = f"[{{path: {first}, prefix: {one}}}, {{path: {second}, prefix: {other}}}]"
        sets = ("--set", f"data.train={entries}", "--set", f"data.valid={own}")
        return [spec.prefix for spec in tformer.load(train(*sets, *SHORT)).recipe.data.valid]

    assert prefixes("'one '", "'one '") == ["one ", "other"]
    assert prefixes("'one '", "'two '") == ["", "other"]


def test_a_prefix_without_data_to_stand_before_is_refused(cli: Cli, recipe: Path) -> None:
    outcome = cli("train", "--config", recipe, "--prefix", "x ")
    assert outcome.code == 2 and "--prefix" in outcome.err


# --- vocabularies -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizers(cli: Cli, aligned: tuple[Path, Path], tmp_path: Path) -> list[Path]:
    files = [tmp_path / "source.json", tmp_path / "target.json"]
    for text, file in zip(aligned, files, strict=True):
        outcome = cli("train-tokenizer", text, "--model", "word", "--template", "seq2seq", "--vocab-size", 60,
                      "--out", file)  # fmt: skip
        assert outcome.code == 0, outcome.err
    return files


def test_a_tokenizer_for_each_side_means_two_vocabularies(
    train: Callable[..., Path], aligned: tuple[Path, Path], tokenizers: list[Path], cli: Cli
) -> None:
    run = train(*sides(aligned), "--source-tokenizer", tokenizers[0], "--target-tokenizer", tokenizers[1], *SHORT)
    loaded = tformer.load(run)
    assert loaded.text_tokenizer.to_json() == tokenizers[0].read_text()
    assert loaded.target_tokenizer.to_json() == tokenizers[1].read_text()
    assert not loaded.recipe.model.tie.source_target
    more = train("--init-from", run, *sides(aligned), *SHORT, base=False)  # needs neither file
    recipe = tformer.load(more).recipe
    assert recipe.separate_vocabularies and recipe.tokenizer.source_path is None


def test_joint_takes_the_files_of_both_sides_away(
    train: Callable[..., Path], aligned: tuple[Path, Path], tokenizers: list[Path], recipe: Path
) -> None:
    first, second = tokenizers
    files = f"tokenizer: {{source_path: {first}, target_path: {second}, "
    recipe.write_text(recipe.read_text().replace("tokenizer: {", files))
    run = train(*sides(aligned), "--vocabulary", "joint", *SHORT)
    assert tformer.load(run).own_target_tokenizer is None


def test_files_and_vocabularies_that_contradict_are_refused(
    cli: Cli, recipe: Path, aligned: tuple[Path, Path], tokenizers: list[Path]
) -> None:
    first, second = tokenizers
    two = ("--source-tokenizer", first, "--target-tokenizer", second)
    for flags, told in (
        (("--tokenizer", first, *VOCABULARY), "expected null where source and target have a vocabulary each"),
        (("--tokenizer", first, *two), "--tokenizer and --source-tokenizer exclude each other"),
        ((*two, "--vocabulary", "joint"), "--vocabulary joint and --source-tokenizer exclude each other"),
        (two[:2], "--target-tokenizer is missing"),
        (two[2:], "--source-tokenizer is missing"),
    ):
        outcome = cli("train", "--config", recipe, *sides(aligned), *flags)
        assert outcome.code == 2 and told in outcome.err.replace("\n", " "), outcome.err


def test_one_tokenizer_cannot_be_asked_of_a_model_with_two(
    cli: Cli, train: Callable[..., Path], aligned: tuple[Path, Path], tokenizers: list[Path], recipe: Path
) -> None:
    run = train(*sides(aligned), *VOCABULARY, *SHORT)
    base = ("train", "--init-from", run, *sides(aligned), "--tokenizer", tokenizers[0])
    for flags in ((), ("--preset", "transformer/tiny")):
        outcome = cli(*base, *flags)
        assert outcome.code == 2 and "a vocabulary each" in outcome.err.replace("\n", " "), outcome.err


# --- one side of pairs, and bodies of other runs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "told"), [("t5", "--objective seq2seq"), ("gpt", "--arch transformer"), ("bert", "--arch transformer")]
)
def test_pairs_are_not_half_read_by_objectives_of_texts(
    cli: Cli, aligned: tuple[Path, Path], family: str, told: str
) -> None:
    outcome = cli("train", "--arch", family, "--preset", "tiny", *sides(aligned), "--dry-run")
    message = outcome.err.replace("\n", " ")
    assert outcome.code == 2 and "data.train.0.target_path" in message and told in message, outcome.err


def test_a_prefix_is_not_ignored_by_objectives_of_texts(cli: Cli, text_file: Path) -> None:
    outcome = cli("train", "--arch", "gpt", "--data", text_file, "--prefix", "x ", "--dry-run")
    assert outcome.code == 2 and "data.train.0.prefix" in outcome.err


def test_lengths_of_a_preset_are_cut_to_those_of_the_body(
    train: Callable[..., Path], aligned: tuple[Path, Path]
) -> None:
    body = train(*sides(aligned), *SHORT)
    run = train("--init-from", body, "--preset", "transformer/tiny", "--set", "data.target_seq_len=200",
                *sides(aligned), "--set", "training.batch_tokens=200", *SHORT, base=False)  # fmt: skip
    data = tformer.load(run).recipe.data
    assert (data.seq_len, data.target_seq_len) == (32, 32)


def test_what_pre_training_asked_of_texts_is_not_held_against_pairs(
    cli: Cli, train: Callable[..., Path], aligned: tuple[Path, Path], text_file: Path, tmp_path: Path
) -> None:
    texts = ("--objective", "span_corruption", "--data", text_file, *SHORT[:-2])
    body = train(*texts, "--set", "tokenizer.train.template=t5", "--set", "tokenizer.train.vocab_size=200",
                 "--set", "data.packing=documents")  # fmt: skip
    outcome = cli("train", "--init-from", body, "--objective", "seq2seq", *sides(aligned), "--out", tmp_path / "tuned",
                  "--max-steps", 2)  # fmt: skip
    assert outcome.code == 0 and "is not used by" not in outcome.err, outcome.err
    recipe = tformer.load(tmp_path / "tuned").recipe
    assert recipe.data.packing == "concat" and recipe.training.eval_every == 2  # the training section stays
    assert "bleu" in metrics(tmp_path / "tuned")[-1]
    more = cli("train", "--init-from", body, *texts, "--out", tmp_path / "more")  # text again is no turn to labels
    assert more.code == 0 and "preset" not in more.err, more.err
    assert tformer.load(tmp_path / "more").recipe.data.packing == "documents"
    labels = cli("train", "--init-from", body, "--objective", "classification", "--data", text_file)
    assert labels.code == 2 and "plain text has no labels" in labels.err, labels.err  # its decoder would be read twice
