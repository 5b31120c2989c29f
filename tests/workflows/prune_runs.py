"""Tiny checkpoints with every number random, and models that run with some of their layers or heads left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.random_runs import random_contents
from tformer.checkpoint.save import write_checkpoint
from tformer.loading import Loaded, load
from tformer.model import Transformer
from tformer.tokenizer import Tokenizer

LETTERS = "abcdefgh "
EFFICIENT = {
    "sliding_window": "attention: {kind: sliding_window, window: 4}",
    "bigbird": "attention: {kind: bigbird, block: 2, random_blocks: 0, implementation: blocks}",
    "linformer": "attention: {kind: linformer, rank: 4, sharing: none}",
    "linformer shared": "attention: {kind: linformer, rank: 4, sharing: layerwise}",
    "performer": "attention: {kind: performer, features: 8}",
    "additive": "attention: {kind: additive}",
    "disentangled": "attention: {kind: disentangled, buckets: 8, max_distance: 20}",
}
TEMPLATE = """
schema: 1
model: {{d_model: 12, max_seq_len: 16, tie: {{source_target: false, output: true}}, {stacks}, heads: [{head}]}}
objectives: [{{kind: {objective}}}]
training: {{precision: fp32}}
seed: 3
"""


def recipe_text(*, decoder: str | None = None, encoder: str | None = None) -> str:
    """A recipe with these stacks, whose options stand in braces."""
    both = encoder is not None and decoder is not None
    stacks = ", ".join(
        f"{side}: {{feedforward: {{d_ff: 16}}, {options}}}"
        for side, options in (("encoder", encoder), ("decoder", decoder))
        if options is not None
    )
    head = "{kind: masked_lm}" if decoder is None else "{kind: lm}"
    objective = "masked_lm" if decoder is None else "seq2seq" if both else "causal_lm"
    return TEMPLATE.format(stacks=stacks, head=head, objective=objective)


def make(folder: Path, text: str, *, ema: bool = False) -> Path:
    """A checkpoint of this recipe, drawn from seed 0; with averages that are other numbers."""

    def draw(model: Transformer, tokenizer: Tokenizer) -> Mapping[str, Tensor] | None:
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor) + 0.5 if "norm" in name else torch.randn_like(tensor) * 0.4)
        return {name: tensor.detach() * 0.5 for name, tensor in model.named_parameters()} if ema else None

    write_checkpoint(folder, 7, random_contents(text, letters=LETTERS, step=7, change=draw))
    return folder


def inputs(model: Transformer) -> dict[str, Tensor]:
    """Two rows of ids, one of them padded."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 8, (2, 15), generator=draw)
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[1, 11:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if model.encoder is not None and model.decoder is not None:
        given |= {"decoder_input_ids": torch.randint(0, 8, (2, 5), generator=draw)}
    return given


def output(loaded: Loaded | Path) -> Tensor:
    """What a model makes of `inputs`: logits, of what is not padded."""
    model = (load(loaded) if isinstance(loaded, Path) else loaded).model
    with torch.no_grad():
        given = inputs(model)
        logits: Tensor = model(**given).logits
    return logits if "decoder_input_ids" in given else logits[given["attention_mask"].bool()]


def output_without_layers(path: Path, dropped: Mapping[str, Sequence[int]]) -> Tensor:
    """The full model's output when these layers hand on what they are given."""
    loaded = load(path)
    for side, layers in dropped.items():
        for layer in layers:
            block: Any = getattr(loaded.model, side).blocks[layer]
            block.forward = lambda x, *_, **__: x
    return output(loaded)


def output_without_heads(path: Path, gone: Mapping[str, Sequence[int]]) -> Tensor:
    """The full model's output when these heads, by the name of the attention, say nothing but zeros."""
    loaded = load(path)
    for name, heads in gone.items():
        attention: Any = loaded.model.get_submodule(name)
        with torch.no_grad():
            attention.out.weight.unflatten(1, (attention.num_heads, -1))[:, list(heads)] = 0.0
    return output(loaded)
