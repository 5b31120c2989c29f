"""Floating-point operations of a model: every matrix product and every attention, by module, token or example.

    product with a weight [out, in]    2 out in for each position
    attention                          4 (mean of head_dim and value_dim) for each head, query and key
    training                           forward + backward; the backward pass costs two forward passes

A module counts for the positions that pass through it: those of its stack, the source's for the keys and values of
cross-attention, one for a head that reads a pooled vector, the masked ones for the head of masked language modelling.
Each kind of attention counts its own products (`Mechanism.flops`), with padded blocks, random features and what the
backward pass forms again; full attention counts all keys, also causal ones that a kernel may skip. Norms, softmax and
activations are left out, as is the custom (arXiv 2204.02311, appendix B; nanoGPT): a model with N weights in products
costs 6 N + 12 L d T per trained token. Totals agree with torch's FlopCounterMode within 1 %, for one example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tformer.build import resolve_sizes
from tformer.data.batching.mixture import MixedPairs
from tformer.data.shards.pair_tokens import PairTokens
from tformer.model import Transformer
from tformer.nn.attention import Mechanism
from tformer.nn.attention.mechanism import BACKWARD_AND_FORWARD
from tformer.nn.classification_heads import PooledHead
from tformer.nn.heads import MaskedLmHeadOptions, VocabularyHead
from tformer.nn.linear import Linear
from tformer.nn.patches import PatchEmbedding
from tformer.recipe.recipe import Recipe

HEADS, STEM = "heads.", "embedding"


@dataclass(frozen=True)
class Flops:
    """Operations of one example.

    forward: with every head on every position. training: forward and backward, heads on the labelled positions.
    """

    forward: float
    training: float


# --- by module -------------------------------------------------------------------------------------------------------


def module_flops(model: Transformer, *, source_length: float, target_length: float) -> dict[str, float]:
    """{name of a module: operations of one example in the forward pass}, for every module that multiplies.

    source_length: positions of the encoder, or of the only stack; target_length: of the decoder beside an encoder.
    """
    found = dict(product_flops(model, source_length=source_length, target_length=target_length))
    for name, flops in attention_flops(model, source_length=source_length, target_length=target_length):
        found[name] = found.get(name, 0.0) + flops  # one module of positions may serve all layers
    return found


def _lengths(model: Transformer, source_length: float, target_length: float) -> dict[str, float]:
    return {"encoder": source_length, "decoder": target_length if model.is_encoder_decoder else source_length}


def product_flops(model: Transformer, *, source_length: float, target_length: float) -> Iterator[tuple[str, float]]:
    """(name of a module, operations of one example) of all matrix products outside attention: forward."""
    lengths = _lengths(model, source_length, target_length)
    first = lengths["encoder" if model.encoder is not None else "decoder"]
    last = lengths["decoder" if model.decoder is not None else "encoder"]
    pooling = {name: head for name, head in model.heads.items() if isinstance(head, PooledHead)}
    pooled = tuple(f"{HEADS}{name}." for name in pooling)
    every = {f"{HEADS}{name}.{part}" for name, head in pooling.items() for part in head.reads_every_position}
    if isinstance(model.embedding, PatchEmbedding):
        yield STEM, sum(model.embedding.flops())
    inside = {id(part) for module in model.modules() if isinstance(module, Mechanism) for part in module.modules()}
    for name, module in model.named_modules(remove_duplicate=False):  # a block may serve several layers
        if not isinstance(module, Linear | VocabularyHead) or id(module) in inside:
            continue  # a kind of attention counts its own products
        part = name.partition(".")[0]
        if part in lengths:
            positions = lengths["encoder"] if name.endswith("cross_attention.kv") else lengths[part]
        elif name.startswith(HEADS):
            positions = 1.0 if name.startswith(pooled) and name not in every else last
        else:
            positions = first if part == STEM else lengths["decoder"]
        yield name, 2.0 * module.weight.numel() * positions


def attention_flops(
    model: Transformer, *, source_length: float, target_length: float, training: bool = False
) -> Iterator[tuple[str, float]]:
    """(name of a module, operations of one example) of all attention: forward, or with the backward pass."""
    lengths = _lengths(model, source_length, target_length)
    for side, length in lengths.items():
        stack = getattr(model, side)
        for number, block in enumerate(() if stack is None else stack.blocks):
            path, own, cross = f"{side}.blocks.{number}", block.self_attention.mechanism, block.cross_attention
            yield f"{path}.self_attention.mechanism", own.flops(length, length, training=training)
            if cross is not None:
                flops = cross.mechanism.flops(length, lengths["encoder"], training=training)
                yield f"{path}.cross_attention.mechanism", flops
            positions = stack.positions_of(number)
            flops = positions.flops(num_heads=own.sizes.num_heads, length=length)
            if flops:
                name = f"{side}.layer_positions.{number}" if positions.per_layer else f"{side}.positions"
                yield name, flops * (BACKWARD_AND_FORWARD if training else 1)


# --- by example ------------------------------------------------------------------------------------------------------


def example_flops(
    recipe: Recipe, model: Transformer, generator: Transformer | None, *, source_length: float, target_length: float
) -> Flops:
    """Operations of one example, ELECTRA's generator included; lengths as in `module_flops`."""
    lengths = {"source_length": source_length, "target_length": target_length}
    found = [_model_flops(recipe, each, lengths) for each in (model, generator) if each is not None]
    return Flops(sum(each.forward for each in found), sum(each.training for each in found))


