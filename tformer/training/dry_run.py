"""`--dry-run`: the resolved recipe, parameters, memory and one batch, and nothing trained."""

from __future__ import annotations

from typing import Any

from tformer.recipe import recipe_to_yaml
from tformer.training.assemble import make_objective
from tformer.training.batches import make_batches
from tformer.training.estimate import estimate_memory
from tformer.training.prepare import Prepared


def describe(prepared: Prepared) -> dict[str, Any]:
    """What would be trained: recipe_yaml, parameters, memory (bytes by purpose), a batch's shapes and first text."""
    recipe = prepared.recipe
    objective = make_objective(recipe, prepared.material)
    batches = make_batches(recipe, prepared.material, objective, cursor=None, device=prepared.device)
    [batch, *_] = batches.next()
    batches.close()
    teacher = prepared.start.teacher
    is_beside = teacher is not None and recipe.teacher is not None and recipe.teacher.kind == "soft"
    memory = estimate_memory(
        recipe.model,
        num_parameters=prepared.num_parameters,
        optimizer=recipe.optimizer.kind,
        tokens_per_micro_batch=prepared.tokens_per_micro_batch,
        dtype=prepared.precision.dtype,
        activation_checkpointing=recipe.training.activation_checkpointing,
        ema=recipe.training.ema_decay is not None,
        teacher_parameters=teacher.model.num_parameters() if teacher is not None and is_beside else 0,
        seq_len=recipe.seq_len,
        target_seq_len=recipe.target_seq_len,
        on_cpu=prepared.device.type == "cpu",
    )
    shapes = {name: list(tensor.shape) for name, tensor in batch.model_inputs().items()}
    tokenizer = prepared.material.tokenizer
    first = "" if batch.input_ids is None or tokenizer is None else tokenizer.decode(batch.input_ids[0].tolist())
    return {
        "recipe_yaml": recipe_to_yaml(recipe),
        "parameters": prepared.num_parameters,
        "memory": memory.to_json(),
        "batch": {**shapes, "tokens": batch.num_tokens, "first": first},
    }
