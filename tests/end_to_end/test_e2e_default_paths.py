"""Every default path: each architecture with each form of data that its task reads and each kind of length.

Each preset, too, with built-in data and with a form in turn; each objective that `--objective` can name, with each form
of its data, from the default of a family that can learn it.

The cells come from the tables: the presets are the shipped files, the forms of data those whose columns the `row_keys`
of a task name, and the commands after the training follow from the heads of the model. A preset is shrunk by `--set`;
its data path, tokenizer, metric, split and plan of validations are its own.
"""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.labelled_examples import sentences, write_images
from tests.pairwise import pairwise
from tformer.data.sources.conversations import FORMATS
from tformer.objectives import OBJECTIVES, unused_keys
from tformer.recipe import Recipe, load_recipe
from tformer.support.errors import InputError
from tformer.support.shipped import list_presets
from tformer.tasks.table import TASKS, task_of

Cli = Callable[..., Any]

ROWS = 60
LENGTHS: dict[str, list[str]] = {
    "steps": ["--max-steps", "2"],
    "json": ["--max-steps", "2", "--json"],
    "dry run": ["--max-steps", "2", "--dry-run"],
    "epochs": ["--max-epochs", "1"],
    "minutes": ["--minutes", "0.05"],
}
"""Flags by the name of a way to set the length."""
NOT_BUILT_IN = {"chat", "dpo", "question_answering", "contrastive", "similarity", "regression"}
"""Objectives without built-in data; there are no images, either."""
MORE_MINUTES = "0.5"  # where a busy machine asks for them


# --- data ------------------------------------------------------------------------------------------------------------


def example(number: int) -> dict[str, Any]:
    """An example with a value for each key of any task's rows."""
    draw = random.Random(number)
    [(label, text)], [(_, other)] = sentences(1, number), sentences(1, number + ROWS)
    text = f"{text} {draw.choice('abcdefgh')}{number} ."
    words = text.split()
    answer = {"role": "assistant", "content": other}
    return {
        "text": f"{text} {other.capitalize()} .",  # a document of two sentences
        "text2": f"{other} !",
        "label": str(int(label == "tool")),  # a class, and a score
        "source": text,
        "target": " ".join(reversed(words)),
        "words": words,
        "tags": ["O" if word in ("and", "the") else label for word in words],
        "question": f"what is {number} ?",
        "context": text,
        "answers": [{"text": words[1], "answer_start": text.index(words[1])}],
        **dict.fromkeys(("prompt", "instruction"), text),
        **dict.fromkeys(("chosen", "completion", "output"), other),
        "rejected": " ".join(reversed(words)),
        "messages": [{"role": "user", "content": text}, answer],
        "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": other}],
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


def data_forms(recipe: Recipe) -> Iterator[tuple[str, Callable[[Path], list[str]]]]:
    """The name of each form of data that its task reads, and what writes it into a folder and returns its options."""
    task = task_of(recipe)
    yield "none", lambda folder: []
    if task is TASKS["images"]:
        yield "images", lambda folder: images(folder, ())
    is_chat, are_scored = task is TASKS["chat"], any(each.objective.reads_scores for each in recipe.objectives)
    for keys in [keys for each in FORMATS.values() for keys in each] if is_chat else task.row_keys:
        if are_scored and "label" not in keys:
            continue
        name, values = "+".join(keys), example(0)
        is_object = is_chat or "chosen" in keys or not all(isinstance(values[key], str) for key in keys)
        writers = [objects if is_object else table]
        if keys == ("text",) and not is_chat:
            writers += [text_file, text_folder]
        if keys == ("source", "target"):
            writers.append(aligned)
        for write in writers:
            yield f"{write.__name__} of {name}", lambda folder, write=write, keys=keys: write(folder, keys)


# --- cells -----------------------------------------------------------------------------------------------------------


@cache
def recipe_of(arch: str, preset: str | None, objective: str | None = None) -> Recipe:
    flags = {"objectives": [{"kind": kind} for kind in objective.split(",")]} if objective else {}
    return load_recipe(arch=arch, preset=preset, flags=flags).recipe


