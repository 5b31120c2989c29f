"""Translation of texts by encoder-decoders, and continuation of prompts by decoder-only models with beam search.

`Translator` is for translation, summaries, any text-to-text task. Sentences are sorted by length inside, decoded in
batches by beam search (or sampled), and returned in their order. An empty text gives an empty text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tformer.data.shards.template import single_template
from tformer.decoding.beam_search import beam_search
from tformer.decoding.completion import TextFollower
from tformer.decoding.generate import generate
from tformer.decoding.prompts import OnCut, OnRead, encode_prompts, suppressed_tokens
from tformer.decoding.score import Links, links_of, mean_attention
from tformer.decoding.sentences import LINES, Places, SentenceReader, SourceSentence, TooLong
from tformer.decoding.settings import (
    BeamSettings,
    FinishReason,
    Generated,
    GenerationSettings,
    Hypothesis,
)
from tformer.decoding.stepper import EnsembleStepper, ModelStepper
from tformer.model import Transformer
from tformer.support.decoding import ContextPolicy
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import DecoderTokens
from tformer.workers.work import ShouldStop, never
from tformer.workers.worker import ALONE, Worker


@dataclass(frozen=True)
class Translation:
    """One translation of a text, or one continuation of a prompt.

    Attributes:
        text: with the forced prefix, without special tokens.
        ids: the tokens after the start tokens: the forced prefix, the new tokens, and eos where it ends by one.
        score: what translations are ranked by: log-probability / length penalty.
        logprob: of the tokens after the forced prefix (natural logarithm).
        finish_reason: `eos`, `stop`, `length` or `interrupted`.
        alignment: for each token of the text, the source token with its highest attention. None unless requested.
        num_forced: number of ids of the forced prefix, which has no part in `logprob`.
        logprobs: the terms of `logprob`: one for each id after the forced prefix.
    """

    text: str
    ids: tuple[int, ...]
    score: float
    logprob: float
    finish_reason: FinishReason
    alignment: Links | None = None
    num_forced: int = 0
    logprobs: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Translation:
        """The translation whose fields have become a JSON document."""
        links = values["alignment"]
        return cls(
            **values
            | {"ids": tuple(values["ids"]), "logprobs": tuple(values["logprobs"])}
            | {"alignment": None if links is None else tuple((target, source) for target, source in links)}
        )


EMPTY = Translation("", (), 0.0, 0.0, "eos")
"""The translation of an empty text."""

OnText = Callable[[int, list[Translation]], None]
"""Called as (row, its translations) when a text is done; batches are decoded longest first, so rows come unsorted."""


def best_of_each_text(ranked: Iterable[Translation], count: int) -> list[Translation]:
    """The first `count`. If a text has several segmentations, the best one stays."""
    best: dict[str, Translation] = {}
    for answer in ranked:
        best.setdefault(answer.text, answer)
    return list(best.values())[:count]


class Translator:
    """A model, or an ensemble of models with averaged probabilities, that translates texts.

    Attributes:
        target_tokenizer: of the translations.
        reader: makes sentences of texts; for callers that check texts ahead.
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
        alignments: bool = False,
        too_long: TooLong = "error",
        on_read: OnRead = lambda *_: None,
    ) -> None:
        """
        Args:
            models: encoder-decoders of the same vocabularies, at least one.
            settings: for beam search, or for sampling with one model; `target` has the end that they use.
            target: the decoder's start and end tokens.
            max_source: maximum number of tokens of a source, special ones included; a model's context may be shorter.
            length_margin: a translation has at most this number of tokens more than its source text; None: no limit.
            alignments: whether translations have alignments.
            too_long: whether longer sources are errors or are cut.
            on_read: called for each text that is not empty.

        Raises InputError for sampling with an ensemble.
        """
        if isinstance(settings, GenerationSettings) and len(models) > 1:
            raise InputError(f"an ensemble of {len(models)} models decodes with beam search, it cannot sample")
        context = min(model.longest_target for model in models)
        ends: dict[str, Any] = {"eos_id": target.eos, "forced_eos": target.forced_eos}
        if isinstance(settings, BeamSettings):
            ends["counted_start"] = len(target.prefix) - 1
        self._settings, self._alignments = replace(settings, **ends), alignments
        self._models, self.target_tokenizer, self._target = list(models), target_tokenizer, target
        self._on_read = on_read
        self._suppressed = suppressed_tokens(
            target_tokenizer.special, target, eos=target.eos, suppressed=settings.suppress_tokens
        )
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
        """Number of texts so far that were cut because they were too long."""
        return self.reader.cut

    def translate(
        self,
        texts: Sequence[str],
        *,
        target_prefixes: Sequence[str] | None = None,
        batch_size: int = 32,
        should_stop: ShouldStop = never,
        first_row: int = 0,
        on_text: OnText | None = None,
        too_long: TooLong | None = None,
        places: Places = LINES,
        worker: Worker = ALONE,
    ) -> list[list[Translation]]:
        """The translations of each text, best first, in the order of the texts.

        Beam search gives up to `n_best` different texts, sampling `num_samples`; an empty text gives one empty text.

        Args:
            target_prefixes: the beginning of each translation; "": none.
            batch_size: texts at a time.
            should_stop: polled before every token; translations that it cuts short have the finish reason
                `interrupted`.
            first_row: number of the first text in a longer list, for messages and for the seeds of sampling.
            on_text: called with (row, translations) for each text, when its batch is done.
            too_long: None: the translator's own.
            places: names of the rows in messages.
            worker: this process, where several divide the batches; all get all translations.

        Raises what `SentenceReader.read` does, before anything is decoded.
        """
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

        def decode(batch: list[int]) -> list[list[Translation]]:
            chosen = [sentences[index] for index in batch]
            if isinstance(self._settings, GenerationSettings):
                found = self._sample(self._settings, chosen, should_stop, row=first_row + batch[0])
            else:
                found = self._search(self._settings, chosen, should_stop)
            pairs = zip(chosen, found, strict=True)
            return self._aligned([(sentence, answers) for sentence, answers in pairs if not sentence.is_empty])

        for batch, found in worker.divide(
            self._batches(sentences, batch_size),
            decode,
            should_stop=should_stop,
            to_json=lambda found: [[asdict(answer) for answer in answers] for answers in found],
            from_json=lambda found: [[Translation.from_json(answer) for answer in answers] for answers in found],
        ):
            decoded = (index for index in batch if not sentences[index].is_empty)
            for index, answers in zip(decoded, found, strict=True):
                read = len(self._target.prefix) + max((len(answer.ids) for answer in answers), default=1) - 1
                self._on_read(len(sentences[index].source), read)
                finish(index, answers)
        return results

    def _batches(self, sentences: Sequence[SourceSentence], batch_size: int) -> Iterator[list[int]]:
        """Indices of the sentences of each batch: longest first; sampled texts in order, as their seeds count rows."""
        indices = list(range(len(sentences)))
        if isinstance(self._settings, BeamSettings):
            indices = [index for index in indices if not sentences[index].is_empty]
            indices.sort(key=lambda index: -len(sentences[index].source))
        for start in range(0, len(indices), batch_size):
            batch = indices[start : start + batch_size]
            if not all(sentences[index].is_empty for index in batch):
                yield batch

    def _aligned(self, found: list[tuple[SourceSentence, list[Translation]]]) -> list[list[Translation]]:
        """The translations with their alignments, where these are requested."""
        if not self._alignments:
            return [answers for _, answers in found]
        attention = iter(self._attention([(sentence, answer.ids) for sentence, answers in found for answer in answers]))
        ends = self._settings.ends
        return [
            [
                replace(answer, alignment=links_of(next(attention)[:, sentence.text_slice], answer.ids, ends))
                for answer in answers
            ]
            for sentence, answers in found
        ]

    def _attention(self, pairs: Sequence[tuple[SourceSentence, Sequence[int]]]) -> list[np.ndarray]:
        """fp32 [u, t] for each (sentence, target): the mean over the models."""
        sources, targets = [sentence.source for sentence, _ in pairs], [ids for _, ids in pairs]
        return mean_attention(self._models, sources, targets, start_ids=self._target.prefix)

    def _starts(self, sentences: Sequence[SourceSentence]) -> list[list[int]]:
        """The decoder's first tokens for each sentence."""
        return [[*self._target.prefix, *sentence.prefix] for sentence in sentences]

    def _text(self, ids: Sequence[int]) -> str:
        return self.target_tokenizer.decode([token for token in ids if token not in self._settings.ends])

    # --- beam search --------------------------------------------------------------------------------------------------

    def _search(
        self, settings: BeamSettings, sentences: Sequence[SourceSentence], should_stop: ShouldStop
    ) -> list[list[Translation]]:
        limits = [sentence.limit for sentence in sentences]
        sources, starts = [sentence.source for sentence in sentences], self._starts(sentences)
        stepper = EnsembleStepper(
            [
                ModelStepper(
                    model, starts, sources=sources, capacity=max(limits), vocab_size=self.target_tokenizer.vocab_size
                )
                for model in self._models
            ]
        )
        found = beam_search(
            stepper,
            settings,
            limits=limits,
            histories=[sentence.prefix for sentence in sentences],  # without the start tokens, which are no text
            suppressed=self._suppressed,
            should_stop=should_stop,
        )
        pairs = zip(sentences, found, strict=True)
        return [self._ranked(settings, sentence, hypotheses) for sentence, hypotheses in pairs]

    def _ranked(
        self, settings: BeamSettings, sentence: SourceSentence, hypotheses: list[Hypothesis]
    ) -> list[Translation]:
        """The first `n_best` of different texts."""
        forced, answers = len(sentence.prefix), []
        for found in hypotheses:
            ids = (*sentence.prefix, *found.ids)
            text, reason = self._text(ids), found.finish_reason
            answers.append(
                Translation(text, ids, found.score, found.logprob, reason, num_forced=forced, logprobs=found.logprobs)
            )
        return best_of_each_text(answers, settings.n_best)

    # --- sampling -----------------------------------------------------------------------------------------------------

    def _sample(
        self,
        settings: GenerationSettings,
        sentences: Sequence[SourceSentence],
        should_stop: ShouldStop,
        *,
        row: int,
    ) -> list[list[Translation]]:
        """Samples for each sentence, also for empty ones: a row's draws do not depend on the other rows.

        row: number of the first sentence, for the seeds.
        """
        longest = max(sentence.limit for sentence in sentences)
        shortest = min(settings.min_new_tokens, longest)
        found = generate(
            self._models[0],
            self._starts(sentences),
            replace(settings, logprobs=True, max_new_tokens=longest, min_new_tokens=shortest),
            sources=[sentence.source or (0,) for sentence in sentences],
            limits=[sentence.limit for sentence in sentences],
            tokenizer=self.target_tokenizer,
            num_start=len(self._target.prefix),
            suppressed=self._suppressed,
            should_stop=should_stop,
            first_row=row,
        )
        return [
            [self._sampled(sentence, completion) for completion in completions]
            for sentence, completions in zip(sentences, found, strict=True)
        ]

    def _sampled(self, sentence: SourceSentence, found: Generated) -> Translation:
        ids = (*sentence.prefix, *found.ids)
        text = self._text(ids)
        if found.finish_reason == "stop":  # cut before the stop text
            text = self._text(sentence.prefix) + (found.text or "")
        logprobs = found.logprobs or ()
        logprob = float(sum(logprobs))
        forced = len(sentence.prefix)
        return Translation(text, ids, logprob, logprob, found.finish_reason, num_forced=forced, logprobs=logprobs)


