"""A stack of blocks: an encoder or a decoder.

LayerDrop (1909.11556) skips whole blocks while training: a block stays when u > p, drawn afresh at every forward,
without rescaling. Activation checkpointing recomputes each block in the backward pass instead of keeping its
intermediate tensors (1604.06174).
"""

# Shapes: x [B, T, D].

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tformer.nn.attention import Reach
from tformer.nn.attention.masks import make_mask
from tformer.nn.block import Block, Sight
from tformer.nn.cache import ModelCache
from tformer.nn.positions.base import Positions
from tformer.nn.taps import TapSink


class Stack(nn.Module):
    """Blocks, their positions and the final norm.

    Args:
        blocks: the layers, in order.
        positions: one object for all layers, or (Shaw) one for each.
        final_norm: None where the last block ends in a norm of its own (post-norm) or in none.
        d_model: width of the stream.
        layerdrop: probability of skipping a block while training.

    Attributes:
        checkpointing: recompute blocks in the backward pass; switched by the training loop.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        positions: Positions | Sequence[Positions],
        final_norm: nn.Module | None,
        d_model: int,
        layerdrop: float = 0.0,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        if isinstance(positions, Positions):
            self.positions: Positions | None = positions
            self.layer_positions: nn.ModuleList | None = None
        else:
            assert len(positions) == len(blocks)
            self.positions, self.layer_positions = None, nn.ModuleList(positions)
        self.final_norm = final_norm
        self.d_model, self.layerdrop = d_model, layerdrop
        self.checkpointing = False

    @property
    def layers(self) -> list[Block]:
        """The blocks, typed as what they are."""
        return cast("list[Block]", list(self.blocks))

    def positions_of(self, layer: int) -> Positions:
        """The positions that a layer uses; layer 0's also serve the embedding."""
        found = self.positions if self.layer_positions is None else self.layer_positions[layer]
        assert isinstance(found, Positions)
        return found

    def sight(self, q_pos: Tensor, k_pos: Tensor, reach: Reach) -> Sight:
        """Who may look at whom within this stack. The dense mask is made only if a layer's attention kind reads it."""
        if not any(block.self_attention.mechanism.reads_dense_mask for block in self.layers):
            return Sight(q_pos, k_pos, reach=reach)
        mask, is_causal = make_mask(
            causal=reach.causal,
            num_queries=q_pos.shape[1],
            num_keys=k_pos.shape[1],
            key_mask=reach.key_mask,
            document_ids=reach.document_ids,
        )
        return Sight(q_pos, k_pos, mask, is_causal, reach=reach)

    def forward(
        self,
        x_BTD: Tensor,
        sight: Sight,
        *,
        cross_sight: Sight | None = None,
        cache: ModelCache | None = None,
        taps: TapSink | None = None,
    ) -> Tensor:
        """Embedded input → last hidden states, [B, T, D]."""
        if taps is not None:
            taps.put("embedding", x_BTD)
        if self.positions is not None and self.positions.has_rotate:
            heads = self.layers[0].self_attention.num_heads
            sight = replace(sight, prepared=self.positions.prepare(x_BTD, sight.q_pos, heads=heads))
        recompute = self.checkpointing and torch.is_grad_enabled() and cache is None and taps is None
        for layer, block in enumerate(self.layers):
            scope = taps.scope(layer) if taps is not None else None
            positions = self.positions_of(layer)
            if self.training and self.layerdrop and float(torch.rand(())) <= self.layerdrop:
                pass  # this layer is skipped: the stream goes on as it was
            elif recompute:
                x_BTD = checkpoint(
                    block, x_BTD, sight, positions=positions, cross_sight=cross_sight, use_reentrant=False
                )
            else:
                x_BTD = block(
                    x_BTD,
                    sight,
                    positions=positions,
                    cross_sight=cross_sight,
                    cache=cache.layers[layer] if cache is not None else None,
                    cross_cache=cache.cross[layer] if cache is not None and cache.cross else None,
                    taps=scope,
                )
            if scope is not None:
                scope.put("hidden", x_BTD)
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD)
