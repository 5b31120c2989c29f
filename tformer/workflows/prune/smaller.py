"""The smaller model: its weights out of a checkpoint, running in memory, and as a checkpoint of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tformer.build import build_model
from tformer.checkpoint import Checkpoint, files, find_tied, probe, write_checkpoint
from tformer.checkpoint.average import require_new
from tformer.checkpoint.run import make_folders
from tformer.checkpoint.tensor_files import file_bytes
from tformer.loading import Loaded
from tformer.model import Transformer
from tformer.recipe import recipe_from_yaml, recipe_to_yaml
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe
from tformer.workflows.prune.cut import Weights


def stored_weights(checkpoint: Checkpoint) -> Weights:
    """The averaged weights where there are any, the plain ones for the rest, as stored; tied ones are one tensor."""
    return checkpoint.weights() | (checkpoint.ema() or {})


def with_model(recipe: Recipe, model: Model) -> Recipe:
    """The recipe of another model: written down and read again, so that it is one that loads."""
    return recipe_from_yaml(recipe_to_yaml(recipe.model_copy(update={"model": model})), name="the pruned recipe")


def rebuilt(loaded: Loaded, recipe: Recipe, weights: Mapping[str, Tensor]) -> Transformer:
    """The pruned model, on the device and in the precision of the one that was loaded, ready for evaluation."""
    tokenizer, target = loaded.tokenizer, loaded.own_target_tokenizer
    model = build_model(
        recipe.model,
        vocab_size=None if tokenizer is None else tokenizer.vocab_size,
        target_vocab_size=None if target is None else target.vocab_size,
        num_labels=len(recipe.data.labels) or None,
        device=next(loaded.model.parameters()).device,
    )
    state = model.state_dict()
    assert state.keys() <= weights.keys(), f"the recipe asks for more than is left: {state.keys() - weights.keys()}"
    with torch.no_grad():
        for name, tensor in state.items():
            assert tensor.shape == weights[name].shape, f"{name}: {tensor.shape} is not {weights[name].shape}"
            tensor.copy_(weights[name])
    model.compute_dtype = loaded.model.compute_dtype
    return model.eval()


def write_pruned(
    out: Path, checkpoint: Checkpoint, recipe: Recipe, weights: Weights, *, pruned: Mapping[str, Any]
) -> None:
    """Writes the smaller model with everything else of the checkpoint, but without optimizer, averages and score.

    Raises:
        InputError: `out` exists.
        StorageError: the disk refuses; no part of the result is left.
    """
    generator = checkpoint.generator()
    tied = find_tied(weights)
    stored = {name: tensor for name, tensor in weights.items() if name not in tied}
    probe.require_room(out, file_bytes(stored) + file_bytes(generator or {}))
    with files.storage_errors(out):
        make_folders(out.absolute().parent)
    require_new(out)  # measuring took its time
    # Of a model that came from elsewhere later commands must know that its recipe names no data.
    imported = {key: value for key, value in checkpoint.trainer.items() if key == "imported"}
    write_checkpoint(
        out,
        checkpoint.step,
        weights=weights,
        tied=tied,
        recipe_yaml=recipe_to_yaml(recipe),
        tokenizer_json=checkpoint.tokenizer_json,
        tokenizer_sha256=checkpoint.tokenizer_sha256,
        target_tokenizer_json=checkpoint.target_tokenizer_json,
        target_tokenizer_sha256=checkpoint.target_tokenizer_sha256,
        trainer={"step": checkpoint.step, **imported, "pruned": {"name": checkpoint.path.name, **pruned}},
        generator=generator,
    )
