"""What every tensor of a forward pass is: its letters, its meaning, the tensors it is made of, the parameters in it.

Each function describes the taps of one module by name, and the rates at which training drops numbers after them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from tformer.nn.attention.mechanism import OwnTap
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.classification_heads import POOLINGS, LabelKind, PooledHead
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.feedforward import FeedForward
from tformer.nn.heads import VocabularyHead
from tformer.nn.patches import PatchEmbedding
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
"""Meanings of the letters of shapes. Letters side by side are a product, `+` a sum: `Hh+Kh+Kv`."""


class Described(NamedTuple):
    """A tensor in words.

    Attributes:
        inputs: names of the tensors it is made of, as far as they exist; None: the tensor before it.
        parameters: modules and parameters in it, relative to the described module; `positions` is that of the layer.
        beside: whether the next tensor reads the one before this one too.
        replaces: name of the tensor in whose place later ones read this one.
    """

    name: str
    symbols: tuple[str, ...]
    meaning: str
    inputs: tuple[str, ...] | None = None
    parameters: tuple[str, ...] = ()
    beside: bool = False
    replaces: str | None = None


class Tensors(NamedTuple):
    """Descriptions of a module's taps by name, its letters, and the dropout rates after its taps."""

    described: dict[str, Described]
    letters: dict[str, int]
    dropout: Mapping[str, float] = {}


def embedding_tensors(embedding: TokenEmbedding | PatchEmbedding, positions: Positions, at: str) -> Tensors:
    """The tensors of an embedding; dropout comes before the projection, or else at the end."""
    is_table = isinstance(embedding, TokenEmbedding)
    width = embedding.weight.shape[1] if isinstance(embedding, TokenEmbedding) else embedding.d_model
    e = "D" if embedding.project is None else "E"
    stem, stem_taps = (embedding.parts, embedding.stem_taps()) if isinstance(embedding, PatchEmbedding) else ((), {})
    rows = "waves" if isinstance(positions, TabledPositions) else "row of the table"
    factor = f"times √D = {embedding.factor:.4g}" if is_table else ""
    described = {
        "ids": Described("ids", ("B", at), "token numbers", ()),
        "tokens": Described("tokens", ("B", at, e), "the table's row of each token", None, ("weight",)),
        "unit": Described("unit vectors", ("B", at, e), "each row at length 1 (FixNorm)"),
        "ngrams": Described(
            "n-grams",
            ("B", at, e),
            "the vectors of the n-grams that end at each token, added",
            (),
            ("ngrams",),
            beside=True,
        ),
        "scaled": Described("scaled", ("B", at, e), factor),
        "segments": Described(
            "segments", ("B", at, e), "the vector of each token's segment, added", (), ("token_types",), beside=True
        ),
        "convolved": Described(
            "convolved", ("B", at, e), "each token with its neighbours: one product and ReLU", None, ("convolve",)
        ),
        "pixels": Described("pixels", ("B", "C", "Y", "X"), "the image", ()),
        **{name: Described(name, symbols, meaning) for name, (symbols, meaning) in stem_taps.items()},
        "patch_vectors": Described(
            "patch vectors", ("B", "N", "D"), "each patch projected to the model's width", None, stem
        ),
        "with_cls": Described("with class token", ("B", at, "D"), "a learned vector put in front", None, ("cls",)),
        "position_ids": Described("position", ("1", at), "the number of each position", (), beside=True),
        "positions": Described(
            "positions", ("1", at, e), f"the {rows} of each position", ("position_ids",), ("positions",), beside=True
        ),
        "sum": Described("sum", ("B", at, e), f"with the {positions.kind} vector of each position added"),
        "normalised": Described("normalised", ("B", at, e), "each vector normalised", None, ("norm",)),
        "projected": Described("widened", ("B", at, "D"), "projected to the model's width", None, ("project",)),
        "input": Described("input", ("B", at, "D"), "what enters the first layer"),
    }
    last = "projected" if embedding.project is not None else "input"
    return Tensors(described, {"E": width}, {f"before {last}": embedding.dropout})


