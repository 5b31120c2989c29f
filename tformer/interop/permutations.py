"""Reordering the residual stream, or the coordinates of heads, so that the same function is stored in another order.

A model computes the same when every vector that travels along its stream has its numbers in another order, if whatever
writes to the stream writes in that order and whatever reads from it reads in that order; norms do not care. Rows of a
matrix [out, in] are what it writes, columns what it reads.
"""

# Shapes: D d_model, h head_dim.

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from tformer.build import resolve_sizes
from tformer.recipe.model import Model

# What stands in the stream's order: (name of the tensor, the dimensions that do). {side} is encoder or decoder.
STREAM = (
    (r"{side}\.blocks\.\d+\.\w+_norm\.(weight|bias)", (0,)),
    (r"{side}\.final_norm\.(weight|bias)", (0,)),
    (r"{side}\.blocks\.\d+\.(self_attention\.qkv|cross_attention\.q|feedforward\.up)\.weight", (1,)),
    (r"{side}\.blocks\.\d+\.(self_attention\.out|cross_attention\.out|feedforward\.down)\.weight", (0,)),
    (r"{side}\.blocks\.\d+\.(self_attention\.out|cross_attention\.out|feedforward\.down)\.bias", (0,)),
)
MEMORY = ((r"decoder\.blocks\.\d+\.cross_attention\.kv\.weight", (1,)),)
TABLES = (
    (r"{tokens}\.(weight|token_types)", (1,)),
    (r"{tokens}\.norm\.(weight|bias)", (0,)),
)
LEARNED = ((r"{side}\.positions\.weight", (1,)),)
# A head that ends in the product with the vocabulary has that product's vectors in the order of the tied table.
HEADS = (
    (r"heads\.lm\.weight", (1,)),
    (r"heads\.masked_lm\.weight", (1,)),
    (r"heads\.masked_lm\.dense\.weight", (0, 1)),
    (r"heads\.masked_lm\.(dense\.bias|norm\.weight|norm\.bias)", (0,)),
    (r"heads\.(classifier|regression|next_sentence)\.pooler\.weight", (1,)),
    (r"heads\.replaced_token\.dense\.weight", (1,)),
)
UNPOOLED = (
    (r"heads\.(classifier|regression)\.project\.weight", (1,)),
)  # reads the stream where no pooler stands before


def halves(size: int) -> Tensor:
    """[0, 2, 4, ..., 1, 3, 5, ...]: evens, then odds."""
    return torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])


def reorder_streams(model: Model, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The streams of all stacks with their even columns first. Needs embeddings as wide as the streams, of tokens."""
    sides = [side for side in ("encoder", "decoder") if getattr(model, side) is not None]
    widths = {side: resolve_sizes(model, side).d_model for side in sides}
    rules: list[tuple[re.Pattern[str], tuple[int, ...], int]] = []

    def add(table: tuple[tuple[str, tuple[int, ...]], ...], width: int, **names: str) -> None:
        for pattern, dimensions in table:
            for key, name in names.items():
                pattern = pattern.replace(f"{{{key}}}", name)
            rules.append((re.compile(pattern), dimensions, width))

    for side in sides:
        add(STREAM, widths[side], side=side)
        add(TABLES, widths[side], tokens="embedding" if side == sides[0] else "decoder_embedding")
        if getattr(model, side).positions.kind == "learned":
            add(LEARNED, widths[side], side=side)
    if len(sides) == 2:
        add(MEMORY, widths["encoder"])
    add(HEADS, widths[sides[-1]])
    if any(getattr(head, "pooler", True) is False for head in model.heads):
        add(UNPOOLED, widths[sides[-1]])

    def reordered(name: str, tensor: Tensor) -> Tensor:
        for pattern, dimensions, width in rules:
            if pattern.fullmatch(name):
                for dimension in dimensions:
                    tensor = tensor.index_select(dimension, halves(width).to(tensor.device))
        return tensor

    return {name: reordered(name, tensor) for name, tensor in weights.items()}


def reorder_heads(model: Model, weights: Mapping[str, Tensor], *, side: str) -> dict[str, Tensor]:
    """The queries and keys of a stack's self-attention with the even coordinates of every head first."""
    sizes = resolve_sizes(model, side)
    turned = sizes.num_heads + sizes.num_kv_heads
    starts = torch.arange(turned).unsqueeze(1) * sizes.head_dim
    order = (starts + halves(sizes.head_dim)).flatten()
    pattern = re.compile(rf"{side}\.blocks\.\d+\.self_attention\.qkv\.(weight|bias)")

    def reordered(tensor: Tensor) -> Tensor:
        rest = torch.arange(len(order), tensor.shape[0])  # values do not turn
        return tensor.index_select(0, torch.cat([order, rest]).to(tensor.device))

    return {name: reordered(tensor) if pattern.fullmatch(name) else tensor for name, tensor in weights.items()}
