"""Texts in, texts out, with an encoder-decoder: translation, summaries, any text-to-text task.

Sentences are sorted by length inside, decoded in batches by beam search (or sampled), and come back in their order. An
empty text gives an empty text. With a coverage penalty (`score.coverage_penalty`) every finished hypothesis is read
once more for its attention, and ranked by score + penalty: s = log P / lp + cp (arXiv 1609.08144, equation 14).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from tformer.data.template import single_template
from tformer.decoding.alignment import links_of, mean_attention
from tformer.decoding.beam import beam_search
from tformer.decoding.beam_settings import BeamSettings, Hypothesis
from tformer.decoding.ensemble import EnsembleStepper
from tformer.decoding.generate import generate
from tformer.decoding.score import coverage_penalty
from tformer.decoding.settings import GenerationSettings
from tformer.decoding.stepper import EncoderDecoderStepper, Stepper
from tformer.decoding.translate_input import Sentence, SentenceReader, TooLong
from tformer.decoding.translation import EMPTY, OnText, Translation
from tformer.errors import InputError
from tformer.model import Transformer
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import DecoderTokens


class Translator:
    """A model, or an ensemble whose probabilities are averaged, with what is needed from text to text.

    Attributes: `cut` counts the texts so far that were cut because they were too long.
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
        self._models, self._target_tokenizer, self._target = list(models), target_tokenizer, target
        self._settings = replace(settings, eos_id=target.eos)
        self._beta, self._alignments, self._too_long = coverage_penalty, alignments, too_long
        self._vocab_size = target_tokenizer.vocab_size if vocab_size is None else vocab_size
        self._reader = SentenceReader(
            tokenizer,
            target_tokenizer,
            single_template(tokenizer),
            max_source=min(max_source, context),
            max_prefix=context - len(target.prefix),
            max_new_tokens=settings.max_new_tokens,
            length_margin=length_margin,
        )

    @property
    def cut(self) -> int:
        return self._reader.cut

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

        Raises what `SentenceReader.read` does, before anything is decoded.
        """
        stops = should_stop or (lambda: False)
        sentences = self._reader.read(texts, target_prefixes, first_row=first_row, too_long=too_long or self._too_long)
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
            found = self._decode([sentences[index] for index in batch], stops, row=first_row + batch[0])
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

    def _decode(
        self, sentences: list[Sentence], should_stop: Callable[[], bool], *, row: int
    ) -> list[list[Translation]]:
        if isinstance(self._settings, GenerationSettings):
            return self._sample(self._settings, sentences, should_stop, row=row)
        return self._search(self._settings, sentences, should_stop)

    # --- beam search --------------------------------------------------------------------------------------------------

    def _search(
        self, settings: BeamSettings, sentences: list[Sentence], should_stop: Callable[[], bool]
    ) -> list[list[Translation]]:
        prefixes = [[*self._target.prefix, *sentence.prefix] for sentence in sentences]
        limits = [sentence.limit for sentence in sentences]
        steppers = [
            EncoderDecoderStepper(
                model,
                [sentence.source for sentence in sentences],
                prefixes,
                capacity=max(limits),
                vocab_size=self._vocab_size,
            )
            for model in self._models
        ]
        stepper: Stepper = steppers[0] if len(steppers) == 1 else EnsembleStepper(steppers)
        found = beam_search(stepper, settings, limits=limits, histories=prefixes, should_stop=should_stop)
        penalties = self._coverage(sentences, found)
        return [
            self._best(settings, sentence, hypotheses, extra)
            for sentence, hypotheses, extra in zip(sentences, found, penalties, strict=True)
        ]

    def _coverage(self, sentences: list[Sentence], found: list[list[Hypothesis]]) -> list[list[float]]:
        """What is added to the score of each hypothesis."""
        if not self._beta:
            return [[0.0] * len(hypotheses) for hypotheses in found]
        pairs = [(s, (*s.prefix, *h.ids)) for s, hypotheses in zip(sentences, found, strict=True) for h in hypotheses]
        flat = iter([coverage_penalty(alignment, self._beta) for alignment in self._attention(pairs)])
        return [[next(flat) for _ in hypotheses] for hypotheses in found]

    def _best(
        self, settings: BeamSettings, sentence: Sentence, hypotheses: list[Hypothesis], extra: list[float]
    ) -> list[Translation]:
        """The first `n_best` of different texts; interrupted ones, whose scores lack an end, last."""
        pairs = [(one, one.score + penalty) for one, penalty in zip(hypotheses, extra, strict=True)]
        ranked = sorted(pairs, key=lambda pair: (pair[0].finish_reason == "interrupted", -pair[1]))
        best: dict[str, Translation] = {}
        for hypothesis, score in ranked:
            ids = (*sentence.prefix, *hypothesis.ids)
            text = self._text(ids)
            if text not in best:
                best[text] = Translation(text, ids, score, hypothesis.logprob, hypothesis.finish_reason)
        return list(best.values())[: settings.n_best]

    # --- sampling -----------------------------------------------------------------------------------------------------

    def _sample(
        self, settings: GenerationSettings, sentences: list[Sentence], should_stop: Callable[[], bool], *, row: int
    ) -> list[list[Translation]]:
        """Draws for empty sentences too, which nobody sees: a row's draws do not depend on what is around it."""
        found = generate(
            self._models[0],
            [[*self._target.prefix, *sentence.prefix] for sentence in sentences],
            replace(settings, logprobs=True, max_new_tokens=max(sentence.limit for sentence in sentences)),
            sources=[sentence.source or (0,) for sentence in sentences],
            tokenizer=self._target_tokenizer,
            should_stop=should_stop,
            first_row=row,
        )
        results = []
        for sentence, completions in zip(sentences, found, strict=True):
            translations = []
            for completion in completions:
                drawn, reason = completion.ids[: sentence.limit], completion.finish_reason
                ids = (*sentence.prefix, *drawn)
                if len(drawn) < len(completion.ids):
                    reason = "length"
                text = self._text(ids)
                if reason == "stop":  # cut before the text that ends it
                    text = self._text(sentence.prefix) + (completion.text or "")
                logprob = float(sum((completion.logprobs or ())[: sentence.limit]))
                translations.append(Translation(text, ids, logprob, logprob, reason))
            results.append(translations)
        return results

    # --- texts and alignments -----------------------------------------------------------------------------------------

    def _text(self, ids: Sequence[int]) -> str:
        return self._target_tokenizer.decode([token for token in ids if token != self._target.eos])

    def _attention(self, pairs: Sequence[tuple[Sentence, Sequence[int]]]) -> list[np.ndarray]:
        """fp32 [u, t] for each (sentence, target): the mean over the models."""
        sources, targets = [sentence.source for sentence, _ in pairs], [ids for _, ids in pairs]
        return mean_attention(self._models, sources, targets, start_ids=self._target.prefix)

    def _aligned(self, found: list[tuple[Sentence, list[Translation]]]) -> list[list[Translation]]:
        if not self._alignments:
            return [ones for _, ones in found]
        attention = iter(self._attention([(sentence, one.ids) for sentence, ones in found for one in ones]))
        return [
            [
                replace(one, alignment=links_of(next(attention)[:, sentence.text_slice], one.ids, self._target.eos))
                for one in ones
            ]
            for sentence, ones in found
        ]
