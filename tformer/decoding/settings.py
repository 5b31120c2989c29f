"""Settings and results of sampling and beam search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from tformer.errors import InputError
from tformer.recipe.sections import Generation

FinishReason = Literal["eos", "stop", "length", "context", "interrupted"]
ContextPolicy = Literal["slide", "error"]


@dataclass(frozen=True)
class GenerationSettings:
    """How tokens are chosen and when a completion ends.

    `context` says what happens when a sequence outgrows the model's `max_seq_len` (for position kinds without a limit
    of their own too, so that all models behave alike):
    `slide`: only the last `max_seq_len // 2` tokens are kept as the context, read again, and generation goes on; a
    prompt that is too long is cut the same way.
    `error`: a prompt that is too long is an `InputError`, and a completion that fills the context ends with the
    finish reason `context`.
    """

    max_new_tokens: int = 200
    min_new_tokens: int = 0  # so many tokens come before an end of sequence
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    no_repeat_ngram: int = 0  # 0: off
    stop_texts: tuple[str, ...] = ()
    eos_id: int | None = None  # None: only length, stop tokens and stop texts end a completion
    stop_tokens: tuple[int, ...] = ()  # end a completion as `eos_id` does
    forced_eos: int | None = None  # the last of `max_new_tokens` is this one; None: what gets there is cut
    suppress_tokens: tuple[int, ...] | None = None  # never written; None: `suppressed_tokens` chooses
    seed: int = 0
    num_samples: int = 1  # completions per prompt
    logprobs: bool = False
    context: ContextPolicy = "slide"

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", self.min_new_tokens >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0 (0 is greedy) and finite"),
            ("top_k", self.top_k >= 0, "at least 0 (0 is off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 (0 is off) and below 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0 (1 is off) and finite"),
            ("no_repeat_ngram", self.no_repeat_ngram >= 0, "at least 0 (0 is off)"),
            ("stop", all(self.stop_texts), "texts that are not empty"),
            ("seed", self.seed >= 0, "at least 0"),
            ("num_samples", self.num_samples >= 1, "at least 1"),
            ("context", self.context in ("slide", "error"), "slide or error"),
        ):
            if not holds:
                value = self.stop_texts if name == "stop" else getattr(self, name)
                raise InputError(f"{name} must be {expected}, found {value}")
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"--min-new-tokens {self.min_new_tokens} is larger than --max-new-tokens {self.max_new_tokens}"
            )

    @property
    def ends(self) -> tuple[int, ...]:
        """Every token that ends a completion."""
        return (*(() if self.eos_id is None else (self.eos_id,)), *self.stop_tokens)

    @property
    def greedy(self) -> bool:
        """True when every token is the most probable one: nothing is drawn."""
        return self.temperature == 0 or self.top_k == 1

    @classmethod
    def from_recipe(cls, generation: Generation, **overrides: Any) -> GenerationSettings:
        """The recipe's `generation` section, with every override that is not None in its place.

        The recipe's own minimum gives way to a smaller maximum that overrides the recipe's.
        """
        settings: dict[str, Any] = {
            "max_new_tokens": generation.max_new_tokens,
            "temperature": generation.temperature,
            "top_k": generation.top_k,
            "top_p": generation.top_p,
            "min_p": generation.min_p,
            "repetition_penalty": generation.repetition_penalty,
            "no_repeat_ngram": generation.no_repeat_ngram,
            "stop_texts": generation.stop,
            "suppress_tokens": generation.suppress_tokens,
            "stop_tokens": generation.stop_tokens,
        }
        settings.update({name: value for name, value in overrides.items() if value is not None})
        settings.setdefault("min_new_tokens", min(generation.min_new_tokens, settings["max_new_tokens"]))
        return cls(**settings)


@dataclass(frozen=True)
class Generated:
    """One completion.

    `ids`: every token drawn, a final end-of-sequence token and the tokens of a stop text included.
    `text`: the completion alone, cut before a stop text; None when generation had no tokenizer.
    `logprobs`: natural logarithms, one per id, under the model's own distribution: before penalties, temperature and
    truncation. None unless asked for.
    """

    ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason


LengthPenaltyType = Literal["gnmt", "avg", "none"]

LENGTH_PENALTIES: dict[LengthPenaltyType, Callable[[int, float], float]] = {
    "gnmt": lambda length, alpha: ((5.0 + length) / 6.0) ** alpha,
    "avg": lambda length, alpha: float(length) ** alpha,
    "none": lambda length, alpha: 1.0,
}


def length_penalty(length: int, *, alpha: float, kind: LengthPenaltyType) -> float:
    """lp(length), above zero. A hypothesis without tokens counts as one of length 1: its sum is 0 all the same."""
    return LENGTH_PENALTIES[kind](max(length, 1), alpha)


Stopping = Literal["beam", "heuristic", "exhaustive"]

OF_RECIPE = (
    *("beam_size", "length_penalty", "length_penalty_type", "max_new_tokens", "min_new_tokens", "stopping"),
    *("no_repeat_ngram", "repetition_penalty", "beam_groups", "diversity_penalty", "suppress_tokens", "stop_tokens"),
)
"""The settings that the recipe's `generation` section has under the same names."""

BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "beam_size": (lambda value: value >= 1, "at least 1"),
    "n_best": (lambda value: value >= 1, "at least 1"),
    "length_penalty": (lambda value: -10 <= value <= 10, "between -10 and 10 (0 is off)"),
    "length_penalty_type": (lambda value: value in LENGTH_PENALTIES, "gnmt, avg or none"),
    "max_new_tokens": (lambda value: value >= 1, "at least 1"),
    "min_new_tokens": (lambda value: value >= 0, "at least 0"),
    "stopping": (lambda value: value in ("beam", "heuristic", "exhaustive"), "beam, heuristic or exhaustive"),
    "no_repeat_ngram": (lambda value: value >= 0, "at least 0 (0 is off)"),
    "repetition_penalty": (lambda value: 0 < value < float("inf"), "above 0 (1 is off) and finite"),
    "beam_groups": (lambda value: value >= 1, "at least 1 (1 is off)"),
    "diversity_penalty": (lambda value: 0 <= value < float("inf"), "at least 0 (0 is off) and finite"),
}
"""What each setting must be, in code and in words."""


@dataclass(frozen=True)
class BeamSettings:
    """How hypotheses are searched, scored and finished.

    `stopping`, when a sentence is done before its limit: by `beam` with `beam_size` finished hypotheses; by `heuristic`
    when besides no live one would displace the `beam_size`-th best if it ended as it stands (its sum over the penalty
    of its present length: where long hypotheses are favoured, a better one may be missed); by `exhaustive` when none
    can any more. They are what `transformers` calls `early_stopping` True, False and "never". The search never depends
    on `n_best`, by which the caller cuts.
    `repetition_penalty` multiplies the log-probability of tokens that a hypothesis (or its history) already holds;
    `score` counts it, `logprob` does not. `diversity_penalty` is taken off a token once for every hypothesis of earlier
    groups that took it at the same step, and steers the choice alone: neither `score` nor `logprob` counts it.
    `forced_eos` is the only token offered at a sentence's limit; it adds nothing to `score`, to `logprob` what the
    model gives it.
    """

    beam_size: int = 4
    n_best: int = 1
    length_penalty: float = 1.0  # alpha
    length_penalty_type: LengthPenaltyType = "avg"
    max_new_tokens: int = 200
    min_new_tokens: int = 0  # so many tokens come before an end of sequence
    eos_id: int | None = None  # None: only the length and stop tokens end a hypothesis
    stop_tokens: tuple[int, ...] = ()  # end a hypothesis as `eos_id` does
    forced_eos: int | None = None  # None: what reaches its limit is cut
    counted_start: int = 0  # tokens before the new ones that the length penalty counts: a forced first of every target
    suppress_tokens: tuple[int, ...] | None = None  # never written; None: `suppressed_tokens` chooses
    stopping: Stopping = "beam"
    no_repeat_ngram: int = 0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    beam_groups: int = 1  # 1: off
    diversity_penalty: float = 0.0  # 0: off

    def __post_init__(self) -> None:
        _require_sound(vars(self), called={})

    @classmethod
    def from_recipe(cls, generation: Generation, **overrides: Any) -> BeamSettings:
        """The recipe's `generation` section, with every override that is not None in its place.

        Raises InputError for what contradicts: it names the recipe's keys, and the flags of what was overridden.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        of_recipe = {name: getattr(generation, name) for name in OF_RECIPE if name not in given}
        defaults = {field.name: field.default for field in fields(cls)}
        _require_sound({**defaults, **of_recipe, **given}, called={name: f"generation.{name}" for name in of_recipe})
        return cls(**of_recipe, **given)

    @property
    def ends(self) -> tuple[int, ...]:
        """Every token that ends a hypothesis."""
        return (*(() if self.eos_id is None else (self.eos_id,)), *self.stop_tokens)

    def penalty(self, length: int) -> float:
        """What the sum of a hypothesis of so many new tokens is divided by."""
        return length_penalty(length + self.counted_start, alpha=self.length_penalty, kind=self.length_penalty_type)


def fitting_beam_settings(generation: Generation, *, eos_id: int | None, **overrides: Any) -> BeamSettings:
    """`BeamSettings.from_recipe` for another beam than the recipe's: its groups go where the beam cannot hold them.

    The recipe's `beam_groups` give way to an overriding `beam_size` that they do not divide, its `diversity_penalty` to
    a single group that was not its own.

    Raises InputError for overrides that contradict one another, and for a recipe that contradicts itself.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    if given.get("beam_size", 0) % generation.beam_groups:
        given.setdefault("beam_groups", 1)
    if given.get("beam_groups") == 1:
        given.setdefault("diversity_penalty", 0.0)
    return BeamSettings.from_recipe(generation, eos_id=eos_id, **given)


