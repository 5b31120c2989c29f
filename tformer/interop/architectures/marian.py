"""Marian (OPUS-MT): the original Transformer with sinusoids in halves, and one or two vocabularies.

Files of older versions repeat the sinusoids, newer ones leave them out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.bart import (
    COPIES,
    SKIPPED,
    Traits,
    body,
    body_links,
    generator_links,
    of_files,
    output_links,
    stored_sinusoids,
)
from tformer.interop.architectures.parts import OUTPUT
from tformer.interop.config import Config
from tformer.interop.mapping import Link, link
from tformer.recipe.model import Model

CONFIG = body(Traits("post", learned_positions=False, embedding_norm=False, vocab_size=58101))


def read(config: Config, class_name: str) -> dict[str, Any]:
    section = CONFIG.read(config) | {"heads": [{"kind": "lm", "bias": True}]}
    if config.take("share_encoder_decoder_embeddings", default=True, kind=bool):
        # Untied, this class would read two further tables beside the shared one, and never that.
        config.expect("tie_word_embeddings", True)
        config.expect("decoder_vocab_size", section["vocab_size"])
        return section
    tied = config.take("tie_word_embeddings", default=True, kind=bool)
    return section | {
        "target_vocab_size": config.size("decoder_vocab_size", default=section["vocab_size"]),
        "tie": {"source_target": False, "output": tied},
    }


def write(model: Model, class_name: str) -> dict[str, Any]:
    shared = model.tie.source_target
    return CONFIG.write(model) | {
        "decoder_vocab_size": model.target_vocab_size or model.vocab_size,
        "share_encoder_decoder_embeddings": shared,
        "tie_word_embeddings": shared or model.tie.output,
    }


def links(model: Model, class_name: str) -> list[Link]:
    if model.tie.source_target:
        return generator_links(model, class_name)
    source, target = COPIES
    return [
        link("embedding.weight", source),
        link("decoder_embedding.weight", target, also=[OUTPUT] if model.tie.output else []),
        *output_links(model),
        *body_links(model),
    ]


MARIAN = Architecture(
    model_type="marian",
    classes={"MarianMTModel": ("lm",), "MarianModel": ()},
    family="transformer",
    read=read,
    write=write,
    links=links,
    prefix="model.",
    skipped=SKIPPED,
    of_files=of_files,
    undecided=("model.tie.output",),
    fixed=partial(stored_sinusoids, written=False),
    special_ids={"pad": 58100, "eos": 0, "decoder_start": 58100, "forced_eos": 0},
    ctranslate2=("BartLoader", {"normalize_before": False, "normalize_embedding": False}),
)
