"""One example of a batch: what every objective does to a text is visible, and it is what training reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tformer.objectives import OBJECTIVES
from tformer.tasks.example import SHOWN_POSITIONS, example_lines

Cli = Callable[..., Any]

STACK = "{num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}"
RECIPE = """\
arch: {arch}
tokenizer: {{train: {{model: word, vocab_size: 130, template: {template}}}}}
model: {{d_model: 8, max_seq_len: 32{model}, heads: [{heads}]}}
objectives: [{objectives}]
data: {{seq_len: 24}}
training: {{max_steps: 2, batch_size: 4, precision: fp32, device: cpu, threads: 1}}
"""
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run"]
IGNORED = None


def lines_of(count: int = 60) -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, size=9)) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """`shown(kind, objectives, heads, ...)`: the report of a dry run on tiny data."""
    folder = tmp_path_factory.mktemp("data")
    text, labelled, pairs = folder / "text.txt", folder / "labelled.jsonl", folder / "pairs.tsv"
    text.write_text("\n".join(f"{first}\n{second}\n" for first, second in zip(lines_of(), lines_of(), strict=True)))
    rows = [{"text": line, "label": ["yes", "no"][n % 2], "score": n / 7} for n, line in enumerate(lines_of())]
    labelled.write_text("\n".join(map(json.dumps, rows)))
    pairs.write_text("source\ttarget\n" + "\n".join(f"{line}\t{' '.join(line.split()[:3])}" for line in lines_of()))
    files = {"text": text, "labelled": labelled, "pairs": pairs}

    def ask(
        cli: Cli, *flags: object, data: str = "text", arch: str = "bert", template: str = "bert",
        heads: str = "kind: masked_lm", objectives: str = "kind: masked_lm", stacks: str = "encoder",
    ) -> dict[str, Any]:  # fmt: skip
        model = "".join(f", {stack}: {STACK}" for stack in stacks.split())
        recipe = RECIPE.format(
            arch=arch, template=template, model=model,
            heads=", ".join(f"{{{head}}}" for head in heads.split(" + ")),
            objectives=", ".join(f"{{{objective}}}" for objective in objectives.split(" + ")),
        )  # fmt: skip
        path = folder / "recipe.yaml"
        path.write_text(recipe)
        outcome = cli("train", "--config", path, "--data", files[data], "--dry-run", "--json", *flags)
        assert outcome.code == 0, outcome.err
        report: dict[str, Any] = json.loads(outcome.out)
        return report

    return ask


def test_every_objective_says_what_it_predicts() -> None:
    assert all(objective.predicts for objective in OBJECTIVES.values())


def test_masked_lm_shows_the_original_the_masks_and_the_labels(cli: Cli, shown: Callable[..., Any]) -> None:
    example = shown(cli)["example"]
    original, given, labels = example["original"]["text"], example["input_ids"], example["labels"]
    assert original["text"].startswith("[CLS]") and "[MASK]" in given["tokens"]
    assert set(labels["tokens"]) != {IGNORED}
    for before, token, label in zip(original["ids"], given["ids"], labels["ids"], strict=True):
        assert label == before if label is not IGNORED else token == before


def test_replaced_token_detection_shows_what_the_generator_reads(cli: Cli, tmp_path: Path) -> None:
    flags = ("--set", "model.d_model=16", "--set", "model.embedding.size=16", "--set", "data.seq_len=16")
    (tmp_path / "text.txt").write_text("\n".join(lines_of()))
    found = cli("train", "--arch", "electra", "--preset", "tiny", "--data", tmp_path / "text.txt", "--dry-run",
                "--json", "--set", "tokenizer.train.vocab_size=60", "--set", "generator.embedding.size=16",
                *flags)  # fmt: skip
    assert found.code == 0, found.err
    example = json.loads(found.out)["example"]
    masked = [token == "[MASK]" for token in example["input_ids"]["tokens"]]
    assert masked == [label is not None for label in example["labels"]["tokens"]] and any(masked)
    assert "generator" in example["objective"]["replaced_token"]


def test_next_sentence_shows_both_texts_and_their_label(cli: Cli, shown: Callable[..., Any]) -> None:
    example = shown(
        cli, "--set", "model.embedding.token_types=2",
        heads="kind: masked_lm + kind: next_sentence", objectives="kind: masked_lm + kind: next_sentence",
    )["example"]  # fmt: skip
    assert set(example["objective"]) == {"masked_lm", "next_sentence"}
    assert example["next_sentence_label"] in (0, 1) and set(example["token_type_ids"]) == {0, 1}


def test_causal_lm_shows_every_label_as_the_next_input(cli: Cli, shown: Callable[..., Any]) -> None:
    example = shown(cli, arch="gpt", template="none", stacks="decoder", heads="kind: lm", objectives="kind: causal_lm")
    example = example["example"]
    given, labels = example["input_ids"]["ids"], example["labels"]["ids"]
    assert given[1:] == labels[:-1] and [*given, labels[-1]] == example["original"]["text"]["ids"]


def test_seq2seq_shows_source_decoder_input_and_labels(cli: Cli, shown: Callable[..., Any]) -> None:
    both = {"arch": "transformer", "stacks": "encoder decoder", "heads": "kind: lm"}
    example = shown(cli, data="pairs", template="seq2seq", objectives="kind: seq2seq", **both)["example"]
    source, target = example["original"]["source"], example["original"]["target"]
    assert source["tokens"][0] == "[START]" and source["tokens"][-1] == target["tokens"][-1] == "[END]"
    assert example["input_ids"]["ids"][: len(source["ids"])] == source["ids"]
    assert [each for each in example["labels"]["ids"] if each is not IGNORED] == target["ids"]
    assert example["decoder_input_ids"]["tokens"][0] == "[START]"
    assert example["decoder_input_ids"]["ids"][1 : len(target["ids"])] == target["ids"][:-1]


def test_span_corruption_shows_sentinels_and_the_text_can_be_put_together(cli: Cli, shown: Callable[..., Any]) -> None:
    both = {"arch": "t5", "stacks": "encoder decoder", "heads": "kind: lm"}
    example = shown(cli, template="t5", objectives="kind: span_corruption", **both)["example"]
    target = [token for token in example["labels"]["tokens"] if token not in (IGNORED, "</s>")]
    spans: dict[str, list[str]] = {}
    for token in target:
        if token.startswith("<extra_id_"):
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    restored = [word for token in example["input_ids"]["tokens"] for word in spans.get(token, [token])]
    assert any(token in spans for token in example["input_ids"]["tokens"])
    text = [token for token in restored if token not in ("<pad>", "</s>")]
    assert text == [token for token in example["original"]["text"]["tokens"] if token != "</s>"][: len(text)]


def test_denoising_shows_masks_and_the_whole_text_as_labels(cli: Cli, shown: Callable[..., Any]) -> None:
    both = {"arch": "bart", "stacks": "encoder decoder", "heads": "kind: lm"}
    example = shown(cli, template="roberta", objectives="kind: denoising", **both)["example"]
    words = [token for token in example["labels"]["tokens"] if token is not IGNORED and not token.startswith("<")]
    text = [token for token in example["original"]["text"]["tokens"] if not token.startswith("<")]
    assert "<mask>" in example["input_ids"]["tokens"] and words == text[: len(words)] and len(words) > 5


@pytest.mark.parametrize(
    ("kind", "head", "label"),
    [("classification", "classifier", str), ("multi_label", "classifier, multi_label: true", list),
     ("regression", "regression", float)],
)  # fmt: skip
def test_labelled_examples_show_their_label_by_name(
    kind: str, head: str, label: type, cli: Cli, shown: Callable[..., Any]
) -> None:
    column = "score" if kind == "regression" else "label"
    report = shown(cli, "--label-column", column, data="labelled", heads=f"kind: {head}", objectives=f"kind: {kind}")
    example = report["example"]
    assert isinstance(example["label"], label) and example["input_ids"]["tokens"][0] == "[CLS]"
    assert "labels" not in example and list(example["objective"]) == [kind]


@pytest.mark.parametrize(("label", "line"), [("pos", "pos"), (["a", "b"], "a, b"), ([], "none"), (0.5, "0.5")])
def test_the_line_of_a_label_reads_like_text(label: object, line: str) -> None:
    assert list(example_lines({"objective": {}, "original": {}, "label": label}, width=80)) == [f"label: {line}"]


def test_padding_is_visible_in_tokens_and_mask() -> None:
    document = {
        "objective": {"masked_lm": "the masked tokens"},
        "original": {"text": {"text": "[CLS]a\nb[SEP]", "ids": [], "tokens": []}},
        "input_ids": {"tokens": ["[CLS]", " a", "[MASK]", "[SEP]", "[PAD]", "[PAD]"], "ids": []},
        "labels": {"tokens": [None, None, "b", None, None, None], "ids": []},
        "attention_mask": [True] * 4 + [False] * 2,
    }
    assert list(example_lines(document, width=60)) == [
        "masked_lm: predicts the masked tokens",
        "original: [CLS]a\\nb[SEP]",
        "",
        "input   [CLS] ␣a [MASK] [SEP] [PAD] [PAD]",
        "labels  ·     ·  b      ·     ·     ·",
        "mask    positions 0-3 real, 4-5 padding",
    ]


@pytest.mark.parametrize("width", [40, 80, 140])
def test_columns_stay_aligned_and_fit_the_width(width: int) -> None:
    draw = np.random.default_rng(0)
    tokens = ["".join(draw.choice(list("ab字 "), size=draw.integers(1, 9))) for _ in range(SHOWN_POSITIONS + 5)]
    rows = {"input_ids": {"tokens": tokens, "ids": []}, "labels": {"tokens": tokens[::-1], "ids": []}}
    document = {"objective": {}, "original": {}, **rows}
    lines = list(example_lines(document, width=width))
    assert max(len(line) for line in lines) <= width
    shown = [line.removeprefix("input").split() for line in lines if line.startswith("input")]
    assert [cell for row in shown for cell in row] == [token.replace(" ", "␣") for token in tokens[:SHOWN_POSITIONS]]
    assert lines[-2].startswith("... 5 more positions")


def test_control_characters_of_a_text_are_spelled_out() -> None:
    tokens = {"tokens": ["\x1b[31m"], "ids": []}
    document = {"objective": {}, "original": {"text": {"text": "\x1b[31m"}}, "input_ids": tokens}
    assert "\x1b" not in "\n".join(example_lines(document, width=80))


def test_a_dry_run_prints_the_example_beside_the_recipe(cli: Cli, tiny_recipe: Path, text_file: Path) -> None:
    outcome = cli("train", "--config", tiny_recipe, "--data", text_file, "--dry-run")
    assert "its first example" in outcome.err and "causal_lm: predicts the next token" in outcome.err
    assert outcome.out.startswith("schema:"), "the recipe alone is data"


def test_an_image_shows_its_size_its_numbers_and_its_label(cli: Cli, tmp_path: Path) -> None:
    for number in range(24):
        path = tmp_path / "images" / ["cats", "dogs"][number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, size=(8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    small = ("--set", "model.d_model=16", "--set", "model.encoder.num_layers=1", "--set", "model.patches.image_size=8")
    words = ("train", "--arch", "vit", "--preset", "mnist", "--data", tmp_path / "images", "--dry-run", *small,
             "--set", "model.patches.size=4", "--set", "model.max_seq_len=5")  # fmt: skip
    outcome = cli(*words, "--json")
    assert outcome.code == 0, outcome.err
    example = json.loads(outcome.out)["example"]
    assert example["pixel_values"]["shape"] == [1, 8, 8] and example["label"] in ("cats", "dogs")
    assert example["original"] == {} and example["pixel_values"]["min"] < 0 < example["pixel_values"]["max"]
    assert list(example_lines(example, width=80))[-1] == f"label: {example['label']}"
