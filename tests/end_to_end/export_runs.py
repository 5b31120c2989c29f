"""Runs of the shapes that Hugging Face has, trained for a few steps by the command a user types."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.labelled_examples import pairs, sentences, write_table

TRAINING = """\
optimizer: {kind: adamw, lr: 0.005}
schedule: {kind: constant}
training: {max_steps: 12, batch_size: 8, eval_every: 12, save_every: 12, log_every: 12,
           precision: fp32, device: cpu, threads: 1}
"""
GPT = (
    """\
arch: gpt
tokenizer: {train: {model: byte-bpe, vocab_size: 300, template: gpt}}
model:
  d_model: 16
  max_seq_len: 32
  decoder: {num_layers: 2, num_heads: 2, feedforward: {activation: gelu_tanh}}
"""
    + TRAINING
)
BERT = (
    """\
arch: bert
tokenizer: {train: {model: word, template: bert, vocab_size: 200, min_frequency: 1}}
model:
  d_model: 16
  max_seq_len: 24
  embedding: {norm: true, token_types: 2}
  encoder: {num_layers: 2, num_heads: 2, feedforward: {d_ff: 32}, norm: {place: post, eps: 1.0e-12}, final_norm: false}
  heads: [{kind: classifier, pooling: cls, pooler: true}]
objectives: [{kind: classification}]
"""
    + TRAINING
)
SIDE = """\
    num_layers: 2
    num_heads: 2
    positions: {kind: sinusoidal, layout: interleaved}
    feedforward: {d_ff: 32, activation: relu}
    norm: {place: post}
    final_norm: false
"""
ORIGINAL = f"""\
arch: transformer
tokenizer: {{train: {{model: char, template: seq2seq}}}}
model:
  d_model: 16
  max_seq_len: 32
  embedding: {{scale: true}}
  encoder:
{SIDE}  decoder:
{SIDE}objectives: [{{kind: seq2seq}}]
generation: {{beam_size: 4, length_penalty: 1.0, length_penalty_type: avg, max_new_tokens: 20}}
""" + TRAINING.replace("12", "240")


def train(kind: str, folder: Path) -> Path:
    """The run of a kind: gpt, classifier, pairs, original."""
    from tformer.cli.app import main

    folder.mkdir()
    recipe = folder / "recipe.yaml"
    recipe.write_text({"gpt": GPT, "original": ORIGINAL}.get(kind, BERT))
    words = ["train", "--config", recipe, "--out", folder / "run", *_data(kind, folder)]
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == 0
    return folder / "run"


def _data(kind: str, folder: Path) -> list[object]:
    if kind == "gpt":
        text = folder / "text.txt"
        text.write_text("\n".join(text for _, text in sentences(200, 5)) + "\n")
        return ["--data", text]
    if kind == "classifier":
        rows = [tuple(row) for row in sentences(80, 0)]
        return ["--data", write_table(folder / "data.tsv", ("label", "text"), rows)]
    if kind == "pairs":
        return ["--data", write_table(folder / "data.tsv", ("label", "text_a", "text_b"), pairs(80))]
    sources = [f"{number:02d}" for number in range(100)]
    (folder / "source.txt").write_text("\n".join(sources) + "\n")
    (folder / "target.txt").write_text("\n".join(source[::-1] for source in sources) + "\n")
    return ["--source", folder / "source.txt", "--target", folder / "target.txt"]
