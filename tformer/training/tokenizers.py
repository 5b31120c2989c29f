"""Which tokenizer a run uses: its checkpoint's, its own file's, the recipe's, or one trained on the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tformer.errors import InputError
from tformer.objectives.base import ObjectiveContext
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer, train_tokenizer
from tformer.tokenizer.words import word_starts
from tformer.training.material import Sources


def obtain_tokenizer(
    sources: Sources, documents: Callable[[], Iterator[str]], *, size_bytes: int | None = None
) -> Tokenizer:
    """The tokenizer of this run; `documents` are what a new one is trained on.

    Errors: the recipe or the command line names a file with another tokenizer than the run's own.
    """
    start, recipe = sources.start, sources.recipe
    checkpoint = start.resumed or start.weights
    if checkpoint is not None:
        if checkpoint.tokenizer_json is None:
            raise InputError(f"{checkpoint.path} is a model of images: it cannot be trained on text")
        return _same(recipe, Tokenizer.from_json(checkpoint.tokenizer_json))
    if start.tokenizer_file is not None and start.tokenizer_file.exists():
        return _same(recipe, Tokenizer.load(start.tokenizer_file))
    if recipe.tokenizer.path is not None:
        return Tokenizer.load(Path(recipe.tokenizer.path))
    with sources.progress("training the tokenizer", total=size_bytes) as report:
        return train_tokenizer(
            documents,
            recipe.tokenizer.train,
            size_bytes=size_bytes,
            progress=report,
            should_stop=sources.should_stop,
        )


def _same(recipe: Recipe, own: Tokenizer) -> Tokenizer:
    named = recipe.tokenizer.path
    if named is not None and Path(named).exists() and Tokenizer.load(Path(named)).sha256 != own.sha256:
        raise InputError(f"{named} is not the tokenizer that this model was trained with", hint="leave --tokenizer out")
    return own


def text_context(recipe: Recipe, tokenizer: Tokenizer, **more: object) -> ObjectiveContext:
    """What objectives may know of a tokenizer: ids and kinds of tokens, never the tokenizer itself."""
    tokens = tokenizer.tokens
    special = np.array([not token or tokenizer.is_special(token_id) for token_id, token in enumerate(tokens)])
    return ObjectiveContext(
        special_ids=tokenizer.special,
        seq_len=recipe.data.seq_len or recipe.model.max_seq_len,
        padding=recipe.data.padding,
        pad_to=recipe.data.pad_to,
        vocab_size=tokenizer.vocab_size,
        never_masked=special,
        word_starts=word_starts(tokenizer.kind, tokens),
        **more,  # type: ignore[arg-type]
    )


def require_mask(tokenizer: Tokenizer, objective: str) -> None:
    """Errors: a tokenizer without a mask token, for an objective that hides tokens."""
    if tokenizer.special.mask is None:
        raise InputError(
            f"{objective} needs a tokenizer with a mask token ([MASK] or <mask>), this one has none",
            hint="train one with --template bert or roberta (tokenizer.train.template)",
        )
