"""`tformer train --teacher` as a person meets it: what is said, what is refused, what an interruption costs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tformer
from tests.end_to_end.conftest import ENCODER, GENERATOR, IMAGES
from tests.end_to_end.labelled_examples import sentences, write_table
from tests.end_to_end.translate_runs import refusal
from tests.training.pair_makers import RECIPE, english, german, metrics

Cli = Callable[..., Any]
STEPS = ("--max-steps", 4, "--set", "training.eval_every=4", "--set", "training.save_every=4")


@pytest.fixture
def labelled(encoder_run: Callable[[str], Path], tmp_path: Path) -> Callable[..., tuple[object, ...]]:
    """`labelled(kind, ...)`: flags of a student of the run of that kind, on its data."""

    def flags(kind: str, *more: object, recipe: str = ENCODER) -> tuple[object, ...]:
        config = tmp_path / "recipe.yaml"
        config.write_text(recipe)
        run = encoder_run(kind)
        data = run.parent / "data.tsv" if kind != "image" else run.parent / "data"
        return ("train", "--config", config, "--data", data, "--teacher", run, "--out", tmp_path / "student",
                *STEPS, *more)  # fmt: skip

    return flags


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of the teacher that the first test has trained."""
    return tmp_path_factory.mktemp("teacher") / "teacher"


@pytest.fixture
def pairs(tmp_path: Path, cli: Cli, teacher: Path) -> tuple[object, ...]:
    """Flags of a run of pairs; `tmp_path / "teacher"` is one that has been trained so."""
    texts = english(60)
    (tmp_path / "a.en").write_text("\n".join(texts) + "\n")
    (tmp_path / "a.de").write_text("\n".join(map(german, texts)) + "\n")
    (tmp_path / "pairs.yaml").write_text(RECIPE)
    flags = ("train", "--config", tmp_path / "pairs.yaml", "--source", tmp_path / "a.en", "--target",
             tmp_path / "a.de", *STEPS)  # fmt: skip
    if not teacher.exists():
        assert cli(*flags, "--out", teacher, "--max-steps", 40).code == 0
    shutil.copytree(teacher, tmp_path / "teacher", symlinks=True)
    return flags


