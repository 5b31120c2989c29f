"""The recipe of an imported model: its model section, its conventions, and how it is fine-tuned unless told otherwise.

Fine-tuning follows BERT (arXiv 1810.04805, A.3): Adam at 5e-5 with a little decay, three epochs of small batches, a
short warm-up and a straight way down to zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tformer.errors import InputError
from tformer.interop.read_model import CONFIG, ForeignModel
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe

LABEL_HEADS = ("classifier", "regression")
PIXELS = {"image_mean": 0.5, "image_std": 0.5}  # what an image processor means where the folder has none

FINE_TUNING: dict[str, dict[str, Any]] = {
    "optimizer": {"kind": "adamw", "lr": 5e-5, "betas": (0.9, 0.999), "weight_decay": 0.01, "clip_grad_norm": 1.0},
    "schedule": {"kind": "linear", "warmup_ratio": 0.06, "min_ratio": 0.0},
    "training": {
        "max_steps": 100_000,
        "max_epochs": 3.0,
        "batch_size": 16,
        "eval_every": None,
        "save_every": None,
    },
}


def recipe_of(
    foreign: ForeignModel,
    *,
    special_ids: Mapping[str, int],
    generation: Mapping[str, Any],
    pixels: Mapping[str, Sequence[float]],
    labels: Sequence[str],
    separate: bool,
) -> Recipe:
    """The recipe of a model that was read.

    Args:
        special_ids: values of `tokenizer.special_ids`.
        generation: values of the `generation` section.
        pixels: `image_mean` and `image_std`, of a model of images; {}: one half each.
        labels: of its classifier, in the order of their ids; () where it has none.
        separate: source and target have a tokenizer each.

    Raises InputError for values of the folder that no recipe can hold.
    """
    model = foreign.model
    data: dict[str, Any] = {"labels": tuple(labels)}
    if model.patches is not None:
        half = {name: (value,) * model.patches.channels for name, value in PIXELS.items()}
        data |= {name: tuple(pixels.get(name, value)) for name, value in half.items()}
    try:
        return Recipe.model_validate(
            {
                "arch": foreign.architecture.family,
                "preset": None,
                "tokenizer": {"special_ids": dict(special_ids), "separate": separate},
                "data": data,
                "model": _section(model, labels, separate=separate),
                "objectives": [{"kind": kind} for kind in objectives_of(model)],
                "generation": dict(generation),
                **FINE_TUNING,
            }
        )
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise InputError(
            f"{foreign.folder}: {where}: {problem['msg']}, found {problem['input']!r}",
            hint=f"it comes from {CONFIG}, generation_config.json or the tokenizer's files",
        ) from None


def objectives_of(model: Model) -> list[str]:
    """What the heads of a model are trained on."""
    heads = {head.kind: head for head in model.heads}
    if "lm" in heads:
        return ["causal_lm" if model.encoder is None else "seq2seq"]
    if "classifier" in heads:
        return ["multi_label" if getattr(heads["classifier"], "multi_label", False) else "classification"]
    if "regression" in heads:
        return ["regression"]
    if "masked_lm" in heads:
        return ["masked_lm", *(["next_sentence"] if "next_sentence" in heads else [])]
    return ["replaced_token"]


def _section(model: Model, labels: Sequence[str], *, separate: bool) -> dict[str, Any]:
    """The section with its number of labels left to `data.labels`, as in a run: other data may bring others.

    Where two tokenizers cut texts for one table (Marian's), both sides have that table's rows.
    """
    values = model.model_dump()
    if separate and model.target_vocab_size is None:
        values["target_vocab_size"] = model.vocab_size
    for head in values["heads"]:
        if head["kind"] == "classifier" and labels:
            head["num_labels"] = None
    return values
