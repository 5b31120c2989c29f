"""Documents split into sentences: pairs of segments for masked LM + next sentence (BERT, arXiv 1810.04805)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tformer.data.batching.sentences import SentenceCorpus, SentencePairs, prepare_sentences
from tformer.data.sources.text import TextSource, open_sources
from tformer.loading import Loaded
from tformer.objectives import build_objective
from tformer.objectives.base import ObjectiveContext
from tformer.recipe.recipe import Recipe
from tformer.tasks.base import (
    ChosenData,
    GivenExample,
    HeldOut,
    Tokenizers,
    TrainingData,
    TrainingSets,
    note_rows,
    positions_of,
)
from tformer.tasks.baselines import label_baselines
from tformer.tasks.labelled import labelled_sample
from tformer.tasks.masked_text import MaskedText
from tformer.tasks.text import note_text, opening_of
from tformer.tokenizer import Tokenizer
from tformer.workers.work import Work

VALIDATION_PAIRS = 64  # of a batch


class Sentences(MaskedText):
    """Documents split into sentences, evaluated like masked text on pairs of sentences."""

    tokenizer_texts = "sentences"

    def tokenize(self, sets: TrainingSets, sources: Sequence[Any], *, validation: bool) -> Sequence[Any]:
        """Errors: fewer than two documents, or no document of two sentences."""
        return [_read_sentences(sources, sets.tokenizer, sets.work)]

    def assembled(self, sets: TrainingSets) -> TrainingData:
        recipe, tokenizer, [train], [valid] = sets.recipe, sets.tokenizer, sets.train, sets.valid
        context = self.context(recipe, tokenizer)
        pairs, valid_pairs = (_pairs(recipe, part, tokenizer) for part in (train, valid))
        note_text(sets.start, sets.sources, sets.work)
        sets.work.note(f"data: {len(pairs):,} pairs of sentences to train on, {len(valid_pairs):,} to validate on")
        held_out = HeldOut("", valid_pairs, build_objective(recipe.objectives, context), recipe, VALIDATION_PAIRS)
        return TrainingData(
            samples=pairs,
            validate=held_out.validate,
            context=context,
            fingerprint=f"{train.fingerprint}-{valid.fingerprint}",
            tokens_per_sample=recipe.seq_len,
            valid_tokens=positions_of(valid_pairs, recipe.seq_len),
            baselines=lambda objective: label_baselines(objective, pairs, valid_pairs, num_ids=tokenizer.vocab_size),
            first_try=self.first_try(recipe, opening_of(valid.ids, tokenizer)),
        )

    def sample_of(self, recipe: Recipe, tokenizers: Tokenizers, given: GivenExample) -> tuple[Any, ObjectiveContext]:
        """A sample of a text and its next sentence."""
        given.require("text", "text2", reader=self.description)
        tokenizer, _ = tokenizers
        assert tokenizer is not None
        sample = labelled_sample(recipe, tokenizer, given)
        return replace(sample, label=0), self.context(recipe, tokenizer)

    def held_out(self, loaded: Loaded, data: ChosenData, work: Work) -> HeldOut:
        recipe, tokenizer = loaded.recipe, loaded.text_tokenizer
        sources = open_sources(data.specs, columns=data.columns, reading=data.reading)
        work.note_all(*sources)
        note_rows(sources, work)
        name = ", ".join(source.name for source in sources)
        sentences = _read_sentences(sources, tokenizer, work)
        if data.held_out:
            _, sentences = sentences.split(fraction=recipe.data.valid_fraction)
            name = f"the last {recipe.data.valid_fraction:.0%} of {name}"
        return HeldOut(
            name, _pairs(recipe, sentences, tokenizer), self.loaded_objective(loaded), recipe, VALIDATION_PAIRS
        )


def _read_sentences(sources: Sequence[TextSource], tokenizer: Tokenizer, work: Work) -> SentenceCorpus:
    with work.part(f"splitting {', '.join(source.name for source in sources)} into sentences", unit="B") as part:
        return prepare_sentences(sources, tokenizer, work=part)


def _pairs(recipe: Recipe, sentences: SentenceCorpus, tokenizer: Tokenizer) -> SentencePairs:
    return SentencePairs(
        sentences,
        tokenizer,
        seq_len=recipe.seq_len,
        seed=recipe.seed,
        token_types=recipe.model.embedding.token_types > 1,
    )
