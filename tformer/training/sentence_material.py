"""Documents split into sentences as material: pairs for masked LM + next sentence (BERT, arXiv 1810.04805)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from tformer.data.batching.sentences import (
    SentenceCorpus,
    SentencePairs,
    prepare_sentences,
)
from tformer.data.sources.text import TextSource
from tformer.evaluation.predict import evaluate_objective
from tformer.objectives.base import Objective
from tformer.recipe.recipe import Recipe
from tformer.training.corpora import open_text
from tformer.training.material import Material, ShouldStop, Sources
from tformer.training.tokenizers import obtain_tokenizer, require_mask, text_context

VALIDATION_EXAMPLES = 64  # in a batch


def sentence_material(sources: Sources) -> Material:
    """Split, tokenise and pair the sentences. Errors: fewer than two documents, or no document of two sentences."""
    recipe = sources.recipe
    train = open_text(recipe.data.train, recipe.data)
    valid = open_text(recipe.data.valid, recipe.data) if recipe.data.valid else []

    def documents() -> Iterator[str]:
        for source in train:
            for piece in source.documents():
                yield piece.text

    tokenizer = obtain_tokenizer(sources, documents)
    require_mask(tokenizer, "masked_lm")

    def prepare(texts: list[TextSource]) -> SentenceCorpus:
        names = ", ".join(source.name for source in texts)
        with sources.progress(f"splitting {names} into sentences") as report:
            return prepare_sentences(texts, tokenizer, progress=report, should_stop=sources.should_stop)

    sentences = prepare(train)
    if valid:
        held_out = prepare(valid)
    else:
        sentences, held_out = sentences.split(fraction=recipe.data.valid_fraction)
    seq_len = recipe.seq_len
    pairs, held_out_pairs = (
        SentencePairs(
            part, tokenizer, seq_len=seq_len, seed=recipe.seed, token_types=recipe.model.embedding.token_types > 1
        )
        for part in (sentences, held_out)
    )
    notes = [note for source in (*train, *valid) for note in source.notes]
    if not recipe.data.train:
        notes.append("no --data: training on the documentation that comes with Python (builtin:python-docs)")
    notes.append(f"data: {len(pairs):,} pairs of sentences to train on, {len(held_out_pairs):,} to validate on")
    return Material(
        recipe=recipe,
        tokenizer=tokenizer,
        samples=pairs,
        validate=functools.partial(_validate, recipe, held_out_pairs),
        context=text_context(recipe, tokenizer),
        fingerprint=f"{sentences.fingerprint}-{held_out.fingerprint}",
        notes=tuple(dict.fromkeys(notes)),
        tokens_per_sample=seq_len,
    )


def _validate(
    recipe: Recipe, pairs: SentencePairs, model: Any, objective: Objective, should_stop: ShouldStop
) -> dict[str, Any] | None:
    values = evaluate_objective(
        model, objective, pairs, batch_size=VALIDATION_EXAMPLES, seed=recipe.seed, should_stop=should_stop
    )
    return None if should_stop() else values
