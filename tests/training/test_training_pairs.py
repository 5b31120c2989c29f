"""Training on pairs: objectives of encoder-decoders, columns, prefixes, vocabularies, and decoding in validation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tformer
from tests.quick import first_is_quick
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


@pytest.mark.slow
def test_it_learns_to_copy(train: Callable[..., Path]) -> None:
    run = train("--arch", "transformer", "--preset", "dates", "--data", "builtin:copy", "--max-steps", 40,
                "--set", "training.eval_every=40", "--set", "training.valid_sentences=40", base=False)  # fmt: skip
    first, last = metrics(run, "train")[0]["loss"], metrics(run, "train")[-1]["loss"]
    assert last < 0.7 * first


@first_is_quick("best", ["loss", "bleu", "chrf", "sequence_accuracy", "accuracy"], quick=2)
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
    run = train(*sides(aligned), "--vocabulary", "separate", *FOUR_SENTENCES)
    assert cli("train", "--resume", "--out", run, "--max-steps", 3).code == 0
    more = train("--init-from", run, *sides(aligned), *FOUR_SENTENCES, base=False)
    own, theirs = tformer.load(more), tformer.load(run)
    assert own.target_tokenizer.sha256 == theirs.target_tokenizer.sha256
    assert own.text_tokenizer.sha256 == theirs.text_tokenizer.sha256


@pytest.mark.parametrize(("own", "asked"), [("separate", "joint"), ("joint", "separate")])
def test_a_body_keeps_the_vocabularies_it_was_trained_with(
    train: Callable[..., Path], aligned: tuple[Path, Path], cli: Cli, own: str, asked: str
) -> None:
    run = train(*sides(aligned), "--vocabulary", own, *FOUR_SENTENCES)
    for preset in ((), ("--arch", "transformer", "--preset", "tiny")):
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
    table.write_text("\n".join(f"{text}\t{german(text)}" for text in english(60)) + "\n")
    config = tmp_path / "tasks.yaml"
    config.write_text(RECIPE.replace("data: {sort_window: 64}", TASKS.format(table=table) + "  sort_window: 64"))
    run = train("--config", config, *FOUR_SENTENCES[:-1], "training.valid_sentences=20", base=False)
    assert "translate" in (run / "samples.txt").read_text()
    recipe = tformer.load(run).recipe
    assert [(spec.prefix, spec.weight) for spec in recipe.data.train] == [("translate: ", 3.0), ("reverse: ", 1.0)]


TEXT = " ".join(f"the {word} sat on {i} red cats ." for i in range(40) for word in ("house", "cat"))


@first_is_quick(("objective", "template"), [("span_corruption", "t5"), ("denoising", "roberta"), ("denoising", "bert")])
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


@pytest.mark.slow
def test_the_default_without_data_reads_dates(cli: Cli) -> None:
    """The quick twin is `end_to_end/test_e2e_default_paths.py::test_a_default_path_of_each_task_trains`."""
    outcome = cli("train", "--arch", "transformer", "--dry-run")
    assert outcome.code == 0, outcome.err
    assert "learning to read dates" in outcome.err and "18,000 training pairs" in outcome.err.replace("\n", " ")


FOUR_SENTENCES = ("--max-steps", 2, "--set", "training.eval_every=2", "--set", "training.valid_sentences=4")
VOCABULARY = ("--vocabulary", "separate")


def table(path: Path, header: str, count: int = 30) -> Path:
    rows = [f"{text}\t{german(text)}" for text in english(count)]
    path.write_text("\n".join(([header] if header else []) + rows) + "\n")
    return path


# --- columns ----------------------------------------------------------------------------------------------------------


def test_columns_that_all_tables_share_are_written_down(train: Callable[..., Path], tmp_path: Path) -> None:
    first, second = table(tmp_path / "a.tsv", "source\ttarget"), table(tmp_path / "b.tsv", "source\ttarget", 9)
    columns = tformer.load(train("--data", first, "--valid", second, *FOUR_SENTENCES)).recipe.data.columns
    assert (columns.source, columns.target) == ("source", "target")


def test_tables_with_other_headers_train_resume_and_are_evaluated(
    train: Callable[..., Path], tmp_path: Path, cli: Cli
) -> None:
    first, second = table(tmp_path / "a.tsv", "source\ttarget"), table(tmp_path / "b.tsv", "en\tde", 9)
    run = train("--data", first, "--valid", second, *FOUR_SENTENCES)
    columns = tformer.load(run).recipe.data.columns
    assert (columns.source, columns.target) == (None, None)
    assert cli("train", "--resume", "--out", run, "--max-steps", 3).code == 0
    assert json.loads(cli("evaluate", run, "--json").out)["examples"] == 9


def test_the_runs_columns_are_not_imposed_on_a_table_without_them(
    train: Callable[..., Path], tmp_path: Path, cli: Cli
) -> None:
    run = train("--data", table(tmp_path / "a.tsv", "source\ttarget"), *FOUR_SENTENCES)
    for header in ("source\ttarget", "en\tde", "", "question\tanswer"):
        outcome = cli("evaluate", run, "--data", table(tmp_path / "test.tsv", header, 7), "--json")
        assert outcome.code == 0, outcome.err
        assert json.loads(outcome.out)["examples"] == 7


def test_the_runs_columns_hold_where_a_table_has_them(train: Callable[..., Path], tmp_path: Path, cli: Cli) -> None:
    rows = [f"{n}\t{german(text)}\t{text}" for n, text in enumerate(english(30))]
    (tmp_path / "a.tsv").write_text("\n".join(["number\tafter\tbefore", *rows]) + "\n")
    asked = ("--source-column", "before", "--target-column", "after")
    run = train("--data", tmp_path / "a.tsv", *asked, *FOUR_SENTENCES)
    found, named = (cli("evaluate", run, "--data", tmp_path / "a.tsv", *more, "--json") for more in ((), asked))
    assert found.code == 0 and json.loads(found.out)["loss"] == pytest.approx(json.loads(named.out)["loss"])


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_a_prefix_stands_before_every_source_of_the_command(
    train: Callable[..., Path], aligned: tuple[Path, Path], tmp_path: Path
) -> None:
    more = table(tmp_path / "more.tsv", "source\ttarget")
    run = train(*sides(aligned), "--data", more, "--valid", more, "--prefix", "to german: ", *FOUR_SENTENCES)
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
        return [spec.prefix for spec in tformer.load(train(*sets, *FOUR_SENTENCES)).recipe.data.valid]

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
    run = train(
        *sides(aligned), "--source-tokenizer", tokenizers[0], "--target-tokenizer", tokenizers[1], *FOUR_SENTENCES
    )
    loaded = tformer.load(run)
    assert loaded.text_tokenizer.to_json() == tokenizers[0].read_text()
    assert loaded.target_tokenizer.to_json() == tokenizers[1].read_text()
    assert not loaded.recipe.model.tie.source_target
    more = train("--init-from", run, *sides(aligned), *FOUR_SENTENCES, base=False)  # needs neither file
    recipe = tformer.load(more).recipe
    assert recipe.separate_vocabularies and recipe.tokenizer.source_path is None


def test_joint_takes_the_files_of_both_sides_away(
    train: Callable[..., Path], aligned: tuple[Path, Path], tokenizers: list[Path], recipe: Path
) -> None:
    first, second = tokenizers
    files = f"tokenizer: {{source_path: {first}, target_path: {second}, "
    recipe.write_text(recipe.read_text().replace("tokenizer: {", files))
    run = train(*sides(aligned), "--vocabulary", "joint", *FOUR_SENTENCES)
    assert tformer.load(run).own_target_tokenizer is None


def test_files_and_vocabularies_that_contradict_are_refused(
    cli: Cli, recipe: Path, aligned: tuple[Path, Path], tokenizers: list[Path]
) -> None:
    flags = ("--tokenizer", tokenizers[0], *VOCABULARY)
    outcome = cli("train", "--config", recipe, *sides(aligned), *flags)
    told = "expected null where source and target have a vocabulary each"
    assert outcome.code == 2 and told in outcome.err.replace("\n", " "), outcome.err


def test_one_tokenizer_cannot_be_asked_of_a_model_with_two(
    cli: Cli, train: Callable[..., Path], aligned: tuple[Path, Path], tokenizers: list[Path], recipe: Path
) -> None:
    run = train(*sides(aligned), *VOCABULARY, *FOUR_SENTENCES)
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
    body = train(*sides(aligned), *FOUR_SENTENCES)
    run = train("--init-from", body, "--preset", "transformer/tiny", "--set", "data.target_seq_len=200",
                *sides(aligned), "--set", "training.batch_tokens=200", *FOUR_SENTENCES, base=False)  # fmt: skip
    data = tformer.load(run).recipe.data
    assert (data.seq_len, data.target_seq_len) == (32, 32)


def test_what_pre_training_asked_of_texts_is_not_held_against_pairs(
    cli: Cli, train: Callable[..., Path], aligned: tuple[Path, Path], text_file: Path, tmp_path: Path
) -> None:
    texts = ("--objective", "span_corruption", "--data", text_file, *FOUR_SENTENCES[:-2])
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


SHORT = ("--max-steps", 2, "--set", "training.eval_every=2")


def test_a_beam_may_be_as_large_as_the_vocabulary(cli: Cli, recipe: Path, aligned: tuple[Path, Path]) -> None:
    def tried(beam_size: int | str) -> Any:
        beam = f"generation.beam_size={beam_size}"
        return cli("train", "--config", recipe, *sides(aligned), "--dry-run", "--set", beam)

    found = re.search(r"at most the target's (\d+) token", tried(99).err)
    assert found is not None and tried(found[1]).code == 0


WRONG = {
    "generation.min_new_tokens=300": "generation.min_new_tokens 300 is larger than generation.max_new_tokens 12",
    "generation.length_penalty=99.0": "generation.length_penalty must be between -10 and 10",
    "training.valid_beam_size=99": "training.valid_beam_size: found 99, expected at most the target's",
    "generation.beam_size=99": "generation.beam_size: found 99, expected at most the target's",
    "training.valid_beam_size=0": "training.best_metric: found 'bleu', expected accuracy, loss",
    "data.target_seq_len=33": "data.target_seq_len: found 33, expected at most model.max_seq_len (32)",
    "tokenizer.special_ids.forced_bos=999": "tokenizer.special_ids.forced_bos: found 999, expected an id of the",
    "tokenizer.special_ids.decoder_start=99": "tokenizer.special_ids.decoder_start: found 99",
    "tokenizer.special_ids.eos=99": "tokenizer.special_ids.eos: found 99",
}


@pytest.mark.parametrize(("text", "told"), WRONG.items(), ids=WRONG)
def test_a_wrong_setting_is_told_with_its_key_before_training(
    cli: Cli, recipe: Path, aligned: tuple[Path, Path], tmp_path: Path, text: str, told: str
) -> None:
    out = tmp_path / "run"
    outcome = cli("train", "--config", recipe, *sides(aligned), "--out", out, "--set", text)
    assert outcome.code == 2 and told in outcome.err.replace("\n", " "), outcome.err
    assert "--min-new" not in outcome.err and not out.exists()


def test_evaluate_says_what_the_validation_said(
    train: Callable[..., Path], aligned: tuple[Path, Path], cli: Cli, tmp_path: Path
) -> None:
    """Sources longer than in training, and a beam: one translator for both."""
    texts = [" ".join(english(20)[n : n + 3]) for n in range(12)]
    (tmp_path / "v.en").write_text("\n".join(texts) + "\n")
    (tmp_path / "v.de").write_text("\n".join(map(german, texts)) + "\n")
    run = train(*sides(aligned), "--valid-source", tmp_path / "v.en", "--valid-target", tmp_path / "v.de",
                "--set", "data.seq_len=8", "--set", "training.valid_beam_size=3",
                "--set", "generation.max_new_tokens=12")  # fmt: skip
    outcome = cli("evaluate", run, "--checkpoint", "latest", "--json")
    found, validated = json.loads(outcome.out), metrics(run)[-1]
    for name in ("loss", "accuracy", "bleu", "chrf", "sequence_accuracy"):
        assert found[name] == pytest.approx(validated[name], abs=1e-4), name


def test_several_tasks_are_measured_one_by_one(train: Callable[..., Path], tmp_path: Path, cli: Cli) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_text("\n".join(f"{text}\t{german(text)}" for text in english(40)) + "\n")
    spell = tmp_path / "spell.tsv"
    spell.write_text("\n".join(f"{text}\t{text}" for text in english(60)[20:]) + "\n")
    config = tmp_path / "tasks.yaml"
    data = (
        f'data: {{train: [{{path: {table}, task: translate, prefix: "to german "}}, '
        f'{{path: {spell}, task: copy, prefix: "copy "}}]}}'
    )
    config.write_text(RECIPE.replace("data: {sort_window: 64}", data))
    run = train("--config", config, "--set", "training.valid_sentences=4", *SHORT, base=False)
    found = metrics(run)[-1]
    assert {"loss.translate", "loss.copy", "bleu.translate", "bleu.copy"} <= found.keys()
    low, high = sorted((found["loss.translate"], found["loss.copy"]))
    assert low <= found["loss"] <= high
    lines = cli("evaluate", run, "--checkpoint", "latest").out.splitlines()
    named = dict(line.split()[:2] for line in lines)
    assert float(named["loss.copy"]) == pytest.approx(found["loss.copy"], abs=1e-3)
    assert {"loss.translate", "bleu.translate", "bleu.copy"} <= named.keys()


def test_one_task_is_not_measured_twice(train: Callable[..., Path], aligned: tuple[Path, Path]) -> None:
    assert not [name for name in metrics(train(*sides(aligned), *SHORT))[-1] if "." in name]