def test_a_half_size_classifier_keeps_what_its_teacher_knows(
    labelled: Callable[..., tuple[object, ...]], cli: Cli, tmp_path: Path
) -> None:
    outcome = cli(*labelled("single", "--set", "model.d_model=8", "--max-steps", 60))
    assert outcome.code == 0, outcome.err
    assert "soft targets at temperature 2, labels at 0.5" in outcome.err
    assert "distillation " in outcome.err and "classifier " in outcome.err  # in the lines of training
    assert metrics(tmp_path / "student")[-1]["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("kind", "flags", "said"),
    [
        ("single", ("--set", "teacher.hidden=1", "--set", "model.d_model=8"),
         "teacher.hidden: the student's encoder is 8 wide, the teacher's 16"),
        ("single", ("--set", "teacher.attention=1", "--set", "model.encoder.num_heads=4"),
         "teacher.attention: layer 0 of the student's encoder has 4 heads, the teacher's 2"),
        ("single", ("--set", "teacher.attention=1", "--set", "model.encoder.layerdrop=0.2"),
         "teacher.attention: found 1, expected 0 with model.encoder.layerdrop"),
        ("single", ("--set", "teacher.temperature=0"), "teacher.temperature"),
        ("single", ("--set", "teacher.alpha=1.5"), "teacher.alpha"),
        ("single", ("--distil", "hard"), "teacher.kind: found the text 'hard', expected one of soft, sequence"),
        ("single", ("--distil", "sequence"), "found sequence, expected soft with the objective classification"),
        ("single", ("--set", "model.max_seq_len=64"), "reads 24 tokens, the student's batches have up to 64"),
        ("single", ("--set", "model.embedding.token_types=3"), "model.embedding.token_types: the student's is 3"),
        ("single", ("--objective", "regression"), "has no head of kind regression"),
        ("multi", (), "gives each example several labels, the objective is classification"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_that_names_both_sides(
    kind: str, flags: tuple[str, ...], said: str, labelled: Callable[..., tuple[object, ...]], cli: Cli, tmp_path: Path
) -> None:
    assert said in refusal(cli(*labelled(kind, *flags)))
    assert not (tmp_path / "student").exists()


def test_a_model_with_a_generator_has_no_teacher(labelled: Callable[..., tuple[object, ...]], cli: Cli) -> None:
    message = refusal(cli(*labelled("single", "--objective", "replaced_token", recipe=ENCODER + GENERATOR)))
    assert "expected null with replaced_token, which has no soft targets" in message


def test_other_labels_and_another_vocabulary_are_refused(
    labelled: Callable[..., tuple[object, ...]], encoder_run: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    rows = [("stone" if label == "tool" else label, text) for label, text in sentences(80, 0)]
    table = write_table(tmp_path / "other.tsv", ("label", "text"), [tuple(row) for row in rows])
    message = refusal(cli(*labelled("single", "--valid", table)[:3], "--data", table, "--teacher",
                          encoder_run("single"), "--out", tmp_path / "student"))  # fmt: skip
    assert "has 2 labels, the student 2: only the student has 'stone'" in message
    other = encoder_run("masked") / "tokenizer.json"
    message = refusal(cli(*labelled("single", "--tokenizer", other)))
    assert "has another vocabulary than the student" in message and "sha256" in message
    assert not (tmp_path / "student").exists()


def test_another_kind_of_model_cannot_teach(encoder_run: Callable[[str], Path], cli: Cli, tmp_path: Path) -> None:
    teacher, out = encoder_run("single"), tmp_path / "student"
    message = refusal(cli("train", "--arch", "gpt", "--teacher", teacher, "--out", out))
    assert "is another kind of model (bert) than its student (gpt)" in message
    assert "--distil needs a teacher" in refusal(cli("train", "--arch", "gpt", "--distil", "soft", "--out", out))
    assert "teacher.path: " in refusal(cli("train", "--teacher", tmp_path / "nothing", "--out", out))
    image = IMAGES.replace("image_size: 8", "image_size: 16")
    (tmp_path / "big.yaml").write_text(image)
    run = encoder_run("image")
    message = refusal(cli("train", "--config", tmp_path / "big.yaml", "--data", run.parent / "data", "--teacher", run,
                          "--out", out))  # fmt: skip
    assert "model.patches.image_size: the student's is 16, the teacher's 8" in message


def test_a_teacher_that_is_gone_is_told_on_resume(
    labelled: Callable[..., tuple[object, ...]], encoder_run: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    assert cli(*labelled("single")).code == 0
    teacher, student = encoder_run("single"), tmp_path / "student"
    away = teacher.rename(teacher.parent / "away")
    try:
        outcome = cli("train", "--resume", "--out", student, "--max-steps", 6)
        assert "teacher.path: " in refusal(outcome) and "--set teacher.path=null" in outcome.err
        alone = cli("train", "--resume", "--out", student, "--max-steps", 6, "--set", "teacher.path=null")
        assert alone.code == 0 and "teacher does nothing" in alone.err
    finally:
        away.rename(teacher)


def test_a_hugging_face_folder_teaches(folders: Path, cli: Cli, tmp_path: Path, text_file: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    loaded = tformer.load(folders / "gpt2")
    recipe.write_text(f"""\
arch: gpt
model: {{d_model: 8, max_seq_len: {loaded.model.max_seq_len}, decoder: {{num_layers: 1, num_heads: 2}}}}
data: {{seq_len: 8}}
training: {{batch_size: 4, precision: fp32, device: cpu, threads: 1}}
""")
    outcome = cli("train", "--config", recipe, "--data", text_file, "--teacher", folders / "gpt2", "--out",
                  tmp_path / "student", *STEPS)  # fmt: skip
    assert outcome.code == 0, outcome.err
    student = tformer.load(tmp_path / "student")
    assert student.text_tokenizer.sha256 == loaded.text_tokenizer.sha256


def test_sequences_are_the_teachers_and_validation_the_references(
    pairs: tuple[object, ...], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    outcome = cli(*pairs, "--teacher", tmp_path / "teacher", "--distil", "sequence", "--out", tmp_path / "student")
    assert outcome.code == 0, outcome.err
    assert "54 sentences translated by the teacher with beam 3, BLEU " in outcome.err
    [file] = (tmp_path / "cache").glob("translations-*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    sources = {record["source"] for record in records}
    assert len(records) == 54 and sources <= set(english(60))  # what is held out is not translated
    translated = cli("generate", tmp_path / "teacher", "--input", tmp_path / "a.en").out.splitlines()
    expected = dict(zip(english(60), translated, strict=True))
    assert all(record["target"] == expected[record["source"]] for record in records)
    again = cli(*pairs, "--teacher", tmp_path / "teacher", "--distil", "sequence", "--out", tmp_path / "again")
    assert again.code == 0 and file.read_text().count("\n") == 54
    plain = metrics(tmp_path / "teacher")[-1]
    assert metrics(tmp_path / "student")[-1].keys() == plain.keys()


def test_another_tokenizer_reads_sequences(pairs: tuple[object, ...], cli: Cli, tmp_path: Path) -> None:
    recipe = tmp_path / "pairs.yaml"
    recipe.write_text(RECIPE.replace("model: word", "model: char").replace("max_seq_len: 32", "max_seq_len: 300"))
    assert cli(*pairs, "--out", tmp_path / "letters").code == 0
    flags = ("--tokenizer", tmp_path / "letters" / "tokenizer.json", "--teacher", tmp_path / "teacher")
    assert "another vocabulary" in refusal(cli(*pairs, *flags, "--out", tmp_path / "student",
                                               "--set", "data.seq_len=32"))  # fmt: skip
    outcome = cli(*pairs, *flags, "--distil", "sequence", "--out", tmp_path / "student")
    assert outcome.code == 0, outcome.err


def test_an_interruption_keeps_what_was_translated(
    pairs: tuple[object, ...], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tformer.decoding.loaded import translator_of
    from tformer.tasks import sequence_teacher

    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sequence_teacher, "SENTENCES", 10)
    flags = (*pairs, "--teacher", tmp_path / "teacher", "--distil", "sequence", "--out", tmp_path / "student")
    translate, calls = translator_of, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        translator = translate(*arguments, **options)
        inner = translator.translate

        def spy(*arguments: Any, **options: Any) -> Any:
            calls.append(len(arguments[0]))
            if len(calls) == 3:
                os.kill(os.getpid(), 2)
            return inner(*arguments, **options)

        translator.translate = spy  # type: ignore[method-assign]
        return translator

    monkeypatch.setattr(sequence_teacher, "translator_of", interrupted)
    outcome = cli(*flags)
    assert outcome.code == 130 and "20 of 54 sentences are kept" in outcome.err
    assert not (tmp_path / "student").exists()
    [file] = (tmp_path / "cache").glob("translations-*.jsonl")
    kept = file.read_text()
    file.write_text(kept + '{"source": "cut')  # as a killed process leaves it
    outcome = cli(*flags)
    assert outcome.code == 0, outcome.err
    assert file.read_text().startswith(kept) and file.read_text().count("\n") == 54
    assert calls[3:] == [10, 10, 10, 4]
