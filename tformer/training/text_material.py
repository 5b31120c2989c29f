"""Running text as material: token corpora cut into windows, for language models and for models that restore text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from tformer.data.batching.mixture import MixedWindows
from tformer.data.batching.windows import LmWindows
from tformer.data.shards.corpus import TokenCorpus
from tformer.evaluation.lm import combine_validation, evaluate_lm, isolates_documents
from tformer.evaluation.masked import masked_samples
from tformer.evaluation.predict import evaluate_objective
from tformer.objectives import build_objective
from tformer.objectives.base import Objective, ObjectiveContext
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer
from tformer.training.corpora import Corpora, check_validation, open_text, prepare_corpora
from tformer.training.material import Material, ShouldStop, Sources
from tformer.training.tokenizers import decoder_context, obtain_tokenizer, require_mask, require_sentinels, text_context

VALIDATION_TOKENS = 16384  # in a batch
VALIDATION_WINDOWS = 64  # in a batch, at most


def validation_batch(seq_len: int) -> int:
    """Windows in a batch of a validation: an evaluation with as many damages texts in the same way."""
    return max(1, min(VALIDATION_WINDOWS, VALIDATION_TOKENS // seq_len))


def text_material(sources: Sources) -> Material:
    """Tokenise the texts and cut them. Errors: too little text, a tokenizer without the tokens that are needed."""
    recipe = sources.recipe
    train = open_text(recipe.data.train, recipe.data)
    valid = open_text(recipe.data.valid, recipe.data) if recipe.data.valid else []

    def documents() -> Iterator[str]:
        for source in train:
            for piece in source.documents():
                yield piece.text

    sizes = [source.size_bytes() for source in train]
    size = None if None in sizes else sum(size for size in sizes if size is not None)
    tokenizer = obtain_tokenizer(sources, documents, size_bytes=size)
    kind = recipe.objectives[0].kind
    REQUIREMENTS.get(kind, require_mask)(tokenizer, kind)
    corpora = prepare_corpora(
        recipe,
        train,
        valid,
        tokenizer,
        cache_dir=sources.cache_dir,
        progress=sources.progress,
        should_stop=sources.should_stop,
    )
    context = _context(recipe, tokenizer)
    samples = _cut(recipe, corpora.train, tokenizer, context)
    check_validation(corpora)
    notes = [note for corpus in (*corpora.train, *corpora.valid) for note in corpus.notes]
    notes = list(dict.fromkeys([*(note for source in train for note in source.notes), *notes]))
    if not recipe.data.train:
        notes.append("no --data: training on the documentation that comes with Python (builtin:python-docs)")
    if len(corpora.train) > 1:
        total = sum(corpora.weights)
        pairs = zip(corpora.train, corpora.weights, strict=True)
        notes.append("mixture: " + ", ".join(f"{corpus.name} {weight / total:.1%}" for corpus, weight in pairs))
    tokens, held_out = (sum(len(corpus) for corpus in part) for part in (corpora.train, corpora.valid))
    notes.append(f"data: {tokens:,} training tokens, {held_out:,} validation tokens")
    mixed = samples[0] if len(samples) == 1 else MixedWindows(samples, corpora.weights, seed=recipe.seed)
    return Material(
        recipe=recipe,
        tokenizer=tokenizer,
        samples=mixed,
        validate=functools.partial(VALIDATIONS.get(kind, _validate_masked), recipe, corpora, tokenizer),
        context=context,
        fingerprint=corpora.fingerprint,
        notes=tuple(notes),
        packed=recipe.data.packing == "concat" and not recipe.data.document_mask,
        tokens_per_sample=recipe.seq_len,
    )


def _context(recipe: Recipe, tokenizer: Tokenizer) -> ObjectiveContext:
    both = recipe.model.encoder is not None and recipe.model.decoder is not None
    return decoder_context(recipe, tokenizer) if both else text_context(recipe, tokenizer)


def _cut(
    recipe: Recipe, corpora: tuple[TokenCorpus, ...], tokenizer: Tokenizer, context: ObjectiveContext
) -> list[Any]:
    """One set of windows per corpus. Errors: a corpus shorter than one window."""
    if recipe.objectives[0].kind != "causal_lm":
        # Objectives that damage the text themselves say how much of it they take.
        damages = context.target is not None
        room = getattr(build_objective(recipe.objectives, context), "room", None) if damages else None
        return masked_samples(recipe, corpora, tokenizer, room=room).parts
    data = recipe.data
    return [
        LmWindows(corpus, recipe.seq_len, packing=data.packing, seed=recipe.seed, document_mask=data.document_mask)
        for corpus in corpora
    ]


def _validate_causal(
    recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer, model: Any, objective: Objective, should_stop: ShouldStop
) -> dict[str, Any] | None:
    parts = []
    for corpus in corpora.valid:
        values = evaluate_lm(
            model,
            corpus,
            seq_len=recipe.seq_len,
            batch_size=validation_batch(recipe.seq_len),
            document_mask=isolates_documents(recipe.data),
            should_stop=should_stop,
        )
        if should_stop():
            return None
        parts.append(values)
    values = combine_validation(parts)
    values.pop("tokens_per_second", None)
    return values


def _validate_masked(
    recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer, model: Any, objective: Objective, should_stop: ShouldStop
) -> dict[str, Any] | None:
    """The objective's own loss on every validation text, under masks that stay the same."""
    values = evaluate_objective(
        model,
        objective,
        masked_samples(recipe, corpora.valid, tokenizer, room=getattr(objective, "room", None)),
        batch_size=validation_batch(recipe.seq_len),
        seed=recipe.seed,
        should_stop=should_stop,
    )
    return None if should_stop() else values


VALIDATIONS = {"causal_lm": _validate_causal}
REQUIREMENTS: dict[str, Callable[[Tokenizer, str], None]] = {
    "causal_lm": lambda tokenizer, objective: None,
    "span_corruption": require_sentinels,
}
