"""Translators of loaded models and of models in training; checks of ensembles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.decoding.translate import Translator
from tformer.loading import Loaded, decoder_tokens_of
from tformer.model import Transformer
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.support.formatting import listed
from tformer.tokenizer import Tokenizer


def require_same_vocabularies(ensemble: Sequence[Loaded]) -> None:
    """Raise InputError, naming both, for models whose probabilities cannot be averaged token by token.

    All must be encoder-decoders or all decoder-only, with the same source and target vocabularies. One model is an
    ensemble too.
    """
    first = ensemble[0]
    for loaded in ensemble:
        if loaded.model.decoder is None:
            raise InputError(f"{loaded.path} cannot generate text: it has no decoder")
    for other in ensemble[1:]:
        both = f"{first.path} and {other.path}"
        if (first.model.encoder is None) != (other.model.encoder is None):
            alone = first if first.model.encoder is None else other
            raise InputError(f"an ensemble needs models of one kind: of {both}, {alone.path} has no encoder")
        one_vocabulary = first.own_target_tokenizer is None is other.own_target_tokenizer
        for side, ours, theirs in (
            ("source ", first.text_tokenizer, other.text_tokenizer),
            ("target ", first.target_tokenizer, other.target_tokenizer),
        ):
            if ours.sha256 != theirs.sha256:
                raise InputError(
                    f"an ensemble needs one vocabulary: {both} have different {'' if one_vocabulary else side}"
                    f"vocabularies ({ours.vocab_size:,} and {theirs.vocab_size:,} tokens, sha256 {ours.sha256[:8]} and "
                    f"{theirs.sha256[:8]})",
                    hint="train the models with the same tokenizer files: --tokenizer of the first",
                )
        if first.model.encoder is not None and first.decoder_tokens != other.decoder_tokens:
            raise InputError(
                f"an ensemble needs one start and end: {both} begin or end with different tokens "
                "(tokenizer.special_ids)"
            )


def choose_languages(loaded: Loaded, source: str | None, target: str | None) -> None:
    """Set the languages of a model with a token for each (M2M100, NLLB, mBART); None: unchanged.

    Args:
        source: stands in the template of sources in the place of another language.
        target: the first token of every output; what the decoder starts from where that is a language (mBART).

    Raises InputError for a code without a token, and for a model that names no language.
    """
    if source is not None:
        tokenizer = loaded.text_tokenizer
        found = tokenizer.in_language(_language(loaded, tokenizer, "--source-language", source))
        if found is None:
            raise InputError(f"--source-language: the template of {loaded.path} names no language")
        loaded.tokenizer = found
    if target is not None:
        token = _language(loaded, loaded.target_tokenizer, "--target-language", target)
        options = loaded.recipe.tokenizer
        starts = options.special_ids.decoder_start in loaded.target_tokenizer.languages.values()
        special = options.special_ids.model_copy(update={"decoder_start" if starts else "forced_bos": token})
        changed = options.model_copy(update={"special_ids": special})
        loaded.recipe = loaded.recipe.model_copy(update={"tokenizer": changed})


def _language(loaded: Loaded, tokenizer: Tokenizer, flag: str, code: str) -> int:
    known = tokenizer.languages
    if code not in known:
        raise InputError(
            f"{flag}: {loaded.path} has no token for the language {code!r}; it has {listed(list(known), 12) or 'none'}"
        )
    return known[code]


def make_translator(
    recipe: Recipe,
    models: Sequence[Transformer],
    tokenizers: tuple[Tokenizer, Tokenizer],
    *,
    settings: BeamSettings | GenerationSettings | None = None,
    **options: Any,
) -> Translator:
    """A translator with the recipe's conventions, for a model in training, a loaded model or an ensemble.

    A source may be as long as the model reads, whatever length it was trained on.

    Args:
        tokenizers: of source and target.
        settings: None: the recipe's beam search.
        options: arguments of `Translator` that override the recipe's; None: the recipe's.

    Raises InputError for wrong settings, and what `Translator` does.
    """
    generation, target = recipe.generation, decoder_tokens_of(recipe, tokenizers[1])
    chosen = settings or BeamSettings.from_recipe(generation, eos_id=target.eos)
    given: dict[str, Any] = {
        "length_margin": generation.length_margin,
        "max_source": min(model.max_seq_len for model in models),
    }
    given.update({name: value for name, value in options.items() if value is not None})
    return Translator(models, *tokenizers, settings=chosen, target=target, **given)


def translator_of(
    loaded: Loaded, *more: Loaded, settings: BeamSettings | GenerationSettings | None = None, **options: Any
) -> Translator:
    """`make_translator` for loaded models, with the recipe of the first.

    Raises InputError for a model that is no encoder-decoder, and for an ensemble of different vocabularies.
    """
    ensemble = (loaded, *more)
    require_same_vocabularies(ensemble)
    if loaded.model.encoder is None:
        raise InputError(f"{loaded.path}: translation needs a model with an encoder and a decoder")
    tokenizers = (loaded.text_tokenizer, loaded.target_tokenizer)
    return make_translator(
        loaded.recipe, [member.model for member in ensemble], tokenizers, settings=settings, **options
    )
