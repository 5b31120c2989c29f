"""The tensors of layers: norms and residuals, attention from projection to projection, feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tformer.nn.attention.linformer import LinformerAttention
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.attention.performer import PerformerAttention
from tformer.nn.attention.sliding_window import SlidingWindowAttention
from tformer.nn.feedforward import FeedForward
from tformer.nn.positions.base import Positions
from tformer.nn.stack import Block, Stack
from tformer.workflows.inspect.watch import Record, Watch, Where, after, around, before, kind_of


def watch_stack(
    stack: ExitStack, watch: Watch, record: Record, layers: Stack, *, side: str, at: str, memory: bool
) -> None:
    """The layers and the final norm; `memory`: the output is what a decoder's cross-attention reads."""
    own = {"D": layers.d_model}
    for number, block in enumerate(layers.layers):
        parts = [("self-attention", block.self_attention_norm)]
        watch_attention(
            stack, watch, record, block.self_attention, layers.positions_of(number), (side, number, "self-attention"),
            queries=at, keys=at,
        )  # fmt: skip
        if block.cross_attention is not None:
            assert block.cross_attention_norm is not None
            parts.append(("cross-attention", block.cross_attention_norm))
            watch_attention(
                stack, watch, record, block.cross_attention, None, (side, number, "cross-attention"),
                queries=at, keys="S",
            )  # fmt: skip
        parts.append(("feed-forward", block.feedforward_norm))
        _watch_residuals(stack, record, block, parts, (side, number), at, own)
        _watch_feedforward(stack, record, block.feedforward, (side, number, "feed-forward"), at, own)
    meaning = "the encoder's output, read by every cross-attention" if memory else "the last states, normalised"
    after(stack, layers.final_norm,
          lambda out: record.see((f"{side}: end", None, ""), "hidden", out, ("B", at, "D"), meaning, own))  # fmt: skip


def _watch_residuals(
    stack: ExitStack,
    record: Record,
    block: Block,
    parts: list[tuple[str, nn.Module]],
    place: tuple[str, int],
    at: str,
    own: Mapping[str, int],
) -> None:
    """Norms, and the stream after each part: pre-norm shows it to the next norm, post-norm to its own."""

    def see(part: str, name: str, meaning: str) -> Callable[[Tensor], None]:
        return lambda x: record.see((*place, part), name, x, ("B", at, "D"), meaning, own)

    added = "the stream, with this part's output added"
    previous: str | None = None
    for part, norm in parts:
        is_pre = block.place == "pre"
        if not is_pre or previous is not None:
            look = see(previous if is_pre and previous is not None else part, "residual", added)
            before(stack, norm, lambda arguments, look=look: look(arguments[0]))  # type: ignore[misc]
        after(stack, norm, see(part, "normalised", "each vector normalised"))
        previous = part
    if block.place == "pre":
        after(stack, block, see(parts[-1][0], "residual", added))