def _model_flops(recipe: Recipe, model: Transformer, lengths: dict[str, float]) -> Flops:
    parts = module_flops(model, **lengths)
    attention = sum(flops for _, flops in attention_flops(model, **lengths, training=False))
    trained_attention = sum(flops for _, flops in attention_flops(model, **lengths, training=True))
    vocabulary = tuple(f"{HEADS}{name}" for name, head in model.heads.items() if isinstance(head, VocabularyHead))
    heads = sum(flops for name, flops in parts.items() if vocabulary and name.startswith(vocabulary))
    forward = sum(parts.values())
    training = BACKWARD_AND_FORWARD * (forward - attention - (1 - labelled_share(recipe)) * heads) + trained_attention
    if isinstance(model.embedding, PatchEmbedding):
        training -= model.embedding.flops()[0]  # pixels need no gradient
    if recipe.training.activation_checkpointing:
        kept = set()  # last products of blocks: nothing behind them needs them, so they are not recomputed
        for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
            for number, block in enumerate(() if stack is None else stack.layers):
                if block.place == "pre" and not block.dropout:
                    kept.add(f"{side}.blocks.{number}.feedforward.down")
        training += sum(flops for name, flops in parts.items() if ".blocks." in name and name not in kept)
    return Flops(forward, training)


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


def training_flops_per_token(
    recipe: Recipe, model: Transformer, generator: Transformer | None, *, source_length: float, target_length: float
) -> float:
    """Operations of forward and backward, for a token as training counts them; an image is one, with all its patches.

    An example of an encoder-decoder has the tokens of both sides, and each passes through the products of its own.
    """
    target_length = max(part.objective.target_length(source_length, target_length, part) for part in recipe.objectives)
    lengths = {"source_length": source_length, "target_length": target_length}
    tokens = source_length + (target_length if model.is_encoder_decoder else 0)
    if recipe.model.patches is not None:
        tokens = 1
    return example_flops(recipe, model, generator, **lengths).training / tokens


def product_shape(recipe: Recipe, tokens_per_sample: int) -> tuple[int, int, int]:
    """(rows, d_model, d_ff) of the model's largest ordinary matrix product, for measurements of the machine's speed."""
    side = "decoder" if recipe.model.decoder is not None else "encoder"
    stack = recipe.model.decoder or recipe.model.encoder
    assert stack is not None
    d_model = resolve_sizes(recipe.model, side).d_model
    rows = recipe.training.batch_tokens or (recipe.training.batch_size or 1) * tokens_per_sample
    return rows, d_model, stack.feedforward.hidden_size(d_model)
