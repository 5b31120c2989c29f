"""Tiny encoder-decoders and decoders with random weights, and how what a command says of them is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.random_runs import random_run

Cli = Callable[..., Any]
Run = Path

LETTERS = "abcdefgh \t"
SEQ2SEQ = """
schema: 1
model:
  d_model: 8
  max_seq_len: 16
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
  tie: {source_target: false, output: false}
  heads: [{kind: lm, bias: true}]
  init: {std: 0.7}
generation: {beam_size: 3, max_new_tokens: 8}
training: {precision: fp32}
"""
DECODER = SEQ2SEQ.replace("  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}\n", "").replace(
    "beam_size: 3", "beam_size: 1"
)
LINES = ["abc", "", "fed cab", "h", "   ", "hgfedcba", "a b"]


def build_run(home: Path, recipe: str = SEQ2SEQ, *, letters: str = LETTERS, **options: Any) -> Run:
    """A run under `home` with random weights; `options` of `random_contents`."""

    def silence(model: Any, tokenizer: Any) -> None:
        """Visible texts: of the special tokens only the end is ever likely."""
        import torch

        with torch.no_grad():
            bias = model.state_dict()["heads.lm.bias"]
            special = [token for token in range(len(bias)) if tokenizer.is_special(token)]
            bias[[token for token in special if token != tokenizer.special.eos]] = -30.0

    return random_run(home / "runs", recipe, letters=letters, change=silence, **options)


def documents(outcome: Any) -> list[dict[str, Any]]:
    assert outcome.code == 0, outcome.err
    return [json.loads(line) for line in outcome.out.splitlines()]


def refusal(outcome: Any) -> str:
    """The one line of an error that is the user's; with --json stdout holds it as an object, and else nothing."""
    assert outcome.code == 2 and (not outcome.out or json.loads(outcome.out)["code"] == 2), outcome.err
    assert "Traceback" not in outcome.err
    [message] = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    return message
