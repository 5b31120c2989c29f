"""Cost of a model before and after pruning, and a stack that runs with some of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from tformer.cost.flops import attention_flops_per_token, matmul_parameters
from tformer.model import Transformer
from tformer.nn.stack import Stack
from tformer.recipe.recipe import Recipe


@contextmanager
def only_layers(stack: Stack, kept: Sequence[int]) -> Iterator[None]:
    """Lets a stack run with some of its layers alone, in evaluation."""
    blocks, positions = stack.blocks, stack.layer_positions
    stack.blocks = nn.ModuleList(blocks[layer] for layer in kept)
    if positions is not None:
        stack.layer_positions = nn.ModuleList(positions[layer] for layer in kept)
    try:
        yield
    finally:
        stack.blocks, stack.layer_positions = blocks, positions


def cost(model: Transformer, recipe: Recipe) -> dict[str, float]:
    """Parameters, and forward FLOPs per token at the training length: 2 N, and what each layer's attention costs.

    Of an encoder-decoder a token passes through one of the stacks: half of the products.
    """
    products = 2.0 * matmul_parameters(model)
    if model.encoder is not None and model.decoder is not None:
        products /= 2
    attention = attention_flops_per_token(recipe.model, source_length=recipe.seq_len, target_length=recipe.seq_len)
    return {"parameters": model.num_parameters(), "flops_per_token": products + attention}
