"""Pairs of texts: every objective of an encoder-decoder trains, resumes and fine-tunes by the command a user types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tformer
from tests.training.pair_makers import RECIPE, english, german, metrics, sides

Cli = Callable[..., Any]


def test_aligned_files_are_translated_and_validated(train: Callable[..., Path], aligned: tuple[Path, Path]) -> None:
    run = train(*sides(aligned), "--valid-source", aligned[0], "--valid-target", aligned[1])
    found = metrics(run)[-1]
    assert {"loss", "accuracy", "perplexity", "bleu", "chrf", "sequence_accuracy"} <= found.keys()
    assert "tok:13a" in found["bleu_signature"] and found["chrf_signature"]
    loaded = tformer.load(run)
    assert loaded.target_tokenizer is loaded.text_tokenizer
    assert loaded.decoder_tokens.start == loaded.text_tokenizer.special.bos
    assert " -> " in (run / "samples.txt").read_text()


def test_it_learns_to_copy(train: Callable[..., Path]) -> None:
    run = train("--arch", "transformer", "--preset", "dates", "--data", "builtin:copy", "--max-steps", 40,
                "--set", "training.eval_every=40", "--set", "training.valid_sentences=40", base=False)  # fmt: skip
    first, last = metrics(run, "train")[0]["loss"], metrics(run, "train")[-1]["loss"]
    assert last < 0.7 * first


@pytest.mark.parametrize("best", ["loss", "bleu", "chrf", "sequence_accuracy", "accuracy"])
def test_best_and_early_stopping_by_any_metric(
    train: Callable[..., Path], aligned: tuple[Path, Path], best: str
) -> None:
    run = train(*sides(aligned), "--set", f"training.best_metric={best}", "--set", "training.early_stopping.patience=1",
                "--lr", "1e-9", "--set", "optimizer.weight_decay=0")  # fmt: skip
    assert len(metrics(run)) == 2 or best == "loss"  # nothing gets better: the second validation ends the run
    assert (run / "checkpoints" / "best").exists()


def test_validation_may_use_a_beam_or_not_decode(train: Callable[..., Path], aligned: tuple[Path, Path]) -> None:
    beam = metrics(train(*sides(aligned), "--set", "training.valid_beam_size=4", "--max-steps", 2))[-1]
    assert "bleu" in beam
    none = train(*sides(aligned), "--set", "training.valid_beam_size=0", "--set", "training.best_metric=loss",
                 "--max-steps", 2)  # fmt: skip
    assert "bleu" not in metrics(none)[-1]


def test_a_resumed_run_is_the_uninterrupted_one(
    train: Callable[..., Path], aligned: tuple[Path, Path], cli: Cli, tmp_path: Path
) -> None:
    flags = (*sides(aligned), "--set", "objectives.0.word_dropout=0.2")
    whole, cut = train(*flags), train(*flags)
    for folder in (cut / "checkpoints").iterdir():  # as if killed before the last checkpoint
        if folder.name == "step-00000008":
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    for pointer in ("latest", "best"):
        (cut / "checkpoints" / pointer).write_text("step-00000004\n")
    assert cli("train", "--resume", "--out", cut).code == 0
    one, other = (load_file(run / "checkpoints" / "step-00000008" / "model.safetensors") for run in (whole, cut))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_separate_vocabularies_live_in_the_checkpoint(train: Callable[..., Path], aligned: tuple[Path, Path]) -> None:
    run = train(*sides(aligned), "--vocabulary", "separate")
    for folder in (run, run / "checkpoints" / "step-00000008"):
        assert {"tokenizer.source.json", "tokenizer.target.json"} <= {file.name for file in folder.iterdir()}
        assert not (folder / "tokenizer.json").exists()
    loaded = tformer.load(run)
    assert loaded.text_tokenizer.token_id("house") is not None and loaded.text_tokenizer.token_id("haus") is None
    assert loaded.target_tokenizer.token_id("haus") is not None
    tables = (loaded.model.embedding.weight, loaded.model.decoder_embedding.weight)
    assert [len(table) for table in tables] == [loaded.text_tokenizer.vocab_size, loaded.target_tokenizer.vocab_size]


def test_a_run_with_separate_vocabularies_resumes_and_is_built_upon(
    train: Callable[..., Path], aligned: tuple[Path, Path], cli: Cli
) -> None:
    run = train(*sides(aligned), "--vocabulary", "separate")
    assert cli("train", "--resume", "--out", run, "--max-steps", 10).code == 0
    more = train("--init-from", run, *sides(aligned), "--max-steps", 2, base=False)
    own, theirs = tformer.load(more), tformer.load(run)
    assert own.target_tokenizer.sha256 == theirs.target_tokenizer.sha256
    assert own.text_tokenizer.sha256 == theirs.text_tokenizer.sha256


@pytest.mark.parametrize(("own", "asked"), [("separate", "joint"), ("joint", "separate")])
@pytest.mark.parametrize("preset", [(), ("--arch", "transformer", "--preset", "tiny")])
def test_a_body_keeps_the_vocabularies_it_was_trained_with(
    train: Callable[..., Path], aligned: tuple[Path, Path], cli: Cli, own: str, asked: str, preset: tuple[str, ...]
) -> None:
    run = train(*sides(aligned), "--vocabulary", own, "--max-steps", 2)
    outcome = cli("train", "--init-from", run, *preset, *sides(aligned), "--vocabulary", asked)
    assert outcome.code == 2 and f"are {own}" in outcome.err


def test_one_tied_table_cannot_serve_two_vocabularies(
    cli: Cli, recipe: Path, aligned: tuple[Path, Path], tmp_path: Path
) -> None:
    outcome = cli("train", "--config", recipe, *sides(aligned), "--set", "tokenizer.separate=true")
    assert outcome.code == 2 and "model.tie.source_target" in outcome.err


def test_a_table_of_pairs_names_its_columns(train: Callable[..., Path], tmp_path: Path) -> None:
    table = tmp_path / "forms.tsv"
    rows = [f"{word}\t{german(word)}\tN;PL" for word in english(30)]
    table.write_text("\n".join(["lemma\tform\tfeatures", *rows]) + "\n")
    run = train("--data", table, "--source-column", "lemma,features", "--target-column", "form")
    columns = tformer.load(run).recipe.data.columns
    assert (columns.source, columns.target) == ("lemma,features", "form")
    assert "N;PL" in (run / "samples.txt").read_text().replace(" ", "")


def test_pairs_of_different_length_are_one_clear_line(
    cli: Cli, recipe: Path, aligned: tuple[Path, Path], tmp_path: Path
) -> None:
    short = tmp_path / "short.de"
    short.write_text("eins\nzwei\n")
    outcome = cli("train", "--config", recipe, "--source", aligned[0], "--target", short)
    assert outcome.code == 2 and "60" in outcome.err and "2" in outcome.err and "short.de" in outcome.err
    outcome = cli("train", "--config", recipe, "--source", aligned[0])
    assert outcome.code == 2 and "--source and --target come in pairs, found 1 and 0" in outcome.err


TASKS = """\
data:
  train:
    - {{path: {table}, prefix: "translate: ", task: translate, weight: 3}}
    - {{path: "builtin:reverse", prefix: "reverse: ", task: reverse, weight: 1}}
