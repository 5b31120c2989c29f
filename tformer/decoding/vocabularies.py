"""Whether loaded models can decode together: their probabilities are averaged token by token."""

from __future__ import annotations

from collections.abc import Sequence

from tformer.errors import InputError
from tformer.loading import Loaded


def require_same_vocabularies(ensemble: Sequence[Loaded]) -> None:
    """Raise InputError, naming both, for a model that reads or writes other tokens than the first, or does not write.

    For encoder-decoders and for decoders alone, never for a mixture. One model is an ensemble too.
    """
    first = ensemble[0]
    for one in ensemble:
        if one.model.decoder is None:
            raise InputError(f"{one.path} writes no text: it is a model without a decoder")
    for other in ensemble[1:]:
        both = f"{first.path} and {other.path}"
        if _reads_sources(first) != _reads_sources(other):
            alone = other if _reads_sources(first) else first
            raise InputError(
                f"an ensemble needs models of one kind: of {both}, {alone.path} has no encoder beside its decoder"
            )
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
        if _reads_sources(first) and first.decoder_tokens != other.decoder_tokens:
            raise InputError(
                f"an ensemble needs one start and end: {both} begin or end with different tokens "
                "(tokenizer.special_ids)"
            )


def _reads_sources(loaded: Loaded) -> bool:
    return loaded.model.encoder is not None
