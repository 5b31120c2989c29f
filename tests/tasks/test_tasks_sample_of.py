"""A given example is the sample of the same text in training, and gives the same batch; the first command's text."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tformer.data.shards.corpus import Example
from tformer.objectives import build_objective
from tformer.recipe.load import recipe_from_yaml
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.tasks.base import GivenExample, TrainingData, TrainingStart
from tformer.tasks.table import task_of
from tformer.tasks.text import opening_of
from tformer.tokenizer import TokenizerOptions, train_tokenizer
from tformer.workers.work import Work

STACK = "{num_layers: 1, num_heads: 2, feedforward: {d_ff: 8}}"
ENCODER, DECODER, BOTH = f"encoder: {STACK}", f"decoder: {STACK}", f"encoder: {STACK}, decoder: {STACK}"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run"]
LINES = [" ".join(np.random.default_rng(number).choice(WORDS, size=4 + number % 5)) for number in range(40)]
FIRST, SECOND = LINES[::2], LINES[1::2]


def write(folder: Path, kind: str) -> Path:
    rows: list[dict[str, Any]] = [
        {"text": one, "text2": two, "label": "yn"[n % 2], "source": one, "target": two, "words": one.split()}
        | {
            "tags": ["yn"[n % 2]] * len(one.split()),
            "question": one,
            "context": two,
            "answers": [] if n else [{"text": two, "answer_start": 0}],
        }
        for n, (one, two) in enumerate(zip(FIRST, SECOND, strict=True))
    ]
    names = {"text": ("text",), "labelled": ("text", "label"), "pair": ("text", "text2", "label")}
    names |= {"tagged": ("words", "tags"), "questions": ("question", "context", "answers")}
    kept = names.get(kind, ("source", "target"))
    path = folder / f"{kind}.jsonl"
    path.write_text("\n".join(json.dumps({name: row[name] for name in kept}) for row in rows))
    return path


def recipe_of(path: Path, *, objective: str, head: str, stacks: str, template: str, token_types: int) -> Recipe:
    text = f"""
schema: 1
tokenizer: {{train: {{model: word, vocab_size: 130, template: {template}}}}}
model: {{d_model: 8, max_seq_len: 32, {stacks}, heads: [{{kind: {head}}}], embedding: {{token_types: {token_types}}}}}
objectives: [{{kind: {objective}}}]
data: {{train: [{{path: {json.dumps(str(path))}}}], seq_len: 24, packing: none}}
training: {{batch_size: 4, precision: fp32, device: cpu}}
"""
    return recipe_from_yaml(text, name="test")


CLASSES = {"objective": "classification", "head": "classifier", "stacks": ENCODER}
CASES = {
    "causal LM": ("text", {"objective": "causal_lm", "head": "lm", "stacks": DECODER, "template": "gpt"}),
    "masked LM": ("text", {"objective": "masked_lm", "head": "masked_lm", "stacks": ENCODER, "template": "bert"}),
    "RoBERTa": ("text", {"objective": "masked_lm", "head": "masked_lm", "stacks": ENCODER, "template": "roberta"}),
    "T5": ("text", {"objective": "span_corruption", "head": "lm", "stacks": BOTH, "template": "t5"}),
    "BART": ("text", {"objective": "denoising", "head": "lm", "stacks": BOTH, "template": "roberta"}),
    "classes": ("labelled", CLASSES | {"template": "bert"}),
    "pairs": ("pair", CLASSES | {"template": "bert"}),
    "tags": (
        "tagged",
        {"objective": "token_classification", "head": "token_classifier", "stacks": ENCODER, "template": "bert"},
    ),
    "questions": (
        "questions",
        {"objective": "question_answering", "head": "span", "stacks": ENCODER, "template": "bert"},
    ),
    "translation": ("translation", {"objective": "seq2seq", "head": "lm", "stacks": BOTH, "template": "seq2seq"}),
}  # fmt: skip


def prepared(name: str, folder: Path) -> tuple[Recipe, TrainingData]:
    kind, settings = CASES[name]
    recipe = recipe_of(write(folder, kind), **settings, token_types=2 if kind == "pair" else 0)
    return task_of(recipe).training_data(TrainingStart(recipe=recipe), Work())


def given_of(name: str, number: int) -> GivenExample:
    kind, _ = CASES[name]
    text, other = FIRST[number], SECOND[number]
    text2 = other if kind in ("pair", "questions") else None
    return GivenExample(text, text2=text2, target=other if kind == "translation" else None)


def as_arrays(sample: Any) -> list[np.ndarray]:
    if isinstance(sample, Example):
        return [sample.ids, *([] if sample.token_type_ids is None else [sample.token_type_ids])]
    return [sample] if isinstance(sample, np.ndarray) else [sample.source, sample.target]


@pytest.mark.parametrize("name", CASES)
def test_a_given_text_is_the_sample_of_training(name: str, tmp_path: Path) -> None:
    recipe, data = prepared(name, tmp_path)
    tokenizers = data.tokenizer, data.target_tokenizer
    trained = [as_arrays(sample) for sample in data.samples.examples(0, np.arange(len(data.samples)))]
    found = 0
    for number in range(len(FIRST)):
        sample, _ = task_of(recipe).sample_of(recipe, tokenizers, given_of(name, number))
        arrays = as_arrays(sample)
        found += any(len(arrays) == len(other) and all(map(np.array_equal, arrays, other)) for other in trained)
    assert found >= len(trained) - 2, "all but what validation holds out, and the document at its edge"


@pytest.mark.parametrize("name", CASES)
def test_a_given_text_gives_the_batch_of_training(name: str, tmp_path: Path) -> None:
    """The sample's batch, by the objective of training, has the fields that a batch of training has."""
    recipe, data = prepared(name, tmp_path)
    sample, context = task_of(recipe).sample_of(recipe, (data.tokenizer, data.target_tokenizer), given_of(name, 3))
    objective = build_objective(recipe.objectives, data.context)
    [first] = data.samples.examples(0, np.arange(1))
    trained = objective.collate([first], rng=np.random.default_rng(0))
    own = build_objective(recipe.objectives, context).collate([sample], rng=np.random.default_rng(0))
    assert own.model_inputs().keys() == trained.model_inputs().keys()
    again = objective.collate([sample], rng=np.random.default_rng(0))
    assert all(own.model_inputs()[key].equal(value) for key, value in again.model_inputs().items())


