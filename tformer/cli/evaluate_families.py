"""Which models `tformer evaluate` knows, how each kind is evaluated and shown, and which options it understands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tformer.cli.evaluate_continuations import evaluate_continuations
from tformer.cli.evaluate_labelled import evaluate_labelled, show_labelled
from tformer.cli.evaluate_masked import evaluate_masked, show_masked
from tformer.cli.evaluate_pairs import evaluate_pairs, show_pairs
from tformer.cli.evaluate_request import Request
from tformer.cli.evaluate_restored import evaluate_restored
from tformer.cli.evaluate_text import evaluate_text, show_text
from tformer.cli.process import StopFlag
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.loading import Loaded


@dataclass(frozen=True)
class Family:
    """How one kind of model is evaluated and shown, and which of the options mean something for it."""

    name: str
    evaluate: Callable[[Loaded, Request, StopFlag], dict[str, Any]]
    show: Callable[[dict[str, Any]], None]
    options: frozenset[str]


TEXT_OPTIONS = frozenset({"text_column", "invalid_utf8", "seq_len"})
TEXT = Family("a causal language model", evaluate_text, show_text, TEXT_OPTIONS | {"stride"})
CONTINUATIONS = Family(
    "a causal language model, and --score reads continuations",
    evaluate_continuations,
    show_pairs,
    frozenset(("score", "source", "target", "source_column", "target_column", "invalid_utf8", "seq_len")),
)
MASKED = Family(
    "a masked language model", evaluate_masked, show_masked, TEXT_OPTIONS | {"pseudo_perplexity", "max_tokens"}
)
LABELLED = Family(
    "a model of labelled examples",
    evaluate_labelled,
    show_labelled,
    TEXT_OPTIONS | {"text2_column", "label_column", "errors_file"},
)
DAMAGED = Family("a model that restores texts", evaluate_restored, show_masked, TEXT_OPTIONS)
PAIRS = Family(
    "a model of pairs",
    evaluate_pairs,
    show_pairs,
    CONTINUATIONS.options
    | {"prefix", "errors_file", "no_decode", "beam_size", "length_penalty", "length_penalty_type"}
    | {"max_new_tokens", "bleu_tokenize", "lowercase"},
)
IMAGES = Family("a model of images", evaluate_labelled, show_labelled, frozenset({"errors_file"}))
FAMILIES = {  # of text, by the kind of the run's first objective
    "causal_lm": TEXT,
    "masked_lm": MASKED,
    "next_sentence": MASKED,
    "replaced_token": MASKED,
    "classification": LABELLED,
    "multi_label": LABELLED,
    "regression": LABELLED,
    "seq2seq": PAIRS,
    "span_corruption": DAMAGED,
    "denoising": DAMAGED,
}
FLAGS = {
    "seq_len": "--seq-len",
    "stride": "--stride",
    "pseudo_perplexity": "--pseudo-perplexity",
    "max_tokens": "--max-tokens",
    "text_column": "--text-column",
    "text2_column": "--text2-column",
    "invalid_utf8": "--invalid-utf8",
    "label_column": "--label-column",
    "errors_file": "--errors",
    "source": "--source",
    "target": "--target",
    "source_column": "--source-column",
    "target_column": "--target-column",
    "prefix": "--prefix",
    "score": "--score",
    "no_decode": "--no-decode",
    "beam_size": "--beam-size",
    "max_new_tokens": "--max-new-tokens",
    "length_penalty": "--length-penalty",
    "length_penalty_type": "--length-penalty-type",
    "bleu_tokenize": "--bleu-tokenize",
    "lowercase": "--lowercase",
}


def family_of(loaded: Loaded, request: Request) -> Family:
    """What kind of model this is, for what is asked of it."""
    if loaded.recipe.model.patches is not None:
        return IMAGES
    family = FAMILIES[loaded.recipe.objectives[0].kind]
    return CONTINUATIONS if family is TEXT and request.score else family


def check_family(request: Request, family: Family, loaded: Loaded) -> None:
    """Raise InputError for an option that means nothing to this kind of model."""
    for option, flag in FLAGS.items():
        value = getattr(request, option)
        if value is not None and value is not False and option not in family.options:
            raise InputError(
                f"{flag} has no meaning here: {loaded.path} is {family.name}",
                hint="--score reads continuations" if family is TEXT and option in CONTINUATIONS.options else None,
            )


def at_length_asked(loaded: Loaded, request: Request) -> Loaded:
    """The model for sequences of `--seq-len` tokens.

    Raises InputError where it does not reach so far, and for pairs held out of training by a length of its own.
    """
    from tformer.evaluation.extrapolation import at_length

    if request.seq_len is None:
        return loaded
    if request.held_out(loaded) and FAMILIES[loaded.recipe.objectives[0].kind] is PAIRS:
        raise InputError(
            f"--seq-len {request.seq_len} would change which pairs are held out: they were split at "
            f"{loaded.recipe.seq_len} tokens",
            hint="name what to evaluate on with --data or --source",
        )
    return at_length(loaded, request.seq_len)
