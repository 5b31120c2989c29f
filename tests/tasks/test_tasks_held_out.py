"""Validation during training, `evaluate` without --data, `prune` and `sweep` use the same held-out examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import TINY_RECIPE
from tests.end_to_end.conftest import ENCODER, IMAGES
from tests.end_to_end.labelled_examples import documents, pairs, sentences, write_images, write_table
from tests.training.pair_makers import RECIPE as PAIRS
from tests.training.pair_makers import english, german
from tformer.data.sources.labelled import duplicate_keys
from tformer.data.sources.tables import LabelledRow
from tformer.evaluation.classifier import GivenRows
from tformer.model import Transformer
from tformer.recipe import list_presets, load_recipe
from tformer.recipe.sections import Data, SourceSpec
from tformer.support.errors import InputError
from tformer.tasks.labelled import Parts, note_missing
from tformer.tasks.table import task_of
from tformer.training.display import Console
from tformer.training.options import read_words
from tformer.training.session import run_training
from tformer.workers.work import Work
from tformer.workflows.sweep.grid import start_of
from tformer.workflows.sweep.plan import SweepTask

Cli = Callable[..., Any]
FEW_STEPS = ("--max-steps", "2", "--set", "training.eval_every=2", "--set", "training.save_every=2")


class Seen:
    """The inputs of a model in evaluation mode, without padding."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: set[bytes] = set()
        forward = Transformer.forward

        def recording(model: Transformer, *arguments: Any, **inputs: Any) -> Any:
            if not model.training:
                self._record(arguments[0] if arguments else inputs.get("input_ids"), inputs)
            return forward(model, *arguments, **inputs)

        monkeypatch.setattr(Transformer, "forward", recording)

    def _record(self, ids: Any, inputs: dict[str, Any]) -> None:
        if ids is None:
            self.rows.update(row.numpy().tobytes() for row in inputs["pixel_values"])
            return
        mask = inputs.get("attention_mask")
        for number, row in enumerate(ids):
            self.rows.add((row if mask is None else row[mask[number].bool()]).numpy().tobytes())

    def take(self) -> set[bytes]:
        rows, self.rows = self.rows, set()
        return rows


def text(folder: Path) -> tuple[str, list[object]]:
    path = folder / "text.txt"
    path.write_text("\n".join(words for _, words in sentences(300, 6)) + "\n")
    return TINY_RECIPE, ["--data", path]


def masked_text(folder: Path) -> tuple[str, list[object]]:
    return ENCODER, [*text(folder)[1], "--objective", "masked_lm"]


def sentence_pairs(folder: Path) -> tuple[str, list[object]]:
    return ENCODER, ["--data", documents(folder / "data"), "--objective", "masked_lm,next_sentence"]


def labelled(folder: Path) -> tuple[str, list[object]]:
    return ENCODER, ["--data", write_table(folder / "data.tsv", ("label", "text_a", "text_b"), pairs(120))]


