"""What `tformer prune` measures on: the data that `tformer evaluate` would read, as samples and their objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tformer.cli.evaluate_families import (
    DAMAGED,
    IMAGES,
    LABELLED,
    MASKED,
    PAIRS,
    TEXT,
    check_family,
    family_of,
)
from tformer.cli.evaluate_labelled import read_images, read_texts
from tformer.cli.evaluate_masked import masked_batch, masked_objective, read_sentences, read_windows
from tformer.cli.evaluate_pairs import read_pairs
from tformer.cli.evaluate_request import Request
from tformer.cli.evaluate_text import read_corpora
from tformer.cli.process import StopFlag
from tformer.cli.report import console
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.loading import Loaded
    from tformer.objectives.base import Objective
    from tformer.workflows.prune import HeldOut

Found = tuple[Any, "Objective", str, int | None]
"""(samples, the objective that reads them, what they are called, how many at a time unless asked otherwise)"""


def held_out_data(loaded: Loaded, request: Request, flag: StopFlag, *, max_examples: int | None) -> HeldOut:
    """The named data, else the run's validation data; at most so many examples of it, evenly spread.

    Raises InputError for options that mean nothing to the model, and for data that cannot be read or has no examples.
    """
    from tformer.workflows.prune import HeldOut, Spread

    family = family_of(loaded, request)
    try:
        check_family(request, family, loaded)
    except InputError as error:
        error.hint = None  # it speaks of the options of `tformer evaluate`
        raise
    if (note := request.note(loaded)) is not None:
        console.print(note, style="dim", markup=False)
    samples, objective, name, batch_size = READERS[family.name](loaded, request, flag)
    if flag.should_stop():
        raise flag.interrupted("interrupted while reading the data, nothing written")
    if not len(samples):
        raise InputError(f"{name}: no examples to measure on")
    if max_examples is not None and len(samples) > max_examples:
        name = f"{max_examples:,} of {len(samples):,} examples of {name}"
        samples = Spread(samples, max_examples)
    return HeldOut(
        name=name,
        samples=samples,
        objective=objective,
        recipe=loaded.recipe,
        batch_size=request.batch_size or batch_size,
        should_stop=flag.should_stop,
    )


def _text(loaded: Loaded, request: Request, flag: StopFlag) -> Found:
    from tformer.evaluation.lm import isolates_documents
    from tformer.objectives import build_objective
    from tformer.training.tokenizers import text_context
    from tformer.workflows.prune import LmText

    recipe = loaded.recipe
    corpora = read_corpora(loaded, request, flag)
    samples = LmText([corpus for _, corpus in corpora], recipe.seq_len, document_mask=isolates_documents(recipe.data))
    objective = build_objective(recipe.objectives, text_context(recipe, loaded.text_tokenizer))
    return samples, objective, ", ".join(name for name, _ in corpora), None


def _masked(loaded: Loaded, request: Request, flag: StopFlag) -> Found:
    kinds = {objective.kind for objective in loaded.recipe.objectives}
    if "replaced_token" in kinds and loaded.recipe.generator is None:
        raise InputError(
            f"{loaded.path} is a discriminator without its generator: nothing replaces the tokens that it would find",
            hint="--no-evaluate prunes layers without measuring",
        )
    samples, name = (read_sentences if "next_sentence" in kinds else read_windows)(loaded, request, flag)
    return samples, masked_objective(loaded), name, masked_batch(loaded)


def _damaged(loaded: Loaded, request: Request, flag: StopFlag) -> Found:
    from tformer.evaluation.masked import masked_samples
    from tformer.objectives import build_objective
    from tformer.training.text_material import validation_batch
    from tformer.training.tokenizers import decoder_context

    recipe, tokenizer = loaded.recipe, loaded.text_tokenizer
    corpora = read_corpora(loaded, request, flag)
    objective = build_objective(recipe.objectives, decoder_context(recipe, tokenizer))
    samples = masked_samples(
        recipe, [corpus for _, corpus in corpora], tokenizer, room=getattr(objective, "room", None)
    )
    return samples, objective, ", ".join(name for name, _ in corpora), validation_batch(recipe.seq_len)


def _pairs(loaded: Loaded, request: Request, flag: StopFlag) -> Found:
    from tformer.objectives import build_objective
    from tformer.training.tokenizers import decoder_context

    pairs, name = read_pairs(loaded, request, flag)
    context = decoder_context(loaded.recipe, loaded.text_tokenizer, loaded.own_target_tokenizer)
    return pairs, build_objective(loaded.recipe.objectives, context), name, None


def _labelled(loaded: Loaded, request: Request, flag: StopFlag) -> Found:
    from tformer.evaluation.classifier import plain_objective

    samples, name, _ = read_texts(loaded, request, flag)
    return samples, plain_objective(loaded), name, None


def _images(loaded: Loaded, request: Request, flag: StopFlag) -> Found:
    from tformer.evaluation.classifier import plain_objective

    samples, name = read_images(loaded, request, flag)
    return samples, plain_objective(loaded), name, None


READERS: dict[str, Callable[[Loaded, Request, StopFlag], Found]] = {
    TEXT.name: _text,
    MASKED.name: _masked,
    DAMAGED.name: _damaged,
    PAIRS.name: _pairs,
    LABELLED.name: _labelled,
    IMAGES.name: _images,
}
