"""The table of objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tformer.objectives.base import Combined, Objective, ObjectiveContext
from tformer.objectives.causal_lm import CausalLm, CausalLmOptions
from tformer.objectives.denoising import Denoising
from tformer.objectives.labelled import Classification, MultiLabel, Regression
from tformer.objectives.masked_lm import MaskedLm, never_masked
from tformer.objectives.next_sentence import NextSentence
from tformer.objectives.options import (
    ClassificationOptions,
    DenoisingOptions,
    MaskedLmOptions,
    MultiLabelOptions,
    NextSentenceOptions,
    RegressionOptions,
    ReplacedTokenOptions,
    Seq2SeqOptions,
    SpanCorruptionOptions,
)
from tformer.objectives.replaced_token import ReplacedToken
from tformer.objectives.seq2seq import Seq2Seq
from tformer.objectives.span_corruption import SpanCorruption

__all__ = ["OBJECTIVES", "CausalLmOptions", "ObjectiveOptions", "build_objective"]

ObjectiveOptions = (
    CausalLmOptions
    | MaskedLmOptions
    | NextSentenceOptions
    | ReplacedTokenOptions
    | ClassificationOptions
    | MultiLabelOptions
    | RegressionOptions
    | Seq2SeqOptions
    | SpanCorruptionOptions
    | DenoisingOptions
)


def _causal_lm(options: CausalLmOptions, context: ObjectiveContext) -> CausalLm:
    return CausalLm(
        options,
        context.special_ids,
        seq_len=context.seq_len,
        padding=context.padding,
        pad_to=context.pad_to,
        never_masked=never_masked(context) if options.word_dropout else None,
    )


OBJECTIVES: dict[str, Callable[[Any, ObjectiveContext], Objective]] = {
    "causal_lm": _causal_lm,
    "masked_lm": MaskedLm,
    "next_sentence": NextSentence,
    "replaced_token": ReplacedToken,
    "classification": Classification,
    "multi_label": MultiLabel,
    "regression": Regression,
    "seq2seq": Seq2Seq,
    "span_corruption": SpanCorruption,
    "denoising": Denoising,
}


def build_objective(options: Sequence[ObjectiveOptions], context: ObjectiveContext) -> Objective:
    """The objective of these options; several share the batches of the first and one forward pass."""
    built = [OBJECTIVES[one.kind](one, context) for one in options]
    return built[0] if len(built) == 1 else Combined(built)
