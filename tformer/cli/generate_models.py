"""The model, or the ensemble of models, that `tformer generate` was asked to use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tformer.cli.generate_compile import compiles
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
    from tformer.decoding.inference import (
        compile_decoding,
        inference_dtype,
        prepare_inference,
    )
    from tformer.decoding.loaded import require_same_vocabularies
    from tformer.device import resolve_device
    from tformer.loading import load

    place = resolve_device(asked.device)
    models: dict[Path, Loaded] = {}
    for name in names_of_models(asked.arguments or [], asked.ensemble or []):
        loaded = load(name, device=place, which=asked.checkpoint, kinds=set(KINDS))
        if asked.special_tokens:
            loaded.tokenizer = loaded.text_tokenizer.reading_special()
        models.setdefault(loaded.path.resolve(), loaded)
    chosen = list(models.values())
    if len(chosen) > 1:
        require_same_vocabularies(chosen)
    for loaded in chosen:
        trained_in = loaded.recipe.training.precision
        dtype = inference_dtype(asked.precision, trained_in=trained_in, device=place)
        if compiles(asked, loaded, place):
            compile_decoding(loaded.model, dtype)
        else:
            rows = asked.rows_of_a_step(loaded.recipe.generation, encoder_decoder=is_encoder_decoder(loaded))
            prepare_inference(loaded.model, dtype, quantize=asked.quantize, rows=rows)
    return chosen


def is_encoder_decoder(loaded: Loaded) -> bool:
    return loaded.model.encoder is not None and loaded.model.decoder is not None


def fills_masks(loaded: Loaded) -> bool:
    return loaded.model.decoder is None and "masked_lm" in loaded.model.heads


def end_token(loaded: Loaded) -> int | None:
    """What ends a text of a decoder alone."""
    return loaded.text_tokenizer.special.eos
