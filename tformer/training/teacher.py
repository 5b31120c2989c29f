"""The teacher of a run: loaded, its words handed on, and made part of the student's objective.

What must fit together, and how that is told, stands in `teacher_checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from tformer.decoding.precision import cast_matrices
from tformer.errors import InputError
from tformer.loading import Loaded, load
from tformer.model import Transformer
from tformer.objectives import distillation
from tformer.objectives.base import Objective, SharedObjective
from tformer.objectives.distillation import Distillation
from tformer.recipe.recipe import Recipe, SpecialTokens
from tformer.recipe.recipe import Teacher as TeacherSection
from tformer.training.teacher_checks import label_order, layer_pairs


def open_teacher(section: TeacherSection, *, hint: str | None = None) -> Loaded:
    """The model that `teacher.path` names, on the CPU.

    Raises InputError for what cannot be loaded, with `hint` or one of its own.
    """
    assert section.path is not None
    try:
        return load(section.path)
    except InputError as error:
        raise InputError(f"teacher.path: {error.message}", hint=hint or error.hint) from error


def with_teachers_words(recipe: Recipe, teacher: Loaded) -> Recipe:
    """The student's recipe with the teacher's vocabularies and image statistics, where it has named none of its own."""
    tokenizer, model, data = recipe.tokenizer, recipe.model, recipe.data
    if takes_tokenizer(recipe) and teacher.tokenizer is not None:
        separate = teacher.own_target_tokenizer is not None
        ids = tokenizer.special_ids
        ids = teacher.recipe.tokenizer.special_ids if ids == SpecialTokens() else ids
        tokenizer = tokenizer.model_copy(update={"separate": separate, "special_ids": ids})
        if separate and model.encoder is not None and model.decoder is not None:
            model = model.model_copy(update={"tie": model.tie.model_copy(update={"source_target": False})})
    if model.patches is not None and not (data.image_mean and data.image_std):
        own = teacher.recipe.data
        data = data.model_copy(update={"image_mean": own.image_mean, "image_std": own.image_std})
    return recipe.model_copy(update={"tokenizer": tokenizer, "model": model, "data": data})


def takes_tokenizer(recipe: Recipe) -> bool:
    """Whether the recipe leaves the tokenizer to its teacher."""
    named = recipe.tokenizer
    return named.path is None and named.source_path is None and named.target_path is None


def describe_teacher(section: TeacherSection, teacher: Loaded) -> Iterator[str]:
    """What a person should know of it."""
    how = f"soft targets at temperature {section.temperature:g}, labels at {section.alpha:g}"
    if section.kind == "sequence":
        how = "its translations of the training sources"
    parts = [f"{name} {getattr(section, name):g}" for name in ("hidden", "attention") if getattr(section, name)]
    how = ", ".join([how, *(parts if section.kind == "soft" else ())])
    yield f"teacher: {teacher.path} (step {teacher.step}), {teacher.model.num_parameters():,} parameters; {how}"
    yield from (f"teacher: {note}" for note in teacher.notes)


def make_distillation(
    recipe: Recipe,
    inner: Objective,
    student: Transformer,
    teacher: Loaded,
    *,
    device: torch.device,
    dtype: torch.dtype,
    wrap: Callable[[Transformer], Callable[..., Any]] = lambda model: model,
) -> Distillation:
    """The objective of a student with soft targets. The teacher moves to the device and computes in `dtype` from here.

    `wrap` makes of the teacher what is called: the model itself, or compiled.
    """
    section = recipe.teacher
    assert section is not None
    model = teacher.model.requires_grad_(False)
    cast_matrices(model, dtype)
    model.to(device)
    order = label_order(recipe, teacher)
    return Distillation(
        cast(SharedObjective, inner),
        distillation.Teacher(wrap(model), None if order is None else torch.tensor(order, device=device)),
        kinds=[objective.kind for objective in recipe.objectives],
        temperature=section.temperature,
        alpha=section.alpha,
        hidden=section.hidden,
        attention=section.attention,
        hidden_pairs=layer_pairs(student, teacher.model, "hidden"),
        attention_pairs=layer_pairs(student, teacher.model, "attention"),
        image_positions=recipe.seq_len if recipe.model.patches is not None else None,
    )