@dataclass(frozen=True)
class Cell:
    """A training; preset: None for the one that data, time or family choose; objective: None for the preset's."""

    arch: str
    preset: str | None
    form: str
    length: str
    objective: str | None = None

    def __str__(self) -> str:
        return f"{self.arch}/{self.preset or self.objective or 'default'}, {self.form}, {self.length}"

    @property
    def recipe(self) -> Recipe:
        return recipe_of(self.arch, self.preset, self.objective)


@cache
def cells(arch: str) -> list[Cell]:
    """Of the default of an architecture all pairs of a form and a length; of its presets two forms and two lengths."""
    forms = [name for name, _ in data_forms(recipe_of(arch, None))]
    found = [Cell(arch, None, form, length) for form, length in pairwise(form=forms, length=list(LENGTHS))]
    lengths = cycle(length for length in LENGTHS if length != "minutes")
    for number, preset in enumerate(list_presets()[arch]):
        files = [name for name, _ in data_forms(recipe_of(arch, preset))][1:]
        found += [Cell(arch, preset, form, next(lengths)) for form in ("none", files[number % len(files)])]
        next(lengths)  # else built-in data would have every other length only
    # An epoch of built-in data is long.
    return [replace(cell, length="steps") if (cell.form, cell.length) == ("none", "epochs") else cell for cell in found]


@cache
def objective_cells() -> list[Cell]:
    """Each objective with each form of its data, from the defaults of the families that can learn it in turn."""
    found: list[Cell] = []
    lengths = cycle(("json", "epochs", "steps"))
    for kind, objective in OBJECTIVES.items():
        name = kind if objective.companion_of is None else f"{objective.companion_of},{kind}"
        families = [arch for arch in list_presets() if can_learn(arch, name)]
        forms = {form: arch for arch in families for form, _ in data_forms(recipe_of(arch, None, name))}
        turn = cycle(families)
        for form in forms:
            arch = next(arch for arch in turn if form in dict(data_forms(recipe_of(arch, None, name))))
            found.append(Cell(arch, None, form, "steps" if form == "none" else next(lengths), name))
    return found


def can_learn(arch: str, objective: str) -> bool:
    with suppress(InputError):
        return bool(recipe_of(arch, None, objective))
    return False


SAMPLE = [
    Cell("transformer", None, "table of source+target", "steps"),
    Cell("gpt", None, "text_file of text", "epochs"),
    Cell("bert", "base", "text_folder of text", "steps"),
    Cell("bart", None, "text_file of text", "epochs"),
    Cell("vit", None, "images", "epochs"),
    Cell("gpt", None, "objects of prompt+chosen+rejected", "json", "dpo"),
    Cell("bert", None, "objects of words+tags", "epochs", "token_classification"),
    Cell("bert", None, "table of text+label", "json"),
    Cell("gpt", None, "objects of text", "json", "chat"),
    Cell("bert", None, "table of text+text2+label", "steps", "contrastive"),
    Cell("bert", None, "objects of question+context+answers", "json", "question_answering"),
]
"""A cell for each task, with a form of data and a length in turn, none of which waits for a clock."""


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


def validations() -> list[dict[str, Any]]:
    """The records of the validations of the run; [] before any."""
    file = Path("run/metrics.jsonl")
    records = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    return [record for record in records if record.get("split") == "valid"]


