"""Beam search of decoder-only models: each text is a prompt, and comes out as its continuations, best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tformer.decoding.beam_search import beam_search
from tformer.decoding.completion import TextFollower
from tformer.decoding.prompts import encode_prompt, suppressed_tokens
from tformer.decoding.settings import (
    BeamSettings,
    ContextPolicy,
    Hypothesis,
)
from tformer.decoding.stepper import DecoderStepper, EnsembleStepper
from tformer.decoding.translate import (
    Translation,
    best_of_each_text,
)
from tformer.errors import InputError
from tformer.model import Transformer
from tformer.tokenizer import Tokenizer


class Continuer:
    """One model, or several of one vocabulary, that continue prompts as `Translator` translates sources.

    A prompt and its continuation share the context, which does not slide under a beam: what outgrows it ends with the
    finish reason `length`. A prompt longer than the context loses its beginning, as in sampling, unless `context` is
    `error`.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        tokenizer: Tokenizer,
        settings: BeamSettings,
        *,
        context: ContextPolicy = "slide",
        on_cut: Callable[[int, int, int], None] | None = None,
    ) -> None:
        """`on_cut`: called with (number of the prompt from 1, its tokens, the context's) for one that is cut."""
        self._models, self._tokenizer, self._settings = list(models), tokenizer, settings
        self._context, self._on_cut = context, on_cut
        self._limit = min(model.max_seq_len for model in models)
        self._suppressed = suppressed_tokens(
            tokenizer.special, eos=settings.eos_id, suppressed=settings.suppress_tokens
        )

    def continue_texts(
        self,
        texts: Sequence[str],
        *,
        batch_size: int = 32,
        should_stop: Callable[[], bool] | None = None,
        first_row: int = 0,
    ) -> list[list[Translation]]:
        """At most `n_best` continuations of each text, in order. InputError for a prompt that the context refuses."""
        prompts = [self._prompt(text, number) for number, text in enumerate(texts, start=first_row + 1)]
        results: list[list[Translation]] = []
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            for prompt, found in zip(batch, self._search(batch, should_stop), strict=True):
                answers = (self._answer(prompt, hypothesis) for hypothesis in found)
                results.append(best_of_each_text(answers, self._settings.n_best))
        return results

    def _prompt(self, text: str, number: int) -> list[int]:
        ids, limit = encode_prompt(self._tokenizer, text), self._limit
        if len(ids) <= limit:
            return ids
        if self._context == "error":
            raise InputError(
                f"prompt {number} has {len(ids)} tokens, but the model's context holds {limit}",
                hint=f"shorten it, or read its end alone with --context slide ({max(1, limit // 2)} tokens)",
            )
        if self._on_cut is not None:
            self._on_cut(number, len(ids), limit)
        return ids[-max(1, limit // 2) :]

    def _search(self, prompts: Sequence[list[int]], should_stop: Callable[[], bool] | None) -> list[list[Hypothesis]]:
        capacity, vocab_size = self._settings.max_new_tokens, self._tokenizer.vocab_size
        stepper = EnsembleStepper(
            [DecoderStepper(model, prompts, capacity=capacity, vocab_size=vocab_size) for model in self._models]
        )
        return beam_search(
            stepper,
            self._settings,
            limits=stepper.rooms,
            histories=prompts,
            suppressed=self._suppressed,
            should_stop=should_stop,
        )

    def _answer(self, prompt: list[int], found: Hypothesis) -> Translation:
        follower = TextFollower.after_prompt(self._tokenizer, prompt)
        for token in found.ids:
            if token not in self._settings.ends:
                follower.push(token)
        follower.finish()
        return Translation(follower.text, found.ids, found.score, found.logprob, found.finish_reason)
