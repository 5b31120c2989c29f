"""A tiny run with random weights: enough to generate from and to evaluate, without training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import random_runs

# The vocabulary: an escape is among it; without a template no token ends a text, so lengths are certain.
LETTERS = "abcdefgh \n\\é\x1b[2"

RECIPE = """
schema: 1
model:
  d_model: 8
  max_seq_len: 16
  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
  init: {std: 0.5}
generation: {max_new_tokens: 12, temperature: 1.5}
training: {precision: fp32}
"""


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_run(recipe=...)` writes a run directory and returns its path."""

    def make(recipe: str = RECIPE, *, seed: int = 0) -> Path:
        runs = tmp_path_factory.mktemp("home") / "runs"
        return random_runs.random_run(runs, recipe, arch="gpt", letters=LETTERS, template="none", seed=seed)

    return make


@pytest.fixture(scope="session")
def random_run(make_run: Callable[..., Path]) -> Path:
    return make_run()
