"""Every default path: each architecture and preset with each form of data that its task reads, and each kind of length.

The cells come from the tables: the presets are the shipped files, the forms of data those whose columns the `row_keys`
of a task name, and the commands after the training follow from the heads of the model. A preset is shrunk by `--set`;
its data path, tokenizer, metric, split and plan of validations are its own.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.labelled_examples import sentences, write_images
from tests.pairwise import pairwise
from tformer.objectives import unused_keys
from tformer.recipe import Recipe, load_recipe
from tformer.support.shipped import list_presets
from tformer.tasks import task_of
from tformer.tasks.base import Task

Cli = Callable[..., Any]

ROWS = 60
LENGTHS: dict[str, list[str]] = {
    "steps": ["--max-steps", "2"],
    "json": ["--max-steps", "2", "--json"],
    "dry run": ["--max-steps", "2", "--dry-run"],
    "epochs": ["--max-epochs", "1"],
    "minutes": ["--minutes", "0.2"],
}
"""Flags by the name of a way to set the length."""


# --- data ------------------------------------------------------------------------------------------------------------


def example(number: int) -> dict[str, Any]:
    """An example with a value for each key of any task's rows."""
    draw = random.Random(number)
    [(label, text)], [(_, other)] = sentences(1, number), sentences(1, number + ROWS)
    text = f"{text} {draw.choice('abcdefgh')}{number} ."
    words = text.split()
    return {
        "text": f"{text} {other.capitalize()} .",  # a document of two sentences
        "text2": f"{other} !",
        "label": label,
        "source": text,
        "target": " ".join(reversed(words)),
        "words": words,
        "tags": ["O" if word in ("and", "the") else label for word in words],
    }


def examples(keys: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in keys} for row in map(example, range(ROWS))]


def text_file(folder: Path, keys: tuple[str, ...]) -> list[str]:
    (folder / "data.txt").write_text("\n\n".join(row["text"] for row in examples(keys) * 2) + "\n")
    return ["--data", "data.txt"]


def text_folder(folder: Path, keys: tuple[str, ...]) -> list[str]:
    (folder / "texts").mkdir()
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_text("\n".join(row["text"] for row in examples(keys)) + "\n")
    return ["--data", "texts"]


def table(folder: Path, keys: tuple[str, ...]) -> list[str]:
    with (folder / "data.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(examples(keys))
    return ["--data", "data.csv"]


def objects(folder: Path, keys: tuple[str, ...]) -> list[str]:
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples(keys)))
    return ["--data", "data.jsonl"]


def aligned(folder: Path, keys: tuple[str, ...]) -> list[str]:
    for key in keys:
        (folder / f"data.{key}").write_text("\n".join(row[key] for row in examples(keys)) + "\n")
    return [word for key in keys for word in (f"--{key}", f"data.{key}")]


