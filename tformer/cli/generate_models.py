"""The model, or the ensemble of models, that `tformer generate` was asked to use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.cli.generate_request import Asked
    from tformer.loading import Loaded

KINDS = ("lm", "masked_lm")


def names_of_models(arguments: Sequence[str], ensemble: Sequence[str]) -> list[str | None]:
    """What to load, in order; None is the newest run.

    Further words after `--ensemble A` reach us as arguments beside RUN, so all of them belong to the ensemble. A word
    with commas is several names, unless there is a folder of that name.
    """
    if not ensemble:
        if len(arguments) > 1:
            raise InputError(
                f"unexpected argument '{arguments[1]}'",
                hint="a text needs --prompt or --input; several models need --ensemble",
            )
        return list(arguments) or [None]
    words = [part for word in ensemble for part in ([word] if Path(word).exists() else word.split(","))]
    return [word for word in dict.fromkeys([*words, *arguments]) if word]


def load_models(asked: Asked) -> list[Loaded]:
    """Every model asked for, once, in the precision asked for. Raises InputError for models that do not go together."""
    from tformer.decoding.precision import cast_matrices, inference_dtype
    from tformer.loading import load
    from tformer.training.precision import resolve_device

    place = resolve_device(asked.device)
    models: dict[Path, Loaded] = {}
    for name in names_of_models(asked.arguments or [], asked.ensemble or []):
        loaded = load(name, device=place, which=asked.checkpoint, kinds=set(KINDS))
        models.setdefault(loaded.path.resolve(), loaded)
    chosen = list(models.values())
    require_one_vocabulary(chosen)
    for loaded in chosen:
        trained_in = loaded.recipe.training.precision
        cast_matrices(loaded.model, inference_dtype(asked.precision, trained_in=trained_in, device=place))
    return chosen


def require_one_vocabulary(models: Sequence[Loaded]) -> None:
    """Raise InputError, naming both, for models whose probabilities cannot be averaged token by token."""
    first = models[0]
    for other in models[1:]:
        both = f"{first.path} and {other.path}"
        if fills_masks(first) or fills_masks(other):
            filler = first if fills_masks(first) else other
            raise InputError(f"--ensemble: {filler.path} fills masks, and only models that write text can be averaged")
        if is_encoder_decoder(first) != is_encoder_decoder(other):
            alone = other if is_encoder_decoder(first) else first
            raise InputError(f"--ensemble: {both} read differently: {alone.path} has no encoder beside its decoder")
        for side, one, two in (
            ("source vocabularies", first.text_tokenizer, other.text_tokenizer),
            ("target vocabularies", first.target_tokenizer, other.target_tokenizer),
        ):
            if one.sha256 != two.sha256:
                what = "vocabularies" if first.own_target_tokenizer is None is other.own_target_tokenizer else side
                raise InputError(
                    f"--ensemble: {both} have different {what} "
                    f"({one.vocab_size:,} and {two.vocab_size:,} tokens, sha256 {one.sha256[:8]} and {two.sha256[:8]})",
                    hint="models of an ensemble must share their tokenizers: train the second with --tokenizer of the "
                    "first",
                )
        if is_encoder_decoder(first) and first.decoder_tokens != other.decoder_tokens:
            raise InputError(f"--ensemble: {both} begin or end with different tokens (tokenizer.special_ids)")


def is_encoder_decoder(loaded: Loaded) -> bool:
    return loaded.model.encoder is not None and loaded.model.decoder is not None


def fills_masks(loaded: Loaded) -> bool:
    return loaded.model.decoder is None and "masked_lm" in loaded.model.heads


def end_token(loaded: Loaded) -> int | None:
    """What ends a text of a decoder alone."""
    chosen = loaded.recipe.tokenizer.special_ids.eos
    return loaded.text_tokenizer.special.eos if chosen is None else chosen
