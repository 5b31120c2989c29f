"""Labelled texts and pairs of texts as material: rows read, labels indexed, texts tokenised, a part held out."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tformer.data.shards.labelled_tokens import (
    LabelledTokens,
    tokenise_labelled,
)
from tformer.data.sources.labelled import (
    LabelIndex,
    LabelledSource,
    collect_labels,
    open_labelled,
)
from tformer.errors import InputError
from tformer.evaluation.reports import evaluate_labelled
from tformer.loading import decoder_tokens_of
from tformer.objectives.base import Objective
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import SourceSpec
from tformer.tokenizer import Tokenizer
from tformer.training.material import Material, ShouldStop, Sources
from tformer.training.tokenizers import obtain_tokenizer, text_context

BUILTIN = "builtin:python-packages"


def labelled_material(sources: Sources) -> Material:
    """Read and tokenise the rows. Errors: a file without labels, an unknown label, one class only."""
    recipe = sources.recipe
    kind = recipe.objectives[0].kind
    specs = recipe.data.train or (SourceSpec(path=BUILTIN),)
    train, valid = (_open(recipe, part) for part in (specs, recipe.data.valid))
    with_pairs = _pairs_agree([*train, *valid])
    if getattr(recipe.objectives[0], "swap_pairs", False) and not (
        with_pairs and recipe.model.embedding.token_types > 1
    ):
        raise InputError(
            "objectives.0.swap_pairs: needs pairs of texts and a model that tells them apart (embedding.token_types: 2)"
        )

    def documents() -> Iterator[str]:
        for source in train:
            for row in source.rows():
                yield row.text
                if row.text2 is not None:
                    yield row.text2

    tokenizer = obtain_tokenizer(sources, documents)
    index = None if kind == "regression" else _index_labels(recipe, train, sources.start.stored_labels)
    tokenise = functools.partial(_tokenise, sources, tokenizer, index)
    rows = tokenise(train)
    if valid:
        held_out = tokenise(valid)
    else:
        rows, held_out = _hold_out(recipe, rows)
    recipe = _decided(recipe, index, train[0], with_pairs=with_pairs)
    notes = [note for source in (*train, *valid) for note in source.notes]
    notes += [note for part in (rows, held_out) for note in part.notes]
    if not recipe.data.train:
        notes.append("no --data: telling apart which package of Python's library a text is from (python-packages)")
    notes.append(f"data: {len(rows):,} training examples, {len(held_out):,} validation examples")
    if index is not None:
        notes.append(f"labels: {_listing(index.names)}")
    assert rows.labels is not None
    counts = np.bincount(rows.labels, minlength=len(index.names)) if index and kind == "classification" else None
    return Material(
        recipe=recipe,
        tokenizer=tokenizer,
        samples=rows,
        validate=functools.partial(_validate, recipe, held_out),
        context=text_context(
            recipe,
            tokenizer,
            label_counts=counts,
            target=None if recipe.model.decoder is None else decoder_tokens_of(recipe, tokenizer),
        ),
        fingerprint=hashlib.sha256(f"{rows.fingerprint} {held_out.fingerprint}".encode()).hexdigest(),
        notes=tuple(dict.fromkeys(notes)),
        label_mean=float(np.mean(rows.labels)) if index is None else None,
        tokens_per_sample=recipe.seq_len,
    )


def _open(recipe: Recipe, specs: tuple[SourceSpec, ...]) -> list[LabelledSource]:
    if not specs:
        return []
    data, kind = recipe.data, recipe.objectives[0].kind
    return open_labelled(
        specs,
        columns=data.columns,
        errors=data.errors,
        needs_label=True,
        numeric_label=kind == "regression",
        multi_label=kind == "multi_label",
        separator=data.label_separator,
    )


def _pairs_agree(sources: list[LabelledSource]) -> bool:
    found = {source.has_text2 for source in sources}
    if len(found) > 1:
        pair = next(source.name for source in sources if source.has_text2)
        single = next(source.name for source in sources if not source.has_text2)
        raise InputError(
            f"{single} has one text a row, {pair} has two",
            hint="name the columns with --text-column and --text2-column",
        )
    return found.pop()


def _index_labels(recipe: Recipe, train: list[LabelledSource], stored: tuple[str, ...]) -> LabelIndex:
    """The recipe's labels, else the data's; `stored` labels that are the same keep their order, and so their head."""
    data, multi = recipe.data, recipe.objectives[0].kind == "multi_label"
    names = data.labels
    if not names:
        labels = (row.label or "" for source in train for row in source.rows())
        names = collect_labels(labels, multi=multi, separator=data.label_separator)
        names = stored if set(stored) == set(names) else names
    return LabelIndex(names, multi=multi, separator=data.label_separator)


def _tokenise(
    sources: Sources, tokenizer: Tokenizer, index: LabelIndex | None, rows: list[LabelledSource]
) -> LabelledTokens:
    recipe = sources.recipe
    names = ", ".join(dict.fromkeys(source.name for source in rows))
    with sources.progress(f"tokenising {names}") as report:
        return tokenise_labelled(
            rows,
            tokenizer,
            seq_len=recipe.seq_len,
            index=index,
            numeric=index is None,
            truncation=recipe.data.truncation,
            token_types=recipe.model.embedding.token_types > 1,
            progress=report,
            should_stop=sources.should_stop,
        )


def _hold_out(recipe: Recipe, rows: LabelledTokens) -> tuple[LabelledTokens, LabelledTokens]:
    return rows.split(fraction=recipe.data.valid_fraction, how=recipe.data.valid_split)


def _decided(recipe: Recipe, index: LabelIndex | None, first: LabelledSource, *, with_pairs: bool) -> Recipe:
    """The recipe with what the data decided: label names in order, and which columns hold what."""
    columns = recipe.data.columns.model_copy(
        update={
            "text": first.text_column,
            "text2": first.text2_column if with_pairs else None,
            "label": first.label_column,
        }
    )
    labels = () if index is None else index.names
    data = recipe.data.model_copy(update={"labels": labels, "columns": columns})
    return recipe.model_copy(update={"data": data})


def _validate(
    recipe: Recipe, held_out: LabelledTokens, model: Any, objective: Objective, should_stop: ShouldStop
) -> dict[str, Any] | None:
    values = evaluate_labelled(model, objective, held_out, recipe, should_stop=should_stop)
    return None if should_stop() else values


def _listing(names: tuple[str, ...], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)}: {', '.join(names[:most])}{more}"
