"""What is asked of generation, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tformer.errors import InputError
from tformer.recipe.training import Generation

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
    suppress_tokens: tuple[int, ...] | None = None  # never written; None: `unwritten_tokens` says
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