def check(cell: Cell, cli: Cli, folder: Path) -> None:
    """Train the cell, and use what it leaves."""
    recipe = cell.recipe
    words = ["train", "--arch", cell.arch, *(["--preset", cell.preset] if cell.preset else []), "--out", "run"]
    words += ["--objective", cell.objective] if cell.objective else []
    data, small = dict(data_forms(recipe))[cell.form](folder), shrunk(recipe)
    if any(options.objective.compares_base for options in recipe.objectives):
        texts = text_file(folder, ("text",))
        succeed(cli, "train", "--arch", cell.arch, *texts, "--out", "base", "--max-steps", "1", *small)
        words, small = ["train", "--init-from", "base", "--lora", "2", "--out", "run"], []
        words += ["--objective", str(cell.objective)]
    words += [*data, *LENGTHS[cell.length], *small]
    outcome = cli(*words)
    if cell.length == "minutes" and not validations():  # a busy machine
        assert outcome.code == 0 or "more minutes" in outcome.err or "hint: give" in outcome.err, outcome.err
        shutil.rmtree("run", ignore_errors=True)
        words[words.index("--minutes") + 1] = MORE_MINUTES
        outcome = cli(*words)
    if cell.form == "none" and (recipe.model.patches is not None or cell.objective in NOT_BUILT_IN):
        assert outcome.code == 2 and "hint: give" in outcome.err and not Path("run").exists(), outcome.err
        return
    assert outcome.code == 0, f"tformer {' '.join(words)}\n{outcome.err[-3000:]}"
    if cell.length == "dry run":
        assert not Path("run").exists()
        return
    if cell.length == "json":
        assert json.loads(outcome.out)["step"] == 2
    recipe = load_recipe(config=Path("run/recipe.yaml")).recipe
    assert validations()
    quick = ["--no-decode"] if cell.form == "none" and "no_decode" in task_of(recipe).options else []
    for command in filter(None, (after(cell, recipe, folder), ["evaluate", "run", *quick], ["inspect", "run"])):
        assert json.loads(succeed(cli, *command, "--json"))


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Cell], Path]:
    """`surroundings(cell)`: a new current folder, and the start of a command now.

    Validations are planned as for a model that was not shrunk.
    """
    monkeypatch.setattr("tformer.training.validations.FEW_OPERATIONS", 0.0)

    def enter(cell: Cell) -> Path:
        folder = tmp_path / re.sub(r"\W+", "-", str(cell))
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setattr("tformer.cli.train.STARTED", time.monotonic())
        return folder

    return enter


Enter = Callable[[Cell], Path]


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_default_path_of_each_task_trains(cell: Cell, cli: Cli, surroundings: Enter) -> None:
    check(cell, cli, surroundings(cell))


def check_all(found: list[Cell], cli: Cli, surroundings: Enter) -> None:
    """Train all cells, and fail with the message of each that does not train."""
    messages = []
    for cell in found:
        folder = surroundings(cell)
        try:
            check(cell, cli, folder)
        except AssertionError as error:
            messages.append(f"{cell}: {error}")
        shutil.rmtree(folder)
    assert not messages, "\n\n".join(messages)


@pytest.mark.slow
@pytest.mark.parametrize("arch", list_presets())
def test_every_default_path_of_an_architecture_trains(arch: str, cli: Cli, surroundings: Enter) -> None:
    """Its quick twin is `test_a_default_path_of_each_task_trains`."""
    check_all(cells(arch), cli, surroundings)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_every_objective_trains_from_a_default(part: int, cli: Cli, surroundings: Enter) -> None:
    """Its quick twin is `test_a_default_path_of_each_task_trains`."""
    check_all(objective_cells()[part::6], cli, surroundings)


@pytest.mark.slow
def test_the_matrix_has_every_default_and_objective_with_every_form_and_length_and_every_preset_with_two() -> None:
    """It trains nothing, but reads more than a hundred recipes.

    Its quick twin is `test_a_default_path_of_each_task_trains`.
    """
    for arch, presets in list_presets().items():
        for preset in (None, *presets):
            own = [cell for cell in cells(arch) if cell.preset == preset]
            forms, lengths = {cell.form for cell in own}, {cell.length for cell in own}
            every = {name for name, _ in data_forms(recipe_of(arch, preset))}
            assert forms == every if preset is None else "none" in forms <= every and len(forms) == 2
            assert lengths == set(LENGTHS) if preset is None else lengths <= set(LENGTHS) - {"minutes"}
    matrix = [*objective_cells(), *(cell for arch in list_presets() for cell in cells(arch))]
    assert {task_of(cell.recipe) for cell in SAMPLE} == {task_of(cell.recipe) for cell in matrix}
    everywhere = [cell for arch in list_presets() for cell in cells(arch) if cell.preset is not None]
    assert {cell.length for cell in everywhere} == set(LENGTHS) - {"minutes"}
    found = objective_cells()
    assert {kind for cell in found for kind in str(cell.objective).split(",")} == set(OBJECTIVES)
    for objective in {cell.objective for cell in found}:
        own = [cell for cell in found if cell.objective == objective]
        for cell in own:
            assert {name for name, _ in data_forms(cell.recipe)} <= {each.form for each in own}, cell
