"""Tokenizers of a training (from its checkpoint, a file, its teacher, or the data), and contexts of objectives.

A tokenizer that is trained on the data is kept in the cache, under a key of the data's fingerprint and the options.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path

import numpy as np

from tformer.data.shards.template import single_template
from tformer.data.sources.files import Source
from tformer.loading import decoder_tokens_of
from tformer.objectives.base import ObjectiveContext
from tformer.recipe.recipe import Recipe, with_own_roles, with_roles
from tformer.support import __version__
from tformer.support.device import default_cache_dir
from tformer.support.errors import InputError, TformerError
from tformer.support.files import make_folders, write_text
from tformer.tasks.base import TrainingStart
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.decoding import word_starts
from tformer.workers.work import Work

SENTENCE_ENDS = (".", "!", "?", "。")
"""Last characters of tokens that can end a sentence, apart from closing quotes and brackets."""

CACHE = "tokenizers"
"""Folder of the cache for tokenizers that were trained on the data of a run."""

VERSION = 2
"""Tokenizers of version 1 may be of half a text, which changed while it was read."""

LEFT_OUT = 1.25
"""A held-out part is cut by tokens, or after pairs were left out, which needs a tokenizer. What a new one is trained on
is cut before, and leaves out a quarter more."""

TRAINERS = ("tokenizers", "sentencepiece")
"""Packages whose version may change what is trained."""


@dataclass(frozen=True)
class Texts:
    """Training texts of a new tokenizer.

    Attributes:
        read: a fresh iterator over the texts at each call.
        fingerprint: changes when the texts may have changed.
        size_bytes: None: unknown.
    """

    read: Callable[[], Iterator[str]]
    fingerprint: str
    size_bytes: int | None = None

    @classmethod
    def of(
        cls, sources: Sequence[Source], read: Callable[[], Iterator[str]], *, part: str, size_bytes: int | None = None
    ) -> Texts:
        """The texts that `read` takes from the sources. part: names the selection, for the fingerprint."""
        fingerprints = (source.fingerprint() + source.samples() for source in sources)
        return cls(read, "\n".join([part, *fingerprints]), size_bytes)

    def __add__(self, other: Texts) -> Texts:
        return Texts(lambda: chain(self.read(), other.read()), f"{self.fingerprint}\n{other.fingerprint}")


def obtain_tokenizer(start: TrainingStart, work: Work, texts: Texts) -> Tokenizer:
    """The tokenizer of a training: the given one, the checkpoint's, or a new one trained on `texts`.

    Errors: the recipe or the command line names a file with another tokenizer than the run's own.
    """
    options, checkpoint, teacher = start.recipe.tokenizer, start.checkpoint, start.teacher
    if checkpoint is not None and checkpoint.tokenizer_json is None:
        raise InputError(f"{checkpoint.path} is a model of images: it cannot be trained on text")
    origin = TokenizerSource(
        path=options.path,
        stored=None if checkpoint is None else checkpoint.tokenizer_json,
        file=start.tokenizer_file,
        teacher=None if teacher is None else teacher.tokenizer,
        train=options.train,
    )
    return with_own_roles(options.special_ids, origin.obtain(work, texts))


def obtain_tokenizers(
    start: TrainingStart, work: Work, source: Texts, target: Texts
) -> tuple[Tokenizer, Tokenizer | None]:
    """(source's, target's) tokenizers of a training on pairs; the second is None where one serves both sides.

    Errors: as `obtain_tokenizer`; a checkpoint with one tokenizer for a recipe with two, or the reverse.
    """
    recipe, checkpoint, teacher = start.recipe, start.checkpoint, start.teacher
    if checkpoint is not None and (checkpoint.target_tokenizer_json is not None) != recipe.separate_vocabularies:
        found, wanted = ("one vocabulary", "two") if recipe.separate_vocabularies else ("two vocabularies", "one")
        raise InputError(
            f"{checkpoint.path} has {found}, the recipe needs {wanted}",
            hint="leave --vocabulary (tokenizer.separate) as the checkpoint has it",
        )
    if not recipe.separate_vocabularies:
        return obtain_tokenizer(start, work, source + target), None
    options, folder = recipe.tokenizer, None if start.tokenizer_file is None else start.tokenizer_file.parent
    if options.path is not None:  # the two vocabularies are the checkpoint's: a recipe that sets both is refused
        raise InputError(f"{options.path}: source and target have a vocabulary each", hint="leave --tokenizer out")
    first = TokenizerSource(
        path=options.source_path,
        stored=None if checkpoint is None else checkpoint.tokenizer_json,
        file=None if folder is None else folder / "tokenizer.source.json",
        teacher=None if teacher is None else teacher.tokenizer,
        train=options.train,
    )
    second = TokenizerSource(
        path=options.target_path,
        stored=None if checkpoint is None else checkpoint.target_tokenizer_json,
        file=None if folder is None else folder / "tokenizer.target.json",
        teacher=None if teacher is None else teacher.target_tokenizer,
        train=options.train,
    )
    return with_roles(options.special_ids, first.obtain(work, source), second.obtain(work, target))


@dataclass(frozen=True)
class TokenizerSource:
    """Where a tokenizer may come from.

    Attributes:
        path: file that the recipe names.
        stored: tokenizer.json of the checkpoint that training starts from.
        file: of a run that stopped before its first checkpoint; it need not exist.
        teacher: the teacher's tokenizer.
        train: how a new one is trained.
    """

    path: str | None
    stored: str | None
    file: Path | None
    teacher: Tokenizer | None
    train: TokenizerOptions

    def obtain(self, work: Work, texts: Texts) -> Tokenizer:
        """The tokenizer of the first origin that exists."""
        if self.stored is not None:
            return self._same(Tokenizer.from_json(self.stored, name=str(self.file or "tokenizer.json")))
        if self.file is not None and self.file.exists():
            return self._same(Tokenizer.load(self.file))
        if self.path is not None:
            return Tokenizer.load(Path(self.path))
        if self.teacher is not None:
            return self.teacher
        return _trained(texts, self.train, work)

    def _same(self, own: Tokenizer) -> Tokenizer:
        """The model's own tokenizer. Raises InputError when the recipe names a file with another one."""
        named = None if self.path is None else Path(self.path)
        if named is not None and named.exists() and Tokenizer.load(named).sha256 != own.sha256:
            raise InputError(
                f"{named} is not the tokenizer that this model was trained with", hint="name none: it has its own"
            )
        return own


def _trained(texts: Texts, options: TokenizerOptions, work: Work) -> Tokenizer:
    """A tokenizer trained on the texts; the cached one where these texts and options were used before."""
    versions = [VERSION, __version__, *(metadata.version(package) for package in TRAINERS)]
    parts = [versions, asdict(options), texts.fingerprint]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    file = (work.cache_dir or default_cache_dir()) / CACHE / f"{key}.json"
    if file.is_file():
        with suppress(InputError):  # damaged: train it again
            return Tokenizer.load(file)
    with work.part("training the tokenizer", total=texts.size_bytes, unit="B") as part:
        tokenizer = train_tokenizer(texts.read, options, size_bytes=texts.size_bytes, work=part)
    with suppress(OSError, TformerError):  # a cache that cannot be written is no error
        make_folders(file.parent)
        write_text(file, tokenizer.to_json())
    return tokenizer


def text_context(recipe: Recipe, tokenizer: Tokenizer, **more: object) -> ObjectiveContext:
    """The context of an objective: ids and kinds of tokens of the tokenizer."""
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
    """`text_context` for an encoder-decoder; `target`: the tokenizer of the target side where it has its own."""
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
