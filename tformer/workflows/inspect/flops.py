"""Floating-point operations of one example, module by module: every matrix product and every attention.

    product with a weight [out, in]    2 out in for each position
    attention                          4 (mean of head_dim and value_dim) for each head, query and key
    training                           forward + backward, and the backward pass costs two forwards

A module counts for the positions that pass through it: those of its stack, the source's for the keys and values of
cross-attention, one for a head that reads a pooled vector. An attention kind says itself how many keys' worth of work a
query is; full attention counts all keys, also causal ones that a kernel may skip. Norms, softmax and activations are
left out, as everywhere (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tformer.build import layer_sizes
from tformer.metrics import BACKWARD_AND_FORWARD
from tformer.model import Transformer
from tformer.nn.attention import CROSS_ATTENTION
from tformer.nn.embedding import PatchEmbedding
from tformer.nn.heads import PooledHead, VocabularyHead
from tformer.nn.linear import Linear
from tformer.nn.positions.shaw import ShawPositions
from tformer.recipe.model import Model, layer_sections
from tformer.recipe.recipe import Recipe
from tformer.workflows.inspect.subject import Subject, stack_sides

HEADS, STEM = "heads.", "embedding"


@dataclass(frozen=True)
class Flops:
    """Operations of one example. forward: with every head on every position. training: forward and backward, heads
    on the positions that have a label."""

    forward: float
    training: float


def module_flops(model: Transformer, section: Model, *, source_length: int, target_length: int) -> dict[str, float]:
    """{name of a module: operations of one example in the forward pass}, of every module that multiplies itself."""
    lengths = {"encoder": source_length, "decoder": target_length if model.encoder is not None else source_length}
    last = lengths["decoder" if model.decoder is not None else "encoder"]
    found = dict(_products(model, lengths, last))
    for side in stack_sides(section):
        found |= dict(_attentions(model, section, side, lengths))
    return found


def _products(model: Transformer, lengths: dict[str, int], last: int) -> Iterator[tuple[str, float]]:
    first = lengths["encoder" if model.encoder is not None else "decoder"]
    pooled = tuple(f"{HEADS}{name}." for name, head in model.heads.items() if isinstance(head, PooledHead))
    for name, module in model.named_modules():
        room = name.partition(".")[0]
        if isinstance(module, Linear) and ".mechanism." not in name:
            if room in lengths:
                positions = lengths["encoder"] if name.endswith("cross_attention.kv") else lengths[room]
            elif name.startswith(HEADS):
                positions = 1 if name.startswith(pooled) else last
            else:
                positions = first if room == STEM else lengths["decoder"]
            yield name, 2.0 * module.weight.numel() * positions
        elif isinstance(module, VocabularyHead):
            yield name, 2.0 * module.weight.numel() * last
        elif isinstance(module, PatchEmbedding):
            yield name, 2.0 * module.weight.numel() * (module.seq_len - (module.cls is not None))


def _attentions(model: Transformer, section: Model, side: str, lengths: dict[str, int]) -> Iterator[tuple[str, float]]:
    stack, length = getattr(model, side), lengths[side]
    layers = layer_sections(getattr(section, side), path=f"model.{side}")
    for number, (layer, sizes) in enumerate(zip(layers, layer_sizes(section, side), strict=True)):
        place = f"{side}.blocks.{number}"
        per_key = 2.0 * sizes.num_heads * (sizes.head_dim + sizes.value_dim) * length
        kind = layer.attention
        yield f"{place}.self_attention.mechanism", per_key * kind.keys_per_query(length)
        if stack.blocks[number].cross_attention is not None:
            source = lengths["encoder"]
            keys = kind.keys_per_query(source) if kind.kind in CROSS_ATTENTION else source
            yield f"{place}.cross_attention.mechanism", per_key * keys
        positions = stack.positions_of(number)
        if isinstance(positions, ShawPositions):
            rows = sum(table.numel() for table in positions.parameters())
            yield f"{side}.layer_positions.{number}", 2.0 * sizes.num_heads * length * rows


def flops_of(subject: Subject) -> Flops:
    """Of the model, with ELECTRA's generator where there is one."""
    recipe = subject.recipe
    total = _model_flops(subject.model, recipe.model, subject, labelled=labelled_share(recipe))
    if subject.generator is None or recipe.generator is None:
        return total
    beside = _model_flops(subject.generator, recipe.generator, subject, labelled=labelled_share(recipe))
    return Flops(total.forward + beside.forward, total.training + beside.training)


def _model_flops(model: Transformer, section: Model, subject: Subject, *, labelled: float) -> Flops:
    parts = module_flops(model, section, source_length=subject.source_length, target_length=subject.target_length)
    vocabulary = tuple(f"{HEADS}{name}" for name, head in model.heads.items() if isinstance(head, VocabularyHead))
    heads = sum(flops for name, flops in parts.items() if vocabulary and name.startswith(vocabulary))
    forward = sum(parts.values())
    training = BACKWARD_AND_FORWARD * (forward - heads + labelled * heads)
    if isinstance(model.embedding, PatchEmbedding):
        training -= parts[STEM]  # pixels need no gradient
    if subject.recipe.training.activation_checkpointing:
        training += sum(flops for name, flops in parts.items() if ".blocks." in name)
    return Flops(forward, training)


def labelled_share(recipe: Recipe) -> float:
    """The share of positions at which a head over the vocabulary predicts in training: the masked ones, or all."""
    return min(options.objective.predicted_share("masked_lm", options) for options in recipe.objectives)
