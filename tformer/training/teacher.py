"""Distillation teacher: loading, compatibility checks with the student, and the distillation objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from tformer.build import build_model
from tformer.decoding.inference import cast_matrices
from tformer.loading import Loaded, decoder_tokens_of
from tformer.model import Transformer
from tformer.nn.stack import Block
from tformer.objectives.base import Objective
from tformer.objectives.distillation import Distillation, LayerPair, teacher_layer
from tformer.recipe.recipe import Recipe, SpecialTokens
from tformer.recipe.recipe import Teacher as TeacherSection
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer

SIDES = ("encoder", "decoder")
PARTS = (*SIDES, "patches")


def check_teacher(recipe: Recipe, teacher: Loaded) -> None:
    """Raise InputError for a teacher that cannot teach this model, before any data is read."""
    section, own = recipe.teacher, teacher.recipe
    assert section is not None
    for part in PARTS if section.kind == "soft" else SIDES:
        if (getattr(own.model, part) is None) != (getattr(recipe.model, part) is None):
            has, lacks = ("the teacher", "the student")
            if getattr(own.model, part) is None:
                has, lacks = lacks, has
            raise InputError(
                f"teacher: {teacher.path} is another kind of model ({own.arch}) than its student ({recipe.arch}): "
                f"{has} has model.{part}, {lacks} has none",
                hint=f"a student of its kind: --arch {own.arch}",
            )
    heads = {head.kind: head for head in own.model.heads}
    for objective in recipe.objectives:
        wanted = objective.objective.head
        if wanted.kind not in heads:
            raise InputError(
                f"teacher: {teacher.path} has no head of kind {wanted.kind}, which the objective {objective.kind} "
                f"learns from; it has {', '.join(heads) or 'none'}",
                hint="train or fine-tune the teacher with the student's objective first",
            )
        if heads[wanted.kind].label_kind != wanted.label_kind:
            found = "several labels" if heads[wanted.kind].label_kind == "labels" else "one label"
            raise InputError(f"teacher: {teacher.path} gives each example {found}, the objective is {objective.kind}")
    if section.kind == "soft":
        _check_inputs(recipe, teacher)
        _check_layers(recipe, teacher)


def _check_inputs(recipe: Recipe, teacher: Loaded) -> None:
    """Raise InputError for a teacher that cannot read the student's batches."""
    own = teacher.recipe.model
    if own.patches is not None and recipe.model.patches is not None:
        for name in ("image_size", "channels"):
            ours, theirs = getattr(recipe.model.patches, name), getattr(own.patches, name)
            if ours != theirs:
                raise InputError(f"teacher: model.patches.{name}: the student's is {ours}, the teacher's {theirs}")
        return
    for key, longest, most in (
        ("seq_len", recipe.seq_len, own.max_seq_len),
        ("target_seq_len", recipe.target_seq_len, own.longest_target),
    ):
        if longest > most:
            raise InputError(
                f"teacher: {teacher.path} reads {most} tokens, the student's batches have up to {longest}",
                hint=f"--set data.{key}={most}",
            )
    types, own_types = recipe.model.embedding.token_types, own.embedding.token_types
    if types > max(1, own_types):
        raise InputError(
            f"teacher: model.embedding.token_types: the student's is {types}, the teacher's {own_types}",
            hint=f"--set model.embedding.token_types={own_types}",
        )


