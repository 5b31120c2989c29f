"""`train --teacher`: soft targets in every family, and cached translations of a sequence teacher."""

from __future__ import annotations

import copy
import errno
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tformer
from tests.end_to_end.conftest import ENCODER, IMAGES
from tests.end_to_end.labelled_examples import documents, many, sentences, write_images, write_table
from tests.quick import first_is_quick
from tests.training.pair_makers import RECIPE, english, german, metrics
from tformer.support.errors import StorageError
from tformer.tasks import pairs, sequence_teacher
from tformer.tasks.sequence_teacher import weights_digest

Cli = Callable[..., Any]

DECODER = """\
arch: gpt
tokenizer: {train: {model: char, template: none}}
model:
  d_model: 16
  max_seq_len: 16
  decoder: {num_layers: 2, num_heads: 2, feedforward: {d_ff: 32}, dropout: 0.1, attention_dropout: 0.1}
optimizer: {lr: 0.01}
training: {max_steps: 12, batch_size: 4, eval_every: 6, save_every: 6, log_every: 6,
           precision: fp32, device: cpu, threads: 1}
generation: {max_new_tokens: 20}
"""
T5 = RECIPE.replace("template: seq2seq", "template: t5").replace("vocab_size: 60", "vocab_size: 160")
T5 = T5.replace("best_metric: bleu", "best_metric: loss")
FAST = ("--max-steps", 8, "--set", "training.eval_every=4", "--set", "training.log_every=4",
        "--set", "training.save_every=4")  # fmt: skip


class Family:
    """A recipe and data; `run` trains one that must succeed."""

    def __init__(self, cli: Cli, folder: Path, kind: str) -> None:
        self.cli, self.folder, self.count = cli, folder, 0
        recipe = {"causal_lm": DECODER, "images": IMAGES, "seq2seq": RECIPE, "span_corruption": T5}.get(kind, ENCODER)
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(recipe)
        self.flags = ("--config", self.recipe, *self._data(kind), *FAST)

    def _data(self, kind: str) -> tuple[object, ...]:
        folder, singles = self.folder, sentences(80, 0)
        if kind == "classification":
            return "--data", write_table(folder / "data.tsv", ("label", "text"), [*singles])
        if kind == "multi_label":
            return "--data", write_table(folder / "data.tsv", ("labels", "text"), many(80)), "--objective", kind
        if kind == "regression":
            rows: list[tuple[object, ...]] = [(1 + 2 * (label == "tool"), text) for label, text in singles]
            return "--data", write_table(folder / "data.tsv", ("score", "text"), rows), "--objective", kind
        if kind == "images":
            return "--data", write_images(folder / "images", 20)
        if kind == "seq2seq":
            texts = english(60)
            (folder / "a.en").write_text("\n".join(texts) + "\n")
            (folder / "a.de").write_text("\n".join(map(german, texts)) + "\n")
            return "--source", folder / "a.en", "--target", folder / "a.de"
        if kind == "masked_lm,next_sentence":
            return "--data", documents(folder / "documents"), "--objective", kind
        text = folder / "text.txt"
        text.write_text("\n".join(text for _, text in sentences(300, 6)) + "\n")
        return "--data", text, "--objective", kind

    def ask(self, *flags: object, base: bool = True) -> Any:
        self.count += 1
        out = () if {"--dry-run", "--out"} & set(flags) else ("--out", self.folder / f"run-{self.count}")
        return self.cli("train", *(self.flags if base else ()), *out, *flags)

    def run(self, *flags: object, base: bool = True) -> Path:
        outcome = self.ask(*flags, base=base)
        assert outcome.code == 0, outcome.err
        return Path(outcome.out.strip())


@pytest.fixture
def family(cli: Cli, tmp_path: Path) -> Callable[[str], Family]:
    return lambda kind: Family(cli, tmp_path, kind)


def weights(run: Path, step: int = 8) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


@first_is_quick(
    "kind",
    [
        *("causal_lm", "masked_lm,next_sentence", "seq2seq", "classification", "images"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("masked_lm", "span_corruption", "multi_label", "regression")
        ),
    ],
)
def test_every_family_learns_from_a_teacher(kind: str, family: Callable[[str], Family]) -> None:
    made = family(kind)
    once = ("--set", "training.best_metric=loss", "--set", "training.eval_every=100")  # one validation, at the end
    teacher = made.run("--max-steps", 40, *once)
    student = made.run("--teacher", teacher, "--seed", 5, "--max-steps", 24, "--set", "teacher.alpha=0",
                       "--set", "teacher.hidden=0.1", "--set", "teacher.attention=0.1", *once)  # fmt: skip
    logs = metrics(student, "train")
    assert {"distillation_loss", "hidden_loss", "attention_loss"} <= logs[-1].keys()
    assert logs[-1]["distillation_loss"] < logs[0]["distillation_loss"]
    plain = metrics(teacher, "valid")[-1].keys()
    assert metrics(student, "valid")[-1].keys() == plain  # validation is that of any run


