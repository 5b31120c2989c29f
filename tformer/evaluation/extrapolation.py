"""A loaded model on sequences of another length than it was trained on, also longer ones.

Positions that are computed (sinusoidal, rope, alibi, t5_bias, shaw, none) reach as far as one likes; whether the model
makes sense of them there is what is measured (arXiv 2108.12409). A learned table ends at its last row, and Linformer's
projections at the length that they were made for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tformer.errors import InputError
from tformer.loading import Loaded
from tformer.nn.positions.base import Positions
from tformer.recipe.model import layer_sections


def at_length(loaded: Loaded, seq_len: int) -> Loaded:
    """The model, reading up to `seq_len` tokens a sequence (of pairs: each side), special tokens included.

    The model itself is changed where it is made to read further than it did; data is cut at `seq_len` either way.

    Raises:
        InputError: it has too few learned positions, or attention of a fixed length.
    """
    if seq_len > loaded.model.max_seq_len:
        _require_reach(loaded, seq_len)
        loaded.model.max_seq_len = seq_len
    recipe = loaded.recipe
    sizes = {"seq_len": seq_len, "target_seq_len": seq_len if recipe.model.encoder and recipe.model.decoder else None}
    reach: dict[str, Any] = {"max_seq_len": loaded.model.max_seq_len}
    return replace(
        loaded,
        recipe=recipe.model_copy(
            update={"data": recipe.data.model_copy(update=sizes), "model": recipe.model.model_copy(update=reach)}
        ),
    )


def _require_reach(loaded: Loaded, seq_len: int) -> None:
    positions = [module for module in loaded.model.modules() if isinstance(module, Positions)]
    learned = [module.max_positions for module in positions if module.max_positions is not None]
    generator = loaded.recipe.generator  # which replaces tokens of the same sequences
    if generator is not None and generator.encoder is not None and generator.encoder.positions.kind == "learned":
        learned.append(generator.max_seq_len)
    if learned and seq_len > min(learned):
        raise InputError(
            f"--seq-len: found {seq_len:,}, the model has {min(learned):,} learned positions",
            hint="computed positions read further: rope, alibi, t5_bias, shaw, sinusoidal or none",
        )
    model = loaded.recipe.model
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        sections = () if stack is None else layer_sections(stack, path=f"model.{side}")
        for kind in (section.attention.kind for section in sections if section.attention.mechanism.fixed_length):
            raise InputError(
                f"--seq-len: found {seq_len:,}, the {kind} attention of model.{side} was made for "
                f"{loaded.model.max_seq_len:,} tokens"
            )
