"""mBART: BART with norms in front and a last one behind each stack."""

from __future__ import annotations

from functools import partial

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.bart_family import (
    SKIPPED,
    Traits,
    generator_links,
    of_files,
    read_generator,
    write_body,
)

MBART = Architecture(
    model_type="mbart",
    classes={"MBartForConditionalGeneration": ("lm",)},
    family="bart",
    read=partial(read_generator, traits=Traits("pre", learned_positions=True, embedding_norm=True)),
    write=write_body,
    links=generator_links,
    prefix="model.",
    skipped=SKIPPED,
    of_files=of_files,
    undecided=("model.tie.output",),
)
