"""The last lines of a training say where the result is, how good it is beside a guess, and what to try next."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import ENCODER, GENERATOR, IMAGES
from tests.end_to_end.labelled_examples import documents, many, sentences, write_images, write_table
from tests.quick import first_is_quick
from tests.training.pair_makers import sides
from tformer.tasks.baselines import FILE, constant_baselines, copy_baselines
from tformer.training.first_look import compare

Cli = Callable[..., Any]
NAMES = ("result", "quality", "next")


def last_lines(err: str) -> dict[str, str]:
    """The three lines of a training, by their first word."""
    lines = dict(line.split(maxsplit=1) for line in err.splitlines()[-3:])
    assert tuple(lines) == NAMES, err
    return lines


def report(cli: Cli, *words: object) -> dict[str, Any]:
    outcome = cli("evaluate", *words, "--json")
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    return found


# What a baseline is


def test_the_majority_is_right_as_often_as_it_occurs() -> None:
    labels = [0] * 30 + [1] * 10
    found = constant_baselines("classes", ("pos", "neg"), labels, [0, 0, 1, 0])["constant"]
    assert found["accuracy"] == 0.75 and found["guess"] == "always answering 'pos'" and found["mcc"] == 0


def test_the_mean_has_the_variance_as_its_loss() -> None:
    found = constant_baselines("score", (), [1.0, 3.0], [1.0, 3.0, 2.0])["constant"]
    assert found["loss"] == pytest.approx(2 / 3) and found["mae"] == pytest.approx(2 / 3) and found["pearson"] == 0


def test_copying_is_perfect_for_equal_sides_and_worthless_for_others() -> None:
    texts = ["the cat sat on the mat .", "two dogs ran to the house ."]
    found = copy_baselines(texts, texts)["copy"]
    assert found["bleu"] == pytest.approx(100) and found["sequence_accuracy"] == 1
    assert copy_baselines(texts, ["eine Katze sass da", "zwei Hunde liefen heim"])["copy"]["sequence_accuracy"] == 0


# The words


@pytest.mark.parametrize(
    ("accuracy", "words"),
    [
        (0.9, "accuracy 0.9000; always answering 'a' 0.5000"),
        (0.5, "accuracy 0.5000; not yet better than always answering 'a' (0.5000)"),
        (0.4, "accuracy 0.4000; not yet better than always answering 'a' (0.5000)"),
    ],
)
def test_a_model_that_is_not_better_than_a_guess_is_said_to_be_so(accuracy: float, words: str) -> None:
    baselines = {"constant": {"guess": "always answering 'a'", "accuracy": 0.5, "loss": 0.7}}
    found = compare({"loss": 0.3, "accuracy": accuracy}, baselines, best_metric="loss")
    assert found == (words, accuracy <= 0.5)


def test_the_metric_of_the_run_is_compared_first_and_the_strongest_guess_named() -> None:
    baselines = {
        "unigram": {"guess": "by frequency", "perplexity": 600.0, "accuracy": 0.1},
        "bigram": {"guess": "a bigram table", "perplexity": 200.0},
    }
    values = {"loss": 6.0, "perplexity": 300.0, "accuracy": 0.3}
    compared = compare(values, baselines, best_metric="loss")[0]
    assert compared == "perplexity 300.00; not yet better than a bigram table (200.00)"
    assert compare(values, baselines, best_metric="accuracy")[0] == "accuracy 0.3000; by frequency 0.1000"
    assert compare(values, {}, best_metric="loss") == ("perplexity 300.00", False)
    assert compare({}, baselines, best_metric="loss") == ("", False)


# The families


def test_a_language_model_beside_its_ngrams(tiny: Cli, cli: Cli, text_file: Path) -> None:
    trained = tiny("--out", "run")
    lines, stored = last_lines(trained.err), json.loads(Path("run", FILE).read_text())
    assert trained.out == "run\n" and lines["result"] == "run (checkpoint: step 12)"
    bigram = f"{stored['bigram']['perplexity']:,.2f}"
    assert lines["quality"].endswith(f"; not yet better than a bigram table ({bigram}): train longer")
    assert shlex.split(lines["next"]) == [*["tformer", "train", "--resume", "--out", "run", "--max-steps", "24"]]
    assert stored["bigram"]["loss"] < stored["unigram"]["loss"]
    assert report(cli, "run")["baseline"] == report(cli, "run/checkpoints/step-00000012")["baseline"] == stored
    assert report(cli, "run", "--data", text_file)["baseline"] == {}  # its tokens were not counted
    shown = cli("evaluate", "run").out.splitlines()
    assert [line.split()[0] for line in shown[-2:]] == ["baseline", "baseline"]
    assert shown[-1].endswith("(a bigram table)")


def test_a_resumed_run_keeps_its_baseline_and_one_that_is_not_done_says_how_to_go_on(tiny: Cli, cli: Cli) -> None:
    begun = tiny("--out", "run", "--stop-at-step", "6")
    assert last_lines(begun.err)["next"] == "tformer train --resume --out run"
    before = Path("run", FILE).read_bytes()
    resumed = cli("train", "--resume", "--out", "run", "--json")
    assert Path("run", FILE).read_bytes() == before
    summary = json.loads(resumed.out)
    assert summary["baseline"] == json.loads(before) and summary["step"] == 12
    assert last_lines(resumed.err)["result"].startswith("run (")


def test_without_a_checkpoint_there_is_nothing_to_look_at(tiny: Cli) -> None:
    ended = tiny("--out", "run", "--max-minutes", "1e-9", "--json")
    assert json.loads(ended.out)["baseline"] == {} and not Path("run", FILE).exists()
    assert "quality" not in ended.err


def test_a_baseline_that_cannot_be_read_is_none(tiny: Cli, cli: Cli) -> None:
    tiny("--out", "run", "--max-steps", "2")
    for damaged in ("{", "[]", '{"constant": 1}', '{"constant": {"scores": [NaN]}}'):
        Path("run", FILE).write_text(damaged)
        assert report(cli, "run").keys() >= {"loss"}


@pytest.fixture
def learn(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, dict[str, str]]]:
    """`learn(recipe, data, *flags)`: folder and last lines of a training of a few steps, whose next command works."""
    monkeypatch.chdir(tmp_path)

    def run(recipe: str, *words: object) -> tuple[Path, dict[str, str]]:
        (tmp_path / "recipe.yaml").write_text(recipe)
        out = tmp_path / "run"
        trained = cli("train", "--config", tmp_path / "recipe.yaml", "--out", out, "--max-steps", 20, *words)
        assert trained.code == 0, trained.err
        lines = last_lines(trained.err)
        shown = cli(*shlex.split(lines["next"])[1:])
        assert shown.code == 0, shown.err
        return out, lines

    return run


def test_classes_beside_the_most_frequent_one_on_any_data(cli: Cli, learn: Callable[..., Any], tmp_path: Path) -> None:
    rows = sentences(60, 0)
    run, lines = learn(ENCODER, "--data", write_table(tmp_path / "data.tsv", ("label", "text"), list(rows)))
    [[most, _]] = Counter(label for label, _ in rows).most_common(1)
    assert (
        f"; always answering '{most}' 0." in lines["quality"] or f"than always answering '{most}'" in lines["quality"]
    )
    assert shlex.split(lines["next"]) == ["tformer", "evaluate", str(run), "--mistakes", "mistakes.tsv"]
    assert report(cli, run)["baseline"] == json.loads((run / FILE).read_text())
    other = write_table(tmp_path / "other.tsv", ("label", "text"), [(most, "the cat"), *sentences(9, 3)])
    labels = [line.split("\t")[0] for line in other.read_text().splitlines()[1:]]
    found = report(cli, run, "--data", other)["baseline"]["constant"]
    assert found["accuracy"] == labels.count(most) / len(labels)
    assert f"(always answering '{most}')\n" in cli("evaluate", run).out


def test_several_labels_and_scores_beside_one_answer(learn: Callable[..., Any], cli: Cli, tmp_path: Path) -> None:
    table = write_table(tmp_path / "many.tsv", ("labels", "text"), many(60))
    run, lines = learn(ENCODER, "--data", table, "--objective", "multi_label")
    assert "accuracy" in lines["quality"] and "always answering 'animal', 'tool'" in lines["quality"]
    assert report(cli, run)["baseline"]["constant"]["f1_micro"] > 0


def test_scores_beside_their_mean(learn: Callable[..., Any], cli: Cli, tmp_path: Path) -> None:
    rows: list[tuple[object, ...]] = [(1 + 2 * (label == "tool"), text) for label, text in sentences(60, 0)]
    table = write_table(tmp_path / "scores.tsv", ("score", "text"), rows)
    run, lines = learn(ENCODER, "--data", table, "--objective", "regression")
    assert "mean absolute error" in lines["quality"] and "always answering" in lines["quality"]
    [mean] = report(cli, run)["baseline"]["constant"]["scores"]
    assert 1 < mean < 3


def test_what_was_read_from_standard_input_is_not_to_be_evaluated_again(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_table(tmp_path / "data.tsv", ("label", "text"), list(sentences(60, 0)))
    (tmp_path / "recipe.yaml").write_text(ENCODER)
    with table.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        trained = cli("train", "--config", tmp_path / "recipe.yaml", "--out", tmp_path / "run", "--data", "-")
    assert trained.code == 0, trained.err
    assert last_lines(trained.err)["next"] == f"tformer inspect {tmp_path / 'run'}"


def test_images_beside_the_most_frequent_class(learn: Callable[..., Any], cli: Cli, tmp_path: Path) -> None:
    run, lines = learn(IMAGES, "--data", write_images(tmp_path / "images", 12))
    assert "always answering 'dark' 0.5" in lines["quality"]
    assert report(cli, run)["baseline"]["constant"]["accuracy"] == pytest.approx(0.5)


@first_is_quick("objectives", ["masked_lm", "masked_lm,next_sentence"])
def test_masked_tokens_beside_their_frequencies(
    learn: Callable[..., Any], cli: Cli, tmp_path: Path, objectives: str
) -> None:
    run, lines = learn(ENCODER, "--data", documents(tmp_path / "data"), "--objective", objectives)
    assert "guessing by frequency alone" in lines["quality"] and "perplexity" in lines["quality"]
    found = report(cli, run)["baseline"]["unigram"]
    assert found == json.loads((run / FILE).read_text())["unigram"]
    assert 2 < found["perplexity"] < 20 and 0 < found["accuracy"] < 1  # twelve words, "the" and "and"


def test_replaced_tokens_have_no_guess_to_compare(learn: Callable[..., Any], tmp_path: Path) -> None:
    flags = ("--data", documents(tmp_path / "data"), "--objective", "replaced_token")
    run, lines = learn(ENCODER + GENERATOR, *flags)
    assert lines["quality"].startswith("accuracy 0.") and ";" not in lines["quality"]
    assert shlex.split(lines["next"])[:3] == ["tformer", "viz-attention", str(run)]


def test_pairs_beside_copies_of_their_sources(
    train: Callable[..., Path], cli: Cli, aligned: tuple[Path, Path], tmp_path: Path
) -> None:
    run = train(*sides(aligned))
    stored, found = json.loads((run / FILE).read_text()), report(cli, run)["baseline"]
    assert found == stored and 0 < found["copy"]["bleu"] < 100 and found["unigram"]["perplexity"] > 1
    same = report(cli, run, "--source", aligned[0], "--target", aligned[0])["baseline"]
    assert same.keys() == {"copy"} and same["copy"]["bleu"] == pytest.approx(100)
    assert report(cli, run, "--no-decode")["baseline"].keys() == {"unigram"}
    assert cli(*shlex.split(last_lines(cli("train", "--resume", "--out", run).err)["next"])[1:]).code == 0
    again = cli("train", "--resume", "--out", run)
    assert "; copying the source " in last_lines(again.err)["quality"] or "than copying" in again.err


@pytest.mark.parametrize(
    ("objective", "words"),
    [("span_corruption", ("t5",)), ("denoising", ("bert", "--set", "tokenizer.special_ids.eos=3"))],
)
def test_restored_texts_beside_the_frequencies_of_their_targets(
    train: Callable[..., Path], text_file: Path, objective: str, words: tuple[str, ...]
) -> None:
    template, *special = words
    run = train("--data", text_file, "--objective", objective, "--set", f"tokenizer.train.template={template}",
                "--set", "tokenizer.train.vocab_size=200", "--set", "training.best_metric=loss", *special)  # fmt: skip
    assert 1 < json.loads((run / FILE).read_text())["unigram"]["perplexity"] < 60
