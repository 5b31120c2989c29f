"""Remove layers and heads from a recipe and its weights, rebuild the smaller model, and write its checkpoint.

Layers are renumbered, and overrides of single layers follow them. Heads are slices of the projections: rows of queries,
keys and values, columns of the output; the head size is then written into the recipe, as it no longer follows from the
number of heads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tformer.build import build_model, resolve_sizes
from tformer.checkpoint.average import require_new
from tformer.checkpoint.read import Checkpoint
from tformer.checkpoint.save import CheckpointContents, write_checkpoint
from tformer.checkpoint.tensor_files import file_bytes, find_tied
from tformer.loading import Loaded
from tformer.model import Transformer
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.recipe import recipe_from_yaml, recipe_to_yaml
from tformer.recipe.model import Model, Stack, layer_sections
from tformer.recipe.recipe import Recipe
from tformer.support import files
from tformer.workflows.prune.heads import LayerHeads

Weights = dict[str, Tensor]

PER_LAYER_NAMES = ("blocks", "layer_positions")
"""Lists of a stack that have an entry for each layer."""

LEARNED_RATES = "layerdrop."
"""Prefix of LayerDrop's learned rates in a stack; the pruned stack has the plain rate again."""


def cut_layers(model: Model, kept: Mapping[str, Sequence[int]]) -> Model:
    """The recipe's model with only these layers of each stack."""
    stacks = {}
    for side, layers in kept.items():
        section: Stack = getattr(model, side)
        new_number = {old: new for new, old in enumerate(layers)}
        overrides = {new_number[old]: options for old, options in section.layers.items() if old in new_number}
        updates: dict[str, Any] = {"num_layers": len(layers), "layers": overrides}
        if section.learns_layerdrop:
            updates["layerdrop"] = section.layerdrop_rate
        stacks[side] = section.model_copy(update=updates)
    return model.model_copy(update=stacks)


def redrawn_layers(section: Stack, kept: Sequence[int], *, path: str) -> list[int]:
    """The layers that read other random blocks under their new number, which seeds BigBird's draw.

    path: of the stack in the recipe.
    """
    layers = layer_sections(section, path=path)
    moved = [old for new, old in enumerate(kept) if new != old]
    return [layer for layer in moved if getattr(layers[layer].attention, "random_blocks", 0)]


def cut_layer_weights(weights: Mapping[str, Tensor], kept: Mapping[str, Sequence[int]]) -> Weights:
    """The weights with only these layers of each stack, under their new names; tied ones stay one tensor."""
    pattern = re.compile(rf"({'|'.join(kept)})\.({'|'.join(PER_LAYER_NAMES)})\.(\d+)\.(.+)")
    left: Weights = {}
    for name, tensor in weights.items():
        side, _, rest = name.partition(".")
        if side in kept and rest.startswith(LEARNED_RATES):
            continue
        match = pattern.fullmatch(name)
        if match is None:
            left[name] = tensor
        elif int(match[3]) in kept[match[1]]:
            left[f"{match[1]}.{match[2]}.{list(kept[match[1]]).index(int(match[3]))}.{match[4]}"] = tensor
    return left


def cut_heads(model: Model, kept: Mapping[str, Sequence[LayerHeads]]) -> Model:
    """The recipe's model with the numbers of heads that stay; layers that differ from the most common get overrides."""
    stacks = {}
    for side, kept_of_layers in kept.items():
        section: Stack = getattr(model, side)
        counts = [len(layer.self_attention) for layer in kept_of_layers]
        [(common, _)] = Counter(counts).most_common(1)
        layers = {layer: {**options} for layer, options in section.layers.items()}
        for layer, count in enumerate(counts):
            options = layers.setdefault(layer, {})
            options.pop("num_heads", None)
            if count != common:
                options["num_heads"] = count
        updates = {
            "num_heads": common,
            "num_kv_heads": None,
            "head_dim": resolve_sizes(model, side).head_dim,
            "layers": {layer: layers[layer] for layer in sorted(layers) if layers[layer]},
        }
        stacks[side] = section.model_copy(update=updates)
    return model.model_copy(update=stacks)