@first_is_quick("kind", ["causal_lm", "classification", "seq2seq"])
def test_alpha_1_is_the_run_without_a_teacher_to_the_bit(kind: str, family: Callable[[str], Family]) -> None:
    made = family(kind)
    teacher = made.run("--seed", 3)
    flags = ("--set", "training.grad_accum=2")
    taught = made.run("--teacher", teacher, "--set", "teacher.alpha=1", *flags)
    alone = made.run("--tokenizer", taught / "tokenizer.json", *flags)
    first, second = weights(taught), weights(alone)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [record["loss"] for record in metrics(taught)] == [record["loss"] for record in metrics(alone)]


@first_is_quick("distil", ["soft", "sequence"])
def test_a_resumed_student_equals_the_uninterrupted_one(distil: str, family: Callable[[str], Family], cli: Cli) -> None:
    made = family("seq2seq")
    teacher = made.run("--max-steps", 40, "--set", "training.eval_every=40")
    flags = ("--teacher", teacher, "--distil", distil, "--set", "schedule.kind=constant")
    whole, part = made.run(*flags, "--set", "training.keep_last=9"), made.run(*flags, "--max-steps", 4)
    outcome = cli("train", "--resume", "--out", part, "--max-steps", 8)
    assert outcome.code == 0, outcome.err
    first, second = weights(whole), weights(part)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for one, other in zip(metrics(whole, "train"), metrics(part, "train"), strict=True):
        assert {k: v for k, v in one.items() if k.endswith("loss")} == {
            k: v for k, v in other.items() if k.endswith("loss")
        }


def test_the_students_checkpoint_is_enough_afterwards(family: Callable[[str], Family], cli: Cli) -> None:
    made = family("classification")
    teacher = made.run()
    student = made.run("--teacher", teacher)
    shutil.rmtree(teacher)
    loaded = tformer.load(student)
    assert loaded.recipe.teacher is not None and loaded.recipe.teacher.path is not None
    assert loaded.recipe.teacher.path.startswith(str(teacher / "checkpoints"))
    assert cli("classify", student, "--text", "the cat").code == 0
    tuned = made.run("--init-from", student, "--data", made.folder / "data.tsv", base=False)
    assert tformer.load(tuned).recipe.teacher is None


def test_the_student_takes_tokenizer_and_labels(family: Callable[[str], Family]) -> None:
    made = family("classification")
    teacher = made.run("--set", "data.labels=[tool, animal]")
    student = made.run("--teacher", teacher, "--set", "model.d_model=8", "--set",
                       "tokenizer.train.vocab_size=9")  # fmt: skip
    first, second = tformer.load(teacher), tformer.load(student)
    assert second.text_tokenizer.sha256 == first.text_tokenizer.sha256
    assert second.recipe.data.labels == ("tool", "animal")
    assert second.recipe.model.d_model == 8


def test_labels_in_another_order_are_matched_by_name(family: Callable[[str], Family]) -> None:
    made = family("classification")
    length = ("--max-steps", 40, "--valid", made.folder / "data.tsv")  # nothing is held out
    teacher = made.run(*length, "--set", "data.labels=[tool, animal]")
    turned = ("--set", "data.labels=[animal, tool]", "--set", "teacher.alpha=0")
    student = made.run("--teacher", teacher, *length, *turned)
    assert tformer.load(student).recipe.data.labels == ("animal", "tool")
    assert metrics(student)[-1]["accuracy"] == 1.0  # learned from the teacher alone


def test_a_deeper_teacher_with_separate_vocabularies_in_16_bits(family: Callable[[str], Family]) -> None:
    made = family("seq2seq")
    teacher = made.run("--vocabulary", "separate", "--set", "model.encoder.num_layers=3", "--precision", "bf16")
    student = made.run("--teacher", teacher, "--precision", "bf16", "--set", "teacher.hidden=1",
                       "--set", "teacher.attention=1")  # fmt: skip
    first, second = tformer.load(teacher), tformer.load(student)
    assert second.recipe.separate_vocabularies and second.own_target_tokenizer is not None
    assert second.own_target_tokenizer.sha256 == first.target_tokenizer.sha256
    assert {"hidden_loss", "attention_loss"} <= metrics(student, "train")[-1].keys()