def around(at: str, *, is_pre_norm: bool) -> dict[str, Described]:
    """The norm and the sum around a function of a layer. `norm` is the one before or after it."""
    place = "before the function" if is_pre_norm else "after the sum"
    return {
        "normalised": Described("normalised", ("B", at, "D"), f"each vector normalised, {place}", None, ("norm",)),
        "residual": Described(
            "residual", ("B", at, "D"), "the stream, with this part's output added", ("stream", "last")
        ),
    }


def attention_tensors(
    attention: MultiHeadAttention, positions: Positions | None, queries: str, keys: str, num_keys: int
) -> Tensors:
    """The tensors of an attention. queries, keys: the letters of their positions."""
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
    taps = mechanism.taps()
    # Parameters of the kind that none of its tensors names.
    rest = [name for name, _ in mechanism.named_children()] + [
        name for name, _ in mechanism.named_parameters(recurse=False)
    ]
    named = {name for own_tap in taps.values() for name in own_tap.parameters or rest}
    in_scores = tuple(f"mechanism.{name}" for name in rest if name not in named)
    beside = tuple(name for name, own_tap in taps.items() if own_tap.replaces is None)
    described = {
        "q": Described("Q product", ("B", queries, "Hh"), "from the decoder's stream", None, ("q",)),
        "kv": Described("KV product", ("B", keys, kv), "from the encoder's output", ("memory",), ("kv",)),
        "qkv": Described("QKV product", ("B", queries, qkv), "Q, K and V side by side", None, ("qkv",)),
        "queries": Described(
            "Q", ("B", "H", queries, "h"), f"queries of each head{rotated}", ("q", "qkv"), ("q_norm",)
        ),
        "keys": Described("K", ("B", k, keys, "h"), f"keys of each head{rotated}", ("kv", "qkv"), ("k_norm",)),
        "values": Described("V", ("B", k, keys, v), "values of each head", ("kv", "qkv")),
        "position_scores": Described(
            "position scores", ("B", "H", queries, keys), f"{kind}: added to QK", ("queries",), ("positions.keys",)
        ),
        "bias": Described("bias", ("1", "H", queries, keys), f"{kind}: added to the scores", (), ("positions",)),
        "scores": Described(
            "scores", ("B", "H", queries, columns), scores, ("queries", "keys", "position_scores", "bias"), in_scores
        ),
        "position_values": Described(
            "position values",
            ("B", "H", queries, v),
            f"{kind}: added to the heads",
            ("weights",),
            ("positions.values",),
        ),
        "weights": Described(
            "weights",
            ("B", "H", queries, keys),
            mechanism.weights_meaning,
            ("scores",) if mechanism.drops_weights else ("queries", "keys"),
            () if mechanism.drops_weights else in_scores,
        ),
        "heads": Described(
            "heads",
            ("B", "H", queries, v),
            "weights·V: weighted sums of values, per head",
            ("weights", "values", "position_values", *beside),
        ),
        "joined": Described("joined", ("B", queries, f"H{v}"), "the heads side by side"),
        "projection": Described("projection", ("B", queries, "D"), "mixed, at the model's width", None, ("out",)),
    }
    for name, own_tap in taps.items():
        described[name] = _own_tensor(name, own_tap, letters, rest)
    dropout = {"weights": mechanism.dropout if mechanism.drops_weights else 0.0}
    return Tensors(
        described,
        {"D": sizes.d_model, "H": sizes.num_heads, "K": sizes.num_kv_heads, "h": sizes.head_dim, "v": sizes.value_dim}
        | own,
        dropout,
    )


def _own_tensor(name: str, own: OwnTap, letters: Mapping[str, str], parameters: list[str]) -> Described:
    """A tensor that only this kind of attention has."""
    symbols = tuple(letters.get(symbol, symbol) for symbol in own.symbols)
    named = parameters if own.parameters is None else own.parameters
    within = tuple(f"mechanism.{parameter}" for parameter in named)
    return Described(name.replace("_", " "), symbols, own.meaning, own.inputs, within, replaces=own.replaces)


