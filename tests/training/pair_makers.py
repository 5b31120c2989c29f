"""A tiny recipe of pairs, toy translations, and what a run measured."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

RECIPE = """\
arch: transformer
tokenizer: {train: {model: word, template: seq2seq, vocab_size: 60, min_frequency: 1}}
data: {sort_window: 64}
model:
  d_model: 16
  max_seq_len: 32
  embedding: {scale: true}
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}, dropout: 0.1}
  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}, dropout: 0.1}
objectives: [{kind: seq2seq, label_smoothing: 0.1}]
optimizer: {lr: 0.01}
training: {max_steps: 8, batch_size: 8, eval_every: 4, save_every: 4, log_every: 4,
           precision: fp32, device: cpu, threads: 1, best_metric: bleu}
generation: {beam_size: 3, max_new_tokens: 12}
"""
GERMAN = {"red": "rot", "blue": "blau", "house": "haus", "cat": "katze", "the": "die", "a": "eine"}


def english(count: int) -> list[str]:
    words = list(GERMAN)
    return [" ".join(words[(i * k + k) % len(words)] for k in range(1, 2 + i % 5)) + f" {i}" for i in range(count)]


def german(text: str) -> str:
    return " ".join(GERMAN.get(word, word) for word in text.split())


TIMES = {"seconds", "tokens_per_second", "peak_share"}


def records(run: Path) -> list[dict[str, Any]]:
    """All records of the metrics, without times."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def metrics(run: Path, split: str = "valid") -> list[dict[str, Any]]:
    """The records of a split, with times."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record.get("split") == split]


def weights_of(run: Path, step: int | None = None) -> str:
    """The hash of the weights of a checkpoint, by default of the latest."""
    name = (run / "checkpoints" / "latest").read_text().strip() if step is None else f"step-{step:08d}"
    return hashlib.sha256((run / "checkpoints" / name / "model.safetensors").read_bytes()).hexdigest()


def sides(aligned: tuple[Path, Path]) -> tuple[object, ...]:
    return "--source", aligned[0], "--target", aligned[1]
