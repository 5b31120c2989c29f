"""A translator of whatever was loaded: one checkpoint, or an ensemble of several with the same vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tformer.decoding.beam_settings import BeamSettings
from tformer.decoding.settings import GenerationSettings
from tformer.decoding.translate import Translator
from tformer.errors import InputError
from tformer.loading import Loaded


def translator_of(
    loaded: Loaded, *more: Loaded, settings: BeamSettings | GenerationSettings | None = None, **options: Any
) -> Translator:
    """A translator with the conventions and the `generation` section of the first one's recipe.

    settings: None: the recipe's beam search. `options`: of `Translator`, in the place of the recipe's; None: the
    recipe's.

    Raises InputError for a model that is no encoder-decoder, and for an ensemble of different vocabularies.
    """
    ensemble = (loaded, *more)
    require_same_vocabularies(ensemble)
    generation, target = loaded.recipe.generation, loaded.decoder_tokens
    given: dict[str, Any] = {
        "length_margin": generation.length_margin,
        "coverage_penalty": 0.0 if isinstance(settings, GenerationSettings) else generation.coverage_penalty,
        "max_source": loaded.model.max_seq_len,
    }
    given.update({name: value for name, value in options.items() if value is not None})
    return Translator(
        [one.model for one in ensemble],
        loaded.text_tokenizer,
        loaded.target_tokenizer,
        settings=settings or BeamSettings.from_recipe(generation, eos_id=target.eos),
        target=target,
        **given,
    )


def require_same_vocabularies(ensemble: Sequence[Loaded]) -> None:
    """Raises InputError for a model that cannot translate, or reads or writes other tokens than the first."""
    first = ensemble[0]
    for one in ensemble:
        if one.model.encoder is None or one.model.decoder is None:
            raise InputError(f"{one.path}: translation needs a model with an encoder and a decoder")
    sides = (("source", lambda one: one.text_tokenizer), ("target", lambda one: one.target_tokenizer))
    for other in ensemble[1:]:
        for side, tokenizer in sides:
            ours, theirs = tokenizer(first), tokenizer(other)
            if ours.sha256 != theirs.sha256:
                raise InputError(
                    f"an ensemble needs one vocabulary: the {side} tokenizer of {other.path} "
                    f"({theirs.vocab_size:,} ids) is not that of {first.path} ({ours.vocab_size:,} ids)",
                    hint="train the models with the same tokenizer files",
                )
        if other.decoder_tokens != first.decoder_tokens:
            raise InputError(f"an ensemble needs one start token: {other.path} and {first.path} begin differently")
