"""Texts in, texts out, with an encoder-decoder: translation, summaries, any text-to-text task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tformer.data.shards.template import single_template
from tformer.decoding.beam_search import beam_search
from tformer.decoding.generate import generate
from tformer.decoding.prompts import suppressed_tokens
from tformer.decoding.score import Links, coverage_penalty, links_of, mean_attention
from tformer.decoding.sentences import (
    LINES,
    Places,
    Sentence,
    SentenceReader,
    TooLong,
)
from tformer.decoding.settings import (
    BeamSettings,
    FinishReason,
    Generated,
    GenerationSettings,
    Hypothesis,
)
from tformer.decoding.stepper import EncoderDecoderStepper, EnsembleStepper, Stepper
from tformer.errors import InputError
from tformer.model import Transformer
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import DecoderTokens


@dataclass(frozen=True)
class Translation:
    """One translation of a text, or one continuation of a prompt.

    Attributes:
        text: with the forced prefix, without special tokens.
        ids: what follows the start tokens: the forced prefix, the new tokens, and eos where it ends by one.
        score: what translations are ranked by: log-probability / length penalty, + coverage penalty.
        logprob: of the tokens after the forced prefix (natural logarithm).
        finish_reason: `eos`, `stop`, `length` or `interrupted`.
        alignment: for each token of the text, where its attention was highest. None unless asked for.
        num_forced: how many of the ids are the forced prefix, which has no part in `logprob`.
    """

    text: str
    ids: tuple[int, ...]
    score: float
    logprob: float
    finish_reason: FinishReason
    alignment: Links | None = None
    num_forced: int = 0

    @property
    def num_scored(self) -> int:
        """How many tokens `logprob` is the sum of."""
        return len(self.ids) - self.num_forced


EMPTY = Translation("", (), 0.0, 0.0, "eos")
"""Of an empty text."""

OnText = Callable[[int, list[Translation]], None]
"""Called as (row, its translations) when a text is done; batches are decoded longest first, so rows come unsorted."""


def best_of_each_text(ranked: Iterable[Translation], count: int) -> list[Translation]:
    """The first `count` of different texts: segmentations of one text are one answer, that of the best of them."""
    answers: dict[str, Translation] = {}
    for translation in ranked:
        answers.setdefault(translation.text, translation)
    return list(answers.values())[:count]


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

    def _suppressed(self, settings: BeamSettings | GenerationSettings) -> tuple[int, ...]:
        special, target = self.tokenizer.special, self.target
        return suppressed_tokens(special, target, eos=target.eos, suppressed=settings.suppress_tokens)

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
            suppressed=self._suppressed(settings),
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
            suppressed=self._suppressed(settings),
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


class Translator:
    """A model, or an ensemble whose probabilities are averaged, with what is needed from text to text.

    Attributes: `reader` makes sentences of texts, for whoever checks them ahead; `cut` counts the texts so far that
    were cut because they were too long.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        *,
        settings: BeamSettings | GenerationSettings,
        target: DecoderTokens,
        max_source: int,
        length_margin: int | None = None,
        coverage_penalty: float = 0.0,
        alignments: bool = False,
        vocab_size: int | None = None,
        too_long: TooLong = "error",
    ) -> None:
        """
        Args:
            models: encoder-decoders of the same vocabularies, at least one.
            settings: of beam search, or of sampling with one model; their eos is `target`'s.
            target: what the decoder begins and ends with.
            max_source: the most tokens of a source, special ones included; a shorter context of a model holds too.
            length_margin: a translation has at most so many tokens more than its source text has; None: no limit.
            coverage_penalty: beta, 0: off. Beam search only.
            alignments: whether translations tell them.
            vocab_size: larger ids are never chosen; None: the target tokenizer's.
            too_long: what becomes of longer sources.

        Raises InputError for sampling with an ensemble, or with a coverage penalty.
        """
        if isinstance(settings, GenerationSettings) and len(models) > 1:
            raise InputError(f"an ensemble of {len(models)} models decodes with beam search, it cannot sample")
        if isinstance(settings, GenerationSettings) and coverage_penalty:
            raise InputError("a coverage penalty ranks the hypotheses of beam search, it cannot be sampled with")
        context = min(model.max_seq_len for model in models)
        ends: dict[str, Any] = {"eos_id": target.eos, "forced_eos": target.forced_eos}
        if isinstance(settings, BeamSettings):
            ends["counted_start"] = len(target.prefix) - 1
        self._settings, self._alignments = replace(settings, **ends), alignments
        size = target_tokenizer.vocab_size if vocab_size is None else vocab_size
        self._writer = Writer(list(models), target_tokenizer, target, vocab_size=size, coverage=coverage_penalty)
        self.reader = SentenceReader(
            tokenizer,
            target_tokenizer,
            single_template(tokenizer),
            max_source=min(max_source, context),
            max_prefix=context - len(target.prefix),
            max_new_tokens=settings.max_new_tokens,
            length_margin=length_margin,
            too_long=too_long,
        )

    @property
    def cut(self) -> int:
        return self.reader.cut

    def translate(
        self,
        texts: Sequence[str],
        *,
        target_prefixes: Sequence[str] | None = None,
        batch_size: int = 32,
        should_stop: Callable[[], bool] | None = None,
        first_row: int = 0,
        on_text: OnText | None = None,
        too_long: TooLong | None = None,
        places: Places = LINES,
    ) -> list[list[Translation]]:
        """The translations of each text, best first, in the order of the texts.

        Beam search gives `n_best` different texts at most, sampling `num_samples`; an empty text gives one empty text.

        Args:
            target_prefixes: what each translation has to begin with; "": nothing.
            batch_size: texts at a time.
            should_stop: polled before every token; what it cuts short has the finish reason `interrupted`.
            first_row: number of the first text in a longer list, for messages and for the seeds of sampling.
            on_text: called with (row, translations) for each text, when its batch is done.
            too_long: None: the translator's own.
            places: what messages call a row.

        Raises what `SentenceReader.read` does, before anything is decoded.
        """
        stops = should_stop or (lambda: False)
        sentences = self.reader.read(texts, target_prefixes, first_row=first_row, too_long=too_long, places=places)
        empty = replace(EMPTY, alignment=()) if self._alignments else EMPTY
        results = [[replace(empty, finish_reason="interrupted")] for _ in texts]

        def finish(index: int, translations: list[Translation]) -> None:
            results[index] = translations
            if on_text is not None:
                on_text(first_row + index, translations)

        for index, sentence in enumerate(sentences):
            if sentence.is_empty:
                finish(index, [empty])
        for batch in self._batches(sentences, batch_size):
            if stops():
                break
            chosen = [sentences[index] for index in batch]
            found = self._writer.write(self._settings, chosen, stops, row=first_row + batch[0])
            told = [(index, ones) for index, ones in zip(batch, found, strict=True) if not sentences[index].is_empty]
            aligned = self._aligned([(sentences[index], ones) for index, ones in told])
            for (index, _), ones in zip(told, aligned, strict=True):
                finish(index, ones)
        return results

    def _batches(self, sentences: Sequence[Sentence], batch_size: int) -> Iterator[list[int]]:
        """Indices of what is decoded together: longest first; sampled texts in order, for their seeds count rows."""
        indices = list(range(len(sentences)))
        if isinstance(self._settings, BeamSettings):
            indices = [index for index in indices if not sentences[index].is_empty]
            indices.sort(key=lambda index: -len(sentences[index].source))
        for start in range(0, len(indices), batch_size):
            batch = indices[start : start + batch_size]
            if not all(sentences[index].is_empty for index in batch):
                yield batch

    def _aligned(self, found: list[tuple[Sentence, list[Translation]]]) -> list[list[Translation]]:
        if not self._alignments:
            return [ones for _, ones in found]
        pairs = [(sentence, one.ids) for sentence, ones in found for one in ones]
        attention = iter(self._writer.attention(pairs))
        ends = self._settings.ends
        return [
            [replace(one, alignment=links_of(next(attention)[:, sentence.text_slice], one.ids, ends)) for one in ones]
            for sentence, ones in found
        ]
