"""Shapes of all tensors of one forward pass, from the model's taps: each with its letters, numbers and meaning.

The model runs on the meta device, which gives every tensor's shape and no numbers, so a model of any size takes a
second. Shapes are those of real tensors; a description that does not fit a tensor is a failed assertion. Scores and
weights are those of the explicit path of attention; training never stores them.

    B examples   T positions (of the decoder beside an encoder: of the target)   S positions of the source
    D d_model    H heads    K key/value heads    h head size    v value size    F feed-forward size
    V vocabulary    E embedding size    L labels    r projected keys (Linformer)    G global tokens (Longformer)
    C channels   Y image height   X image width   P patch size   N patches

Letters side by side are a product, `+` a sum: `Hh+Kh+Kv`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.model import Transformer
from tformer.nn.attention.context import TapSink
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.classification_heads import PooledHead
from tformer.nn.embedding import PatchEmbedding, TokenEmbedding
from tformer.nn.feedforward import FeedForward
from tformer.nn.heads import VocabularyHead
from tformer.nn.positions.base import Positions
from tformer.nn.positions.fixed import TabledPositions

NAMES = {
    "B": "examples",
    "T": "positions",
    "S": "source positions",
    "D": "d_model",
    "E": "embedding size",
    "H": "heads",
    "K": "key/value heads",
    "h": "head size",
    "v": "value size",
    "F": "feed-forward size",
    "V": "vocabulary",
    "L": "labels",
    "r": "projected keys",
    "G": "global tokens",
    "C": "channels",
    "Y": "image height",
    "X": "image width",
    "P": "patch size",
    "N": "patches",
}
PARTS = {"self_attention": "self-attention", "cross_attention": "cross-attention", "feedforward": "feed-forward"}

Described = tuple[str, tuple[str, ...], str]
"""Name of a tensor in the output, its letters and its meaning."""


@dataclass(frozen=True)
class Step:
    """One tensor. part: of a layer; empty outside the layers."""

    part: str
    name: str
    symbols: tuple[str, ...]
    shape: tuple[int, ...]
    meaning: str

    def to_json(self) -> dict[str, Any]:
        return {"part": self.part, "name": self.name, "symbols": list(self.symbols), "shape": list(self.shape),
                "meaning": self.meaning}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """Steps that belong together: an embedding, a head, or a layer and its equals (`layers`, by number)."""

    title: str
    layers: tuple[int, ...]
    steps: tuple[Step, ...]

    def to_json(self) -> dict[str, Any]:
        return {"title": self.title, "layers": list(self.layers), "steps": [step.to_json() for step in self.steps]}


@dataclass(frozen=True)
class Trace:
    """sizes: the number of each letter outside single layers."""

    sizes: Mapping[str, int]
    sections: tuple[Section, ...]

    def to_json(self) -> dict[str, Any]:
        return {"sizes": dict(self.sizes), "sections": [section.to_json() for section in self.sections]}


def trace_shapes(
    model: Transformer, *, batch_size: int = 1, source_length: int, target_length: int | None = None
) -> Trace:
    """The shapes of `batch_size` examples in a model on any device; the model does not change.

    Args:
        source_length: positions of the encoder or of the only stack; ignored for images.
        target_length: of the decoder beside an encoder.
    """
    sizes = _sizes(model, batch_size, source_length, target_length)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output = model(**_inputs(model, sizes, device), taps=model.tap_names())
            seen = list(_model_steps(model, output.taps, sizes))
            for name, head in model.heads.items():
                seen += _head_steps(name, head, output.hidden, sizes)
    finally:
        model.train(was_training)
    return Trace(sizes, tuple(_sections(seen)))


# --- sizes and inputs ------------------------------------------------------------------------------------------------


def _sizes(model: Transformer, batch_size: int, source_length: int, target_length: int | None) -> dict[str, int]:
    """The letters that are the same everywhere; D is that of the last stack."""
    sizes = {"B": batch_size, "T": source_length}
    if model.encoder is not None and model.decoder is not None:
        sizes |= {"S": source_length, "T": source_length if target_length is None else target_length}
    stack = model.decoder if model.decoder is not None else model.encoder
    assert stack is not None
    sizes["D"] = stack.d_model
    embedding = model.embedding
    if isinstance(embedding, PatchEmbedding):
        side = embedding.image_size // embedding.size
        sizes |= {"C": embedding.channels, "Y": embedding.image_size, "X": embedding.image_size, "P": embedding.size}
        sizes |= {"N": side * side, "S" if "S" in sizes else "T": embedding.seq_len}
    if isinstance(model.embedding, TokenEmbedding):
        sizes["V"] = model.embedding.weight.shape[0]
    if model.decoder_embedding is not None:
        sizes["V"] = model.decoder_embedding.weight.shape[0]
    return sizes


def _inputs(model: Transformer, sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    batch, both = sizes["B"], "S" in sizes
    source = sizes["S"] if both else sizes["T"]
    inputs: dict[str, Tensor] = {}
    if isinstance(model.embedding, PatchEmbedding):
        inputs["pixel_values"] = torch.zeros(batch, sizes["C"], sizes["Y"], sizes["X"], device=device)
    else:
        inputs["input_ids"] = torch.zeros(batch, source, dtype=torch.long, device=device)
        if model.embedding.token_types is not None:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    if both:
        inputs["decoder_input_ids"] = torch.zeros(batch, sizes["T"], dtype=torch.long, device=device)
    return inputs


# --- descriptions ----------------------------------------------------------------------------------------------------

Seen = tuple[str, int | None, Step]
"""Title and layer of the section, and the step."""


def _model_steps(model: Transformer, taps: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Iterator[Seen]:
    """The described taps, in the order of computation."""
    for path, tensor in taps.items():
        side, place, *rest = path.split(".")
        stack = getattr(model, side)
        at = "S" if "S" in sizes and side == "encoder" else "T"
        title, layer, part = side, None, ""
        own = {"D": stack.d_model}
        if place == "embedding":
            title, name = f"{side}: embedding", rest[0] if rest else "input"
            embedding = model.decoder_embedding if side == "decoder" and model.encoder is not None else model.embedding
            assert isinstance(embedding, TokenEmbedding | PatchEmbedding)
            described, letters = _embedding_tensors(embedding, stack.positions_of(0), at)
        elif place == "final_norm":
            title, name = f"{side}: end", place
            is_memory = side == "encoder" and "S" in sizes
            meaning = (
                "the encoder's output, read by every cross-attention" if is_memory else "the last states, normalised"
            )
            described, letters = {name: ("hidden", ("B", at, "D"), meaning)}, {}
        elif rest[0] == "hidden":
            continue
        else:
            layer, (function, name), part = int(place), rest, PARTS[rest[0]]
            module = getattr(stack.blocks[layer], function)
            if isinstance(module, MultiHeadAttention):
                keys = "S" if module.is_cross else at
                positions = None if module.is_cross else stack.positions_of(layer)
                described, letters = _attention_tensors(module, positions, at, keys, sizes[keys])
            else:
                described, letters = _feedforward_tensors(module, at)
            described |= {
                "normalised": ("normalised", ("B", at, "D"), "each vector normalised"),
                "residual": ("residual", ("B", at, "D"), "the stream, with this part's output added"),
            }
        if name in described:
            yield title, layer, _step(title, part, described[name], tensor, {**sizes, **own, **letters})


def _step(title: str, part: str, described: Described, tensor: Tensor, sizes: Mapping[str, int]) -> Step:
    name, symbols, meaning = described
    shape = tuple(tensor.shape)
    check_shape(shape, symbols, sizes, what=f"{title} {part} {name}")
    return Step(part, name, symbols, shape, meaning)


def _embedding_tensors(
    embedding: TokenEmbedding | PatchEmbedding, positions: Positions, at: str
) -> tuple[dict[str, Described], dict[str, int]]:
    """Descriptions of an embedding's taps, and its letters."""
    width = embedding.weight.shape[1] if isinstance(embedding, TokenEmbedding) else embedding.weight.shape[0]
    e = "D" if embedding.project is None else "E"
    rows = "waves" if isinstance(positions, TabledPositions) else "row of the table"
    described: dict[str, Described] = {
        "ids": ("ids", ("B", at), "token numbers"),
        "tokens": ("tokens", ("B", at, e), "the table's row of each token"),
        "segments": ("segments", ("B", at, e), "the vector of each token's segment, added"),
        "pixels": ("pixels", ("B", "C", "Y", "X"), "the image"),
        "patches": ("patches", ("B", "N", "CPP"), "the image cut into squares, numbers in a row"),
        "patch_vectors": ("patch vectors", ("B", "N", "D"), "each patch projected to the model's width"),
        "position_ids": ("position", ("1", at), "the number of each position"),
        "positions": ("positions", ("1", at, e), f"the {rows} of each position"),
        "sum": ("sum", ("B", at, e), f"with the {positions.kind} vector of each position added"),
        "normalised": ("normalised", ("B", at, e), "each vector normalised"),
        "projected": ("widened", ("B", at, "D"), "projected to the model's width"),
        "input": ("input", ("B", at, "D"), "what enters the first layer"),
    }
    return described, {"E": width}


def _attention_tensors(
    attention: MultiHeadAttention, positions: Positions | None, queries: str, keys: str, num_keys: int
) -> tuple[dict[str, Described], dict[str, int]]:
    """Descriptions of an attention's taps, and its letters. queries, keys: the letters of their positions."""
    sizes, mechanism = attention.sizes, attention.mechanism
    own = mechanism.shape_letters(num_keys)
    k = "H" if sizes.num_kv_heads == sizes.num_heads else "K"
    v = "h" if sizes.value_dim == sizes.head_dim else "v"
    qkv, kv = ("3Hh", "2Hh") if (k, v) == ("H", "h") else (f"Hh+{k}h+{k}{v}", f"{k}h+{k}{v}")
    rotated = ", turned by position" if positions is not None and positions.has_rotate else ""
    kind = "" if positions is None else positions.kind
    key, columns = ("projected key", "r") if "r" in own else ("key", keys)
    later = ", later keys masked" if sizes.causal else ""
    scores = f"{mechanism.score_formula}{_scale(attention)}: how well each query fits each {key}{later}"
    letters = {"K": k, "v": v, "S": keys}
    described: dict[str, Described] = {
        "q": ("Q product", ("B", queries, "Hh"), "from the decoder's stream"),
        "kv": ("KV product", ("B", keys, kv), "from the encoder's output"),
        "qkv": ("QKV product", ("B", queries, qkv), "Q, K and V side by side"),
        "queries": ("Q", ("B", "H", queries, "h"), f"queries of each head{rotated}"),
        "keys": ("K", ("B", k, keys, "h"), f"keys of each head{rotated}"),
        "values": ("V", ("B", k, keys, v), "values of each head"),
        "position_scores": ("position scores", ("B", "H", queries, keys), f"{kind}: added to QK"),
        "bias": ("bias", ("1", "H", queries, keys), f"{kind}: added to the scores"),
        "scores": ("scores", ("B", "H", queries, columns), scores),
        "position_values": ("position values", ("B", "H", queries, v), f"{kind}: added to the heads"),
        "weights": ("weights", ("B", "H", queries, keys), mechanism.weights_meaning),
        "heads": ("heads", ("B", "H", queries, v), "weights·V: weighted sums of values, per head"),
        "joined": ("joined", ("B", queries, f"H{v}"), "the heads side by side"),
        "projection": ("projection", ("B", queries, "D"), "mixed, at the model's width"),
    }
    for name, (symbols, meaning) in mechanism.taps().items():
        described[name] = name.replace("_", " "), tuple(letters.get(symbol, symbol) for symbol in symbols), meaning
    return described, {"D": sizes.d_model, "H": sizes.num_heads, "K": sizes.num_kv_heads, "h": sizes.head_dim,
                       "v": sizes.value_dim, **own}  # fmt: skip


def _scale(attention: MultiHeadAttention) -> str:
    """The factor of the scores, as in papers."""
    scale = attention.mechanism.scale
    if scale == 1.0:
        return ""
    return "/√h" if scale == attention.head_dim**-0.5 else f" × {scale:.3g}"


def _feedforward_tensors(module: FeedForward, at: str) -> tuple[dict[str, Described], dict[str, int]]:
    """Descriptions of a feed-forward network's taps, and its letters."""
    active = "activation of the gate, times the value" if module.gated else "after the activation"
    described: dict[str, Described] = {
        "up": ("up", ("B", at, "2F"), "gate and value") if module.gated else ("up", ("B", at, "F"), "widened"),
        "active": ("active", ("B", at, "F"), active),
        "down": ("down", ("B", at, "D"), "back at the model's width"),
    }
    return described, {"F": module.down.in_features}


def _head_steps(name: str, head: nn.Module, hidden: Tensor, sizes: Mapping[str, int]) -> Iterator[Seen]:
    """From hidden states to predictions and the loss, with labels of zeros."""
    title = f"head {name}"
    taps = TapSink(frozenset(("features", "normalised", "pooled", "pooler")))
    logits = head(hidden, taps=taps)
    if isinstance(head, PooledHead) and head.project is None:
        vector = ("pooled vector", ("B", "D"), "the first position after one more layer")
        yield title, None, _step(title, "", vector, logits, sizes)
        return
    own: dict[str, int] = {}
    if isinstance(head, VocabularyHead):
        own = {"E": head.weight.shape[1], "V": head.weight.shape[0]}
        bridge = head.dense if head.dense is not None else head.project
        e = "D" if bridge is None or own["E"] == bridge.in_features else "E"
        last = "input of the product with the vocabulary"
        labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        described: dict[str, Described] = {
            "features": ("features", ("B", "T", e), last if head.norm is None else "one more layer"),
            "normalised": ("normalised", ("B", "T", e), last),
            "logits": ("logits", ("B", "T", "V"), "a score for every token"),
            "labels": ("labels", ("B", "T"), "the token that is right at each position"),
        }
    elif isinstance(head, PooledHead) and head.project is not None:
        own = {"L": head.project.out_features}
        pooled = {"cls": "the first position", "eos": "the last position", "mean": "the mean of all positions"}
        is_class = logits.shape[-1] > 1
        labels = torch.zeros(logits.shape[0], dtype=torch.long if is_class else torch.float32, device=logits.device)
        loss = F.cross_entropy(logits, labels) if is_class else F.mse_loss(logits.squeeze(-1), labels)
        described = {
            "pooled": ("pooled", ("B", "D"), pooled[head.pooling]),
            "pooler": ("pooler", ("B", "D"), "one more layer"),
            "logits": ("logits", ("B", "L"), "a score for every label"),
            "labels": ("labels", ("B",), f"the correct {'class' if is_class else 'number'} of each example"),
        }
    else:
        labels = torch.zeros_like(logits)
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        described = {
            "logits": ("logits", ("B", "T"), "was this token replaced?"),
            "labels": ("labels", ("B", "T"), "1 where the token was replaced"),
        }
    described["loss"] = ("loss", (), "one number, the mean over what has a label")
    for tap, tensor in {**taps.values, "logits": logits, "labels": labels, "loss": loss}.items():
        yield title, None, _step(title, "", described[tap], tensor, {**sizes, **own})


def _sections(seen: Sequence[Seen]) -> Iterator[Section]:
    """The steps by place; consecutive layers with the same steps are one section."""
    last: Section | None = None
    for (title, layer), group in groupby(seen, key=lambda entry: entry[:2]):
        layers = () if layer is None else (layer,)
        section = Section(title, layers, tuple(step for _, _, step in group))
        if last is not None and layers and last.layers and (section.steps, title) == (last.steps, last.title):
            last = Section(title, last.layers + layers, section.steps)
            continue
        if last is not None:
            yield last
        last = section
    if last is not None:
        yield last


# --- letters ---------------------------------------------------------------------------------------------------------


def value_of(symbol: str, sizes: Mapping[str, int]) -> int:
    """The number of a symbol, such as `Hh+Kh+Kv`."""
    return sum(math.prod(sizes[c] if c in sizes else int(c) for c in term) for term in symbol.split("+"))


def check_shape(shape: Sequence[int], symbols: Sequence[str], sizes: Mapping[str, int], *, what: str) -> None:
    """Fail if a tensor does not have the shape of its symbols."""
    expected = [value_of(symbol, sizes) for symbol in symbols]
    assert list(shape) == expected, f"{what}: found {list(shape)}, expected {list(symbols)} = {expected}"


def shown(symbol: str) -> str:
    """A symbol with dots between factors: `CPP` is C·P·P."""
    return "+".join("·".join(term) for term in symbol.split("+"))
