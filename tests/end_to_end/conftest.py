"""Tiny encoders of every kind, trained once for all tests by the command a user types; writers with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end import export_runs
from tests.end_to_end.labelled_examples import documents, many, pairs, sentences, write_images, write_table
from tests.end_to_end.translate_runs import DECODER, LINES, build_run

ENCODER = """\
arch: bert
tokenizer: {train: {model: word, template: bert, vocab_size: 200, min_frequency: 1}}
data: {sort_window: 64}
model:
  d_model: 16
  max_seq_len: 24
  embedding: {token_types: 2}
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}}
  heads: [{kind: classifier, pooling: mean}]
objectives: [{kind: classification}]
optimizer: {lr: 0.01}
training: {max_steps: 40, batch_size: 8, eval_every: 20, save_every: 20, log_every: 20,
           precision: fp32, device: cpu, threads: 1}
"""
GENERATOR = """\
generator:
  d_model: 8
  max_seq_len: 24
  embedding: {token_types: 2, size: 16}
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
  heads: [{kind: masked_lm}]
"""
IMAGES = """\
arch: vit
model:
  d_model: 16
  patches: {image_size: 8, size: 4, channels: 1}
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}}
  heads: [{kind: classifier, pooler: false}]
objectives: [{kind: classification}]
optimizer: {lr: 0.01}
training: {max_steps: 40, batch_size: 8, eval_every: 20, save_every: 20, log_every: 20,
           precision: fp32, device: cpu, threads: 1}
"""


@pytest.fixture(scope="session")
def encoder_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """`encoder_run(kind)`: a trained run of that kind, with its data beside it (`data.tsv`, `data`, `text.txt`)."""
    root = tmp_path_factory.mktemp("encoders")
    done: dict[str, Path] = {}

    def prepare(kind: str, folder: Path) -> list[object]:
        singles = [tuple(row) for row in sentences(80, 0)]
        table = folder / "data.tsv"
        if kind == "single":
            return ["--data", write_table(table, ("label", "text"), singles)]
        if kind == "pair":
            return ["--data", write_table(table, ("label", "text_a", "text_b"), pairs(120))]
        if kind == "multi":
            return ["--data", write_table(table, ("labels", "text"), many(400)), "--objective", "multi_label",
                    "--max-steps", 600, "--lr", 0.03]  # fmt: skip
        if kind == "score":
            rows: list[tuple[object, ...]] = [(1 + 2 * (label == "tool"), text) for label, text in singles]
            return ["--data", write_table(table, ("score", "text"), rows), "--objective", "regression"]
        if kind == "image":
            return ["--data", write_images(folder / "data", 20)]
        if kind == "sentences":
            return ["--data", documents(folder / "data"), "--objective", "masked_lm,next_sentence"]
        text = folder / "text.txt"
        text.write_text("\n".join(text for _, text in sentences(300, 6)) + "\n")
        return ["--data", text, "--objective", {"masked": "masked_lm", "electra": "replaced_token"}[kind]]

    def make(kind: str) -> Path:
        from tformer.cli.app import main

        if kind not in done:
            folder = root / kind
            folder.mkdir()
            recipe = folder / "recipe.yaml"
            recipe.write_text({"image": IMAGES, "electra": ENCODER + GENERATOR}.get(kind, ENCODER))
            words = ["train", "--config", recipe, "--out", folder / "run", *prepare(kind, folder)]
            with pytest.raises(SystemExit) as end:
                main([str(word) for word in words])
            assert end.value.code == 0
            done[kind] = folder / "run"
        return done[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFORMER_CACHE", str(root / "cache"))
        yield make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`trained(kind)`: a trained run that Hugging Face has a class for; kinds as of `export_runs.train`."""
    root = tmp_path_factory.mktemp("exports")
    done: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in done:
            done[kind] = export_runs.train(kind, root / kind)
        return done[kind]

    return make


@pytest.fixture(scope="session")
def random_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`random_run(...)`: a run with random weights; arguments as of `build_run`."""
    return lambda *arguments, **options: build_run(tmp_path_factory.mktemp("home"), *arguments, **options)


@pytest.fixture(scope="session")
def translator(random_run: Callable[..., Path]) -> Path:
    return random_run()


@pytest.fixture(scope="session")
def decoder(random_run: Callable[..., Path]) -> Path:
    return random_run(DECODER)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join(line + "\n" for line in LINES), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny folders of Hugging Face by name; a test that changes one copies it."""
    from tests.end_to_end.import_data import LABELS
    from tests.interop import tiny_folders as tiny

    root = tmp_path_factory.mktemp("folders")
    tiny.gpt2(root / "gpt2")
    tiny.bert(root / "bert")
    tiny.bert(root / "classifier", "SequenceClassification", id2label=LABELS)
    tiny.t5(root / "t5")
    tiny.bart(root / "bart")
    return root