def _require_sound(values: Mapping[str, Any], *, called: Mapping[str, str]) -> None:
    """Raise InputError for settings that cannot be searched with. `called`: the names of those that have no flag."""
    for name, (holds, expected) in BOUNDS.items():
        if not holds(values[name]):
            raise InputError(f"{called.get(name, name)} must be {expected}, found {values[name]}")

    def named(name: str) -> str:
        return called.get(name) or "--" + name.replace("_", "-")

    def with_value(name: str) -> str:
        value = values[name]
        return f"{named(name)} {value:g}" if isinstance(value, float) else f"{named(name)} {value}"

    for smaller, larger in (("n_best", "beam_size"), ("min_new_tokens", "max_new_tokens")):
        if values[smaller] > values[larger]:
            raise InputError(f"{with_value(smaller)} is larger than {with_value(larger)}")
    if values["beam_size"] % values["beam_groups"]:
        raise InputError(
            f"{with_value('beam_size')} cannot be divided into {values['beam_groups']} groups of one size",
            hint=f"{named('beam_groups')} must divide {named('beam_size')}",
        )
    if values["diversity_penalty"] and values["beam_groups"] == 1:
        raise InputError(
            f"{with_value('diversity_penalty')} has nothing to act on with one group of beams",
            hint=f"set {named('beam_groups')} to 2 or more",
        )


@dataclass(frozen=True)
class Hypothesis:
    """One finished, cut or interrupted continuation.

    `ids`: the new tokens, a final end-of-sequence token included.
    `logprob`: the sum of the model's own log-probabilities (natural logarithms), as force-decoding gives it.
    `score`: what hypotheses are ranked by: that sum (with a repetition penalty) / the length penalty.
    `finish_reason`: `eos`, `length` (cut at the maximum, or where the model allows no token) or `interrupted`.
    """

    ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason
