"""Pairs of texts as material: one or several tasks, a tokenizer for both sides or one for each, a part held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from tformer.data.batching.mixture import MixedPairs
from tformer.data.shards.pair_tokens import (
    PairTokens,
    RowSource,
    join_pairs,
)
from tformer.data.sources.pairs import (
    PairSource,
    open_pairs,
    shared_columns,
)
from tformer.device import resolve_device
from tformer.evaluation.paired import paired_tokens
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import SourceSpec
from tformer.tokenizer import Tokenizer
from tformer.training.material import Material, Samples, Sources
from tformer.training.pair_validation import PairValidation, plan_decoding
from tformer.training.sequence_targets import translate_sources, weights_digest
from tformer.training.tokenizers import decoder_context, obtain_tokenizers

BUILTIN = "builtin:dates"


def pair_material(sources: Sources) -> Material:
    """Read, tokenise and filter the pairs.

    Errors: files of different length, a missing column, no pair left, settings that cannot be decoded with.
    """
    recipe = with_shared_prefix(sources.recipe)
    specs = recipe.data.train or (SourceSpec(path=BUILTIN),)
    train, valid = (_open(recipe, part) for part in (specs, recipe.data.valid))
    recipe = _with_columns(recipe, [*train, *valid])
    tokenizer, own_target = obtain_tokenizers(sources, _texts(train, "source"), _texts(train, "target"))
    tokenizers = (tokenizer, own_target or tokenizer)
    decoding = plan_decoding(recipe, tokenizers[1])
    tasks = tuple(source.task for source in train)
    parts = [_tokenise(sources, tokenizers, source, tasks) for source in train]
    if valid:
        held_out = join_pairs([_tokenise(sources, tokenizers, source, tasks, keep_all=True) for source in valid])
    else:
        parts, held_out = _hold_out(recipe, parts)
    parts, taught = _taught(sources, tokenizers, parts)
    samples, mixed = _mixed(parts, specs, seed=recipe.seed)
    notes = [note for source in (*train, *valid) for note in source.notes]
    notes += [note for part in (*parts, held_out) for note in part.notes]
    if not recipe.data.train:
        notes.append("no --data: learning to read dates as people write them (builtin:dates)")
    notes += [*taught, *mixed]
    notes.append(f"data: {sum(map(len, parts)):,} training pairs, {len(held_out):,} validation pairs")
    if own_target is not None:
        notes.append(f"target tokenizer: {own_target.kind}, {own_target.vocab_size:,} ids")
    fingerprints = " ".join(part.fingerprint for part in (*parts, held_out))
    validation = PairValidation(recipe, held_out, tokenizers, decoding)
    return Material(
        recipe=recipe,
        tokenizer=tokenizer,
        target_tokenizer=own_target,
        samples=samples,
        validate=validation.validate,
        context=decoder_context(recipe, tokenizer, own_target),
        fingerprint=hashlib.sha256(fingerprints.encode()).hexdigest(),
        notes=tuple(dict.fromkeys(notes)),
        sample=validation.sample,
        tokens_per_sample=max(recipe.seq_len, recipe.target_seq_len),
    )


def with_shared_prefix(recipe: Recipe) -> Recipe:
    """The recipe with the one prefix of all its training data before the validation data that has none of its own."""
    data, prefixes = recipe.data, {spec.prefix for spec in recipe.data.train}
    if len(prefixes) != 1:
        return recipe
    [prefix] = prefixes
    valid = tuple(spec.model_copy(update={"prefix": spec.prefix or prefix}) for spec in data.valid)
    return recipe.model_copy(update={"data": data.model_copy(update={"valid": valid})})


def _with_columns(recipe: Recipe, sources: Sequence[PairSource]) -> Recipe:
    """The recipe with the columns that were found, for later commands; as it was where the tables have different ones.

    What was asked for by number is then written down by name.
    """
    shared = shared_columns(sources)
    if shared is None:
        return recipe
    columns = recipe.data.columns.model_copy(update={"source": shared[0], "target": shared[1]})
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"columns": columns})})


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
    tokenizers: tuple[Tokenizer, Tokenizer],
    source: RowSource,
    tasks: Sequence[str],
    *,
    keep_all: bool = False,
) -> PairTokens:
    with sources.progress(f"tokenising {source.name}") as report:
        return paired_tokens(
            sources.recipe,
            source,
            tokenizers,
            keep_all=keep_all,
            tasks=tasks,
            progress=report,
            should_stop=sources.should_stop,
        )


def _taught(
    sources: Sources, tokenizers: tuple[Tokenizer, Tokenizer], parts: list[PairTokens]
) -> tuple[list[PairTokens], list[str]]:
    """The training pairs with the targets of a teacher of sequences, where there is one, and what to tell of it."""
    teacher, section = sources.start.teacher, sources.recipe.teacher
    if teacher is None or section is None or section.kind != "sequence":
        return parts, []
    if sources.start.dry_run:
        return parts, ["dry run: the teacher translates nothing, the references stand in for it"]
    device, weights = resolve_device(sources.recipe.training.device), weights_digest(teacher.model)
    translated = [
        translate_sources(
            part,
            teacher,
            weights=weights,
            device=device,
            cache_dir=sources.cache_dir,
            progress=sources.progress,
            should_stop=sources.should_stop,
        )
        for part in parts
    ]
    notes = [note for part in parts for note in part.notes] + [note for pairs in translated for note in pairs.notes]
    return [_tokenise(sources, tokenizers, pairs, parts[0].tasks) for pairs in translated], notes


def _mixed(parts: list[PairTokens], specs: Sequence[SourceSpec], *, seed: int) -> tuple[Samples, list[str]]:
    """What is trained on, and what to tell of it: all pairs, or sets in the shares that any of them asks for."""
    if all(spec.weight is None for spec in specs):
        return join_pairs(parts), []
    weights = [1.0 if spec.weight is None else spec.weight for spec in specs]
    shares = [f"{part.name} {weight / sum(weights):.1%}" for part, weight in zip(parts, weights, strict=True)]
    return MixedPairs(parts, weights, seed=seed), [f"mixture: {', '.join(shares)}"]


def _hold_out(recipe: Recipe, parts: list[PairTokens]) -> tuple[list[PairTokens], PairTokens]:
    """What is left of every set, and what is held out of all."""
    cuts = [part.split(fraction=recipe.data.valid_fraction) for part in parts]
    return [kept for kept, _ in cuts], join_pairs([rest for _, rest in cuts])
