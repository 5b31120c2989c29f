"""What a token costs: the matrices that it meets, and attention, layer by layer with its own kind, options and heads.

A head's matrices count for the positions that it reads, which are few in masked language modelling.
Every kind says what a query costs it, in keys (`options.keys_per_query`): full attention looks at all T, a window at
those in sight, Linformer at its rank and what projecting to it takes, Performer at its features and their making.
"""

from __future__ import annotations

from torch import nn

from tformer.build import layer_sizes
from tformer.data.batching.mixture import MixedPairs
from tformer.data.shards.pair_tokens import PairTokens
from tformer.metrics import attention_flops
from tformer.model import Transformer
from tformer.nn.attention import CROSS_ATTENTION
from tformer.nn.heads import PooledHead
from tformer.objectives.masked_lm import TERM as MASKED_LM
from tformer.objectives.options import MaskedLmOptions
from tformer.recipe.model import Model, layer_sections
from tformer.recipe.recipe import Recipe
from tformer.tasks.base import TrainingData
from tformer.training.assemble import matmul_parameters


def mean_lengths(data: TrainingData) -> tuple[float, float]:
    """Mean tokens of a sample on the encoder's and on the decoder's side; where they are not known apart, the same."""
    samples = data.samples.pairs if isinstance(data.samples, MixedPairs) else data.samples
    if isinstance(samples, PairTokens):
        return float(samples.source_lengths.mean()), float(samples.target_lengths.mean())
    lengths = samples.lengths
    length = data.tokens_per_sample if lengths is None else float(lengths.mean())
    return length, length


def parameters_per_token(model: Transformer, recipe: Recipe, *, length: float) -> float:
    """Parameters in the matrix products that a token of training meets, on average.

    Those of the stacks meet all. Those of a head meet the tokens that it is asked for: of masked language modelling the
    hidden ones, of a whole sample (`length` tokens on average) one.
    """
    found = float(matmul_parameters(model))
    for name, head in model.heads.items():
        found -= (1 - _share_of_tokens(name, head, recipe, length)) * head_parameters(head)
    return found


def head_parameters(head: nn.Module) -> int:
    """Parameters in the matrix products of a head; a tied one is its own here."""
    return sum(parameter.numel() for parameter in head.parameters() if parameter.ndim >= 2)


def _share_of_tokens(name: str, head: nn.Module, recipe: Recipe, length: float) -> float:
    if isinstance(head, PooledHead):
        return 1 / length
    shares = [options.mask_share for options in recipe.objectives if isinstance(options, MaskedLmOptions)]
    return shares[0] if shares and name == MASKED_LM else 1.0


def attention_flops_per_token(model: Model, *, source_length: float, target_length: float) -> float:
    """Forward operations of all attention for one token, on average over the tokens of both sides.

    source_length: tokens that the encoder reads; target_length: that the decoder reads. Of a model with one stack only
    the stack's own length counts.
    """
    if model.encoder is None:
        return attention_flops(_self_attention(model, "decoder", target_length))
    encoder = attention_flops(_self_attention(model, "encoder", source_length))
    if model.decoder is None:
        return encoder
    layers = [*_self_attention(model, "decoder", target_length), *_cross_attention(model, source_length)]
    total = source_length * encoder + target_length * attention_flops(layers)
    return total / (source_length + target_length)


def _self_attention(model: Model, side: str, length: float) -> list[tuple[float, float]]:
    """(width, keys per query) of each layer."""
    options = (layer.attention for layer in layer_sections(getattr(model, side), path=f"model.{side}"))
    return [(width, kind.keys_per_query(length)) for width, kind in zip(_widths(model, side), options, strict=True)]


def _cross_attention(model: Model, length: float) -> list[tuple[float, float]]:
    """The same of the decoder's looks at the encoder's output, which are full where a kind is no cross-attention."""
    assert model.decoder is not None
    options = (layer.attention for layer in layer_sections(model.decoder, path="model.decoder"))
    keys = (kind.keys_per_query(length) if kind.kind in CROSS_ATTENTION else length for kind in options)
    return list(zip(_widths(model, "decoder"), keys, strict=True))


def _widths(model: Model, side: str) -> list[float]:
    """Heads times the mean of query and value size: scores take one, the weighted sum the other."""
    return [sizes.num_heads * (sizes.head_dim + sizes.value_dim) / 2 for sizes in layer_sizes(model, side)]