def _check_layers(recipe: Recipe, teacher: Loaded) -> None:
    """Raise InputError for widths or heads of layers that cannot be compared."""
    section = recipe.teacher
    assert section is not None
    if not (section.hidden or section.attention):
        return
    student = build_model(
        recipe.model,
        vocab_size=1 if teacher.tokenizer is None else teacher.tokenizer.vocab_size,
        target_vocab_size=None if teacher.own_target_tokenizer is None else teacher.own_target_tokenizer.vocab_size,
        num_labels=len(recipe.data.labels or teacher.recipe.data.labels) or None,
        device="meta",
    )
    patches, own_patches = recipe.model.patches, teacher.recipe.model.patches
    if patches and own_patches and (patches.side, patches.cls) != (own_patches.side, own_patches.cls):
        key = "hidden" if section.hidden else "attention"
        raise InputError(
            f"teacher.{key}: the student cuts images into {recipe.seq_len} positions, the teacher into "
            f"{teacher.recipe.seq_len}",
            hint=f"--set model.patches.size={own_patches.size}, or --set teacher.{key}=0",
        )
    for side in SIDES:
        ours, theirs = getattr(student, side), getattr(teacher.model, side)
        if ours is None:
            continue
        if section.hidden and ours.d_model != theirs.d_model:
            raise InputError(
                f"teacher.hidden: the student's {side} is {ours.d_model} wide, the teacher's {theirs.d_model}: hidden "
                "states of different widths cannot be compared",
                hint=f"--set model.d_model={theirs.d_model}, or --set teacher.hidden=0",
            )
        if section.attention and ours.layerdrop:
            raise InputError(
                f"teacher.attention: found {section.attention:g}, expected 0 with model.{side}.layerdrop: a layer that "
                "is skipped has no attention weights"
            )
    for pair in layer_pairs(student, teacher.model, "attention") if section.attention else ():
        _check_attention(pair, student, teacher.model)


def _check_attention(pair: LayerPair, student: Transformer, teacher: Transformer) -> None:
    side, number, kind, _ = pair.student.split(".")
    other = int(pair.teacher.split(".")[1])
    layers: list[Any] = [
        getattr(getattr(model, side).layers[place], kind) for model, place in ((student, int(number)), (teacher, other))
    ]
    for who, name, layer in zip(("student", "teacher"), pair, layers, strict=True):
        if not layer.mechanism.reads_dense_mask:
            raise InputError(
                f"teacher.attention: {name.removesuffix('.weights')} of the {who} forms no attention weights over all "
                "positions",
                hint="full attention does; or --set teacher.attention=0",
            )
    ours, theirs = (layer.num_heads for layer in layers)
    if ours != theirs:
        raise InputError(
            f"teacher.attention: layer {number} of the student's {side} has {ours} heads, the teacher's {theirs}: "
            "attention of different heads cannot be compared",
            hint=f"--set model.{side}.num_heads={theirs}, or --set teacher.attention=0",
        )


def layer_pairs(student: Transformer, teacher: Transformer, what: str) -> list[LayerPair]:
    """Every layer of the student with the corresponding one of the teacher: taps of `hidden` states or `attention`."""
    pairs = []
    for side in SIDES:
        ours, theirs = getattr(student, side), getattr(teacher, side)
        if ours is None:
            continue
        sizes = {"student_layers": len(ours.layers), "teacher_layers": len(theirs.layers)}
        for number, block in enumerate(cast("list[Block]", ours.layers)):
            other = teacher_layer(number, **sizes)
            taps = ["hidden"] if what == "hidden" else ["self_attention.weights"]
            taps += ["cross_attention.weights"] if what == "attention" and block.cross_attention is not None else []
            pairs += [LayerPair(f"{side}.{number}.{tap}", f"{side}.{other}.{tap}") for tap in taps]
    return pairs


def check_vocabulary(recipe: Recipe, teacher: Loaded, tokenizer: Tokenizer | None, target: Tokenizer | None) -> None:
    """Raise InputError for another vocabulary, other labels or image statistics than the teacher's.

    `tokenizer` and `target` are the student's; `target` is None where one serves both sides.
    """
    if recipe.teacher is None or recipe.teacher.kind == "sequence":
        return  # the student learns from texts, which any vocabulary can encode
    if tokenizer is not None:
        _same_vocabulary(teacher, tokenizer, teacher.text_tokenizer, "source " if target is not None else "")
        _same_vocabulary(teacher, target or tokenizer, teacher.target_tokenizer, "target " if target else "")
        if recipe.model.is_encoder_decoder and decoder_tokens_of(recipe, target or tokenizer) != teacher.decoder_tokens:
            raise InputError(
                f"teacher: {teacher.path} begins or ends a target with other tokens than the student "
                "(tokenizer.special_ids)"
            )
    for name in ("image_mean", "image_std") if recipe.model.patches is not None else ():
        ours, theirs = getattr(recipe.data, name), getattr(teacher.recipe.data, name)
        if ours != theirs:
            raise InputError(
                f"teacher: data.{name}: the student's is {list(ours)}, the teacher's {list(theirs)}",
                hint=f"leave data.{name} out: the student takes its teacher's",
            )
    label_order(recipe, teacher)


