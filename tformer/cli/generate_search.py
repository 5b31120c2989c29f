"""Who answers when `tformer generate` searches with a beam, or translates: a translator, or a continuer of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tformer.cli.generate_output import Printer
from tformer.cli.generate_session import tell_cut_prompt
from tformer.cli.report import (
    StopFlag,
    console,
)
from tformer.cli.translate_input import Lines
from tformer.cli.translate_session import TranslateSession

if TYPE_CHECKING:
    from tformer.cli.generate_request import Asked
    from tformer.decoding.settings import BeamSettings, GenerationSettings
    from tformer.decoding.translate import Translation
    from tformer.loading import Loaded


def translating(
    asked: Asked,
    models: Sequence[Loaded],
    settings: BeamSettings | GenerationSettings,
    flag: StopFlag,
    printer: Printer,
    *,
    batch_size: int,
) -> TranslateSession:
    """Encoder-decoders, which turn sources into targets."""
    from tformer.decoding.loaded import translator_of
    from tformer.decoding.sentences import LINES

    first = models[0]
    translator = translator_of(
        *models,
        settings=settings,
        length_margin=asked.length_margin,
        coverage_penalty=asked.coverage_penalty,
        alignments=asked.alignments,
        too_long=asked.too_long,
    )
    from tformer.decoding.prompts import task_prefix

    prefix, note = task_prefix(first.recipe, asked.prefix)
    if note is not None:
        console.print(note, style="dim", markup=False)

    def search(window: Lines) -> list[list[Translation]]:
        return translator.translate(
            window.sources,
            target_prefixes=window.prefixes,
            batch_size=batch_size,
            should_stop=flag.should_stop,
            first_row=window.first,
            places=window.places or LINES,
        )

    return TranslateSession(
        search,
        asked,
        flag,
        printer,
        reader=translator.reader,
        task_prefix=prefix,
        tokenizers=(first.text_tokenizer, first.target_tokenizer),
        batch_size=batch_size,
    )


def continuing(
    asked: Asked,
    models: Sequence[Loaded],
    settings: BeamSettings,
    flag: StopFlag,
    printer: Printer,
    *,
    batch_size: int,
) -> TranslateSession:
    """Decoders alone, which go on from prompts."""
    from tformer.decoding.continuer import Continuer

    tokenizer = models[0].text_tokenizer
    continuer = Continuer(
        [loaded.model for loaded in models],
        tokenizer,
        settings,
        context="error" if asked.context == "error" else "slide",
        on_cut=lambda number, length, limit: tell_cut_prompt(number, length=length, limit=limit),
    )

    def search(window: Lines) -> list[list[Translation]]:
        return continuer.continue_texts(
            window.sources, batch_size=batch_size, should_stop=flag.should_stop, first_row=window.first
        )

    return TranslateSession(
        search, asked, flag, printer, reader=None, tokenizers=(tokenizer, tokenizer), batch_size=batch_size
    )
