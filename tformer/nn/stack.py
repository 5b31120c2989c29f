"""Block (one layer of a Transformer) and stack (an encoder or a decoder).

A block is self-attention, optional cross-attention and feed-forward, each inside a residual:

    pre       x + dropout(f(norm(x)))        GPT-2, Llama, T5, ViT (arXiv 2002.04745 on why it trains without warm-up)
    post      norm(x + dropout(f(x)))        the original (arXiv 1706.03762), BERT, BART
    res_post  x + dropout(norm(f(x)))        Swin v2 (arXiv 2111.09883), OLMo 2
    sandwich  x + dropout(norm(f(norm(x))))  CogView (arXiv 2105.13290), Gemma 2

Both functions may also read the input of the block, after two norms or after one:

    parallel           x + attention(norm1(x)) + feedforward(norm2(x))      GPT-NeoX (arXiv 2204.06745)
    parallel_one_norm  x + attention(norm(x)) + feedforward(norm(x))        GPT-J, PaLM (arXiv 2204.02311)

A block of an encoder may add a convolution over its input, norm(block(x) + gelu(convolution(x))) (DeBERTa v2).

LayerDrop skips whole blocks while training (`nn/structured_dropout.py`); a skipped block's parameters have no gradient
then. Activation checkpointing recomputes each block in the backward pass instead of keeping its intermediate tensors
(arXiv 1604.06174).

Shape legend: x [B, T, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from tformer.nn.attention.context import AttentionContext
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.cache import CrossCache, LayerState, ModelCache
from tformer.nn.dropout import dropout, outside_graphs
from tformer.nn.embedding import neighbours
from tformer.nn.feedforward import FeedForward
from tformer.nn.fixed_cache import AnyCache, FixedLayer
from tformer.nn.linear import Linear
from tformer.nn.norm import BatchNorm, frozen_statistics
from tformer.nn.positions.base import Positions
from tformer.nn.structured_dropout import Draw, LayerDrop
from tformer.nn.taps import Tap, TapSink, scoped, tap

Residual = Literal["sequential", "parallel", "parallel_one_norm"]


class Convolution(nn.Module):
    """gelu(W [x before, x, x after]): `width` neighbouring vectors by one matrix. Padding reads as zeros."""

    def __init__(self, d_model: int, width: int, dropout: float) -> None:
        super().__init__()
        self.width, self.dropout = width, dropout
        self.project = Linear(width * d_model, d_model)

    def forward(self, x_BTD: Tensor, context: AttentionContext, taps: TapSink | None) -> Tensor:
        near = neighbours(x_BTD, self.width, real_BT=context.key_mask, document_ids_BT=context.document_ids)
        return tap(taps, "convolved", F.gelu(dropout(self.project(near), self.dropout, self.training)))


class Block(nn.Module):
    """One layer: attention and feed-forward around a residual stream.

    Args:
        self_attention, cross_attention, feedforward: the functions; `cross_attention` None in encoders and GPTs.
        build_norm: makes one normalization; called once per function, with `sandwich` twice.
        place: of the norms, see above.
        attention_norm: False: attention reads the stream as it is, where the embedding ends in a norm (ModernBERT).
        residual: whether the feed-forward network reads what attention added; see above.
        dropout: probability of dropping a number of a function's output before it joins the stream.
        multiplier: of each function's output before it joins the stream.
        convolution: over the block's input, added to its output before another norm; None: there is none.
    """

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        feedforward: FeedForward,
        *,
        cross_attention: MultiHeadAttention | None = None,
        build_norm: Callable[[], nn.Module],
        place: Literal["pre", "post", "res_post", "sandwich"],
        attention_norm: bool = True,
        residual: Residual = "sequential",
        dropout: float = 0.0,
        multiplier: float = 1.0,
        convolution: Convolution | None = None,
    ) -> None:
        super().__init__()
        self.self_attention_norm = build_norm() if attention_norm else None
        self.self_attention = self_attention
        self.cross_attention_norm = build_norm() if cross_attention is not None else None
        self.cross_attention = cross_attention
        self.feedforward_norm = build_norm() if residual != "parallel_one_norm" else None
        self.feedforward = feedforward
        self.convolution, self.convolution_norm = convolution, None if convolution is None else build_norm()
        self.place, self.residual, self.dropout, self.multiplier = place, residual, dropout, multiplier
        self.norms_input, self.norms_output = place in ("pre", "sandwich"), place in ("res_post", "sandwich")
        self.fuses_residual = not self.norms_output and multiplier == 1.0
        if place == "sandwich":
            for name in ("self_attention", "cross_attention", "feedforward"):
                if getattr(self, name) is not None:
                    setattr(self, f"{name}_out_norm", build_norm())

    def output_norm(self, name: str) -> nn.Module | None:
        """The norm of a function's output before it joins the stream; None: there is none."""
        return getattr(self, f"{name}_out_norm" if self.norms_input else f"{name}_norm") if self.norms_output else None

    def forward(
        self,
        x: Tensor,
        context: AttentionContext,
        *,
        positions: Positions,
        cache: LayerState | FixedLayer | None = None,
        cross_cache: CrossCache | None = None,
        taps: TapSink | None = None,
    ) -> Tensor:
        """The stream after this layer. Cross-attention needs `context.cross`."""
        before = x
        x = self._residual(
            x,
            "self_attention",
            self.self_attention_norm,
            self.self_attention,
            context,
            positions=positions,
            cache=cache,
            taps=scoped(taps, "self_attention"),
        )
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            assert context.cross is not None, "a block with cross-attention needs the encoder's output"
            x = self._residual(
                x,
                "cross_attention",
                self.cross_attention_norm,
                self.cross_attention,
                context.cross,
                cache=cross_cache,
                taps=scoped(taps, "cross_attention"),
            )
        norm = self.self_attention_norm if self.feedforward_norm is None else self.feedforward_norm
        reads, scope = x if self.residual == "sequential" else before, scoped(taps, "feedforward")
        x = self._residual(x, "feedforward", norm, self.feedforward, reads=reads, taps=scope)
        if self.convolution is None or self.convolution_norm is None:
            return x
        scope = scoped(taps, "convolution")
        return tap(scope, "normalized", self.convolution_norm(x + self.convolution(before, context, scope)))

    def _residual(
        self,
        x: Tensor,
        name: str,
        norm: nn.Module | None,
        function: Callable[..., Tensor],
        *arguments: Any,
        reads: Tensor | None = None,
        taps: TapSink | None,
        **named: Any,
    ) -> Tensor:
        """The stream after `function`, which reads `x` or, before the norm, `reads`."""
        reads = x if reads is None else reads
        if taps is None and not self.training and self.fuses_residual:  # the function may do all in fewer pieces
            if self.place == "pre":
                return function(reads, *arguments, norm=norm, residual=x, taps=None, **named)
            return cast("nn.Module", norm)(function(x, *arguments, residual=x, taps=None, **named))
        before = x if not self.norms_input else reads if norm is None else tap(taps, "normalized", norm(reads))
        update = function(before, *arguments, taps=taps, **named)
        if (after := self.output_norm(name)) is not None:
            update = tap(taps, "normalized_output", after(update))
        if self.multiplier != 1.0:
            update = tap(taps, "multiplied", update * self.multiplier)
        if self.dropout:
            update = dropout(update, self.dropout, self.training)
        x = tap(taps, "residual", x + update)
        return tap(taps, "normalized", norm(x)) if self.place == "post" and norm is not None else x

    def taps(self, positions: Positions) -> dict[str, list[Tap]]:
        """Inner tensors of each function, with the norm and the sum around it.

        The parameters `norm` and `out_norm` of a tap are those of its function, such as `self_attention_norm`.
        """
        place = "before the function" if self.norms_input else "after the sum"
        around = [Tap("normalized", "B T D", f"each vector normalized, {place}", parameters=("norm",))]
        out_norm = ("out_norm",) if self.norms_input else ("norm",)
        after = [
            *([Tap("normalized_output", "B T D", "each vector normalized, before the sum", parameters=out_norm)]
              if self.norms_output else []),
            *([Tap("multiplied", "B T D", f"times {self.multiplier:.4g}")] if self.multiplier != 1.0 else []),
        ]  # fmt: skip
        residual = Tap("residual", "B T D", "the stream, with this part's output added", ("stream", "last"))
        inner = {"self_attention": self.self_attention.taps(positions)}
        if self.cross_attention is not None:
            inner["cross_attention"] = self.cross_attention.taps(None)
        inner["feedforward"] = self.feedforward.taps()
        if self.place == "res_post":
            around = []
        found = {function: [*around, *taps, *after] for function, taps in inner.items()}
        if self.self_attention_norm is None:
            found["self_attention"].remove(around[0])
        found = {
            function: [*taps[:-1], taps[-1]._replace(dropout=self.dropout), residual]
            for function, taps in found.items()
        }
        if self.convolution is not None:
            meaning = f"each vector of the block's input with its neighbours, {self.convolution.width} in all"
            convolved = Tap("convolved", "B T D", meaning, ("before",), ("project",), dropout=self.convolution.dropout)
            summed = "each vector normalized, after the sum with the block's output"
            found["convolution"] = [convolved, Tap("normalized", "B T D", summed, ("stream", "last"), ("norm",))]
        return found


