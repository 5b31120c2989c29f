"""Every encoder objective trains, resumes and fine-tunes by the command a user types."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tformer
from tests.end_to_end.conftest import ENCODER as ONE_LAYER
from tests.end_to_end.conftest import GENERATOR, IMAGES
from tests.end_to_end.labelled_examples import documents, many, pairs, sentences, write_images, write_table
from tests.quick import first_is_quick
from tests.training.pair_makers import metrics

Cli = Callable[..., Any]
Train = Callable[..., Path]
ENCODER = (
    ONE_LAYER.replace("num_layers: 1", "num_layers: 2")
    .replace("d_ff: 32}}", "d_ff: 32}, dropout: 0.1}")
    .replace("log_every: 20", "log_every: 5, best_metric: accuracy")
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Of the runs of `train`."""
    return write_recipe(tmp_path)


def write_recipe(folder: Path, text: str = ENCODER) -> Path:
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"


def resumes_exactly(train: Train, cli: Cli, *flags: object, steps: int = 12, base: bool = False) -> Path:
    """A run of this number of steps, and one that was cut after half of them: the same files."""
    whole, part = (train(*flags, "--max-steps", number, base=base) for number in (steps, steps // 2))
    assert cli("train", "--resume", "--out", part, "--max-steps", steps).code == 0
    first, second = (run / "checkpoints" / f"step-{steps:08d}" for run in (whole, part))
    for file in sorted(first.glob("*.safetensors")):
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    return whole


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    return write_table(tmp_path / "train.tsv", ("label", "text"), [*sentences(80, 0)])


def test_classification_learns_holds_out_a_share_of_every_label_and_keeps_their_names(
    train: Train, tmp_path: Path
) -> None:
    rows = sorted(sentences(80, 0))  # by label, as many files are
    run = train("--data", write_table(tmp_path / "sorted.tsv", ("label", "text"), [*rows]))
    found = metrics(run, "valid")[-1]
    assert found["accuracy"] == 1.0 and found["f1_binary"] == found["f1_macro"] == 1.0
    loaded = tformer.load(run)
    assert loaded.recipe.data.labels == ("animal", "tool")
    assert loaded.recipe.data.columns.text2 is None


def test_epochs_become_steps_and_validations(train: Train, labelled: Path) -> None:
    run = train("--data", labelled, "--max-epochs", "3", "--set", "training.eval_every=null")
    assert [record["step"] for record in metrics(run, "valid")] == [9, 18, 27]  # 72 examples in batches of 8
    ends_first = train("--data", labelled, "--max-epochs", "3", "--max-steps", "5")
    assert metrics(ends_first, "valid")[-1]["step"] == 5


def test_explicit_steps_go_beyond_the_epochs_of_the_recipe_and_say_so(
    cli: Cli, recipe: Path, labelled: Path, tmp_path: Path
) -> None:
    recipe.write_text(ENCODER.replace("max_steps: 40", "max_epochs: 1").replace("eval_every: 20", "eval_every: null"))
    flags = ("train", "--config", recipe, "--data", labelled, "--out", tmp_path / "run", "--max-steps", "20")
    outcome = cli(*flags)
    assert outcome.code == 0, outcome.err
    assert "training.max_steps 20 (flag --max-steps) is the limit" in " ".join(outcome.err.split())
    assert [record["step"] for record in metrics(tmp_path / "run", "valid")] == [9, 18, 20]  # each epoch as before
    assert tformer.load(tmp_path / "run").recipe.training.max_epochs is None


def test_resumed_classification_equals_the_uninterrupted_one(train: Train, cli: Cli, labelled: Path) -> None:
    flags = ("--data", labelled, "--set", "schedule.kind=constant")  # the same rates, whatever the horizon
    resumes_exactly(train, cli, *flags, base=True)


def test_pairs_carry_token_types(train: Train, tmp_path: Path) -> None:
    data = write_table(tmp_path / "pairs.tsv", ("label", "text_a", "text_b"), pairs(120))
    run = train("--data", data, "--max-steps", "2")
    loaded = tformer.load(run)
    assert loaded.recipe.data.columns.text2 == "text_b" and loaded.recipe.data.labels == ("other", "same")


def test_regression_starts_at_the_mean_and_learns(train: Train, tmp_path: Path) -> None:
    rows: list[tuple[object, ...]] = [(100 + 2 * (label == "tool"), text) for label, text in sentences(80, 3)]
    data = write_table(tmp_path / "scores.tsv", ("score", "text"), rows)
    run = train("--data", data, "--objective", "regression", "--max-steps", "60")
    found = metrics(run, "valid")[-1]
    assert found["pearson"] > 0.9 and found["loss"] < 1.0


def test_multi_label(train: Train, tmp_path: Path) -> None:
    data = write_table(tmp_path / "many.tsv", ("labels", "text"), many(120))
    run = train("--data", data, "--objective", "multi_label", "--max-steps", "240")
    assert metrics(run, "valid")[-1]["f1_micro"] > 0.9
    assert tformer.load(run).recipe.model.heads[0].multi_label  # type: ignore[union-attr]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(text for _, text in sentences(400, 6)) + "\n")
    return path


@first_is_quick("packing", ["concat", "documents", "none"])
def test_masked_lm_learns(train: Train, text: Path, packing: str) -> None:
    run = train("--data", text, "--objective", "masked_lm", "--set", f"data.packing={packing}")
    found = [record["loss"] for record in metrics(run, "train")]
    assert found[-1] < found[0]
    assert {"loss", "accuracy", "perplexity"} <= metrics(run, "valid")[-1].keys()


def test_masked_lm_reads_the_text_column_of_a_table(train: Train, labelled: Path) -> None:
    run = train("--data", labelled, "--text-column", "text", "--objective", "masked_lm",
                "--set", "data.packing=none", "--max-steps", "2")  # fmt: skip
    assert metrics(run, "valid")


def test_next_sentence_beside_masked_lm(train: Train, tmp_path: Path) -> None:
    data = documents(tmp_path / "documents")
    run = train("--data", data, "--objective", "masked_lm,next_sentence", "--max-steps", "2")
    assert {"masked_lm_loss", "next_sentence_loss", "next_sentence_accuracy"} <= metrics(run, "valid")[-1].keys()


def test_electra_trains_both_models_and_fine_tunes_the_second(
    train: Train, recipe: Path, text: Path, labelled: Path, tmp_path: Path, cli: Cli
) -> None:
    path = write_recipe(tmp_path, ENCODER + GENERATOR)
    run = train("--config", path, "--data", text, "--objective", "replaced_token", base=False)
    assert {"generator_loss", "replaced_token_loss"} <= metrics(run, "valid")[-1].keys()
    names = {file.name for file in (run / "checkpoints" / "step-00000040").iterdir()}
    assert "generator.safetensors" in names
    outcome = cli("train", "--resume", "--out", run, "--max-steps", "44")
    assert outcome.code == 0, outcome.err
    tuned = train("--init-from", run, "--objective", "classification", "--data", labelled, "--lr", "0.02",
                  "--set", "optimizer.adam_lr=0.02", "--max-epochs", "20", base=False)  # fmt: skip
    assert metrics(tuned, "valid")[-1]["accuracy"] > 0.9


def test_init_from_takes_the_body_and_makes_a_new_head(
    train: Train, text: Path, labelled: Path, cli: Cli, tmp_path: Path
) -> None:
    pretrained = train("--data", text, "--objective", "masked_lm", "--set", "data.packing=none", "--max-steps", "2")
    out = tmp_path / "tuned"
    outcome = cli("train", "--init-from", pretrained, "--objective", "classification", "--data", labelled,
                  "--out", out, "--max-steps", "1", "--lr", "1e-9", "--set", "optimizer.adam_lr=1e-9")  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "new head: classifier" in outcome.err
    before, after = (tformer.load(run).model for run in (pretrained, out))
    for name, tensor in before.state_dict().items():
        if not name.startswith("heads."):
            assert torch.allclose(tensor, after.state_dict()[name], atol=1e-6), name


def test_layer_decay_and_frozen_layers(train: Train, text: Path, labelled: Path) -> None:
    pretrained = train("--data", text, "--objective", "masked_lm", "--set", "data.packing=none", "--max-steps", "2")
    tuned = train("--init-from", pretrained, "--objective", "classification", "--data", labelled, "--set",
                  "optimizer.layer_decay=0.5", "--set", "optimizer.groups.0={match: 'embedding.*', frozen: true}",
                  "--max-steps", "2", base=False)  # fmt: skip
    before, after = (tformer.load(run).model.state_dict() for run in (pretrained, tuned))
    assert torch.equal(before["embedding.weight"], after["embedding.weight"])
    assert not torch.equal(before["encoder.blocks.1.feedforward.up.weight"],
                           after["encoder.blocks.1.feedforward.up.weight"])  # fmt: skip


def test_images_train_without_a_tokenizer(train: Train, tmp_path: Path) -> None:
    path, data = write_recipe(tmp_path, IMAGES), write_images(tmp_path / "images", 30)
    flags = ("--set", "data.augment=[shift, flip, crop]")
    run = train("--config", path, "--data", data, *flags, base=False)
    assert metrics(run, "valid")[-1]["accuracy"] == 1.0
    loaded = tformer.load(run)
    assert loaded.tokenizer is None and loaded.recipe.data.labels == ("dark", "light")
    assert len(loaded.recipe.data.image_mean) == 1
    assert not (run / "tokenizer.json").exists()


MIXED = (
    *("--set", "data.augment=[shift, flip, randaugment, erase]", "--set", "schedule.kind=constant"),
    *("--set", "objectives.0.mixup=0.8", "--set", "objectives.0.cutmix=1.0"),
    *("--set", "model.patches.stem=convolutions", "--set", "model.patches.stem_depth=1"),
    *("--set", "model.heads.0.pooling=attention", "--set", "model.encoder.layerdrop=0.2"),
)


def test_augmented_and_mixed_images_resume_exactly_and_are_evaluated_in_views(
    train: Train, cli: Cli, tmp_path: Path
) -> None:
    data = write_images(tmp_path / "images", 30)
    words = ("--config", write_recipe(tmp_path, IMAGES), "--data", data, *MIXED)
    whole = resumes_exactly(train, cli, *words, steps=40)
    outcome = cli("evaluate", whole, "--data", data, "--views", "3", "--json")
    assert outcome.code == 0 and json.loads(outcome.out)["accuracy"] == 1.0
    refused = cli("classify", whole, "--image", data / "dark" / "0.png", "--views", "11")
    assert refused.code == 2 and "1 to 10 views" in refused.err


def test_class_weights_and_label_smoothing_are_options(train: Train, labelled: Path) -> None:
    flags = ("--set", "objectives.0={kind: classification, class_weights: balanced, label_smoothing: 0.1}")
    assert metrics(train("--data", labelled, *flags), "valid")[-1]["accuracy"] == 1.0


@pytest.mark.parametrize("cut", ["head", "tail", "head_tail"])
def test_truncation_is_counted_and_said(cut: str, cli: Cli, recipe: Path, labelled: Path, tmp_path: Path) -> None:
    outcome = cli("train", "--config", recipe, "--data", labelled, "--out", tmp_path / "run", "--max-steps", "2",
                  "--set", "data.seq_len=8", "--set", f"data.truncation={cut}")  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "longer than 8 tokens" in outcome.err


def test_a_head_comes_along_only_where_its_labels_mean_the_same(
    train: Train, cli: Cli, labelled: Path, tmp_path: Path
) -> None:
    first = train("--data", labelled, "--max-steps", "1")
    renamed = tmp_path / "renamed.tsv"
    renamed.write_text(labelled.read_text().replace("animal", "zebra"))  # now the second label in order
    for data, is_new in ((labelled, False), (renamed, True)):
        flags = ("--data", data, "--out", tmp_path / f"again-{is_new}", "--max-steps", "1")
        outcome = cli("train", "--init-from", first, *flags)
        assert outcome.code == 0, outcome.err
        assert (f"{'new' if is_new else 'kept'} head: classifier") in outcome.err


def test_a_run_from_other_weights_has_them_on_disk_before_its_first_step(
    train: Train, text: Path, labelled: Path, cli: Cli
) -> None:
    pretrained = train("--data", text, "--objective", "masked_lm", "--max-steps", "2")
    tuned = train("--init-from", pretrained, "--objective", "classification", "--data", labelled,
                  "--set", "training.keep_last=9", "--max-steps", "1", base=False)  # fmt: skip
    before = tformer.load(pretrained).model.state_dict()
    first = tformer.load(tuned, which="step-0").model.state_dict()
    assert torch.equal(before["embedding.weight"], first["embedding.weight"])


def test_more_epochs_on_resume(train: Train, cli: Cli, labelled: Path) -> None:
    run = train("--data", labelled, "--max-epochs", "1")
    assert metrics(run, "valid")[-1]["step"] == 9
    assert cli("train", "--resume", "--out", run, "--max-epochs", "2").code == 0
    assert metrics(run, "valid")[-1]["step"] == 18


def test_epochs_are_counted_anew_on_other_data(train: Train, labelled: Path, tmp_path: Path) -> None:
    small = write_table(tmp_path / "small.tsv", ("label", "text"), [*sentences(20, 1)])
    first = train("--data", small, "--max-epochs", "2")
    again = train("--init-from", first, "--data", labelled, base=False)
    assert metrics(again, "valid")[-1]["step"] == 18


def test_electra_goes_on_from_both_models_and_shares_its_table(
    train: Train, text: Path, tmp_path: Path, cli: Cli
) -> None:
    path = write_recipe(tmp_path, ENCODER + GENERATOR.replace("size: 16", "size: 8"))
    flags = ("--config", path, "--data", text, "--objective", "replaced_token")
    refused = cli("train", *flags, "--out", tmp_path / "other")
    assert refused.code == 2 and "generator.embedding.size" in refused.err
    path.write_text(ENCODER + GENERATOR)
    first = train(*flags, "--max-steps", "4", base=False)
    second = train(
        "--init-from", first, "--data", text, "--max-steps", "1", "--set", "training.keep_last=9", base=False
    )
    folders = (first / "checkpoints" / "step-00000004", second / "checkpoints" / "step-00000000")
    before, after = (load_file(folder / "generator.safetensors") for folder in folders)
    assert all(torch.equal(before[name], after[name]) for name in before)


@first_is_quick("kind", ["masked_lm", "masked_lm,next_sentence", "replaced_token"])
def test_resumed_pre_training_equals_the_uninterrupted_one(
    kind: str, train: Train, cli: Cli, text: Path, tmp_path: Path
) -> None:
    path = write_recipe(tmp_path, ENCODER + (GENERATOR if kind == "replaced_token" else ""))
    if kind == "masked_lm,next_sentence":
        text.write_text("\n\n".join("\n".join(f"{line} ." for _, line in sentences(9, n)) for n in range(20)))
    flags = ("--config", path, "--data", text, "--objective", kind, "--set", "schedule.kind=constant",
             "--set", "objectives.0.mask_share=0.3")  # fmt: skip
    resumes_exactly(train, cli, *flags)


def test_whole_words_and_swapped_pairs_are_options(train: Train, text: Path, tmp_path: Path) -> None:
    short = ("--max-steps", "2")
    assert train("--data", text, "--objective", "masked_lm", "--set", "objectives.0.whole_words=true", *short)
    data = write_table(tmp_path / "pairs.tsv", ("label", "text_a", "text_b"), pairs(40))
    assert train("--data", data, "--set", "objectives.0.swap_pairs=true", *short)


def test_images_have_classes_alone(cli: Cli, tmp_path: Path) -> None:
    path, data = write_recipe(tmp_path, IMAGES), write_images(tmp_path / "images", 4)
    for kind in ("regression", "multi_label"):
        outcome = cli("train", "--config", path, "--data", data, "--objective", kind, "--out", tmp_path / "run")
        assert outcome.code == 2 and "--objective classification" in outcome.err


def test_init_from_under_a_preset_keeps_body_and_tokenizer(train: Train, text: Path, labelled: Path) -> None:
    pretrained = train("--data", text, "--objective", "masked_lm", "--max-steps", "2")
    tuned = train("--init-from", pretrained, "--preset", "bert/classify", "--data", labelled, "--max-steps", "2",
                  base=False)  # fmt: skip
    before, after = tformer.load(pretrained), tformer.load(tuned)
    assert after.recipe.model.d_model == before.recipe.model.d_model == 16
    assert after.recipe.data.seq_len == 24  # no more than the body was made for
    assert after.recipe.model.encoder is not None and after.recipe.model.encoder.dropout == 0.2  # the preset's
    assert after.tokenizer is not None and before.tokenizer is not None
    assert after.tokenizer.sha256 == before.tokenizer.sha256


@pytest.mark.slow
def test_the_built_in_labelled_source_trains_at_once(cli: Cli, tmp_path: Path) -> None:
    """The quick twin is `end_to_end/test_e2e_default_paths.py::test_a_default_path_of_each_task_trains`."""
    outcome = cli("train", "--arch", "bert", "--out", tmp_path / "run", "--max-steps", "2", "--set",
                  "model.d_model=16", "--set", "model.encoder.num_layers=1", "--batch-size", "4")  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "python-packages" in outcome.err
    assert len(tformer.load(tmp_path / "run").recipe.data.labels) >= 10


def test_a_dry_run_shows_a_batch_of_labelled_text(cli: Cli, recipe: Path, labelled: Path, tmp_path: Path) -> None:
    outcome = cli("train", "--config", recipe, "--data", labelled, "--dry-run", "--json")
    assert outcome.code == 0, outcome.err
    summary = json.loads(outcome.out)
    assert summary["batch"]["input_ids"][0] == 8 and "the" in summary["example"]["original"]["text"]["text"]
