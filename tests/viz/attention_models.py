"""Tiny models with random weights for attention's tests, as a command loads them, and attention made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tformer.build import build_model
from tformer.inside.reading import ModelInputs, TokenSequence
from tformer.loading import Loaded
from tformer.recipe.load import recipe_from_yaml
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.viz.attention.scene import Scene
from tformer.viz.attention.weights import AttentionMaps, Kind, Layer

TEXT = "the brown dog runs across the green meadow and catches unbelievable things"
ENCODER = """
schema: 1
model:
  d_model: 16
  max_seq_len: 32
  embedding: {token_types: 2}
  encoder: {num_layers: 3, num_heads: 2, feedforward: {d_ff: 16}}
  heads: [{kind: masked_lm}]
  init: {std: 0.3}
"""
DECODER = """
schema: 1
model:
  d_model: 16
  max_seq_len: 32
  decoder: {num_layers: 2, num_heads: 4, num_kv_heads: 2, positions: {kind: rope}, feedforward: {d_ff: 16}}
  heads: [{kind: lm}]
  init: {std: 0.3}
"""
SEQ2SEQ = """
schema: 1
model:
  d_model: 16
  max_seq_len: 48
  encoder: {num_layers: 2, num_heads: 2, feedforward: {d_ff: 16}}
  decoder: {num_layers: 3, num_heads: 4, feedforward: {d_ff: 16}}
  tie: {source_target: true, output: true}
  heads: [{kind: lm}]
  init: {std: 0.3}
generation: {beam_size: 2, max_new_tokens: 8}
"""
IMAGES = """
schema: 1
model:
  d_model: 16
  patches: {image_size: 8, size: 4, channels: 1, cls: true}
  encoder: {num_layers: 2, num_heads: 2, feedforward: {d_ff: 16}}
  heads: [{kind: classifier, pooler: false}]
data: {labels: [a, b], image_mean: [0.5], image_std: [0.5]}
"""


@cache
def tokenizer(template: str) -> Tokenizer:
    """Some 60 pieces: words of TEXT fall apart."""
    model: Any = "wordpiece" if template == "bert" else "byte-bpe"
    options = TokenizerOptions(model=model, template=template, vocab_size=300, min_frequency=1)  # type: ignore[arg-type]
    return train_tokenizer(lambda: iter([TEXT, "un believ able thing s"]), options)


def load_of(recipe: str, *, template: str | None = None, seed: int = 0) -> Loaded:
    """A model of this recipe; its tokenizer has the template that the recipe's kind calls for."""
    parsed = recipe_from_yaml(recipe, name="test")
    has = parsed.model
    words = None
    if has.patches is None:
        words = tokenizer(template or ("seq2seq" if has.encoder and has.decoder else "bert" if has.encoder else "gpt"))
    torch.manual_seed(seed)
    model = build_model(
        has, vocab_size=None if words is None else words.vocab_size, num_labels=len(parsed.data.labels) or None
    )
    return Loaded(model.eval(), words, parsed, Path("runs/tiny/checkpoints/step-00000003"), 3)


def with_attention(recipe: str, attention: str, *, positions: str = "{kind: none}") -> str:
    """The recipe's stacks with another kind of attention."""
    return recipe.replace("feedforward:", f"attention: {attention}, positions: {positions}, feedforward:")


def side(tokens: Sequence[str], *, name: str = "encoder") -> TokenSequence:
    """[...] is special; a token that begins with a space begins a word."""
    return TokenSequence(
        name,
        tuple(tokens),
        tuple(token.startswith("[") and token.endswith("]") for token in tokens),
        tuple(token.startswith(" ") for token in tokens),
    )


def attention_of(
    weights_LHTS: np.ndarray, tokens: Sequence[str], *, kind: Kind = "encoder", keys: Sequence[str] | None = None
) -> AttentionMaps:
    """Attention with these weights; of a decoder it is causal."""
    weights = weights_LHTS.astype(np.float32)
    seen = np.ones(weights.shape[-2:], dtype=bool)
    seen = np.tril(seen) if kind == "decoder" else seen
    queries = side(tokens, name="encoder" if kind == "encoder" else "decoder")
    looked_at = queries if keys is None else side(keys)
    layers = [Layer(number, tuple(range(len(heads))), heads, seen) for number, heads in enumerate(weights)]
    return AttentionMaps(kind, queries, looked_at, tuple(layers), causal=kind == "decoder")


def signed_attention(matrix_TS: Sequence[Sequence[float]], tokens: Sequence[str]) -> AttentionMaps:
    """One head of effective weights, as Linformer's are."""
    attention = attention_of(np.array([[matrix_TS]]), tokens)
    return replace(attention, layers=tuple(replace(layer, signed=True) for layer in attention.layers))


def scene_of(*attentions: AttentionMaps, rollouts: bool = True, **more: Any) -> Scene:
    """A scene of attentions made by hand; rollouts are those of self-attention."""
    from tformer.viz.attention.weights import rollout

    sides = {}
    for attention in attentions:
        sides |= {attention.queries.name: attention.queries, attention.keys.name: attention.keys}
    found = {attention.kind: attention for attention in attentions}
    rolled = {kind: rollout(kind, found) for kind in found if rollouts and kind != "cross"}
    model: dict[str, str | int] = {"name": "runs/tiny", "step": 3, "sha256": "ab" * 32}
    return Scene(
        ModelInputs({}, sides, texts={"text": " ".join(attentions[0].keys.tokens)}), found, rolled, model, **more
    )


def random_attention(
    layers: int, heads: int, tokens: int, *, causal: bool = False, spread: float = 1.5, seed: int = 0
) -> AttentionMaps:
    """Rows of softmax over normal scores."""
    scores = torch.randn(layers, heads, tokens, tokens, generator=torch.Generator().manual_seed(seed)) * spread
    if causal:
        scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), float("-inf"))
    words = ["[CLS]", *(f" word{place}" for place in range(tokens - 2)), "[SEP]"][:tokens]
    return attention_of(scores.softmax(-1).numpy(), words, kind="decoder" if causal else "encoder")
