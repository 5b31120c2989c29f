"""Small checkpoints with random weights, of every shape that an export meets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tformer.build import build_model
from tformer.checkpoint.read import Checkpoint, read_checkpoint
from tformer.checkpoint.save import CheckpointContents, write_checkpoint
from tformer.interop.exporting import Tokenizers, resolved
from tformer.recipe.load import recipe_from_yaml
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

LETTERS = "abcdefgh "
SIZES: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "feedforward": {"d_ff": 24}}
GPT: dict[str, Any] = {
    "arch": "gpt",
    "model": {
        "d_model": 16,
        "max_seq_len": 24,
        "decoder": {**SIZES, "feedforward": {"d_ff": 24, "activation": "gelu_tanh"}},
    },
}
_SIDE = {
    **SIZES,
    "positions": {"kind": "sinusoidal"},
    "feedforward": {"d_ff": 24, "activation": "relu"},
    "norm": {"place": "post"},
    "final_norm": False,
}
ORIGINAL: dict[str, Any] = {
    "arch": "transformer",
    "model": {"d_model": 16, "max_seq_len": 24, "embedding": {"scale": True}, "encoder": _SIDE, "decoder": _SIDE},
    "objectives": [{"kind": "seq2seq"}],
    "generation": {"beam_size": 4, "length_penalty": 0.0},
}


def letters(template: str = "seq2seq", text: str = LETTERS) -> Tokenizer:
    options: Any = {"model": "char", "template": template, "min_frequency": 1}
    return train_tokenizer(lambda: iter([text]), TokenizerOptions(**options))


def random_weights(recipe: Mapping[str, Any], tokenizers: Tokenizers, *, seed: int = 0) -> dict[str, Tensor]:
    """Of every number that the recipe's model has, tied names included."""
    read = recipe_from_yaml(json.dumps(dict(recipe)), name="test")
    built = build_model(resolved(read, tokenizers))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(noise + (1.0 if name.endswith("norm.weight") else 0.0))
    return built.state_dict()


def checkpoint(
    folder: Path,
    recipe: Mapping[str, Any] = GPT,
    *,
    tokenizer: Tokenizer | None = None,
    target: Tokenizer | None = None,
    weights: Mapping[str, Tensor] | None = None,
    ema: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """A checkpoint folder of its own; without a tokenizer one of letters, for images none."""
    reads_text = not dict(recipe)["model"].get("patches")
    template = "seq2seq" if "encoder" in dict(recipe)["model"] else "gpt"
    source = (tokenizer or letters(template)) if reads_text else None
    tokenizers = Tokenizers(source, target)
    write_checkpoint(
        folder,
        7,
        CheckpointContents(
            weights=random_weights(recipe, tokenizers) if weights is None else weights,
            ema=ema,
            recipe_yaml=json.dumps(dict(recipe)),
            tokenizer_json=None if source is None else source.to_json(),
            target_tokenizer_json=None if target is None else target.to_json(),
            trainer={"step": 7},
        ),
    )
    return read_checkpoint(folder)


def nothing_but(folder: Path, *names: str) -> bool:
    """Whether these names, and no temporary ones, are all that a folder holds."""
    return sorted(path.name for path in folder.iterdir()) == sorted(names)