class Stack(nn.Module):
    """Blocks, their positions and the final norm.

    Args:
        blocks: the layers, in order; one that stands several times is one set of weights for several layers.
        positions: one object for all layers, or one for each; layers with equal positions may share theirs.
        final_norm: None where the last block already ends in a norm (post-norm), or where there is no norm.
        d_model: width of the stream.
        layerdrop: decides which blocks to skip while training; None: no block is ever skipped.

    Attributes:
        checkpointing: recompute blocks in the backward pass; the training loop sets it.
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
        """The blocks, with their type."""
        return cast("list[Block]", list(self.blocks))

    def layerdrop_rates(self) -> list[float]:
        """The probability of skipping each layer while training."""
        return [0.0] * len(self.blocks) if self.layerdrop is None else self.layerdrop.rates()

    def positions_of(self, layer: int) -> Positions:
        """The positions that a layer uses; layer 0's also serve the embedding."""
        found = self.positions if self.layer_positions is None else self.layer_positions[layer]
        assert isinstance(found, Positions)
        return found

    def taps(self, *, is_memory: bool) -> Iterator[tuple[str, Tap]]:
        """Inner tensors by their names within the stack; is_memory: a decoder reads this stack's output."""
        for layer, block in enumerate(self.layers):
            for function, taps in block.taps(self.positions_of(layer)).items():
                yield from ((f"{layer}.{function}.{each.name}", each) for each in taps)
            yield f"{layer}.hidden", Tap("hidden", "B T D", "the stream after this layer")
        if self.final_norm is not None:
            of_encoder, last = "the encoder's output, read by every cross-attention", "the last states, normalized"
            meaning = of_encoder if is_memory else last
            yield "final_norm", Tap("final_norm", "B T D", meaning, parameters=("",))

    def forward(
        self,
        x_BTD: Tensor,
        context: AttentionContext,
        *,
        cache: AnyCache | None = None,
        taps: TapSink | None = None,
    ) -> Tensor:
        """Embedded input → last hidden states, [B, T, D]."""
        x_BTD = tap(taps, "embedding", x_BTD)
        # Computed once for all layers: the dense mask, if one reads it, and the rotation.
        if any(block.self_attention.mechanism.reads_dense_mask for block in self.layers):
            context = context.with_mask()
        contexts = self._contexts(x_BTD, context)
        draw = self.layerdrop() if self.layerdrop is not None else None
        run_layers = self._run_layers if draw is None else self._run_drawn_layers
        run = partial(run_layers, x_BTD, contexts, cache, taps, draw)
        plain = taps is None and not self.training and _is_plain_step(x_BTD)
        if plain and isinstance(cache, ModelCache) and (context.mask is None or cache.has_lengths):
            x_BTD = cache.step(x_BTD, run)
        else:
            x_BTD = run()
        return x_BTD if self.final_norm is None else tap(taps, "final_norm", self.final_norm(x_BTD))

    def _contexts(self, x_BTD: Tensor, context: AttentionContext) -> list[AttentionContext]:
        """The context of each layer, with the rotation of its positions; layers with the same module share it."""
        heads = max([1] + [block.self_attention.num_heads for block in self.layers])
        made: dict[int, AttentionContext] = {}
        for layer in range(len(self.layers) if self.positions is None else 1):
            positions = self.positions_of(layer)
            if id(positions) not in made:
                rotation = positions.prepare(x_BTD, context.q_pos, heads=heads)
                made[id(positions)] = context if rotation is None else replace(context, rotation=rotation)
        return [made[id(self.positions_of(layer))] for layer in range(len(self.layers))]

    def _run_layers(
        self,
        x_BTD: Tensor,
        contexts: Sequence[AttentionContext],
        cache: AnyCache | None,
        taps: TapSink | None,
        draw: Draw | None,
    ) -> Tensor:
        recompute = self.checkpointing and torch.is_grad_enabled() and cache is None and taps is None
        for layer, block in enumerate(self.layers):
            scope = scoped(taps, layer)
            run = partial(
                self._recomputed(block) if recompute else block,
                x_BTD,
                contexts[layer],
                positions=self.positions_of(layer),
                cache=cache.layers[layer] if cache is not None else None,
                cross_cache=cache.cross[layer] if cache is not None and cache.cross else None,
                taps=scope,
            )
            x_BTD = tap(scope, "hidden", run() if draw is None else draw.gated(layer, x_BTD, run, block))
        return x_BTD

    # Layers that are drawn would need a graph for each set of layers: instead each layer is compiled by itself.
    _run_drawn_layers = outside_graphs(_run_layers, recursive=False)

    def _recomputed(self, block: Block) -> Callable[..., Tensor]:
        """`block` under activation checkpointing."""
        context_fn = noop_context_fn
        if self._has_statistics:  # the second forward does not update the statistics of BatchNorm again
            context_fn = lambda: (nullcontext(), frozen_statistics(block))  # noqa: E731
        shared = block.self_attention.drophead.shared
        if shared is not None:
            assert not self._has_statistics, "statistics of a batch are those of one process"
            context_fn = shared.repeated
        return partial(checkpoint, block, use_reentrant=False, context_fn=context_fn)


def _is_plain_step(x_BTD: Tensor) -> bool:
    """True for one new position of each row in eager inference on a CPU."""
    plain = x_BTD.device.type == "cpu" and x_BTD.shape[1] == 1
    return plain and not torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling()