class Continuer:
    """A decoder-only model, or an ensemble of one vocabulary, that continues prompts by beam search.

    A prompt and its continuation share the context, which does not slide in a beam search: a continuation that fills it
    ends with the finish reason `length`. A prompt longer than the context loses its beginning, as in sampling, unless
    `context` is `error`.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        tokenizer: Tokenizer,
        settings: BeamSettings,
        *,
        context: ContextPolicy = "slide",
        on_cut: OnCut | None = None,
        on_read: OnRead = lambda *_: None,
    ) -> None:
        self._models, self._tokenizer, self._settings = list(models), tokenizer, settings
        self._context, self._on_cut, self._on_read = context, on_cut, on_read
        self._max_seq_len = min(model.max_seq_len for model in models)
        self._suppressed = suppressed_tokens(
            tokenizer.special, eos=settings.eos_id, suppressed=settings.suppress_tokens
        )

    def continue_texts(
        self,
        texts: Sequence[str],
        *,
        batch_size: int = 32,
        should_stop: ShouldStop = never,
        first_row: int = 0,
    ) -> list[list[Translation]]:
        """Up to `n_best` continuations of each text, best first, in order. InputError for a prompt that is too long."""
        settings, limit = self._settings, self._max_seq_len
        whole = encode_prompts(
            self._tokenizer,
            texts,
            context=self._context,
            max_seq_len=limit,
            first_row=first_row,
            on_cut=self._on_cut,
        )
        prompts = [prompt if len(prompt) <= limit else prompt[-max(1, limit // 2) :] for prompt in whole]
        sizes: dict[str, Any] = {"capacity": settings.max_new_tokens, "vocab_size": self._tokenizer.vocab_size}
        results: list[list[Translation]] = []
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            stepper = EnsembleStepper([ModelStepper(model, batch, **sizes) for model in self._models])
            found = beam_search(
                stepper, settings, histories=batch, suppressed=self._suppressed, should_stop=should_stop
            )
            for prompt, hypotheses in zip(batch, found, strict=True):
                self._on_read(len(prompt) + max((len(each.ids) for each in hypotheses), default=1) - 1, 0)
                answers = (self._answer(prompt, hypothesis) for hypothesis in hypotheses)
                results.append(best_of_each_text(answers, settings.n_best))
        return results

    def _answer(self, prompt: list[int], found: Hypothesis) -> Translation:
        follower = TextFollower.after_prompt(self._tokenizer, prompt)
        for token in found.ids:
            if token not in self._settings.ends:
                follower.push(token)
        follower.finish()
        return Translation(
            follower.text, found.ids, found.score, found.logprob, found.finish_reason, logprobs=found.logprobs
        )