def tagged(folder: Path) -> tuple[str, list[object]]:
    rows = [{"words": words.split(), "tags": ["T"] + ["O"] * words.count(" ")} for _, words in sentences(60, 6)]
    (folder / "tags.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ENCODER, ["--data", folder / "tags.jsonl", "--objective", "token_classification"]


def images(folder: Path) -> tuple[str, list[object]]:
    return IMAGES, ["--data", write_images(folder / "data", 20)]


def translations(folder: Path) -> tuple[str, list[object]]:
    texts = english(60)
    (folder / "train.en").write_text("\n".join(texts) + "\n")
    (folder / "train.de").write_text("\n".join(map(german, texts)) + "\n")
    sets = ("training.valid_beam_size=0", "training.best_metric=loss", "training.sample_every=0")
    return PAIRS, [
        *("--source", folder / "train.en", "--target", folder / "train.de"),
        *(word for value in sets for word in ("--set", value)),
    ]


@pytest.mark.parametrize("make", [text, masked_text, sentence_pairs, labelled, images, translations])
def test_train_evaluate_and_prune_agree_on_what_is_held_out(
    make: Callable[[Path], tuple[str, list[object]]], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, flags = make(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe)
    run, seen = tmp_path / "run", Seen(monkeypatch)
    no_sample = () if make is translations else ("--set", "training.sample_every=0")

    def taken(*words: object) -> set[bytes]:
        outcome = cli(*words)
        assert outcome.code == 0, outcome.err
        return seen.take()

    validated = taken("train", "--config", tmp_path / "recipe.yaml", "--out", run, *flags, *FEW_STEPS, *no_sample)
    assert validated
    assert taken("evaluate", run, *(("--no-decode",) if make is translations else ())) == validated
    assert taken("prune", run, "--drop-heads", "0.5", "--out", tmp_path / "pruned") == validated
    # The pruned checkpoint is measured on them as well, and trained on none of them.
    assert taken("evaluate", tmp_path / "pruned", *(("--no-decode",) if make is translations else ())) == validated


@pytest.mark.parametrize(
    ("make", "units"),
    [
        (text, {"validating": "tokens"}),
        (masked_text, {"validating": "examples"}),
        (sentence_pairs, {"validating": "examples"}),
        (labelled, {"validating": "examples"}),
        (images, {"validating": "examples"}),
        (translations, {"validating": "pairs", "decoding the validation data": "pairs"}),
    ],
)
def test_validation_and_its_decoding_show_how_far_they_are(
    make: Callable[[Path], tuple[str, list[object]]], units: dict[str, str], tmp_path: Path
) -> None:
    recipe, flags = make(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe)
    decode = [word for word in flags if word != "training.valid_beam_size=0"]
    sets = ("--set", "training.valid_beam_size=1") if len(decode) < len(flags) else ()
    options = read_words([*map(str, flags), *sets, *FEW_STEPS])
    shown: dict[str, list[tuple[float, float | None]]] = {}
    named: dict[str, str] = {}

    @contextmanager
    def progress(description: str, total: float | None = None, unit: str = "") -> Iterator[Callable[..., None]]:
        named[description] = unit
        reports = shown.setdefault(description, [])
        yield lambda done, total=total: reports.append((done, total))

    run_training(
        replace(options, config=tmp_path / "recipe.yaml", out=tmp_path / "run"),
        console=Console(quiet=True, stderr=True),
        work=Work(progress),
        began=0.0,
    )
    assert units.items() <= named.items()
    for description in units:
        assert shown[description] and shown[description][-1][0] == shown[description][-1][1]


def test_a_sweep_resolves_to_the_data_that_train_reads(cli: Cli, tmp_path: Path) -> None:
    recipe, flags = labelled(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe)
    run = tmp_path / "run"
    assert cli("train", "--config", tmp_path / "recipe.yaml", "--out", run, *flags, *FEW_STEPS).code == 0
    plan = SweepTask(config=str(tmp_path / "recipe.yaml"), train=tuple(map(str, flags)))
    start = start_of(plan, (), max_steps=2)
    work = Work()
    _, found = task_of(start.recipe).training_data(start, work)
    assert found.fingerprint == json.loads((run / "environment.json").read_text())["data_fingerprint"]


@pytest.mark.parametrize("make", [text, masked_text, sentence_pairs, labelled, tagged, images, translations])
def test_a_fraction_of_the_data_is_a_fixed_part_of_what_is_trained_on(
    make: Callable[[Path], tuple[str, list[object]]], tmp_path: Path
) -> None:
    recipe, flags = make(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe)
    plan = SweepTask(config=str(tmp_path / "recipe.yaml"), train=tuple(map(str, flags)))

    def data(*sets: str, seed: int = 1) -> Any:
        start = start_of(plan, sets, max_steps=2, seed=seed)
        return task_of(start.recipe).training_data(start, Work())[1]

    whole, half, again, other = (
        data(), data("data.fraction=0.5"), data("data.fraction=0.5"), data("data.fraction=0.5", seed=2)
    )  # fmt: skip
    assert half.fingerprint == again.fingerprint != whole.fingerprint and half.fingerprint != other.fingerprint
    assert abs(len(half.samples) - len(whole.samples) / 2) <= 0.1 * len(whole.samples) + 1
    if make in (labelled, images):
        share = [np.bincount(part.samples.labels) / len(part.samples) for part in (half, whole)]
        assert share[0] == pytest.approx(share[1], abs=1 / len(half.samples))


def test_a_fraction_changes_neither_validation_nor_tokenizer_nor_labels(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, flags = labelled(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe)
    seen, found = Seen(monkeypatch), []
    for fraction in ("1", "0.05"):
        run = tmp_path / f"run-{fraction}"
        words = ("train", "--config", tmp_path / "recipe.yaml", "--out", run, *flags, *FEW_STEPS)
        assert cli(*words, "--set", f"data.fraction={fraction}", "--set", "training.sample_every=0").code == 0
        labels = yaml.safe_load((run / "recipe.yaml").read_text())["data"]["labels"]
        found.append((seen.take(), (run / "tokenizer.json").read_bytes(), labels))
    assert found[0] == found[1] and found[0][0]


def test_a_wrong_fraction_is_one_line(cli: Cli, tmp_path: Path) -> None:
    _, flags = text(tmp_path)
    for value in ("0", "1.5", "half"):
        outcome = cli("train", "--arch", "gpt", *flags, "--set", f"data.fraction={value}", "--dry-run")
        assert outcome.code == 2 and "data.fraction" in outcome.err and value in outcome.err


SPELLINGS = ("{}", "  {} ", "{}!", "{}.", "¿{}?")
ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.sampled_from(SPELLINGS), st.booleans()), min_size=8, max_size=80
)


@given(ROWS, st.integers(2, 4))
def test_near_duplicates_are_on_one_side_of_every_fold_and_split(
    rows: list[tuple[int, int, str, bool]], folds: int
) -> None:
    """As are the rows of a group, in place of them, where groups are named."""
    texts = [how.format(f"text {n}".upper() if is_upper else f"text {n}") for _, n, how, is_upper in rows]
    labels, numbers = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    keys = duplicate_keys([(text, None) for text in texts])
    assert len(np.unique(np.stack([keys, numbers]), axis=1).T) == len(np.unique(numbers)) == len(np.unique(keys))
    for unit in ("different texts", "groups"):
        groups = [str(number) if unit == "groups" else None for number in numbers]
        made = [LabelledRow(text, None, None, "data:1", group=group) for text, group in zip(texts, groups, strict=True)]
        of = partial(Parts.of, labels, name="data", rows=made)
        if len(np.unique(numbers)) < folds:
            with pytest.raises(InputError, match=f"data: found [1-3] {unit}, expected at least {folds}"):
                of(Data(folds=folds))
            continue
        measured = []
        for fold in range(1, folds + 1):
            parts = of(Data(folds=folds, fold=fold, valid=(SourceSpec(path="other"),)))
            assert not np.isin(numbers[parts.fold], numbers[parts.train]).any() and not len(parts.valid)
            measured += parts.fold.tolist()
        assert sorted(measured) == list(range(len(rows)))
        try:
            parts = of(Data())
        except InputError:  # too few to hold any out
            continue
        assert sorted([*parts.train, *parts.valid]) == list(range(len(rows)))
        if np.isin(numbers[parts.valid], numbers[parts.train]).any():  # a few texts are most of the rows
            plain = Parts.of(labels, Data(), name="data", rows=None)
            assert unit == "different texts" and np.array_equal(parts.valid, plain.valid)


LAST = ("--set", "data.valid_split=last")
SORTED: dict[str, tuple[str, Callable[[int], str], tuple[str, ...], str]] = {
    # file, row of a number from 0 to 39, options of train, what validation lacks with the last rows
    "csv": ("a.csv", lambda n: f"a text {n},{'wxyz'[n // 10]}", ("--arch", "bert"), "validation has no w, x, y"),
    "scores": (
        *("a.tsv", lambda n: f"a text {n}\t{n / 10}", ("--arch", "bert", "--objective", "regression")),
        "validation has the scores 3.6 to 3.9, training 0 to 3.5",
    ),
    "several": (
        *("a.tsv", lambda n: f"a text {n}\t{'wxyz'[n // 10]}|v", ("--arch", "bert", "--objective", "multi_label")),
        "validation has no w, x, y",
    ),
    "tags": (
        *("a.conll", lambda n: f"a{n} {'WXYZ'[n // 10]}\n", ("--arch", "bert", "--objective", "token_classification")),
        "validation has no W, X, Y",
    ),
}


@pytest.mark.parametrize("kind", ["images", *SORTED])
def test_examples_in_the_order_of_their_labels_leave_no_class_out(
    kind: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default; the last rows are held out where the user says so, with a warning and the fix."""
    monkeypatch.chdir(tmp_path)
    if kind == "images":
        words, missing = ("--arch", "vit", "--data", write_images(tmp_path / "images", 20)), "validation has no dark"
    else:
        name, row, options, missing = SORTED[kind]
        head = {"a.csv": "text,label\n", "a.tsv": "text\tscore\n"}.get(name, "")
        (tmp_path / name).write_text(head + "".join(f"{row(n)}\n" for n in range(40)))
        words = (*options, "--data", name, *(("--label-column", "score") if name == "a.tsv" else ()))
    outcome = cli("train", *words, "--dry-run", "--max-steps", "1")
    assert outcome.code == 0 and "caution: validation has" not in outcome.err, outcome.err
    if kind == "tags":  # sentences have no label by which the last could be asked for
        monkeypatch.setattr("tformer.tasks.tags.task.divided", lambda sources, data: cut(sources))
    outcome = cli("train", *words, "--dry-run", "--max-steps", "1", *(LAST if kind != "tags" else ()))
    fix = "give more examples" if kind == "tags" else "--set data.valid_split=stratified"
    [line] = [line for line in outcome.err.splitlines() if "caution: validation has" in line]
    assert missing in line and fix in line


def cut(sources: Any) -> tuple[GivenRows, GivenRows]:
    rows = [row for source in sources for row in source.rows()]
    return GivenRows(rows[:36]), GivenRows(rows[36:])


def test_a_class_of_the_validation_data_alone_is_named() -> None:
    notes = list[str]()
    work = SimpleNamespace(note=notes.append)
    recipe = SimpleNamespace(data=Data(labels=("a", "b", "c"), valid=(SourceSpec(path="v"),), valid_split="last"))
    note_missing(recipe, np.array([0, 1]), np.array([1, 2]), work)  # type: ignore[arg-type]
    note_missing(recipe, np.array([0, 2]), np.array([2, 0]), work)  # type: ignore[arg-type]
    [line] = notes
    assert line.startswith("caution: validation has no a; training has no c (") and "--valid" in line


def test_no_preset_holds_out_the_last_of_labelled_examples() -> None:
    for arch, names in list_presets().items():
        for name in names:
            assert load_recipe(arch=arch, preset=name).recipe.data.valid_split == "stratified"
