"""Settings and results of sampling and beam search.

Length penalties, the divisors of sums of log-probabilities, so that short hypotheses do not win:

    score = log p(y | x) / lp(|y|)

    gnmt   lp = ((5 + length) / 6) ** alpha      arXiv 1609.08144; alpha 0.6 in "Attention Is All You Need"
    avg    lp = length ** alpha                  fairseq, CTranslate2; alpha 1: the mean log-probability per token
    none   lp = 1

`length` counts the new tokens and a final end-of-sequence token. A first token that every target is forced to have
(BART) counts too; a forced target prefix does not. Alpha 0 is `none`; a negative alpha favours short hypotheses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import Any, Literal, Self

from tformer.recipe.sections import Generation
from tformer.support import decoding as row
from tformer.support.bounds import Seed, out_of_bounds
from tformer.support.errors import InputError
from tformer.support.options import facts_of, hints_of

FinishReason = Literal["eos", "stop", "length", "context", "interrupted"]

LENGTH_PENALTIES: dict[row.LengthPenaltyType, Callable[[int, float], float]] = {
    "gnmt": lambda length, alpha: ((5.0 + length) / 6.0) ** alpha,
    "avg": lambda length, alpha: float(length) ** alpha,
    "none": lambda length, alpha: 1.0,
}


def length_penalty(length: int, *, alpha: float, kind: row.LengthPenaltyType) -> float:
    """lp(length), above zero. A hypothesis without tokens counts as one of length 1: its sum is 0 all the same."""
    return LENGTH_PENALTIES[kind](max(length, 1), alpha)


DEFAULT = Generation()


@dataclass(frozen=True)
class DecodingSettings:
    """Settings of both sampling and beam search: length, repetition, and the tokens that end a text.

    `at_limit`: what becomes of a text at its maximum length. `cut`: it has no end, or the one that its model forces
    (`forced_eos`), whose probability a beam search does not count. `end`: its last token is an end of sequence like any
    other, whose probability counts (fairseq's `max_len`).
    """

    max_new_tokens: row.MaxNewTokens = DEFAULT.max_new_tokens
    min_new_tokens: row.MinNewTokens = DEFAULT.min_new_tokens  # number of tokens before an end of sequence
    repetition_penalty: row.RepetitionPenalty = DEFAULT.repetition_penalty  # 1: off
    no_repeat_ngram: row.NoRepeatNgram = DEFAULT.no_repeat_ngram  # 0: off
    eos_id: int | None = None  # None: only length, stop tokens and stop texts end a text
    stop_tokens: tuple[int, ...] = DEFAULT.stop_tokens  # end a text like `eos_id`
    forced_eos: int | None = None  # the last of `max_new_tokens` is this one
    at_limit: row.AtLimit = DEFAULT.at_limit
    suppress_tokens: tuple[int, ...] | None = None  # never written; None: those of `suppressed_tokens`

    def __post_init__(self) -> None:
        self._check(vars(self), names={})

    @classmethod
    def from_recipe(cls, generation: Generation, **overrides: Any) -> Self:
        """The recipe's `generation` section, with every override that is not None in its place.

        Raises InputError for a contradiction: it names the recipe's keys, and the flags of the overrides.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        defaults = {field.name: field.default for field in fields(cls)}
        keys = defaults.keys() & type(generation).model_fields.keys() - given.keys()
        of_recipe = {name: getattr(generation, name) for name in keys}
        cls._check({**defaults, **of_recipe, **given}, names={name: f"generation.{name}" for name in keys})
        return cls(**of_recipe, **given)

    @property
    def ends(self) -> tuple[int, ...]:
        """Every token that ends a text."""
        return (*(() if self.eos_id is None else (self.eos_id,)), *self.stop_tokens)

    @property
    def last_token(self) -> int | None:
        """The only token that a text may have at its limit; None: any."""
        return self.ends[0] if self.forced_eos is None and self.at_limit == "end" else self.forced_eos

    @classmethod
    def _check(cls, values: Mapping[str, Any], *, names: Mapping[str, str]) -> None:
        """Raise InputError for settings that cannot be decoded with. `names`: of values that have no flag."""
        for name, hint in hints_of(cls).items():
            if wrong := out_of_bounds(values[name], facts_of(hint)):
                raise InputError(f"{names.get(name, name)} {wrong}")
        _check_order(values, names, "min_new_tokens", "max_new_tokens")
        has_end = values["eos_id"] is not None or values["forced_eos"] is not None or values["stop_tokens"]
        if values["at_limit"] == "end" and not has_end:
            raise InputError(f"{_shown('at_limit', values, names)} needs an end-of-sequence token, the model has none")


@dataclass(frozen=True)
class GenerationSettings(DecodingSettings):
    """Settings of sampling and of the end of a completion.

    `context` is the policy for a sequence that outgrows the model's `max_seq_len` (also for position kinds without a
    limit, so that all models behave alike):
    `slide`: only the last `max_seq_len // 2` tokens are kept as the context and read again, and generation goes on; a
    prompt that is too long is cut the same way.
    `error`: a prompt that is too long is an `InputError`, and a completion that fills the context ends with the
    finish reason `context`.
    """

    temperature: row.Temperature = DEFAULT.temperature  # 0: greedy
    top_k: row.TopK = DEFAULT.top_k  # 0: off
    top_p: row.TopP = DEFAULT.top_p  # 1: off
    min_p: row.MinP = DEFAULT.min_p  # 0: off
    stop_texts: row.Stop = DEFAULT.stop
    seed: Seed = 0
    num_samples: row.NumSamples = 1  # completions per prompt
    logprobs: bool = False
    context: row.ContextPolicy = "slide"

    @property
    def greedy(self) -> bool:
        """True if every token is the most probable one, without a draw."""
        return self.temperature == 0 or self.top_k == 1

    @classmethod
    def from_recipe(cls, generation: Generation, **overrides: Any) -> Self:
        """`DecodingSettings.from_recipe`; a smaller maximum length lowers the recipe's own minimum."""
        if overrides.get("stop_texts") is None:
            overrides["stop_texts"] = generation.stop
        if overrides.get("min_new_tokens") is None and overrides.get("max_new_tokens") is not None:
            overrides["min_new_tokens"] = min(generation.min_new_tokens, overrides["max_new_tokens"])
        return super().from_recipe(generation, **overrides)


@dataclass(frozen=True)
class BeamSettings(DecodingSettings):
    """Settings of beam search: search, scores and end of hypotheses.

    `stopping`: when a sentence is done before its length limit. `beam`: `beam_size` hypotheses have finished.
    `heuristic`: and no live hypothesis would displace the `beam_size`-th best if it ended now (its sum over the penalty
    of its present length: where long hypotheses are favoured, a better one may be missed). `exhaustive`: and no live
    hypothesis can displace it at any length. `transformers` calls them `early_stopping` True, False and "never". The
    search does not depend on `n_best`, by which the caller cuts the list.

    `repetition_penalty` multiplies the log-probability of tokens that a hypothesis (or its history) already holds; it
    counts in `score`, not in `logprob`. Where `at_limit` is `cut`, `forced_eos` adds nothing to `score`, and the
    model's own log-probability to `logprob`.
    """

    beam_size: row.BeamSize = 4
    n_best: row.NBest = 1
    length_penalty: row.LengthPenalty = DEFAULT.length_penalty  # alpha
    length_penalty_type: row.LengthPenaltyType = DEFAULT.length_penalty_type
    counted_start: int = 0  # tokens before the new ones that the length penalty counts: a forced first of every target
    stopping: row.Stopping = DEFAULT.stopping

    def penalty(self, length: int) -> float:
        """The divisor of the sum of log-probabilities; `length`: number of new tokens."""
        return length_penalty(length + self.counted_start, alpha=self.length_penalty, kind=self.length_penalty_type)

    @classmethod
    def _check(cls, values: Mapping[str, Any], *, names: Mapping[str, str]) -> None:
        super()._check(values, names=names)
        _check_order(values, names, "n_best", "beam_size")


def _check_order(values: Mapping[str, Any], names: Mapping[str, str], smaller: str, larger: str) -> None:
    if values[smaller] > values[larger]:
        raise InputError(f"{_shown(smaller, values, names)} is larger than {_shown(larger, values, names)}")


def _flag(name: str, names: Mapping[str, str]) -> str:
    return names.get(name) or "--" + name.replace("_", "-")


def _shown(name: str, values: Mapping[str, Any], names: Mapping[str, str]) -> str:
    value = values[name]
    return f"{_flag(name, names)} {value:g}" if isinstance(value, float) else f"{_flag(name, names)} {value}"


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    """One sampled completion.

    `ids`: every token drawn, a final end-of-sequence token and the tokens of a stop text included.
    `text`: the completion alone, cut before a stop text; None when generation had no tokenizer.
    `logprobs`: natural logarithms, one per id, under the model's own distribution: before penalties, temperature and
    truncation. None unless requested.
    """

    ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason


@dataclass(frozen=True)
class Hypothesis:
    """One finished, cut or interrupted continuation of a beam search.

    `ids`: the new tokens, a final end-of-sequence token included.
    `logprobs`: the model's own log-probability of each (natural logarithms), as force-decoding gives it.
    `score`: what hypotheses are ranked by: that sum (with a repetition penalty) / the length penalty.
    `finish_reason`: `eos`, `length` (cut at the maximum, or where the model allows no token) or `interrupted`.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    finish_reason: FinishReason

    @property
    def logprob(self) -> float:
        """The sum of `logprobs`, added in order as the search does."""
        return reduce(add, self.logprobs, 0.0)
