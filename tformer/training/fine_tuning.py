"""The recipe of a training that starts from a checkpoint (`--init-from`), as functions of recipes alone.

With a preset the training is the preset's, with the body of the checkpoint (`with_body`). Without one it is that of the
checkpoint again, for other data and another machine (`for_new_data`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tformer.checkpoint.read import Checkpoint
from tformer.interop.adapters import AdaptedCheckpoint
from tformer.objectives import OBJECTIVES, unused_keys
from tformer.recipe.followers import UNLIMITED_STEPS
from tformer.recipe.recipe import Embeddings, Recipe, Tokenizer
from tformer.recipe.sections import OF_DATA, OF_MACHINE, LoraBase, Section
from tformer.support.errors import InputError

FINE_TUNING = "bert/finetune"
"""Default preset for training a pre-trained encoder on labels."""

REGULARIZATION = ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "drophead")
"""Settings of a stack that belong to the training, not to the architecture."""


def with_body(recipe: Recipe, stored: Recipe) -> Recipe:
    """`recipe` with the stored body: sizes and kinds of the checkpoint, dropout and heads of the recipe."""
    body = stored.model
    stacks = {}
    for side in ("encoder", "decoder"):
        old, new = getattr(body, side), getattr(recipe.model, side)
        if (old is None) != (new is None):
            raise InputError(
                f"--init-from: the checkpoint has {'no ' if old is None else 'a '}{side}, "
                f"{recipe.arch}/{recipe.preset} has {'none' if new is None else 'one'}"
            )
        if old is not None:
            stacks[side] = old.model_copy(update={name: getattr(new, name) for name in REGULARIZATION})
    embedding = body.embedding.model_copy(update={"dropout": recipe.model.embedding.dropout})
    model = body.model_copy(update={**stacks, "embedding": embedding, "heads": recipe.model.heads})
    target_seq_len = recipe.data.target_seq_len
    lengths = {
        "seq_len": min(recipe.seq_len, body.max_seq_len),
        "target_seq_len": None if target_seq_len is None else min(target_seq_len, body.longest_target),
    }
    paths = {name: getattr(recipe.tokenizer, name) for name in ("path", "source_path", "target_path")}
    if recipe.tokenizer.chat_template is not None:
        paths["chat_template"] = recipe.tokenizer.chat_template
    return recipe.model_copy(
        update={
            "arch": stored.arch,
            "model_type": stored.model_type,
            "model": model,
            "data": recipe.data.model_copy(update=lengths),
            "tokenizer": _own_tokenizers(stored, paths),
        }
    )


def for_new_data(stored: Recipe, objectives: Sequence[str]) -> Recipe:
    """The stored recipe for other data, another machine and these objectives.

    What belongs to data or machine (`OF_DATA`, `OF_MACHINE`), and what none of the objectives reads, has its default
    again. A number of steps that followed from them is open again.
    """
    training, schedule = with_defaults(stored.training, fields_with(OF_MACHINE, stored.training)), stored.schedule
    if training.minutes is not None:  # the clock decides again
        schedule = schedule.model_copy(update={"points": None})
    if training.max_epochs is not None or training.minutes is not None:
        training = training.model_copy(update={"max_steps": UNLIMITED_STEPS, "eval_every": None, "save_every": None})
    sections: dict[str, Section] = {
        "data": with_defaults(stored.data, fields_with(OF_DATA, stored.data)),
        "training": training,
        "schedule": schedule,
        "generation": stored.generation,
    }
    generator = stored.generator
    if set(objectives) <= OBJECTIVES.keys():  # else loading the recipe raises an error
        for section, _, name in (key.partition(".") for key in unused_keys(objectives)):
            if section in sections and name in type(sections[section]).model_fields:
                sections[section] = with_defaults(sections[section], [name])
    if not any(OBJECTIVES[kind].needs_generator for kind in objectives if kind in OBJECTIVES):
        generator = None
    return stored.model_copy(
        update={
            **sections,
            "tokenizer": _own_tokenizers(stored, {"path": None, "source_path": None, "target_path": None}),
            "generator": generator,
            "teacher": None,
            "lora": None,
            "embeddings": Embeddings(),
        }
    )


def _own_tokenizers(stored: Recipe, paths: Mapping[str, str | None]) -> Tokenizer:
    """The stored tokenizer section with other files and the checkpoint's number of vocabularies."""
    return stored.tokenizer.model_copy(update={**paths, "separate": stored.separate_vocabularies})


def fields_with(fact: str, section: Section) -> list[str]:
    """The names of the fields that state this fact."""
    return [name for name, field in type(section).model_fields.items() if fact in field.metadata]


def with_defaults(section: Section, names: Iterable[str]) -> Any:
    """The section with the defaults of these fields."""
    fields = type(section).model_fields
    return section.model_copy(update={name: fields[name].get_default() for name in names})


def preset_for(checkpoint: Checkpoint, objectives: Sequence[str]) -> str | None:
    """The preset of a training whose objectives teach a pre-trained encoder labels; None: the checkpoint's recipe.

    The recipe of an imported model is one for fine-tuning already.
    """
    stored = checkpoint.recipe
    is_body = not any(each.objective.trains_bodies for each in stored.objectives) and stored.model.decoder is None
    adapts = is_body and any(OBJECTIVES[kind].trains_bodies for kind in objectives if kind in OBJECTIVES)
    return FINE_TUNING if adapts and not is_imported(checkpoint) else None


def is_imported(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is another library's."""
    return "imported" in checkpoint.trainer


def with_adapters(recipe: Recipe, checkpoint: Checkpoint) -> Recipe:
    """The recipe whose adapters, if it has any, name the checkpoint as their base.

    Raises InputError for a base that is made of adapters itself, and for a rank that no matrix has.
    """
    if recipe.lora is None:
        return recipe
    if isinstance(checkpoint, AdaptedCheckpoint):
        raise InputError(
            f"--lora: {checkpoint.path} holds adapters itself, expected a whole model",
            hint=f"make it one: tformer merge {checkpoint.path} --out DIR; or train all its weights without --lora",
        )
    specs = checkpoint.specs("weights").items()
    most = max(min(spec.shape) for name, spec in specs if name.startswith(("encoder.", "decoder.")) and spec.shape[1:])
    if (rank := recipe.lora.rank) > most:
        raise InputError(f"--lora: lora.rank: found {rank}, expected at most {most}, the smaller side of the matrices")
    base = LoraBase(path=str(checkpoint.path.absolute()), sha256=checkpoint.sha256)
    return recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"base": base})})
