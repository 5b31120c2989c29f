"""From the recipe's data section to token corpora: read once, cached, bounded in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tformer.data.shards.corpus import (
    TokenCorpus,
    token_corpus,
)
from tformer.data.sources.text import (
    TextSource,
    open_sources,
)
from tformer.errors import InputError
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import (
    Data,
    SourceSpec,
)
from tformer.tokenizer import Tokenizer
from tformer.training.material import Progress, ShouldStop

BUILTIN_TEXT = "builtin:python-docs"


@dataclass(frozen=True)
class Corpora:
    """Training corpora with their weights, validation corpora, and a fingerprint of all that is trained on."""

    train: tuple[TokenCorpus, ...]
    weights: tuple[float, ...]
    valid: tuple[TokenCorpus, ...]
    fingerprint: str


def open_text(specs: Sequence[SourceSpec], data: Data) -> list[TextSource]:
    """The sources, checked to exist; without any, the built-in text."""
    chosen = list(specs) or [SourceSpec(path=BUILTIN_TEXT)]
    return open_sources(chosen, columns=data.columns, errors=data.errors)


def prepare_corpora(
    recipe: Recipe,
    train: Sequence[TextSource],
    valid: Sequence[TextSource],
    tokenizer: Tokenizer,
    *,
    cache_dir: Path | None,
    progress: Progress,
    should_stop: ShouldStop,
) -> Corpora:
    """Tokenise everything. Without validation sources, the fixed last part of every training source validates."""

    def tokenise(source: TextSource) -> TokenCorpus:
        with progress(f"tokenising {source.name}", total=source.size_bytes()) as report:
            return token_corpus(source, tokenizer, cache_dir=cache_dir, progress=report, should_stop=should_stop)

    corpora = [tokenise(source) for source in train]
    held_out = [tokenise(source) for source in valid]
    if not held_out:
        pairs = [corpus.split(fraction=recipe.data.valid_fraction) for corpus in corpora]
        corpora = [part for part, _ in pairs]
        held_out = [rest for _, rest in pairs]
    return Corpora(
        train=tuple(corpora),
        weights=_weights(recipe.data.train, corpora),
        valid=tuple(held_out),
        fingerprint=_fingerprint([*corpora, *held_out]),
    )


def _weights(specs: Sequence[SourceSpec], corpora: Sequence[TokenCorpus]) -> tuple[float, ...]:
    """Shares of a mixture. By default every token counts alike; once one source has a weight, the others count as 1."""
    if any(spec.weight is not None for spec in specs):
        return tuple(1.0 if spec.weight is None else spec.weight for spec in specs)
    return tuple(float(len(corpus)) for corpus in corpora)


def _fingerprint(corpora: Sequence[TokenCorpus]) -> str:
    digest = hashlib.sha256()
    for corpus in corpora:
        digest.update(f"{corpus.fingerprint} {corpus.start} {corpus.stop}\n".encode())
    return digest.hexdigest()


def check_validation(corpora: Corpora) -> None:
    """Errors: a validation corpus without a single prediction."""
    for corpus in corpora.valid:
        if len(corpus) < 2:
            raise InputError(f"{corpus.name}: {len(corpus)} tokens are too few to validate on, at least 2 are needed")