def test_images_are_normalized_as_the_teachers(family: Callable[[str], Family]) -> None:
    made = family("images")
    teacher = made.run("--set", "data.image_mean=[0.4]", "--set", "data.image_std=[0.3]")
    student = made.run("--teacher", teacher)
    assert tformer.load(student).recipe.data.image_mean == (0.4,)


def test_a_vocabulary_rounded_up_on_one_side(family: Callable[[str], Family]) -> None:
    made = family("causal_lm")
    teacher = made.run("--set", "model.vocab_size=64")
    assert "distillation_loss" in metrics(made.run("--teacher", teacher), "train")[-1]


def test_a_dry_run_counts_the_teacher_and_translates_nothing(family: Callable[[str], Family]) -> None:
    made = family("seq2seq")
    teacher = made.run()
    for distil, counted in (("soft", True), ("sequence", False)):
        outcome = made.ask("--teacher", teacher, "--distil", distil, "--dry-run", "--json")
        assert outcome.code == 0, outcome.err
        assert ("teacher_bytes" in json.loads(outcome.out)["memory"]) == counted
    assert "translates nothing" in outcome.err and "BLEU" not in outcome.err


def test_a_table_of_terms_beside_a_generator_too(family: Callable[[str], Family]) -> None:
    """What is logged of several terms is logged of any objective that has them."""
    made = family("masked_lm,next_sentence")
    assert {"masked_lm_loss", "next_sentence_loss"} <= metrics(made.run(), "train")[-1].keys()


@pytest.fixture
def two_sets(tmp_path: Path) -> str:
    """`--set` of two sets of pairs to train on."""
    texts = english(60)
    for name, part in (("a", texts[:30]), ("b", texts[30:])):
        lines = [f"{text}\t{german(text)}" for text in part]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["source\ttarget", *lines]) + "\n")
    return f"data.train=[{{path: {tmp_path / 'a.tsv'}}}, {{path: {tmp_path / 'b.tsv'}}}]"


def test_two_sets_share_one_digest_taken_before_the_cast_and_a_rerun_finds_both(
    train: Callable[..., Path], two_sets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher computes in bf16: had the second set a digest of cast weights, a rerun would translate it again."""
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sequence_teacher, "inference_dtype", lambda *_, **__: torch.bfloat16)
    taken: list[torch.dtype] = []

    def digest(model: Any) -> str:
        taken.append(next(model.encoder.parameters()).dtype)
        return weights_digest(model)

    monkeypatch.setattr(pairs, "weights_digest", digest)
    teacher = train("--set", two_sets)

    def kept() -> dict[str, str]:
        return {file.name: file.read_text() for file in (tmp_path / "cache").glob("translations-*.jsonl")}

    flags = ("--set", two_sets, "--set", "data.overlong=truncate", "--teacher", teacher, "--distil", "sequence")
    train(*flags)
    first = kept()
    assert len(first) == 2 and all(first.values())
    monkeypatch.setattr(sequence_teacher, "translator_of", None)  # nothing is translated again
    train(*flags)
    assert kept() == first and taken == [torch.float32] * 2


def test_a_cast_changes_the_digest_and_another_teacher_has_another(train: Callable[..., Path], two_sets: str) -> None:
    one = tformer.load(train("--set", two_sets, "--max-steps", 1)).model
    other = copy.deepcopy(one)
    other.embedding.weight.data[0, 0] += 1
    found = weights_digest(one)
    assert found == weights_digest(one) != weights_digest(other)
    assert weights_digest(one.bfloat16()) != found


@pytest.mark.parametrize(
    "damaged", ['{"source": "x", "target": "B"}', '{"source": "b", "target": 5}', '{"source": "b"}', '{"source": "b']
)
def test_kept_translations_end_before_the_first_damaged_one(damaged: str) -> None:
    first, last = '{"source": "a", "target": "A"}\n', '{"source": "c", "target": "C"}\n'
    file = io.BytesIO(f"{first}{damaged}\n{last}".encode())
    assert sequence_teacher._whole_lines(file, ["a", "b", "c"]) == ["A"]
    assert file.getvalue().decode() == first


def test_translations_are_not_kept_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    kept = sequence_teacher._opened(tmp_path / "translations.jsonl")
    with pytest.raises(StorageError, match=r"translations\.jsonl.*locks available"), kept:
        pass
