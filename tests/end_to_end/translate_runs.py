"""Tiny encoder-decoders and decoders with random weights, and how what a command says of them is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def build_run(
    home: Path,
    recipe: str = SEQ2SEQ,
    *,
    seed: int = 0,
    letters: str = LETTERS,
    targets: str | None = None,
) -> Run:
    """A run under `home` with random weights; `targets`: the letters of the target's own vocabulary."""
    import torch

    from tformer.build import build_model
    from tformer.checkpoint.run import RunDirectory
    from tformer.checkpoint.save import CheckpointContents, save_checkpoint
    from tformer.recipe.load import recipe_from_yaml
    from tformer.tokenizer import TokenizerOptions, train_tokenizer

    template = "seq2seq" if "encoder" in recipe else "none"
    options = TokenizerOptions(model="char", template=template, min_frequency=1)
    source = train_tokenizer(lambda: iter([letters]), options)
    target = None if targets is None else train_tokenizer(lambda: iter([targets]), options)
    torch.manual_seed(seed)
    model = build_model(
        recipe_from_yaml(recipe, name="test").model,
        vocab_size=source.vocab_size,
        target_vocab_size=None if target is None else target.vocab_size,
    )
    with torch.no_grad():  # visible texts: of the special tokens only the end is ever likely
        bias = model.state_dict()["heads.lm.bias"]
        special = [token for token in range(len(bias)) if (target or source).is_special(token)]
        bias[[token for token in special if token != (target or source).special.eos]] = -30.0
    run = RunDirectory.create(arch="test", preset="tiny", runs_dir=home / "runs")
    own = {}
    if target is not None:
        own = {"target_tokenizer_json": target.to_json(), "target_tokenizer_sha256": target.sha256}
    save_checkpoint(
        run,
        3,
        CheckpointContents(
            weights=model.state_dict(),
            recipe_yaml=recipe,
            tokenizer_json=source.to_json(),
            tokenizer_sha256=source.sha256,
            trainer={"step": 3},
            **own,
        ),
    )
    return Path(run.path)


def documents(outcome: Any) -> list[dict[str, Any]]:
    assert outcome.code == 0, outcome.err
    return [json.loads(line) for line in outcome.out.splitlines()]


def refusal(outcome: Any) -> str:
    """The one line of an error that is the user's; with --json stdout holds it as an object, and else nothing."""
    assert outcome.code == 2 and (not outcome.out or json.loads(outcome.out)["code"] == 2), outcome.err
    assert "Traceback" not in outcome.err
    [message] = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    return message
