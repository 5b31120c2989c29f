"""Pairs of texts as material: one or several tasks, a tokenizer for both sides or one for each, a part held out."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tformer.data.pair_mixture import MixedPairs
from tformer.data.pair_set import PairTokens, join_pairs, split_pairs
from tformer.data.pair_tokens import tokenise_pairs
from tformer.data.pairs import PairSource, open_pairs
from tformer.decoding.beam_settings import BeamSettings
from tformer.decoding.translate import Translator
from tformer.evaluation.translation import evaluate_pairs, evaluate_translation
from tformer.loading import decoder_tokens_of
from tformer.objectives.base import Objective
from tformer.recipe.data import SourceSpec
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer
from tformer.training.material import Material, Samples, ShouldStop, Sources
from tformer.training.tokenizers import decoder_context, obtain_tokenizers

BUILTIN = "builtin:dates"
VALIDATION_TOKENS = 4096  # in a batch
SAMPLES = 2  # pairs that people see after each validation


@dataclass(frozen=True)
class Vocabularies:
    """The tokenizers of both sides; `own_target` is None where one serves both."""

    source: Tokenizer
    own_target: Tokenizer | None

    @property
    def target(self) -> Tokenizer:
        return self.own_target or self.source


def pair_material(sources: Sources) -> Material:
    """Read, tokenise and filter the pairs. Errors: files of different length, a missing column, no pair left."""
    recipe = sources.recipe
    specs = recipe.data.train or (SourceSpec(path=BUILTIN),)
    train, valid = (_open(recipe, part) for part in (specs, recipe.data.valid))
    vocabularies = Vocabularies(*obtain_tokenizers(sources, _texts(train, "source"), _texts(train, "target")))
    weighted = any(spec.weight is not None for spec in specs)
    tasks = tuple(source.task for source in train)
    parts = [_tokenise(sources, vocabularies, source, tasks) for source in train]
    if valid:
        held_out = join_pairs([_tokenise(sources, vocabularies, source, tasks, keep_all=True) for source in valid])
    else:
        parts, held_out = _hold_out(recipe, parts)
    samples: Samples
    mixed = []
    if not weighted:
        samples = join_pairs(parts)
    else:
        weights = [1.0 if spec.weight is None else spec.weight for spec in specs]
        samples = MixedPairs(parts, weights, seed=recipe.seed)
        shares = [f"{part.name} {weight / sum(weights):.1%}" for part, weight in zip(parts, weights, strict=True)]
        mixed = [f"mixture: {', '.join(shares)}"]
    notes = [note for source in (*train, *valid) for note in source.notes]
    notes += [note for part in (*parts, held_out) for note in part.notes]
    if not recipe.data.train:
        notes.append("no --data: learning to read dates as people write them (builtin:dates)")
    notes += mixed
    notes.append(f"data: {sum(map(len, parts)):,} training pairs, {len(held_out):,} validation pairs")
    if vocabularies.own_target is not None:
        notes.append(f"target tokenizer: {vocabularies.target.kind}, {vocabularies.target.vocab_size:,} ids")
    fingerprints = " ".join(part.fingerprint for part in (*parts, held_out))
    columns = recipe.data.columns.model_copy(
        update={"source": train[0].source_column, "target": train[0].target_column}
    )
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"columns": columns})})
    return Material(
        recipe=recipe,
        tokenizer=vocabularies.source,
        target_tokenizer=vocabularies.own_target,
        samples=samples,
        validate=functools.partial(_validate, recipe, held_out, vocabularies),
        context=decoder_context(recipe, vocabularies.source, vocabularies.own_target),
        fingerprint=hashlib.sha256(fingerprints.encode()).hexdigest(),
        notes=tuple(dict.fromkeys(notes)),
        sample=functools.partial(_sample, recipe, held_out, vocabularies),
        tokens_per_sample=max(recipe.seq_len, recipe.target_seq_len),
    )


def _open(recipe: Recipe, specs: Sequence[SourceSpec]) -> list[PairSource]:
    return open_pairs(specs, columns=recipe.data.columns, errors=recipe.data.errors) if specs else []


def _texts(sources: list[PairSource], side: str) -> Any:
    def documents() -> Iterator[str]:
        for source in sources:
            for row in source.rows():
                yield getattr(row, side)

    return documents


def _tokenise(
    sources: Sources,
    vocabularies: Vocabularies,
    source: PairSource,
    tasks: Sequence[str],
    *,
    keep_all: bool = False,
) -> PairTokens:
    recipe = sources.recipe
    target = decoder_tokens_of(recipe, vocabularies.target)
    with sources.progress(f"tokenising {source.name}") as report:
        return tokenise_pairs(
            [source],
            vocabularies.source,
            vocabularies.target,
            seq_len=recipe.seq_len,
            target_seq_len=recipe.target_seq_len - (target.forced_bos is not None),
            eos=target.eos,
            overlong=recipe.data.overlong,
            max_length_ratio=recipe.data.max_length_ratio,
            keep_all=keep_all,
            tasks=tasks,
            progress=report,
            should_stop=sources.should_stop,
        )


def _hold_out(recipe: Recipe, parts: list[PairTokens]) -> tuple[list[PairTokens], PairTokens]:
    """What is left of every set, and what is held out of all."""
    cuts = [split_pairs(part, fraction=recipe.data.valid_fraction) for part in parts]
    kept = [part.subset(indices) for part, (indices, _) in zip(parts, cuts, strict=True)]
    return kept, join_pairs([part.subset(rest) for part, (_, rest) in zip(parts, cuts, strict=True)])


def _validate(
    recipe: Recipe,
    held_out: PairTokens,
    vocabularies: Vocabularies,
    model: Any,
    objective: Objective,
    should_stop: ShouldStop,
) -> dict[str, Any] | None:
    """The loss under teacher forcing, and what the model's own output is worth."""
    training = recipe.training
    values: dict[str, Any] = evaluate_pairs(
        model, objective, held_out, batch_tokens=VALIDATION_TOKENS, seed=recipe.seed, should_stop=should_stop
    )
    if training.valid_beam_size and not should_stop():
        translator = _translator(recipe, model, vocabularies, beam_size=training.valid_beam_size)
        count = min(len(held_out), training.valid_sentences or len(held_out))
        values |= evaluate_translation(translator, held_out.subset(range(count)), should_stop=should_stop)
    return None if should_stop() else values


def _sample(
    recipe: Recipe, held_out: PairTokens, vocabularies: Vocabularies, model: Any, should_stop: ShouldStop
) -> str | None:
    """The first held-out sources and what the model makes of them."""
    sources = [held_out.texts(index)[0] for index in range(min(SAMPLES, len(held_out)))]
    translator = _translator(recipe, model, vocabularies, beam_size=1)
    outputs = translator.translate(sources, should_stop=should_stop, too_long="cut")
    if should_stop():
        return None
    return "\n".join(f"{source} -> {best[0].text}" for source, best in zip(sources, outputs, strict=True))


def _translator(recipe: Recipe, model: Any, vocabularies: Vocabularies, *, beam_size: int) -> Translator:
    target = decoder_tokens_of(recipe, vocabularies.target)
    settings = BeamSettings.from_recipe(
        recipe.generation, beam_size=beam_size, beam_groups=1, n_best=1, eos_id=target.eos
    )
    return Translator(
        [model],
        vocabularies.source,
        vocabularies.target,
        settings=settings,
        target=target,
        max_source=recipe.seq_len,
        length_margin=recipe.generation.length_margin,
    )