def cut_head_weights(
    weights: Mapping[str, Tensor], built: Transformer, kept: Mapping[str, Sequence[LayerHeads]]
) -> Weights:
    """The weights reduced to the kept heads. built: the model, for the sizes of heads."""
    left = dict(weights)
    for side, layers in kept.items():
        for number, (block, heads) in enumerate(zip(getattr(built, side).layers, layers, strict=True)):
            for attention in ("self_attention", "cross_attention"):
                module = getattr(block, attention)
                if module is not None:
                    prefix = f"{side}.blocks.{number}.{attention}"
                    left |= _sliced(left, prefix, module, heads.of(attention))
    return left


def _sliced(weights: Mapping[str, Tensor], prefix: str, module: MultiHeadAttention, heads: Sequence[int]) -> Weights:
    """The projections of one attention with only these heads."""
    count, queries, values = module.num_heads, _rows(heads, module.head_dim), _rows(heads, module.value_dim)
    after_keys = count * module.head_dim
    if module.is_cross:
        rows = {"q": queries, "kv": torch.cat((queries, after_keys + values))}
    else:
        rows = {"qkv": torch.cat((queries, after_keys + queries, 2 * after_keys + values))}
    cut = {
        name: weights[name][index]
        for projection, index in rows.items()
        for name in (f"{prefix}.{projection}.weight", f"{prefix}.{projection}.bias")
        if name in weights
    }
    out = f"{prefix}.out.weight"
    return cut | {out: weights[out][:, values].contiguous()}


def _rows(heads: Sequence[int], size: int) -> Tensor:
    """The rows of some heads in a projection with `size` rows a head."""
    return (torch.tensor(heads).unsqueeze(1) * size + torch.arange(size)).flatten()


def with_model(recipe: Recipe, model: Model) -> Recipe:
    """The recipe with another model section, validated by writing and reading it."""
    return recipe_from_yaml(recipe_to_yaml(recipe.model_copy(update={"model": model})), name="the pruned recipe")


def rebuilt(loaded: Loaded, recipe: Recipe, weights: Mapping[str, Tensor]) -> Transformer:
    """The pruned model in evaluation mode, on the device and in the precision of the loaded one."""
    tokenizer, target = loaded.tokenizer, loaded.own_target_tokenizer
    model = build_model(
        recipe.model,
        vocab_size=None if tokenizer is None else tokenizer.vocab_size,
        target_vocab_size=None if target is None else target.vocab_size,
        num_labels=len(recipe.data.labels) or None,
        device=next(loaded.model.parameters()).device,
    )
    state = model.state_dict()
    assert state.keys() <= weights.keys(), (
        f"the pruned weights lack tensors of the recipe: {state.keys() - weights.keys()}"
    )
    with torch.no_grad():
        for name, tensor in state.items():
            assert tensor.shape == weights[name].shape, f"{name}: {tensor.shape} is not {weights[name].shape}"
            tensor.copy_(weights[name])
    model.compute_dtype = loaded.model.compute_dtype
    return model.eval()


def write_pruned(
    out: Path, checkpoint: Checkpoint, recipe: Recipe, weights: Weights, *, pruned: Mapping[str, Any]
) -> None:
    """Write the smaller model with the rest of the checkpoint, without optimizer, averages and score.

    Raises:
        InputError: `out` exists.
        StorageError: the disk refuses; no part of the result is left.
    """
    generator = checkpoint.generator()
    tied = find_tied(weights)
    stored = {name: tensor for name, tensor in weights.items() if name not in tied}
    files.require_room(out, file_bytes(stored) + file_bytes(generator or {}))
    require_new(out)  # it may have been made while measuring
    # The recipe of an imported model names no data; later commands must still find that out.
    imported = {key: value for key, value in checkpoint.trainer.items() if key == "imported"}
    write_checkpoint(
        out,
        checkpoint.step,
        CheckpointContents.derived(
            checkpoint,
            weights=weights,
            tied=tied,
            recipe_yaml=recipe_to_yaml(recipe),
            trainer={"step": checkpoint.step, **imported, "pruned": {"name": checkpoint.path.name, **pruned}},
            generator=generator,
        ),
    )