"""


def test_tasks_are_mixed_by_weight_each_with_its_prefix(train: Callable[..., Path], tmp_path: Path) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_text("\n".join(f"{text}\t{german(text)}" for text in english(400)) + "\n")
    config = tmp_path / "tasks.yaml"
    config.write_text(RECIPE.replace("data: {sort_window: 64}", TASKS.format(table=table) + "  sort_window: 64"))
    run = train("--config", config, "--set", "training.valid_sentences=20", base=False)
    assert "translate" in (run / "samples.txt").read_text()
    recipe = tformer.load(run).recipe
    assert [(spec.prefix, spec.weight) for spec in recipe.data.train] == [("translate: ", 3.0), ("reverse: ", 1.0)]


TEXT = " ".join(f"the {word} sat on {i} red cats ." for i in range(40) for word in ("house", "cat"))


@pytest.mark.parametrize(
    ("objective", "template"), [("span_corruption", "t5"), ("denoising", "roberta"), ("denoising", "bert")]
)
def test_text_is_restored_then_fine_tuned_to_pairs(
    train: Callable[..., Path], aligned: tuple[Path, Path], cli: Cli, tmp_path: Path, objective: str, template: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    special = {"roberta": ["--set", "tokenizer.special_ids.decoder_start=2", "--set",
                           "tokenizer.special_ids.forced_bos=0"],
               "bert": ["--set", "tokenizer.special_ids.eos=3"]}.get(template, [])  # fmt: skip
    body = train("--objective", objective, "--data", text, "--set", f"tokenizer.train.template={template}",
                 "--set", "tokenizer.train.vocab_size=200", *special)  # fmt: skip
    found = metrics(body)[-1]
    assert {"loss", "accuracy", "perplexity"} <= found.keys() and "bleu" not in found
    tuned = train("--init-from", body, "--objective", "seq2seq", *sides(aligned), "--max-steps", 2, base=False)
    assert "bleu" in metrics(tuned)[-1]
    assert tformer.load(tuned).decoder_tokens == tformer.load(body).decoder_tokens


def test_span_corruption_needs_sentinels(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    outcome = cli("train", "--config", recipe, "--objective", "span_corruption", "--data", text)
    assert outcome.code == 2 and "sentinels" in outcome.err


def test_the_default_without_data_reads_dates(cli: Cli) -> None:
    outcome = cli("train", "--arch", "transformer", "--dry-run")
    assert outcome.code == 0, outcome.err
    assert "transformer/dates" in outcome.err and "18,000 training pairs" in outcome.err.replace("\n", " ")
