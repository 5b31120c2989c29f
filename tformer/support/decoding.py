"""The settings of decoding, one row each: type, bounds, flag, help, and the models or methods that it is for.

Three places have fields of these types, and follow their rows: the recipe's section `generation`, which has the
defaults; the options of `tformer generate` (None: not given); and the settings of sampling and beam search.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt  # pydantic reads these; its own `Field` takes longer to import than help may

from tformer.support.bounds import Bound, Must, at_least
from tformer.support.options import Neutral, Option, Panel, as_keyword, facts_of

BEAMS, SAMPLING, LENGTH = Panel("Beam search"), Panel("Sampling"), Panel("Length and repetition")
MOST_TOKENS, MOST_BEAMS = 2**30, 2**20
INFINITE = float("inf")


class Use(Enum):
    """The models or methods that an option is for; an option without one is for all."""

    SAMPLE = "drawing samples"
    SEARCH = "beam search"
    SOURCE = "sources of encoder-decoders"
    TEXT = "models that write text: not for filling masks"


ROWS = Bound(1, 2**16, "each takes a row of a batch, and its memory")
TOKENS = Bound(1, 2**30, "each token takes memory")
PENALTY = Bound(1e-30, 1e30, "logits times it, or divided by it, must be finite in float32")


def one_of(*choices: str) -> Must:
    return Must(lambda value: value in choices, f"{', '.join(choices[:-1])} or {choices[-1]}")


# --- length and repetition --------------------------------------------------------------------------------------------

MaxNewTokens = Annotated[
    int,
    Gt(0),
    at_least(1),
    Le(MOST_TOKENS),
    TOKENS,
    LENGTH("--max-new-tokens", help="Maximum tokens of a completion.", default="the recipe's"),
    Use.TEXT,
]
MinNewTokens = Annotated[
    int,
    Ge(0),
    at_least(0),
    TOKENS,
    LENGTH("--min-new-tokens", help="Minimum tokens of a completion.", rare=True, default="the recipe's"),
    Use.TEXT,
    Neutral(0),
]
AtLimit = Annotated[
    Literal["cut", "end"],
    one_of("cut", "end"),
    LENGTH(
        "--at-limit",
        help="At the maximum length. cut: stop there. end: force the end-of-sequence token and score it.",
        rare=True,
        default="the recipe's",
    ),
    Use.TEXT,
    Neutral("cut"),
]
LengthMargin = Annotated[
    int,
    Ge(0),
    at_least(0),
    LENGTH(
        "--length-margin",
        metavar="N",
        help="Limit an output to the length of its source plus N tokens.",
        rare=True,
        default="the recipe's",
    ),
    Use.SOURCE,
]
RepetitionPenalty = Annotated[
    float,
    Gt(0),
    Must(lambda value: 0 < value < INFINITE, "above 0 (1 is off) and finite"),
    PENALTY,
    LENGTH("--repetition-penalty", help="Above 1: used tokens get less likely.", default="the recipe's"),
    Use.TEXT,
]
NoRepeatNgram = Annotated[
    int,
    Ge(0),
    at_least(0, " (0 is off)"),
    LENGTH(
        "--no-repeat-ngram", metavar="N", help="Never repeat a sequence of N tokens.", rare=True, default="the recipe's"
    ),
    Use.TEXT,
]
ContextPolicy = Annotated[
    Literal["slide", "error"],
    one_of("slide", "error"),
    LENGTH(
        "--context",
        help="When the context of a decoder-only model is full. slide: continue with its last half (beam search "
        "stops). error: stop, and refuse a longer prompt. For sources see --too-long.",
        rare=True,
    ),
]

# --- sampling ---------------------------------------------------------------------------------------------------------

Temperature = Annotated[
    float,
    Ge(0),
    Must(lambda value: 0 <= value < INFINITE, "at least 0 (0 is greedy) and finite"),
    SAMPLING("--temperature", help="Divisor of logits; 0: greedy.", default="the recipe's"),
    Use.SAMPLE,
    Neutral(0),
]
TopK = Annotated[
    int,
    Ge(0),
    at_least(0, " (0 is off)"),
    SAMPLING(
        "--top-k",
        help="Keep the K most probable tokens (0: all), or show K for a [MASK].",
        default="the recipe's; 5 for a [MASK]",
        metavar="K",
    ),
    Use.SAMPLE,
    Neutral(0),
]
TopP = Annotated[
    float,
    Gt(0),
    Le(1),
    Must(lambda value: 0 < value <= 1, "above 0 and at most 1 (1 is off)"),
    SAMPLING("--top-p", help="Keep the most probable tokens that sum up to P.", default="the recipe's", metavar="P"),
    Use.SAMPLE,
    Neutral(1),
]
MinP = Annotated[
    float,
    Ge(0),
    Lt(1),
    Must(lambda value: 0 <= value < 1, "at least 0 (0 is off) and below 1"),
    SAMPLING(
        "--min-p",
        help="Keep tokens at least P times as probable as the most probable one.",
        rare=True,
        default="the recipe's",
        metavar="P",
    ),
    Use.SAMPLE,
    Neutral(0),
]
NumSamples = Annotated[
    int,
    Gt(0),
    at_least(1),
    ROWS,
    SAMPLING("--num-samples", help="Number of completions per prompt."),
    Use.SAMPLE,
    Neutral(1),
]
Stop = Annotated[
    tuple[str, ...],
    Must(all, "texts that are not empty"),
    SAMPLING("--stop", help="End the completion before this text; may be repeated."),
    Use.TEXT,
]

# --- beam search ------------------------------------------------------------------------------------------------------

BeamSize = Annotated[
    int,
    Gt(0),
    at_least(1),
    Le(MOST_BEAMS),
    ROWS,
    BEAMS("--beam-size", metavar="B", help="Hypotheses per text; 1: greedy.", default="the recipe's"),
    Use.SEARCH,
]
NBest = Annotated[
    int,
    Gt(0),
    at_least(1),
    ROWS,
    BEAMS(
        "--n-best",
        metavar="N",
        help="Print the N best texts as INDEX, SCORE, TEXT.",
        default="1, without INDEX and SCORE",
    ),
    Use.SEARCH,
]
LengthPenalty = Annotated[
    float,
    Must(lambda value: -10 <= value <= 10, "between -10 and 10 (0 is off)"),
    BEAMS(
        "--length-penalty",
        metavar="A",
        help="A above 0 favours long texts, below 0 short ones.",
        default="the recipe's",
    ),
    Use.SEARCH,
]
LengthPenaltyType = Annotated[
    Literal["gnmt", "avg", "none"],
    one_of("gnmt", "avg", "none"),
    BEAMS(
        "--length-penalty-type",
        help="Divisor of a log-probability: gnmt ((5 + length)/6)^A, avg length^A, none 1.",
        rare=True,
        default="the recipe's",
    ),
    Use.SEARCH,
]
Stopping = Annotated[
    Literal["beam", "heuristic", "exhaustive"],
    one_of("beam", "heuristic", "exhaustive"),
    BEAMS(
        "--stopping",
        help="When the search of a text stops. beam: B hypotheses are finished. heuristic: B are finished, and no "
        "unfinished one, scored at its present length, beats the worst of them. exhaustive: B are finished, and "
        "no unfinished one can beat the worst of them at any allowed length.",
        default="the recipe's",
        rare=True,
    ),
    Use.SEARCH,
]

# --- the whole table --------------------------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Any, ...]] = {
    as_keyword(fact.flags[0]): facts_of(row)
    for row in list(globals().values())
    for fact in facts_of(row)
    if isinstance(fact, Option)
}
"""The facts of each row, by the name of its field."""


def keys_for(*uses: Use) -> tuple[str, ...]:
    """The recipe's keys `generation.NAME` of the settings for one of these uses; `n_best` has none."""
    names = (name for name, facts in SETTINGS.items() if any(use in facts for use in uses))
    return tuple(f"generation.{name}" for name in names if name != "n_best")