def _same_vocabulary(teacher: Loaded, ours: Tokenizer, theirs: Tokenizer, side: str) -> None:
    same_tokens = ours.sha256 == theirs.sha256 or ours.tokens == theirs.tokens
    if same_tokens and ours.special == theirs.special:
        return
    if same_tokens:
        raise InputError(
            f"teacher: {teacher.path} has other special {side}tokens than the student (tokenizer.special_ids)"
        )
    raise InputError(
        f"teacher: {teacher.path} has another {side}vocabulary than the student ({theirs.vocab_size:,} and "
        f"{ours.vocab_size:,} tokens, sha256 {theirs.sha256[:8]} and {ours.sha256[:8]})",
        hint="leave the tokenizer out: the student takes its teacher's; of pairs --distil sequence needs no common one",
    )


def label_order(recipe: Recipe, teacher: Loaded) -> list[int] | None:
    """The index of each of the student's labels among the teacher's; None: no labels, or the same order.

    Raises InputError for labels that only one of them has.
    """
    ours, theirs = recipe.data.labels, teacher.recipe.data.labels
    if not ours or ours == theirs:
        return None
    if set(ours) != set(theirs):
        odd = sorted(set(ours) ^ set(theirs))
        who = "the student" if odd[0] in ours else "the teacher"
        raise InputError(
            f"teacher: {teacher.path} has {len(theirs)} labels, the student {len(ours)}: only {who} has '{odd[0]}'",
            hint="both must learn the same labels; their order may differ",
        )
    return [theirs.index(name) for name in ours]


def with_teacher_vocabulary(recipe: Recipe, teacher: Loaded) -> Recipe:
    """The student's recipe with the teacher's vocabularies and image statistics where it sets none."""
    tokenizer, model, data = recipe.tokenizer, recipe.model, recipe.data
    if uses_teacher_tokenizer(recipe) and teacher.tokenizer is not None:
        separate = teacher.own_target_tokenizer is not None
        ids = tokenizer.special_ids
        ids = teacher.recipe.tokenizer.special_ids if ids == SpecialTokens() else ids
        tokenizer = tokenizer.model_copy(update={"separate": separate, "special_ids": ids})
        if separate and model.is_encoder_decoder:
            model = model.model_copy(update={"tie": model.tie.model_copy(update={"source_target": False})})
    if model.patches is not None and not (data.image_mean and data.image_std):
        own = teacher.recipe.data
        data = data.model_copy(update={"image_mean": own.image_mean, "image_std": own.image_std})
    return recipe.model_copy(update={"tokenizer": tokenizer, "model": model, "data": data})


def uses_teacher_tokenizer(recipe: Recipe) -> bool:
    """Whether the recipe names no tokenizer file, so that the student uses its teacher's tokenizer."""
    named = recipe.tokenizer
    return named.path is None and named.source_path is None and named.target_path is None


def describe_teacher(section: TeacherSection, teacher: Loaded) -> Iterator[str]:
    """Messages about the teacher for the user."""
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
    """The objective of a student with soft targets. Moves the teacher to the device and casts it to `dtype`.

    wrap: gives the callable of the teacher: the model itself, or a compiled one.
    """
    section = recipe.teacher
    assert section is not None
    model = teacher.model.requires_grad_(False)
    cast_matrices(model, dtype)
    model.to(device)
    order = label_order(recipe, teacher)
    return Distillation(
        inner,
        wrap(model),
        order_L=None if order is None else torch.tensor(order, device=device),
        temperature=section.temperature,
        alpha=section.alpha,
        hidden=section.hidden,
        attention=section.attention,
        hidden_pairs=layer_pairs(student, teacher.model, "hidden"),
        attention_pairs=layer_pairs(student, teacher.model, "attention"),
        image_positions=recipe.seq_len if recipe.model.patches is not None else None,
    )
