"""What is asked of beam search, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tformer.decoding.length_penalty import LENGTH_PENALTIES, LengthPenaltyType
from tformer.decoding.settings import FinishReason
from tformer.errors import InputError
from tformer.recipe.training import Generation

Stopping = Literal["beam", "exhaustive"]


@dataclass(frozen=True)
class BeamSettings:
    """How hypotheses are searched, scored and finished.

    `stopping`: `beam` ends a sentence when `beam_size` hypotheses are finished; `exhaustive` goes on while a live one
    could still displace the `beam_size`-th best. The search never depends on `n_best`, by which the caller cuts.
    `repetition_penalty` multiplies the log-probability of tokens that a hypothesis (or its history) already holds;
    `score` counts it, `logprob` does not. `diversity_penalty` is taken off a token once for every hypothesis of earlier
    groups that took it at the same step, and steers the choice alone: neither `score` nor `logprob` counts it.
    """

    beam_size: int = 4
    n_best: int = 1
    length_penalty: float = 1.0  # alpha
    length_penalty_type: LengthPenaltyType = "avg"
    max_new_tokens: int = 200
    min_new_tokens: int = 0  # so many tokens come before an end of sequence
    eos_id: int | None = None  # None: only the length ends a hypothesis
    stopping: Stopping = "beam"
    no_repeat_ngram: int = 0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    beam_groups: int = 1  # 1: off
    diversity_penalty: float = 0.0  # 0: off

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("beam_size", self.beam_size >= 1, "at least 1"),
            ("n_best", self.n_best >= 1, "at least 1"),
            ("length_penalty", -10 <= self.length_penalty <= 10, "between -10 and 10 (0 is off)"),
            ("length_penalty_type", self.length_penalty_type in LENGTH_PENALTIES, "gnmt, avg or none"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", self.min_new_tokens >= 0, "at least 0"),
            ("stopping", self.stopping in ("beam", "exhaustive"), "beam or exhaustive"),
            ("no_repeat_ngram", self.no_repeat_ngram >= 0, "at least 0 (0 is off)"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0 (1 is off) and finite"),
            ("beam_groups", self.beam_groups >= 1, "at least 1 (1 is off)"),
            ("diversity_penalty", 0 <= self.diversity_penalty < float("inf"), "at least 0 (0 is off) and finite"),
        ):
            if not holds:
                raise InputError(f"{name} must be {expected}, found {getattr(self, name)}")
        if self.n_best > self.beam_size:
            raise InputError(f"--n-best {self.n_best} is larger than --beam-size {self.beam_size}")
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"--min-new-tokens {self.min_new_tokens} is larger than --max-new-tokens {self.max_new_tokens}"
            )
        if self.beam_size % self.beam_groups:
            raise InputError(
                f"--beam-size {self.beam_size} cannot be divided into {self.beam_groups} groups of one size",
                hint="--beam-groups must divide --beam-size",
            )
        if self.diversity_penalty and self.beam_groups == 1:
            raise InputError(
                f"--diversity-penalty {self.diversity_penalty:g} has nothing to act on with one group of beams",
                hint="set --beam-groups to 2 or more",
            )

    @classmethod
    def from_recipe(cls, generation: Generation, **overrides: Any) -> BeamSettings:
        """The recipe's `generation` section, with every override that is not None in its place."""
        settings: dict[str, Any] = {
            "beam_size": generation.beam_size,
            "length_penalty": generation.length_penalty,
            "length_penalty_type": generation.length_penalty_type,
            "max_new_tokens": generation.max_new_tokens,
            "min_new_tokens": generation.min_new_tokens,
            "stopping": generation.stopping,
            "no_repeat_ngram": generation.no_repeat_ngram,
            "repetition_penalty": generation.repetition_penalty,
            "beam_groups": generation.beam_groups,
            "diversity_penalty": generation.diversity_penalty,
        }
        settings.update({name: value for name, value in overrides.items() if value is not None})
        return cls(**settings)


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
