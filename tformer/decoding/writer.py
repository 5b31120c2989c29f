"""Sentences in, translations out, one batch at a time: searched with a beam, or sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tformer.decoding.alignment import mean_attention
from tformer.decoding.beam import beam_search
from tformer.decoding.beam_settings import BeamSettings, Hypothesis
from tformer.decoding.ensemble import EnsembleStepper
from tformer.decoding.generate import generate
from tformer.decoding.score import coverage_penalty
from tformer.decoding.settings import Generated, GenerationSettings
from tformer.decoding.stepper import EncoderDecoderStepper, Stepper
from tformer.decoding.translate_input import Sentence
from tformer.decoding.translation import Translation, best_of_each_text
from tformer.decoding.unwritten import unwritten_tokens
from tformer.model import Transformer
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import DecoderTokens


@dataclass(frozen=True)
class Writer:
    """What writes: models of the same vocabularies, and the conventions of their target side.

    Attributes:
        tokenizer: of the target.
        vocab_size: larger ids are never chosen.
        coverage: beta of the coverage penalty, 0: off. Of beam search.
    """

    models: Sequence[Transformer]
    tokenizer: Tokenizer
    target: DecoderTokens
    vocab_size: int
    coverage: float = 0.0

    def write(
        self,
        settings: BeamSettings | GenerationSettings,
        sentences: Sequence[Sentence],
        should_stop: Callable[[], bool],
        *,
        row: int,
    ) -> list[list[Translation]]:
        """The translations of each sentence, best first. `row`: number of the first, for the seeds of sampling."""
        if isinstance(settings, GenerationSettings):
            return self._sample(settings, sentences, should_stop, row=row)
        return self._search(settings, sentences, should_stop)

    def attention(self, pairs: Sequence[tuple[Sentence, Sequence[int]]]) -> list[np.ndarray]:
        """fp32 [u, t] for each (sentence, target): the mean over the models."""
        sources, targets = [sentence.source for sentence, _ in pairs], [ids for _, ids in pairs]
        return mean_attention(self.models, sources, targets, start_ids=self.target.prefix)

    def _never(self, settings: BeamSettings | GenerationSettings) -> tuple[int, ...]:
        special, target = self.tokenizer.special, self.target
        return unwritten_tokens(special, target, eos=target.eos, suppressed=settings.suppress_tokens)

    def _starts(self, sentences: Sequence[Sentence]) -> list[list[int]]:
        """What the decoder reads before it writes."""
        return [[*self.target.prefix, *sentence.prefix] for sentence in sentences]

    def _text(self, ids: Sequence[int], ends: Sequence[int]) -> str:
        return self.tokenizer.decode([token for token in ids if token not in ends])

    # --- beam search --------------------------------------------------------------------------------------------------

    def _search(
        self, settings: BeamSettings, sentences: Sequence[Sentence], should_stop: Callable[[], bool]
    ) -> list[list[Translation]]:
        limits = [sentence.limit for sentence in sentences]
        steppers = [
            EncoderDecoderStepper(
                model,
                [sentence.source for sentence in sentences],
                self._starts(sentences),
                capacity=max(limits),
                vocab_size=self.vocab_size,
            )
            for model in self.models
        ]
        stepper: Stepper = steppers[0] if len(steppers) == 1 else EnsembleStepper(steppers)
        found = beam_search(
            stepper,
            settings,
            limits=limits,
            # The start tokens are no text: repeating them is not repeating anything.
            histories=[sentence.prefix for sentence in sentences],
            never=self._never(settings),
            should_stop=should_stop,
        )
        penalties = self._coverage_of(sentences, found)
        return [
            self._ranked(settings, sentence, hypotheses, extra)
            for sentence, hypotheses, extra in zip(sentences, found, penalties, strict=True)
        ]

    def _coverage_of(self, sentences: Sequence[Sentence], found: list[list[Hypothesis]]) -> list[list[float]]:
        """What is added to the score of each hypothesis."""
        if not self.coverage:
            return [[0.0] * len(hypotheses) for hypotheses in found]
        pairs = [(s, (*s.prefix, *h.ids)) for s, hypotheses in zip(sentences, found, strict=True) for h in hypotheses]
        flat = iter([coverage_penalty(alignment, self.coverage) for alignment in self.attention(pairs)])
        return [[next(flat) for _ in hypotheses] for hypotheses in found]

    def _ranked(
        self, settings: BeamSettings, sentence: Sentence, hypotheses: list[Hypothesis], extra: list[float]
    ) -> list[Translation]:
        """The first `n_best` of different texts; interrupted ones, whose scores lack an end, last."""
        pairs = [(one, one.score + penalty) for one, penalty in zip(hypotheses, extra, strict=True)]
        ranked = sorted(pairs, key=lambda pair: (pair[0].finish_reason == "interrupted", -pair[1]))
        return best_of_each_text(
            (self._searched(settings, sentence, one, score) for one, score in ranked), settings.n_best
        )

    def _searched(self, settings: BeamSettings, sentence: Sentence, found: Hypothesis, score: float) -> Translation:
        ids = (*sentence.prefix, *found.ids)
        forced = len(sentence.prefix)
        text = self._text(ids, settings.ends)
        return Translation(text, ids, score, found.logprob, found.finish_reason, num_forced=forced)

    # --- sampling -----------------------------------------------------------------------------------------------------

    def _sample(
        self,
        settings: GenerationSettings,
        sentences: Sequence[Sentence],
        should_stop: Callable[[], bool],
        *,
        row: int,
    ) -> list[list[Translation]]:
        """Draws for empty sentences too, which nobody sees: a row's draws do not depend on what is around it."""
        longest = max(sentence.limit for sentence in sentences)
        shortest = min(settings.min_new_tokens, longest)
        found = generate(
            self.models[0],
            self._starts(sentences),
            replace(settings, logprobs=True, max_new_tokens=longest, min_new_tokens=shortest),
            sources=[sentence.source or (0,) for sentence in sentences],
            limits=[sentence.limit for sentence in sentences],
            tokenizer=self.tokenizer,
            num_start=len(self.target.prefix),
            never=self._never(settings),
            should_stop=should_stop,
            first_row=row,
        )
        return [
            [self._sampled(settings, sentence, completion) for completion in completions]
            for sentence, completions in zip(sentences, found, strict=True)
        ]

    def _sampled(self, settings: GenerationSettings, sentence: Sentence, found: Generated) -> Translation:
        ids = (*sentence.prefix, *found.ids)
        text = self._text(ids, settings.ends)
        if found.finish_reason == "stop":  # cut before the text that ends it
            text = self._text(sentence.prefix, settings.ends) + (found.text or "")
        logprob = float(sum(found.logprobs or ()))
        return Translation(text, ids, logprob, logprob, found.finish_reason, num_forced=len(sentence.prefix))
