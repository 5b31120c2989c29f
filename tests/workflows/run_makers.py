"""Runs on disk without training: a tiny model's weights, and the records that training would have left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

RECIPE = """\
schema: 1
arch: gpt
preset: {preset}
model:
  d_model: {d_model}
  max_seq_len: 16
  decoder: {{num_layers: 1, num_heads: 2, feedforward: {{d_ff: 16}}, norm: {{kind: {norm}}}}}
training: {{max_steps: 12, best_metric: {metric}, precision: fp32}}
"""
LETTERS = "abcdefghij"
VOCABULARY = 11  # the letters and an unknown one


def train_line(step: int, **changes: Any) -> dict[str, Any]:
    values = {"loss": 3.0 - step / 10, "tokens": 100 * step, "seconds": 2.0 * step, "tokens_per_second": 50.0}
    return {"split": "train", "step": step, **values, **changes}


def valid_line(step: int, loss: float, *, is_best: bool, **values: Any) -> dict[str, Any]:
    return {"split": "valid", "step": step, "loss": loss, **values, "is_best": is_best}


def make_run(
    path: Path,
    *,
    steps: tuple[int, ...] = (6, 12),
    norm: str = "layernorm",
    d_model: int = 8,
    preset: str = "tiny",
    metric: str = "loss",
    finished: bool = False,
    records: list[dict[str, Any]] | None = None,
) -> Path:
    """A closed run with a checkpoint at each step; records None: a line each, the best at the first."""
    from tests.random_runs import random_contents
    from tformer.checkpoint.logs import describe_environment
    from tformer.checkpoint.run import RunDirectory
    from tformer.checkpoint.save import save_checkpoint
    from tformer.recipe import recipe_from_yaml, recipe_to_yaml

    recipe = recipe_from_yaml(RECIPE.format(norm=norm, d_model=d_model, preset=preset, metric=metric), name="test")
    text = recipe_to_yaml(recipe)
    contents = replace(random_contents(text, letters=LETTERS), tokenizer_json=None, tokenizer_sha256=None)
    with RunDirectory.create(path, arch="gpt", preset="tiny") as run:
        run.write_recipe(text)
        facts = describe_environment(device="CPU", data_fingerprint="f00d", command=["tformer", "train"])
        run.write_environment(facts)
        for step in steps:
            trainer = {"step": step, "finished": finished and step == steps[-1]}
            save_checkpoint(run, step, replace(contents, trainer=trainer, score=2.0 + step / 100))
        for number, step in enumerate(steps):
            if records is None:
                run.append_metrics(train_line(step))
                run.append_metrics(valid_line(step, 2.0 + step / 100, is_best=number == 0, accuracy=0.5 - step / 100))
        for record in records or ():
            run.append_metrics(record)
    return path
