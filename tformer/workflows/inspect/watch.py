"""What `trace` sees a model's tensors with: hooks on modules, wrappers around positions, an eye on single functions;
and what stands outside the layers, seen with them.

Everything is put on for one forward pass and taken off again; nothing in the model knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tformer.nn.classification_heads import PooledHead
from tformer.nn.embedding import PatchEmbedding, TokenEmbedding
from tformer.nn.heads import VocabularyHead
from tformer.nn.positions.base import Positions
from tformer.nn.positions.fixed import TabledPositions

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


def around(
    stack: ExitStack,
    module: nn.Module,
    method: str,
    look: Callable[[Any, Any], None],
    first: Callable[[Any], None] = lambda arguments: None,
) -> None:
    """`look(arguments, result)` whenever a method that is no `forward` has run, `first(arguments)` before it does."""
    inner = getattr(module, method)

    def run(*arguments: Any, **named: Any) -> Any:
        first(arguments)
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
    cut: list[Tensor] = []  # the patches, once they have been seen: the products after them are not theirs

    def see(name: str, tensor: Tensor, symbols: Sequence[str], meaning: str) -> None:
        record.see(where, name, tensor, symbols, meaning, own)

    def listen(function: Any, arguments: tuple[Any, ...], result: Any) -> None:
        if function is F.embedding and is_text and arguments[1] is embedding.weight:
            see("tokens", result, ("B", at, e), "the table's row of each token")
        elif function is F.embedding and is_text and arguments[1] is embedding.token_types:
            see("segments", result, ("B", at, e), "the vector of each token's segment, added")
        elif function is F.embedding and arguments[1] is getattr(positions, "weight", None):
            see("positions", result, ("1", at, e), "the table's row of each position")
        elif function is F.linear and not is_text and not cut:
            cut.append(arguments[0])
            see("patches", cut[0], ("B", "N", "CPP"), "the image cut into squares, numbers in a row")
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

    def see_numbers(arguments: Any) -> None:
        see("position", arguments[1], ("1", at), "the number of each position")

    def see_sum(_: Any, result: Tensor) -> None:
        see("sum", result, ("B", at, e), f"with the {kind_of(positions)} vector of each position added")

    before(stack, embedding, begin)
    if positions.has_embed:
        if isinstance(positions, TabledPositions):
            around(
                stack,
                positions,
                "rows",
                lambda _, out: see("positions", out, ("1", at, e), "the waves of each position"),
            )
        around(stack, positions, "embed", see_sum, see_numbers)
    after(stack, embedding.norm, lambda out: see("normalised", out, ("B", at, e), "each vector normalised"))
    after(stack, embedding.project, lambda out: see("widened", out, ("B", at, "D"), "projected to the model's width"))
    after(stack, embedding, end)


def watch_head(stack: ExitStack, record: Record, name: str, head: nn.Module) -> None:
    """From hidden states to predictions."""
    where = (f"head {name}", None, "")
    if isinstance(head, VocabularyHead):
        own = {"E": head.weight.shape[1], "V": head.weight.shape[0]}
        bridge = head.dense if head.dense is not None else head.project

        def see_features(out: Tensor, what: str, own: Mapping[str, int] = own) -> None:
            symbol = "D" if bridge is None or own["E"] == bridge.in_features else "E"
            is_last = what == "normalised" or head.norm is None
            meaning = "what meets the vocabulary" if is_last else "one more layer"
            record.see(where, what, out, ("B", "T", symbol), meaning, own)

        after(stack, bridge, lambda out: see_features(out, "features"))
        after(stack, head.norm, lambda out: see_features(out, "normalised"))
        after(
            stack, head, lambda out: record.see(where, "logits", out, ("B", "T", "V"), "a score for every token", own)
        )
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


def kind_of(positions: Positions) -> str:
    """As recipes name it."""
    name = type(positions).__name__.removesuffix("Positions")
    return {"T5Bias": "t5_bias"}.get(name, name.lower())
