"""Floating-point operations of a model: every matrix product and every attention, by module, token or example.

    product with a weight [out, in]    2 out in for each position
    attention                          4 (mean of head_dim and value_dim) for each head, query and key
    training                           forward + backward; the backward pass costs two forward passes

A module counts for the positions that pass through it: those of its stack, the source's for the keys and values of
cross-attention, one for a head that reads a pooled vector, the masked ones for the head of masked language modelling.
Each kind of attention states its cost in keys per query (`options.keys_per_query`); full attention counts all keys,
also causal ones that a kernel may skip. Norms, softmax and activations are left out, as is the custom (arXiv
2204.02311, appendix B; nanoGPT): a model with N weights in products costs 6 N + 12 L d T per trained token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from tformer.build import layer_sizes, resolve_sizes
from tformer.data.batching.mixture import MixedPairs
from tformer.data.shards.pair_tokens import PairTokens
from tformer.model import Transformer
from tformer.nn.attention import Mechanism, cross_attention_options
from tformer.nn.classification_heads import PooledHead
from tformer.nn.heads import MaskedLmHeadOptions, VocabularyHead
from tformer.nn.linear import Linear
from tformer.nn.patches import PatchEmbedding
from tformer.recipe.model import Model, layer_sections
from tformer.recipe.recipe import Recipe

BACKWARD_AND_FORWARD = 3
"""The backward pass costs two forward passes: one for the inputs' gradients, one for the weights'."""

HEADS, STEM = "heads.", "embedding"


@dataclass(frozen=True)
class Flops:
    """Operations of one example.

    forward: with every head on every position. training: forward and backward, heads on the labelled positions.
    """

    forward: float
    training: float


# --- by module -------------------------------------------------------------------------------------------------------


def module_flops(model: Transformer, section: Model, *, source_length: int, target_length: int) -> dict[str, float]:
    """{name of a module: operations of one example in the forward pass}, for every module that multiplies."""
    both = model.is_encoder_decoder
    lengths = {"encoder": source_length, "decoder": target_length if both else source_length}
    found = dict(_product_flops(model, lengths))
    for side in ("encoder", "decoder"):
        if getattr(section, side) is not None:
            for name, flops in _attention_flops(model, section, side, lengths):
                found[name] = found.get(name, 0.0) + flops  # one module of positions may serve all layers
    return found


def _products(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of each matrix product; those of an attention kind are in its keys, a stem's in its `flops`."""
    inside = {id(part) for module in model.modules() if isinstance(module, Mechanism) for part in module.modules()}
    for name, module in model.named_modules():
        if isinstance(module, Linear | VocabularyHead) and id(module) not in inside:
            yield name, module.weight


def _product_flops(model: Transformer, lengths: dict[str, int]) -> Iterator[tuple[str, float]]:
    first = lengths["encoder" if model.encoder is not None else "decoder"]
    last = lengths["decoder" if model.decoder is not None else "encoder"]
    pooling = {name: head for name, head in model.heads.items() if isinstance(head, PooledHead)}
    pooled = tuple(f"{HEADS}{name}." for name in pooling)
    every = {f"{HEADS}{name}.{part}" for name, head in pooling.items() for part in head.reads_every_position}
    if isinstance(model.embedding, PatchEmbedding):
        yield STEM, sum(model.embedding.flops())
    for name, weight in _products(model):
        part = name.partition(".")[0]
        if part in lengths:
            positions = lengths["encoder"] if name.endswith("cross_attention.kv") else lengths[part]
        elif name.startswith(HEADS):
            positions = 1 if name.startswith(pooled) and name not in every else last
        else:
            positions = first if part == STEM else lengths["decoder"]
        yield name, 2.0 * weight.numel() * positions