def _scale(attention: MultiHeadAttention) -> str:
    """The factor of the scores, as in papers."""
    scale = attention.mechanism.scale
    if scale == 1.0:
        return ""
    return "/√h" if scale == attention.head_dim**-0.5 else f" × {scale:.3g}"


def feedforward_tensors(module: FeedForward, at: str) -> Tensors:
    """The tensors of a feed-forward network."""
    active = "activation of the gate, times the value" if module.gated else "after the activation"
    up = ("2F", "gate and value") if module.gated else ("F", "widened")
    described = {
        "up": Described("up", ("B", at, up[0]), up[1], None, ("up",)),
        "active": Described("active", ("B", at, "F"), active),
        "down": Described("down", ("B", at, "D"), "back at the model's width", None, ("down",)),
    }
    return Tensors(described, {"F": module.down.in_features}, {"active": module.dropout})


LABELS: dict[LabelKind, tuple[tuple[str, ...], str]] = {
    "classes": (("B",), "the correct class of each example"),
    "labels": (("B", "L"), "1 for each label that the example has, else 0"),
    "score": (("B",), "the correct number of each example"),
}
"""Letters and meaning of the labels of a pooled head."""


def head_tensors(head: nn.Module) -> Tensors:
    """The tensors of a head: its own, then labels and loss where it has a projection."""
    own: dict[str, int] = {}
    dropout: dict[str, float] = {}
    loss = Described("loss", (), "one number, the mean over what has a label", ("logits", "labels"))
    if isinstance(head, VocabularyHead):
        own = {"E": head.weight.shape[1], "V": head.weight.shape[0]}
        bridge = head.dense if head.dense is not None else head.project
        e = "D" if bridge is None or own["E"] == bridge.in_features else "E"
        last = "input of the product with the vocabulary"
        capped = "" if head.softcap is None else f", capped at ±{head.softcap:g} by tanh"
        rows = "; the rows of the table at length 1 (FixNorm)" if head.fixnorm else ""
        bridges = ("dense",) if head.dense is not None else ("project",)
        described = {
            "features": Described(
                "features", ("B", "T", e), last if head.norm is None else "one more layer", None, bridges
            ),
            "normalised": Described("normalised", ("B", "T", e), f"activated and normalised: {last}", None, ("norm",)),
            "scaled": Described("scaled", ("B", "T", e), f"times {head.scale:.4g}"),
            "logits": Described(
                "logits",
                ("B", "T", "V"),
                f"a score for every token, at every position{capped}{rows}",
                None,
                ("weight", "bias"),
            ),
            "labels": Described("labels", ("B", "T"), "the token that is right at each position", ()),
        }
    elif isinstance(head, PooledHead):
        dropout = {"pooler" if head.pooler is not None else "pooled": head.dropout}
        described = {
            "pooled": Described("pooled", ("B", "D"), f"pooling {head.pooling}: {POOLINGS[head.pooling].meaning}"),
            "pooler": Described("pooler", ("B", "D"), "one more layer, then its activation", None, ("pooler",)),
        }
        if head.project is None:
            return Tensors(described, own, dropout)
        own = {"L": head.project.out_features}
        symbols, meaning = LABELS[head.label_kind]
        described |= {
            "logits": Described("logits", ("B", "L"), "a score for every label", None, ("project",)),
            "labels": Described("labels", symbols, meaning, ()),
        }
    else:
        described = {
            "features": Described("features", ("B", "T", "D"), "one more layer, at every position", None, ("dense",)),
            "logits": Described("logits", ("B", "T"), "was this token replaced?", None, ("project",)),
            "labels": Described("labels", ("B", "T"), "1 where the token was replaced", ()),
        }
    return Tensors({**described, "loss": loss}, own, dropout)


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
