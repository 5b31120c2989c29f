"""One layer of a Transformer: self-attention, optional cross-attention, feed-forward, each inside a residual.

pre   x + dropout(f(norm(x)))        GPT-2, Llama, T5, ViT (2002.04745 on why it trains without warm-up)
post  norm(x + dropout(f(x)))        the original (1706.03762), BERT, BART
"""

# Shapes: x [B, T, D].

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from tformer.nn.attention.mechanism import Reach
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.dropout import dropout
from tformer.nn.feedforward import FeedForward
from tformer.nn.fixed_cache import FixedLayer
from tformer.nn.layer_cache import CrossCache, LayerState
from tformer.nn.positions.base import Positions
from tformer.nn.taps import TapSink

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