def _attention_flops(
    model: Transformer, section: Model, side: str, lengths: dict[str, int]
) -> Iterator[tuple[str, float]]:
    stack, length = getattr(model, side), lengths[side]
    for number, layer in enumerate(_attention_layers(section, side)):
        per_key = 4.0 * layer.width * length
        yield f"{side}.blocks.{number}.self_attention.mechanism", per_key * layer.keys(length)
        if stack.blocks[number].cross_attention is not None:
            keys = layer.cross_keys(lengths["encoder"])
            yield f"{side}.blocks.{number}.cross_attention.mechanism", per_key * keys
        positions = stack.positions_of(number)
        flops = positions.flops(num_heads=layer.num_heads, length=length)
        if flops:
            yield f"{side}.layer_positions.{number}" if positions.per_layer else f"{side}.positions", flops


@dataclass(frozen=True)
class _AttentionLayer:
    """Attention of one layer. width: heads times the mean of query and value size (scores take one, sums the other)."""

    num_heads: int
    width: float
    options: Any

    def keys(self, length: float) -> float:
        return self.options.keys_per_query(length)

    def cross_keys(self, length: float) -> float:
        """Keys per query of cross-attention, which is full attention where the kind has no form for it."""
        return cross_attention_options(self.options).keys_per_query(length)


def _attention_layers(section: Model, side: str) -> list[_AttentionLayer]:
    layers = layer_sections(getattr(section, side), path=f"model.{side}")
    return [
        _AttentionLayer(sizes.num_heads, sizes.num_heads * (sizes.head_dim + sizes.value_dim) / 2, layer.attention)
        for layer, sizes in zip(layers, layer_sizes(section, side), strict=True)
    ]


# --- by example ------------------------------------------------------------------------------------------------------


def example_flops(
    recipe: Recipe, model: Transformer, generator: Transformer | None, *, source_length: int, target_length: int
) -> Flops:
    """Operations of one example of a model, with ELECTRA's generator where there is one."""
    share = labelled_share(recipe)
    total = _model_flops(recipe, recipe.model, model, source_length, target_length, share)
    if generator is None or recipe.generator is None:
        return total
    beside = _model_flops(recipe, recipe.generator, generator, source_length, target_length, share)
    return Flops(total.forward + beside.forward, total.training + beside.training)


def _model_flops(
    recipe: Recipe, section: Model, model: Transformer, source_length: int, target_length: int, labelled: float
) -> Flops:
    parts = module_flops(model, section, source_length=source_length, target_length=target_length)
    vocabulary = tuple(f"{HEADS}{name}" for name, head in model.heads.items() if isinstance(head, VocabularyHead))
    heads = sum(flops for name, flops in parts.items() if vocabulary and name.startswith(vocabulary))
    forward = sum(parts.values())
    training = BACKWARD_AND_FORWARD * (forward - heads + labelled * heads)
    if isinstance(model.embedding, PatchEmbedding):
        training -= model.embedding.flops()[0]  # pixels need no gradient
    if recipe.training.activation_checkpointing:
        training += sum(flops for name, flops in parts.items() if ".blocks." in name)
    return Flops(forward, recipe.training.copies * training)


def labelled_share(recipe: Recipe) -> float:
    """The share of positions that vocabulary heads predict in training: the masked ones, or all."""
    masked_lm = MaskedLmHeadOptions.kind
    return min(options.objective.predicted_share(masked_lm, options) for options in recipe.objectives)


# --- by token, averaged over examples of any length ------------------------------------------------------------------


def mean_lengths(
    samples: Any, tokens_per_sample: float, *, of: Callable[[np.ndarray], Any] = np.mean
) -> tuple[float, float]:
    """Mean tokens of a sample in the encoder and in the decoder; both the same where samples have one length.

    tokens_per_sample: for samples without known lengths, such as images and windows of a corpus. of: another statistic.
    """
    pairs = samples.pairs if isinstance(samples, MixedPairs) else samples
    if isinstance(pairs, PairTokens):
        return float(of(pairs.source_lengths)), float(of(pairs.target_lengths))
    length = tokens_per_sample if pairs.lengths is None else float(of(pairs.lengths))
    return length, length