def test_an_image_is_read_as_in_training(tmp_path: Path) -> None:
    for number in range(24):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, size=(8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    text = f"""
schema: 1
model: {{d_model: 8, max_seq_len: 5, {ENCODER}, patches: {{image_size: 8, size: 4, channels: 3}}, heads: [{{kind: classifier}}]}}
objectives: [{{kind: classification}}]
data: {{train: [{{path: {json.dumps(str(tmp_path / "images"))}}}]}}
training: {{batch_size: 4, precision: fp32, device: cpu}}
"""  # noqa: E501
    recipe = recipe_from_yaml(text, name="test")
    resolved, data = task_of(recipe).training_data(TrainingStart(recipe=recipe), Work())
    trained = data.samples.examples(0, np.arange(len(data.samples)))
    given = GivenExample(image=tmp_path / "images" / "a" / "00.png")
    sample, context = task_of(recipe).sample_of(resolved, (None, None), given)
    assert any(np.array_equal(sample.pixels, other.pixels) for other in trained)
    batch = build_objective(resolved.objectives, context).collate([sample], rng=np.random.default_rng(0))
    assert batch.model_inputs()["pixel_values"].shape == (1, 3, 8, 8)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("causal LM", GivenExample("a", target="b"), "--target: not read by a causal language model"),
        ("masked LM", GivenExample("a", text2="b"), "--text2: not read by a masked language model"),
        ("classes", GivenExample(image=Path("x.png")), "--image: not read by a model of labelled examples"),
        ("pairs", GivenExample("the cat"), "--text: --text2 is missing"),
        ("translation", GivenExample(target="the cat"), "--target: --text is missing"),
        ("causal LM", GivenExample(""), "--text: found no tokens"),
        ("translation", GivenExample(""), "--text: found no tokens"),
        ("translation", GivenExample("the cat", target=""), "--target: found no tokens"),
        ("causal LM", GivenExample("cat " * 40), "--text has 40 tokens, the model reads 24"),
        ("translation", GivenExample("cat " * 40), "--text"),
    ],
)
def test_a_wrong_example_is_one_clear_line(name: str, given: GivenExample, message: str, tmp_path: Path) -> None:
    recipe, data = prepared(name, tmp_path)
    with pytest.raises(InputError) as error:
        task_of(recipe).sample_of(recipe, (data.tokenizer, data.target_tokenizer), given)
    assert message in str(error.value.message) and "\n" not in error.value.message


def test_a_translation_without_a_target_reads_its_source_as_target(tmp_path: Path) -> None:
    recipe, data = prepared("translation", tmp_path)
    sample, _ = task_of(recipe).sample_of(recipe, (data.tokenizer, None), GivenExample("the cat"))
    assert sample.source[1:-1].tolist() == sample.target[:-1].tolist()


@pytest.mark.parametrize("name", CASES)
def test_the_first_command_gives_the_model_words_that_it_knows(name: str, tmp_path: Path) -> None:
    command = prepared(name, tmp_path)[1].first_try
    texts = [text for option, text in pairwise(command) if option in ("--prompt", "--text")]
    assert len(texts) == 1 or command[0] in ("evaluate", "classify"), command
    for text in texts:
        words = set(text.split())
        assert words - {"[MASK]"} <= {*WORDS} and ("[MASK]" in words) == (name in ("masked LM", "RoBERTa")), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("KxQ\nSdFaEI3SdFaEI3SdFaEI3SdFaEI3SdFaEI3\n", "SdFaEI3SdFaEI3SdFaEI3SdF"),
        ("nde\n\n  ein Hund und eine Katze laufen heim\n", "ein Hund und eine Katze"),
        ("nur eine kurze Zeile", "nur eine kurze Zeile"),
        ("nde\n  The cat\n", "The cat"),
        ("a\n\x1b[1mtwo\twords\x00\n", "[1mtwo words"),
    ],
)
def test_an_opening_is_whole_printable_words_of_a_line(text: str, expected: str) -> None:
    tokenizer = train_tokenizer(lambda: iter([text]), TokenizerOptions(model="char", template="none", min_frequency=1))
    ids = np.array(tokenizer.encode(text))
    assert opening_of(ids, tokenizer) == expected
