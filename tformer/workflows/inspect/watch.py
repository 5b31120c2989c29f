"""What `trace` sees a model's tensors with: hooks on modules, wrappers around positions, an eye on single functions.

Everything is put on for one forward pass and taken off again; nothing in the model knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tformer.nn.attention.linformer import LinformerAttention
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.block import Block
from tformer.nn.embedding import PatchEmbedding, TokenEmbedding
from tformer.nn.feedforward import FeedForward
from tformer.nn.heads import PooledHead, VocabularyHead
from tformer.nn.positions.base import Positions, TabledPositions
from tformer.nn.stack import Stack

Where = tuple[str, int | None, str]


class Record(Protocol):
    """`trace.Recorder`."""

    def see(
        self,
        where: Where,
        name: str,
        tensor: Tensor,
        symbols: Sequence[str],
        meaning: str,
        own: Mapping[str, int] | None = None,
    ) -> None: ...


class Watch(TorchFunctionMode):
    """Calls `listener(function, arguments, result)` for every torch function, while there is a listener."""

    def __init__(self) -> None:
        super().__init__()
        self.listener: Callable[[Any, tuple[Any, ...], Any], None] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.listener is not None:
            self.listener(func, args, result)
        return result


def before(stack: ExitStack, module: nn.Module | None, look: Callable[[tuple[Any, ...]], None]) -> None:
    """`look(arguments)` whenever the module is about to run."""
    if module is not None:
        stack.callback(module.register_forward_pre_hook(lambda _, arguments: look(arguments)).remove)


def after(stack: ExitStack, module: nn.Module | None, look: Callable[[Any], None]) -> None:
    """`look(output)` whenever the module has run."""
    if module is not None:
        stack.callback(module.register_forward_hook(lambda _, __, output: look(output)).remove)


def around(stack: ExitStack, module: nn.Module, method: str, look: Callable[[Any, Any], None]) -> None:
    """`look(arguments, result)` whenever a method that is no `forward` has run."""
    inner = getattr(module, method)

    def run(*arguments: Any, **named: Any) -> Any:
        result = inner(*arguments, **named)
        look(arguments, result)
        return result

    module.__dict__[method] = run
    stack.callback(module.__dict__.pop, method, None)


def watch_embedding(
    stack: ExitStack, watch: Watch, record: Record, embedding: Any, positions: Positions, *, side: str, at: str
) -> None:
    """From ids or pixels to the input of a stack; `at`: the letter of its positions."""
    where = (f"{side}: embedding", None, "")
    assert isinstance(embedding, TokenEmbedding | PatchEmbedding)
    is_text = isinstance(embedding, TokenEmbedding)
    width = embedding.weight.shape[1] if is_text else embedding.weight.shape[0]
    d_model = width if embedding.project is None else embedding.project.out_features
    own = {"D": d_model, "E": width}
    e = "E" if width != d_model else "D"
    # Encoder and decoder may share the position kind's class, never the module: what is seen belongs to this side.
    open_: list[bool] = []

    def see(name: str, tensor: Tensor, symbols: Sequence[str], meaning: str) -> None:
        record.see(where, name, tensor, symbols, meaning, own)

    def listen(function: Any, arguments: tuple[Any, ...], result: Any) -> None:
        if function is F.embedding and is_text and arguments[1] is embedding.weight:
            see("tokens", result, ("B", at, e), "the table's row of each token")
        elif function is F.embedding and is_text and arguments[1] is embedding.token_types:
            see("segments", result, ("B", at, e), "the vector of each token's segment, added")
        elif function is F.linear and not is_text and not open_:
            open_.append(True)
            see("patches", arguments[0], ("B", "N", "CPP"), "the image cut into squares, numbers in a row")
            see("patch vectors", result, ("B", "N", "D"), "each patch projected to the model's width")

    def begin(arguments: tuple[Any, ...]) -> None:
        watch.listener = listen
        if is_text:
            see("ids", arguments[0], ("B", at), "token numbers")
        else:
            see("pixels", arguments[0], ("B", "C", "Y", "X"), "the image")

    def end(output: Tensor) -> None:
        watch.listener = None
        see("input", output, ("B", at, "D"), "what enters the first layer")

    before(stack, embedding, begin)
    if positions.has_embed:
        if isinstance(positions, TabledPositions):
            around(stack, positions, "rows", lambda _, out: see("positions", out, ("1", at, e), "a vector of waves each"))
        around(stack, positions, "embed", lambda args, out: (
            see("position", args[1], ("1", at), "the number of each position"),
            see("sum", out, ("B", at, e), f"with the {_kind(positions)} vector of each position added"),
        ))  # fmt: skip
    after(stack, embedding.norm, lambda out: see("normalised", out, ("B", at, e), "each vector normalised"))
    after(stack, embedding.project, lambda out: see("widened", out, ("B", at, "D"), "projected to the model's width"))
    after(stack, embedding, end)


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
    if isinstance(mechanism, LinformerAttention):
        own["r"] = mechanism.rank
    scored = [("B", "H", queries, keys), *([("B", "H", queries, "r")] if "r" in own else [])]

    def see(name: str, tensor: Tensor, symbols: Sequence[str], meaning: str) -> None:
        record.see(where, name, tensor, symbols, meaning, own)

    def listen(function: Any, arguments: tuple[Any, ...], result: Any) -> None:
        if function is not torch.Tensor.softmax:
            return
        for symbols in scored:
            sizes = [arguments[0].shape[0], own["H"], *arguments[0].shape[2:]]
            if list(arguments[0].shape) == sizes:
                what = "projected key" if symbols[-1] == "r" else "key"
                if symbols is scored[-1]:
                    see("scores", arguments[0], symbols, f"how well each query fits each {what}, masked")

    def begin(arguments: tuple[Any, ...]) -> None:
        turned = ", turned by position" if positions is not None and positions.has_rotate else ""
        see("Q", arguments[0], ("B", "H", queries, "h"), f"queries of each head{turned}")
        see("K", arguments[1], ("B", k, keys, "h"), f"keys of each head{turned}")
        see("V", arguments[2], ("B", k, keys, v), "values of each head")
        watch.listener = listen

    def end(output: tuple[Tensor, Tensor | None]) -> None:
        watch.listener = None
        mixed, weights = output
        if weights is not None:
            see("weights", weights, ("B", "H", queries, keys), "how much each query takes of each value")
        see("heads", mixed, ("B", "H", queries, v), "weighted sums of values, per head")

    if attention.is_cross:
        after(stack, attention.q, lambda out: see("Q product", out, ("B", queries, "Hh"), "from the decoder's stream"))
        after(stack, attention.kv,
              lambda out: see("KV product", out, ("B", keys, f"{k}h+{k}{v}"), "from the encoder's output"))  # fmt: skip
    else:
        qkv = f"Hh+{k}h+{k}{v}"
        after(stack, attention.qkv, lambda out: see("QKV product", out, ("B", queries, qkv), "Q, K and V side by side"))
    before(stack, mechanism, begin)
    if positions is not None:
        _watch_scores(stack, positions, see, lambda: watch.listener is listen, queries, keys, v)
    after(stack, mechanism, end)
    before(stack, attention.out,
           lambda arguments: see("joined", arguments[0], ("B", queries, f"H{v}"), "the heads side by side"))  # fmt: skip
    after(stack, attention.out, lambda out: see("projection", out, ("B", queries, "D"), "mixed, at the model's width"))


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

    kind = _kind(positions)
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


def watch_head(stack: ExitStack, record: Record, name: str, head: nn.Module) -> None:
    """From hidden states to predictions."""
    where = (f"head {name}", None, "")
    if isinstance(head, VocabularyHead):
        own = {"E": head.weight.shape[1], "V": head.weight.shape[0]}
        bridge = head.dense if head.dense is not None else head.project

        def see_features(out: Tensor, what: str, own: Mapping[str, int] = own) -> None:
            symbol = "D" if bridge is None or own["E"] == bridge.in_features else "E"
            record.see(where, what, out, ("B", "T", symbol), "what meets the vocabulary", own)

        after(stack, bridge, lambda out: see_features(out, "features"))
        after(stack, head.norm, lambda out: see_features(out, "normalised"))
        after(stack, head, lambda out: record.see(where, "logits", out, ("B", "T", "V"), "a score for every token", own))
        return
    if isinstance(head, PooledHead):
        own = {"L": head.project.out_features}
        first = head.pooler if head.pooler is not None else head.project
        how = {"cls": "the first position", "eos": "the last position", "mean": "the mean of all positions"}
        before(stack, first,
               lambda arguments: record.see(where, "pooled", arguments[0], ("B", "D"), how[head.pooling]))  # fmt: skip
        after(stack, head.pooler, lambda out: record.see(where, "pooler", out, ("B", "D"), "one more layer"))
        after(stack, head, lambda out: record.see(where, "logits", out, ("B", "L"), "a score for every label", own))
        return
    after(stack, head, lambda out: record.see(where, "logits", out, ("B", "T"), "was this token replaced?"))


def _kind(positions: Positions) -> str:
    return type(positions).__name__.removesuffix("Positions").lower()
