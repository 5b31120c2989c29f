"""A tiny run with random weights: enough to generate from and to evaluate, without training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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
        import torch

        from tformer.build import build_model
        from tformer.checkpoint.run import RunDirectory
        from tformer.checkpoint.save import CheckpointContents, save_checkpoint
        from tformer.recipe.load import recipe_from_yaml
        from tformer.tokenizer import TokenizerOptions, train_tokenizer

        options = TokenizerOptions(model="char", template="none", min_frequency=1)
        tokenizer = train_tokenizer(lambda: iter([LETTERS]), options)
        torch.manual_seed(seed)
        model = build_model(recipe_from_yaml(recipe, name="test").model, vocab_size=tokenizer.vocab_size)
        folder = tmp_path_factory.mktemp("home") / "runs"
        run = RunDirectory.create(arch="gpt", preset="tiny", runs_dir=folder)
        save_checkpoint(
            run,
            3,
            CheckpointContents(
                weights=model.state_dict(),
                recipe_yaml=recipe,
                tokenizer_json=tokenizer.to_json(),
                tokenizer_sha256=tokenizer.sha256,
                trainer={"step": 3},
            ),
        )
        return Path(run.path)

    return make


@pytest.fixture(scope="session")
def random_run(make_run: Callable[..., Path]) -> Path:
    return make_run()
