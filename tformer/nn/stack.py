"""Block (one layer: attention and feed-forward, each inside a residual) and stack (an encoder or a decoder)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from tformer.nn.attention.context import TapSink, make_mask
from tformer.nn.attention.mechanism import Reach
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.cache import (
    CrossCache,
    LayerState,
)
from tformer.nn.dropout import dropout, outside_graphs
from tformer.nn.feedforward import FeedForward
from tformer.nn.fixed_cache import AnyCache, FixedLayer
from tformer.nn.norm import BatchNorm, frozen_statistics
from tformer.nn.positions.base import Positions
from tformer.nn.structured_dropout import (
    Draw,
    LayerDrop,
)

# Shapes: x [B, T, D].


NO_LIMITS = Reach()


@dataclass(frozen=True, slots=True)
class Sight:
    """Who may look at whom in one forward pass, the same for every layer of a stack.

    Attributes:
        q_pos: positions of the queries, long [B or 1, T].
        k_pos: positions of the keys, long [B or 1, S].
        mask: bool, broadcastable to [B, H, T, S], True = may look; None: no limit beside `is_causal`.
        is_causal: query t sees keys up to t (only with T = S); beside a mask, which is then complete, later keys need
            not be read.
        reach: what the mask is made of, for attention kinds that never form one.
        prepared: what the positions made of `q_pos` for all layers; None: each layer does it.
        memory: keys and values come from here [B, S, memory_dim]; None: from the queries' own sequence.
    """

    q_pos: Tensor
    k_pos: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    memory: Tensor | None = None
    prepared: Any = None
    reach: Reach = NO_LIMITS


class Block(nn.Module):
    """Attention and feed-forward around one residual stream.

    Args:
        self_attention, cross_attention, feedforward: the functions; `cross_attention` None in encoders and GPTs.
        build_norm: makes one normalisation; called once per function.
        place: where the norms stand.
        dropout: probability of dropping a number of a function's output before it joins the stream.
    """

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        feedforward: FeedForward,
        *,
        cross_attention: MultiHeadAttention | None = None,
        build_norm: Callable[[], nn.Module],
        place: Literal["pre", "post"],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.self_attention_norm = build_norm()
        self.self_attention = self_attention
        self.cross_attention_norm = build_norm() if cross_attention is not None else None
        self.cross_attention = cross_attention
        self.feedforward_norm = build_norm()
        self.feedforward = feedforward
        self.place, self.dropout = place, dropout

    def forward(
        self,
        x: Tensor,
        sight: Sight,
        *,
        positions: Positions,
        cross_sight: Sight | None = None,
        cache: LayerState | FixedLayer | None = None,
        cross_cache: CrossCache | None = None,
        taps: TapSink | None = None,
    ) -> Tensor:
        """One layer further along the stream; `cross_sight` belongs to the memory that `cross_attention` reads."""
        x = self._residual(
            x,
            self.self_attention_norm,
            lambda h: self.self_attention(
                h,
                q_pos=sight.q_pos,
                k_pos=sight.k_pos,
                mask=sight.mask,
                is_causal=sight.is_causal,
                reach=sight.reach,
                positions=positions,
                prepared=sight.prepared,
                cache=cache,
                taps=taps.scope("self_attention") if taps is not None else None,
            ),
        )
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            assert cross_sight is not None, "a block with cross-attention needs the encoder's output"
            attend = self.cross_attention
            x = self._residual(
                x,
                self.cross_attention_norm,
                lambda h: attend(
                    h,
                    memory=cross_sight.memory,
                    q_pos=cross_sight.q_pos,
                    k_pos=cross_sight.k_pos,
                    mask=cross_sight.mask,
                    is_causal=False,
                    reach=cross_sight.reach,
                    positions=NO_POSITIONS,
                    cache=cross_cache,
                    taps=taps.scope("cross_attention") if taps is not None else None,
                ),
            )
        return self._residual(x, self.feedforward_norm, self.feedforward)

    def _residual(self, x: Tensor, norm: nn.Module, function: Callable[[Tensor], Tensor]) -> Tensor:
        update = function(norm(x) if self.place == "pre" else x)
        if self.dropout:
            update = dropout(update, self.dropout, self.training)
        return x + update if self.place == "pre" else norm(x + update)


NO_POSITIONS = Positions()  # cross-attention knows no order: T5, BART and the original agree on this


# Shapes: x [B, T, D].


class Stack(nn.Module):
    """Blocks, their positions and the final norm.

    Args:
        blocks: the layers, in order.
        positions: one object for all layers, or (Shaw) one for each.
        final_norm: None where the last block ends in a norm of its own (post-norm) or in none.
        d_model: width of the stream.
        layerdrop: which blocks to skip while training; None: none ever.

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
        layerdrop: LayerDrop | None = None,
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
        self._has_statistics = any(isinstance(module, BatchNorm) for module in self.blocks.modules())

    @property
    def layers(self) -> list[Block]:
        """The blocks, typed as what they are."""
        return cast("list[Block]", list(self.blocks))

    def layerdrop_rates(self) -> list[float]:
        """The probability of skipping each layer while training."""
        return [0.0] * len(self.blocks) if self.layerdrop is None else self.layerdrop.rates()

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
        cache: AnyCache | None = None,
        taps: TapSink | None = None,
    ) -> Tensor:
        """Embedded input → last hidden states, [B, T, D]."""
        if taps is not None:
            taps.put("embedding", x_BTD)
        if self.positions is not None and self.positions.has_rotate:
            heads = max(block.self_attention.num_heads for block in self.layers)
            sight = replace(sight, prepared=self.positions.prepare(x_BTD, sight.q_pos, heads=heads))
        recompute = self.checkpointing and torch.is_grad_enabled() and cache is None and taps is None
        draw = self.layerdrop() if self.layerdrop is not None else None
        run_layers = self._run_layers if draw is None else self._run_drawn_layers
        x_BTD = run_layers(x_BTD, sight, cross_sight, cache, taps, recompute, draw)
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD)

    def _run_layers(
        self,
        x_BTD: Tensor,
        sight: Sight,
        cross_sight: Sight | None,
        cache: AnyCache | None,
        taps: TapSink | None,
        recompute: bool,
        draw: Draw | None,
    ) -> Tensor:
        for layer, block in enumerate(self.layers):
            scope = taps.scope(layer) if taps is not None else None
            positions = self.positions_of(layer)
            run: Callable[[], Tensor]
            if recompute:
                run = partial(
                    checkpoint,
                    block,
                    x_BTD,
                    sight,
                    positions=positions,
                    cross_sight=cross_sight,
                    use_reentrant=False,
                    context_fn=partial(_count_once, block) if self._has_statistics else noop_context_fn,
                )
            else:
                run = partial(
                    block,
                    x_BTD,
                    sight,
                    positions=positions,
                    cross_sight=cross_sight,
                    cache=cache.layers[layer] if cache is not None else None,
                    cross_cache=cache.cross[layer] if cache is not None and cache.cross else None,
                    taps=scope,
                )
            x_BTD = run() if draw is None else draw.gated(layer, x_BTD, run, block)
            if scope is not None:
                scope.put("hidden", x_BTD)
        return x_BTD

    # One graph for each set of layers would never do: where layers are drawn, each is compiled by itself.
    _run_drawn_layers = outside_graphs(_run_layers, recursive=False)


def _count_once(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The surroundings of a checkpointed block's two forwards: batch statistics are those of the first."""
    return nullcontext(), frozen_statistics(block)
