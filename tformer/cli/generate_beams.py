"""Beam search of decoder-only models: each text is a prompt, and comes out as its continuations, best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tformer.cli.generate_session import tell_cut_prompt
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.decoding.beam_settings import BeamSettings, Hypothesis
    from tformer.decoding.translation import Translation
    from tformer.model import Transformer
    from tformer.tokenizer import Tokenizer


class Continuer:
    """One model, or several of one vocabulary, that continue prompts as `Translator` translates sources.

    A prompt and its continuation share the context, which does not slide under a beam: what outgrows it ends with the
    finish reason `length`. A prompt longer than the context loses its beginning, as in sampling, unless `context` is
    `error`.
    """

    def __init__(
        self, models: Sequence[Transformer], tokenizer: Tokenizer, settings: BeamSettings, *, context: str
    ) -> None:
        self.models, self.tokenizer, self.settings, self.context = list(models), tokenizer, settings, context
        self.limit = min(model.max_seq_len for model in models)

    def translate(
        self,
        texts: Sequence[str],
        *,
        target_prefixes: Sequence[str] | None = None,
        batch_size: int = 32,
        should_stop: Callable[[], bool] | None = None,
        first_row: int = 0,
    ) -> list[list[Translation]]:
        """At most `n_best` continuations of each text, in order. InputError for a prompt that the context refuses."""
        assert target_prefixes is None, "the prompt is the prefix"
        prompts = [self._prompt(text, number) for number, text in enumerate(texts, start=first_row + 1)]
        results: list[list[Translation]] = []
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            results += [
                self._answers(prompt, found)
                for prompt, found in zip(batch, self._search(batch, should_stop), strict=True)
            ]
        return results

    def _prompt(self, text: str, number: int) -> list[int]:
        from tformer.decoding.prompts import encode_prompt

        ids = encode_prompt(self.tokenizer, text)
        if len(ids) <= self.limit:
            return ids
        if self.context == "error":
            raise InputError(
                f"prompt {number} has {len(ids)} tokens, but the model's context holds {self.limit}",
                hint=f"shorten it, or read its end alone with --context slide ({max(1, self.limit // 2)} tokens)",
            )
        tell_cut_prompt(number, length=len(ids), limit=self.limit)
        return ids[-max(1, self.limit // 2) :]

    def _search(self, prompts: Sequence[list[int]], should_stop: Callable[[], bool] | None) -> list[list[Hypothesis]]:
        from tformer.decoding.beam import beam_search
        from tformer.decoding.ensemble import EnsembleStepper
        from tformer.decoding.stepper import DecoderStepper

        capacity, vocab_size = self.settings.max_new_tokens, self.tokenizer.vocab_size
        stepper = EnsembleStepper(
            [DecoderStepper(model, prompts, capacity=capacity, vocab_size=vocab_size) for model in self.models]
        )
        return beam_search(stepper, self.settings, limits=stepper.rooms, histories=prompts, should_stop=should_stop)

    def _answers(self, prompt: list[int], found: Sequence[Hypothesis]) -> list[Translation]:
        """The best hypothesis of every text, the first `n_best` of them."""
        from tformer.decoding.text import TextFollower
        from tformer.decoding.translation import Translation

        answers: dict[str, Translation] = {}
        for hypothesis in found:
            follower = TextFollower.after_prompt(self.tokenizer, prompt)
            for token in hypothesis.ids:
                if token != self.settings.eos_id:
                    follower.push(token)
            follower.finish()
            answers.setdefault(
                follower.text,
                Translation(
                    text=follower.text,
                    ids=hypothesis.ids,
                    score=hypothesis.score,
                    logprob=hypothesis.logprob,
                    finish_reason=hypothesis.finish_reason,
                    alignment=None,
                ),
            )
        return list(answers.values())[: self.settings.n_best]