def matmul_parameters(model: nn.Module) -> int:
    """Parameters in matrix products: all matrices except lookup tables; a tied table counts as the output's product."""
    weights = {id(weight): weight.numel() for _, weight in _products(model)}
    stems = (module for module in model.modules() if isinstance(module, PatchEmbedding))
    return sum(weights.values()) + sum(matrix.numel() for stem in stems for matrix, _ in stem.matrices())


def parameters_per_token(model: Transformer, recipe: Recipe, *, length: float) -> float:
    """Parameters in the matrix products that a token of training passes through, on average.

    A token passes through all products of the stacks, and through those of a head if the head reads it: in masked
    language modelling the masked tokens, in a pooled head one token of an example of `length` tokens.
    """
    found = float(matmul_parameters(model))
    for name, head in model.heads.items():
        found -= (1 - _share_of_tokens(name, head, recipe, length)) * head_parameters(head)
    return found


def head_parameters(head: nn.Module) -> int:
    """Parameters in the matrix products of a head; a tied matrix counts."""
    return sum(parameter.numel() for parameter in head.parameters() if parameter.ndim >= 2)


def _share_of_tokens(name: str, head: nn.Module, recipe: Recipe, length: float) -> float:
    if isinstance(head, PooledHead):
        return 1 / length
    return min(options.objective.predicted_share(name, options) for options in recipe.objectives)


def attention_flops(layers: Iterable[tuple[float, float]]) -> float:
    """Forward operations of attention for one query: the sum of 4 d S over the layers' (width d, keys per query S)."""
    return sum(4.0 * count * width * keys for (width, keys), count in Counter(layers).items())


def attention_flops_per_token(model: Model, *, source_length: float, target_length: float) -> float:
    """Forward operations of all attention for one token, on average over the tokens of both sides.

    source_length: tokens that the encoder, or the only stack, reads; target_length: that the decoder beside it reads.
    """

    def self_attention(side: str, length: float) -> list[tuple[float, float]]:
        return [(layer.width, layer.keys(length)) for layer in _attention_layers(model, side)]

    if model.encoder is None:
        return attention_flops(self_attention("decoder", target_length))
    encoder = attention_flops(self_attention("encoder", source_length))
    if model.decoder is None:
        return encoder
    cross = [(layer.width, layer.cross_keys(source_length)) for layer in _attention_layers(model, "decoder")]
    decoder = attention_flops([*self_attention("decoder", target_length), *cross])
    return (source_length * encoder + target_length * decoder) / (source_length + target_length)


def training_flops_per_token(model: Model, *, parameters: float, source_length: float, target_length: float) -> float:
    """Forward and backward operations of one trained token; for image models of one image, that is, all its patches.

    parameters: weights in products that a token passes through (`parameters_per_token`). A token of an encoder-decoder
    passes through the encoder or the decoder: half of the products each.
    """
    if model.is_encoder_decoder:
        parameters //= 2
    attention = attention_flops_per_token(model, source_length=source_length, target_length=target_length)
    flops = BACKWARD_AND_FORWARD * (2.0 * parameters + attention)
    return flops * (source_length if model.patches is not None else 1)


def product_shape(recipe: Recipe, tokens_per_sample: int) -> tuple[int, int, int]:
    """(rows, d_model, d_ff) of the model's largest ordinary matrix product, for measurements of the machine's speed."""
    side = "decoder" if recipe.model.decoder is not None else "encoder"
    stack = recipe.model.decoder or recipe.model.encoder
    assert stack is not None
    d_model = resolve_sizes(recipe.model, side).d_model
    rows = recipe.training.batch_tokens or (recipe.training.batch_size or 1) * tokens_per_sample
    return rows, d_model, stack.feedforward.hidden_size(d_model)
