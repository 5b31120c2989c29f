"""Which tokenizer a run uses: its checkpoint's, its own file's, the recipe's, its teacher's, or one trained on the
data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tformer.data.shards.template import single_template
from tformer.errors import InputError
from tformer.loading import decoder_tokens_of
from tformer.objectives.base import ObjectiveContext
from tformer.recipe.recipe import (
    Recipe,
    with_own_roles,
    with_roles,
)
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.decoding import word_starts
from tformer.training.material import Sources

SENTENCE_ENDS = (".", "!", "?", "。")
"""How tokens end that can end a sentence, closing quotes and brackets aside."""


Documents = Callable[[], Iterator[str]]


def obtain_tokenizer(sources: Sources, documents: Documents, *, size_bytes: int | None = None) -> Tokenizer:
    """The tokenizer of this run; `documents` are what a new one is trained on.

    Errors: the recipe or the command line names a file with another tokenizer than the run's own.
    """
    options = sources.recipe.tokenizer
    checkpoint = sources.start.resumed or sources.start.weights
    stored = None if checkpoint is None else checkpoint.tokenizer_json
    if checkpoint is not None and stored is None:
        raise InputError(f"{checkpoint.path} is a model of images: it cannot be trained on text")
    teacher = sources.start.teacher
    side = Side(
        options.path,
        options.train,
        stored,
        sources.start.tokenizer_file,
        None if teacher is None else teacher.tokenizer,
    )
    return with_own_roles(options.special_ids, _obtain(sources, side, documents, size_bytes=size_bytes))


def obtain_tokenizers(sources: Sources, source: Documents, target: Documents) -> tuple[Tokenizer, Tokenizer | None]:
    """(source's, target's) tokenizers of a run on pairs; the second is None where one serves both sides.

    Errors: as `obtain_tokenizer`; a checkpoint that has one tokenizer where the recipe wants two, or the reverse.
    """
    recipe, start = sources.recipe, sources.start
    checkpoint = start.resumed or start.weights
    if checkpoint is not None and (checkpoint.target_tokenizer_json is not None) != recipe.separate_vocabularies:
        found, wanted = ("one vocabulary", "two") if recipe.separate_vocabularies else ("two vocabularies", "one")
        raise InputError(
            f"{checkpoint.path} has {found}, the recipe wants {wanted}",
            hint="leave --vocabulary (tokenizer.separate) as the checkpoint has it",
        )
    if not recipe.separate_vocabularies:
        return obtain_tokenizer(sources, lambda: chain(source(), target())), None
    if recipe.tokenizer.path is not None:  # a checkpoint has brought two vocabularies; else the recipe was refused
        raise InputError(
            f"{recipe.tokenizer.path}: source and target have a vocabulary each", hint="leave --tokenizer out"
        )
    options, folder = recipe.tokenizer, None if start.tokenizer_file is None else start.tokenizer_file.parent
    teacher = start.teacher
    first = Side(
        options.source_path,
        options.train,
        None if checkpoint is None else checkpoint.tokenizer_json,
        None if folder is None else folder / "tokenizer.source.json",
        None if teacher is None else teacher.tokenizer,
    )
    second = Side(
        options.target_path,
        options.train_target or options.train,
        None if checkpoint is None else checkpoint.target_tokenizer_json,
        None if folder is None else folder / "tokenizer.target.json",
        None if teacher is None else teacher.target_tokenizer,
    )
    return with_roles(options.special_ids, _obtain(sources, first, source), _obtain(sources, second, target))


class Side(NamedTuple):
    """Where a tokenizer may come from: the file that the recipe names, training, a checkpoint, a run's own file, or a
    teacher."""

    path: str | None
    train: TokenizerOptions
    stored: str | None
    file: Path | None
    teachers: Tokenizer | None = None


def _obtain(sources: Sources, side: Side, documents: Documents, *, size_bytes: int | None = None) -> Tokenizer:
    if side.stored is not None:
        return _same(side.path, Tokenizer.from_json(side.stored))
    if side.file is not None and side.file.exists():
        return _same(side.path, Tokenizer.load(side.file))
    if side.path is not None:
        return Tokenizer.load(Path(side.path))
    if side.teachers is not None:
        return side.teachers
    with sources.progress("training the tokenizer", total=size_bytes) as report:
        return train_tokenizer(
            documents,
            side.train,
            size_bytes=size_bytes,
            progress=report,
            should_stop=sources.should_stop,
        )


def _same(named: str | None, own: Tokenizer) -> Tokenizer:
    if named is not None and Path(named).exists() and Tokenizer.load(Path(named)).sha256 != own.sha256:
        raise InputError(
            f"{named} is not the tokenizer that this model was trained with", hint="name none: it has its own"
        )
    return own


def text_context(recipe: Recipe, tokenizer: Tokenizer, **more: object) -> ObjectiveContext:
    """What objectives may know of a tokenizer: ids and kinds of tokens, never the tokenizer itself."""
    tokens = tokenizer.tokens
    special = np.array([not token or tokenizer.is_special(token_id) for token_id, token in enumerate(tokens)])
    return ObjectiveContext(
        special_ids=tokenizer.special,
        seq_len=recipe.seq_len,
        padding=recipe.data.padding,
        pad_to=recipe.data.pad_to,
        vocab_size=tokenizer.vocab_size,
        never_masked=special,
        word_starts=word_starts(tokenizer.kind, tokens),
        **more,  # type: ignore[arg-type]
    )


def decoder_context(recipe: Recipe, tokenizer: Tokenizer, target: Tokenizer | None = None) -> ObjectiveContext:
    """`text_context` with what a decoder beside an encoder needs; `target`: its own tokenizer, if it has one."""
    template = single_template(tokenizer)
    return text_context(
        recipe,
        tokenizer,
        target=decoder_tokens_of(recipe, target or tokenizer),
        target_special_ids=None if target is None else target.special,
        target_seq_len=recipe.target_seq_len,
        frame=(tuple(template.prefix), tuple(template.suffix)),
        sentence_ends=np.array([token.rstrip("\"')").endswith(SENTENCE_ENDS) for token in tokenizer.tokens]),
    )


def require_mask(tokenizer: Tokenizer, objective: str) -> None:
    """Errors: a tokenizer without a mask token, for an objective that hides tokens."""
    if tokenizer.special.mask is None:
        raise InputError(
            f"{objective} needs a tokenizer with a mask token ([MASK] or <mask>), this one has none",
            hint="train one with --template bert or roberta (tokenizer.train.template)",
        )


def require_sentinels(tokenizer: Tokenizer, objective: str) -> None:
    """Errors: a tokenizer without sentinels, for the objective that puts them in the place of spans."""
    if not tokenizer.special.sentinels:
        raise InputError(
            f"{objective} needs a tokenizer with sentinels (<extra_id_0>, ...), this one has none",
            hint="train one with --template t5 (tokenizer.train.template), or set tokenizer.train.sentinels",
        )
