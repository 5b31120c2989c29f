"""Pegasus: mBART with sinusoids, and without a norm of the embeddings. Its files repeat the sinusoids."""

from __future__ import annotations

from functools import partial

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.bart_family import (
    SKIPPED,
    Traits,
    generator_links,
    of_files,
    read_generator,
    stored_sinusoids,
    write_body,
)

PEGASUS = Architecture(
    model_type="pegasus",
    classes={"PegasusForConditionalGeneration": ("lm",)},
    family="transformer",
    read=partial(read_generator, traits=Traits("pre", learned_positions=False, embedding_norm=False)),
    write=write_body,
    links=generator_links,
    prefix="model.",
    skipped=SKIPPED,
    of_files=of_files,
    undecided=("model.tie.output",),
    fixed=partial(stored_sinusoids, written=True),
)
