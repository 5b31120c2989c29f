"""Objectives: one file per objective (or family) with its options, batches, loss, soft loss and needs.

To add one: a file with a class and its options, a row in `ObjectiveOptions`, and its name in `training/options.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import get_args

from tformer.nn.heads import HeadOptions
from tformer.objectives.base import Combined, Objective, ObjectiveContext
from tformer.objectives.causal_lm import CausalLmOptions
from tformer.objectives.chat import ChatOptions
from tformer.objectives.contrastive import ContrastiveOptions
from tformer.objectives.denoising import DenoisingOptions
from tformer.objectives.dpo import DpoOptions
from tformer.objectives.labelled import ClassificationOptions, MultiLabelOptions, RegressionOptions
from tformer.objectives.masked_lm import MaskedLmOptions
from tformer.objectives.next_sentence import NextSentenceOptions
from tformer.objectives.question_answering import QuestionAnsweringOptions
from tformer.objectives.replaced_token import ReplacedTokenOptions
from tformer.objectives.seq2seq import Seq2SeqOptions
from tformer.objectives.similarity import SimilarityOptions
from tformer.objectives.span_corruption import SpanCorruptionOptions
from tformer.objectives.token_classification import TokenClassificationOptions
from tformer.support.errors import InputError

__all__ = [
    "OBJECTIVES",
    "CausalLmOptions",
    "ObjectiveOptions",
    "build_objective",
    "check_combination",
    "objectives_for_heads",
    "unused_keys",
]

ObjectiveOptions = (
    CausalLmOptions
    | ChatOptions
    | MaskedLmOptions
    | NextSentenceOptions
    | ReplacedTokenOptions
    | ClassificationOptions
    | MultiLabelOptions
    | RegressionOptions
    | ContrastiveOptions
    | SimilarityOptions
    | TokenClassificationOptions
    | QuestionAnsweringOptions
    | Seq2SeqOptions
    | SpanCorruptionOptions
    | DenoisingOptions
    | DpoOptions
)

OBJECTIVES: dict[str, type[Objective]] = {options.kind: options.objective for options in get_args(ObjectiveOptions)}
"""The objective class of each kind."""


def build_objective(options: Sequence[ObjectiveOptions], context: ObjectiveContext) -> Objective:
    """The objective with these options; several share the batches of the first and one forward pass.

    Raises InputError for objectives that cannot be combined, and for a tokenizer that lacks what they need.
    """
    problem = check_combination([each.kind for each in options])
    if problem is not None:
        raise InputError(f"objectives: {problem}")
    built = [each.objective(each, context) for each in options]
    return built[0] if len(built) == 1 else Combined(built)


def check_combination(kinds: Sequence[str]) -> str | None:
    """The problem with objectives of these kinds in one model, in this order; None: they can be trained together."""
    first, *others = kinds
    if OBJECTIVES[first].companion_of is None and all(OBJECTIVES[kind].companion_of == first for kind in others):
        return None if len(set(kinds)) == len(kinds) else f"found {', '.join(kinds)}, expected each once"
    pairs = [f"{found.companion_of}, {kind}" for kind, found in OBJECTIVES.items() if found.companion_of is not None]
    return f"found {', '.join(kinds)}, expected one objective, or {' or '.join(pairs)}"


def unused_keys(kinds: Iterable[str]) -> list[str]:
    """The keys of the recipe that none of these objectives reads, sorted."""
    return sorted(set.intersection(*(set(OBJECTIVES[kind].unused_keys) for kind in kinds)))


def objectives_for_heads(heads: Sequence[HeadOptions], parts: Collection[str]) -> list[str]:
    """The kinds of objectives that train a model with these heads, for example an imported one.

    Without heads it is the first objective that the model could learn with a new one.

    Args:
        heads: of the model.
        parts: the sections of `model` that are not null: encoder, decoder, patches.
    """
    found = {(head.kind, head.label_kind) for head in heads}
    mains = [kind for kind, objective in OBJECTIVES.items() if objective.companion_of is None]
    fitting = [kind for kind in mains if (OBJECTIVES[kind].head.kind, OBJECTIVES[kind].head.label_kind) in found]
    matching = [
        kind
        for kind in fitting or mains
        if all(part in parts for part in OBJECTIVES[kind].parts)
        and not any(part in parts for part in OBJECTIVES[kind].without)
        and (OBJECTIVES[kind].reads_images or "patches" not in parts)
    ]
    first = (matching or fitting)[0]
    others = [kind for kind, other in OBJECTIVES.items() if other.companion_of == first]
    return [first, *(kind for kind in others if OBJECTIVES[kind].head.kind in {head.kind for head in heads})]