def images(folder: Path, keys: tuple[str, ...]) -> list[str]:
    write_images(folder / "images", ROWS // 2)
    return ["--data", "images"]


def data_forms(task: Task) -> Iterator[tuple[str, Callable[[Path], list[str]]]]:
    """The name of each form of data that a task reads, and what writes it into a folder and returns its options."""
    yield "none", lambda folder: []
    if not task.row_keys:
        yield "images", lambda folder: images(folder, ())
    for keys in task.row_keys:
        name, values = "+".join(keys), example(0)
        writers = [table if all(isinstance(values[key], str) for key in keys) else objects]
        if keys == ("text",):
            writers += [text_file, text_folder]
        if keys == ("source", "target"):
            writers.append(aligned)
        for write in writers:
            yield f"{write.__name__} of {name}", lambda folder, write=write, keys=keys: write(folder, keys)


# --- cells -----------------------------------------------------------------------------------------------------------


@cache
def recipe_of(arch: str, preset: str | None) -> Recipe:
    return load_recipe(arch=arch, preset=preset).recipe


@dataclass(frozen=True)
class Cell:
    """A training; preset: None for the one that data, time or family choose."""

    arch: str
    preset: str | None
    form: str
    length: str

    def __str__(self) -> str:
        return f"{self.arch}/{self.preset or 'default'}, {self.form}, {self.length}"


@cache
def cells() -> list[Cell]:
    """Pairwise over presets, forms of data and lengths, for each task; the clock is for presets that nobody names."""
    found: list[Cell] = []
    for default in (True, False):
        groups: dict[Task, list[tuple[str, str | None]]] = {}
        for arch, presets in list_presets().items():
            for preset in [None] if default else presets:
                groups.setdefault(task_of(recipe_of(arch, preset)), []).append((arch, preset))
        lengths = [length for length in LENGTHS if default or length != "minutes"]
        for task, group in groups.items():
            forms = [name for name, _ in data_forms(task)]
            for names, form, length in pairwise(preset=group, form=forms, length=lengths):
                if (form, length) != ("none", "epochs"):
                    found.append(Cell(*names, form, length))
                else:  # an epoch of built-in data is long
                    found += [Cell(*names, form, "steps"), Cell(*names, forms[1], length)]
    return list(dict.fromkeys(found))


def sample() -> list[Cell]:
    """A cell for each task, with a form of data and a length in turn, none of which waits for a clock."""
    tasks = {task_of(recipe_of(cell.arch, cell.preset)): cell for cell in reversed(cells())}
    found, lengths = [Cell("transformer", None, "none", "steps")], ("json", "epochs", "steps")
    for number, (task, cell) in enumerate(tasks.items()):
        forms = [name for name, _ in data_forms(task)][1:]
        found.append(replace(cell, form=forms[number % len(forms)], length=lengths[number % len(lengths)]))
    return found


def shrunk(recipe: Recipe) -> list[str]:
    """`--set` of two narrow layers, a vocabulary of 400, windows of 64 tokens and batches of 8."""
    sets: dict[str, Any] = {"training.threads": 1}
    sets |= {"training.batch_tokens": 512} if recipe.training.batch_size is None else {"training.batch_size": 8}
    if recipe.model.patches is None:
        sets |= {"tokenizer.train.vocab_size": 400, "data.seq_len": 64}
    if "training.valid_sentences" not in unused_keys(options.kind for options in recipe.objectives):
        sets["training.valid_sentences"] = 8
    models = {"model": recipe.model} | ({} if recipe.generator is None else {"generator": recipe.generator})
    for name, model in models.items():
        sets[f"{name}.d_model"] = 32
        if model.patches is None:
            sets[f"{name}.max_seq_len"] = 64
        if model.vocab_size:
            sets[f"{name}.vocab_size"] = 400
        if model.embedding.size:
            sets[f"{name}.embedding.size"] = 16 if recipe.model.embedding.size else 32  # the table is the model's
        for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
            if stack is None:
                continue
            sets |= {f"{name}.{side}.{key}": 2 for key in ("num_layers", "num_heads")}
            sets |= {f"{name}.{side}.feedforward.d_ff": 48, f"{name}.{side}.head_dim": "null"}
            if stack.num_kv_heads:
                sets[f"{name}.{side}.num_kv_heads"] = 1
            if hasattr(stack.attention, "rank"):
                sets[f"{name}.{side}.attention.rank"] = 16
    return [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]


def after(cell: Cell, recipe: Recipe, folder: Path) -> list[str]:
    """The command that shows what a model with these heads does, and its options; [] for one that has no answer."""
    kinds = {head.kind for head in recipe.model.heads}
    if recipe.model.patches is not None:
        return ["classify", "run", "--image", str(next(folder.rglob("*.png")))]
    if any(head.label_kind for head in recipe.model.heads):
        second = ["--text2", "the dog ."] if "text2" in cell.form else []
        return ["classify", "run", "--text", "the cat and the saw .", *second]
    if "masked_lm" in kinds:
        return ["generate", "run", "--prompt", "the [MASK] and"]
    return ["generate", "run", "--prompt", "the cat", "--max-new-tokens", "4"] if "lm" in kinds else []


def succeed(cli: Cli, *words: str) -> str:
    outcome = cli(*words)
    assert outcome.code == 0, f"tformer {' '.join(words)}\n{outcome.err[-3000:]}"
    return str(outcome.out)


def check(cell: Cell, cli: Cli, folder: Path) -> None:
    """Train the cell, and use what it leaves."""
    recipe = recipe_of(cell.arch, cell.preset)
    task = task_of(recipe)
    words = ["train", "--arch", cell.arch, *(["--preset", cell.preset] if cell.preset else []), "--out", "run"]
    words += [*dict(data_forms(task))[cell.form](folder), *LENGTHS[cell.length], *shrunk(recipe)]
    outcome = cli(*words)
    if cell.form == "none" and not task.row_keys:  # there are no built-in images
        assert outcome.code == 2 and "--data" in outcome.err and not Path("run").exists(), outcome.err
        return
    if outcome.code == 2 and cell.length == "minutes":  # a busy machine
        assert "more minutes" in outcome.err, outcome.err
        return
    assert outcome.code == 0, f"tformer {' '.join(words)}\n{outcome.err[-3000:]}"
    if cell.length == "dry run":
        assert not Path("run").exists()
        return
    if cell.length == "json":
        assert json.loads(outcome.out)["step"] == 2
    recipe = load_recipe(config=Path("run/recipe.yaml")).recipe
    if cell.length == "minutes" and not any(Path("run/checkpoints").glob("step-*")):  # a busy machine
        return
    if cell.length != "minutes":
        records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
        assert any(record.get("split") == "valid" for record in records)
    quick = ["--no-decode"] if cell.form == "none" and "no_decode" in task_of(recipe).options else []
    for command in filter(None, (after(cell, recipe, folder), ["evaluate", "run", *quick], ["inspect", "run"])):
        assert json.loads(succeed(cli, *command, "--json"))


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_a_default_path_of_each_task_trains(
    cell: Cell, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(cell, cli, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_every_default_path_trains(cell: Cell, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(cell, cli, tmp_path)


def test_the_matrix_has_every_preset_with_every_form_of_its_task_and_every_length() -> None:
    found = cells()
    for arch, presets in list_presets().items():
        for preset in (None, *presets):
            own = [cell for cell in found if (cell.arch, cell.preset) == (arch, preset)]
            forms = {name for name, _ in data_forms(task_of(recipe_of(arch, preset)))}
            assert {cell.form for cell in own} == forms, (arch, preset)
            assert {cell.length for cell in own} == set(LENGTHS) - ({"minutes"} if preset else set()), (arch, preset)