def watch_attention(
    stack: ExitStack,
    watch: Watch,
    record: Record,
    attention: MultiHeadAttention,
    positions: Positions | None,
    where: Where,
    *,
    queries: str,
    keys: str,
) -> None:
    """From projections to projection; `queries`, `keys`: the letters of their positions."""
    own = {"D": attention.sizes.d_model, "H": attention.num_heads, "K": attention.num_kv_heads,
           "h": attention.head_dim, "v": attention.value_dim}  # fmt: skip
    k, v = "H" if own["K"] == own["H"] else "K", "h" if own["v"] == own["h"] else "v"
    mechanism = attention.mechanism
    plain = (k, v) == ("H", "h")
    qkv, kv = ("3Hh", "2Hh") if plain else (f"Hh+{k}h+{k}{v}", f"{k}h+{k}{v}")
    if isinstance(mechanism, LinformerAttention):
        own["r"] = mechanism.rank
    has_global_rows = isinstance(mechanism, SlidingWindowAttention) and mechanism.options.global_projections
    if isinstance(mechanism, SlidingWindowAttention) and has_global_rows:
        own["G"] = mechanism.options.global_tokens
    scored = ("B", "H", queries, "r" if "r" in own else keys)
    product = f"{mechanism.score_formula}{_scale(attention)}"
    out_of_sight = ", later keys masked" if attention.sizes.causal else ""
    seen: list[str] = []  # of the call that runs: which scores, which projections

    how = "softmax over keys: how much each query takes of each value"
    if "r" in own:
        how = "what each query takes of each value in the end; only told here, never formed in use"
    elif isinstance(mechanism, PerformerAttention):
        how = "what products of random features amount to; only told here, never formed in use"

    def see(name: str, tensor: Tensor, symbols: Sequence[str], meaning: str) -> None:
        record.see(where, name, tensor, symbols, meaning, own)

    def listen(function: Any, arguments: tuple[Any, ...], result: Any) -> None:
        if function is torch.einsum and "r" in own and len(seen) < 2:
            name, letter = (("projected K", "h"), ("projected V", v))[len(seen)]
            seen.append(name)
            see(name, result, ("B", k, "r", letter), "positions mixed into fewer, by a learned matrix")
        elif function is torch.Tensor.softmax and "scores" not in seen:
            seen.append("scores")
            what = "projected key" if "r" in own else "key"
            see("scores", arguments[0], scored, f"{product}: how well each query fits each {what}{out_of_sight}")
        elif function is torch.Tensor.softmax and has_global_rows and "global scores" not in seen:
            seen.append("global scores")
            see("global scores", arguments[0], ("B", "H", "G", keys),
                "rows of the global tokens, which see all, by matrices of their own")  # fmt: skip

    def begin(arguments: tuple[Any, ...]) -> None:
        turned = ", turned by position" if positions is not None and positions.has_rotate else ""
        see("Q", arguments[0], ("B", "H", queries, "h"), f"queries of each head{turned}")
        see("K", arguments[1], ("B", k, keys, "h"), f"keys of each head{turned}")
        see("V", arguments[2], ("B", k, keys, v), "values of each head")
        if "G" in own:
            own["G"] = min(own["G"], arguments[1].shape[2])
        seen.clear()
        watch.listener = listen

    def end(output: tuple[Tensor, Tensor | None]) -> None:
        watch.listener = None
        mixed, weights = output
        if weights is not None:
            see("weights", weights, ("B", "H", queries, keys), how)
        see("heads", mixed, ("B", "H", queries, v), "weights·V: weighted sums of values, per head")

    if attention.is_cross:
        after(stack, attention.q, lambda out: see("Q product", out, ("B", queries, "Hh"), "from the decoder's stream"))
        after(stack, attention.kv,
              lambda out: see("KV product", out, ("B", keys, kv), "from the encoder's output"))  # fmt: skip
    else:
        after(stack, attention.qkv, lambda out: see("QKV product", out, ("B", queries, qkv), "Q, K and V side by side"))
    before(stack, mechanism, begin)
    if positions is not None:
        _watch_scores(stack, positions, see, lambda: watch.listener is listen, queries, keys, v)
    after(stack, mechanism, end)
    joined = ("B", queries, f"H{v}")
    before(stack, attention.out, lambda arguments: see("joined", arguments[0], joined, "the heads side by side"))
    after(stack, attention.out, lambda out: see("projection", out, ("B", queries, "D"), "mixed, at the model's width"))


def _scale(attention: MultiHeadAttention) -> str:
    """What scores are divided or multiplied by, as papers write it."""
    scale = attention.mechanism.scale
    if scale == 1.0:
        return ""
    return "/√h" if scale == attention.head_dim**-0.5 else f" × {scale:.3g}"


def _watch_scores(
    stack: ExitStack,
    positions: Positions,
    see: Callable[[str, Tensor, Sequence[str], str], None],
    is_here: Callable[[], bool],
    queries: str,
    keys: str,
    v: str,
) -> None:
    """What a position kind adds to scores and outputs; one module may serve all layers, `is_here` tells which runs."""

    def look(name: str, symbols: Sequence[str], meaning: str) -> Callable[[Any, Any], None]:
        return lambda _, out: see(name, out, symbols, meaning) if is_here() else None

    kind = kind_of(positions)
    if positions.has_bias:
        around(stack, positions, "bias", look("bias", ("1", "H", queries, keys), f"{kind}: added to the scores"))
    if positions.has_score:
        around(stack, positions, "score", look("position scores", ("B", "H", queries, keys), f"{kind}: added to QK"))
    if positions.has_mix:
        around(stack, positions, "mix", look("position values", ("B", "H", queries, v), f"{kind}: added to the heads"))


def _watch_feedforward(
    stack: ExitStack, record: Record, module: FeedForward, where: Where, at: str, own: Mapping[str, int]
) -> None:
    sizes = {**own, "F": module.down.in_features}

    def see(name: str, tensor: Tensor, symbols: Sequence[str], meaning: str) -> None:
        record.see(where, name, tensor, symbols, meaning, sizes)

    up = ("B", at, "2F") if module.gated else ("B", at, "F")
    after(stack, module.up, lambda out: see("up", out, up, "gate and value" if module.gated else "widened"))
    active = "activation of the gate, times the value" if module.gated else "after the activation"
    before(stack, module.down, lambda arguments: see("active", arguments[0], ("B", at, "F"), active))
    after(stack, module.down, lambda out: see("down", out, ("B", at, "D"), "back at the model's width"))
