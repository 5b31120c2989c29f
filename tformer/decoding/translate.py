"""Texts in, texts out, with an encoder-decoder: translation, summaries, any text-to-text task.

Sentences are sorted by length inside, decoded in batches by beam search (or sampled), and come back in their order. An
empty text gives an empty text. With a coverage penalty (`score.coverage_penalty`) every finished hypothesis is read
once more for its attention, and ranked by score + penalty: s = log P / lp + cp (arXiv 1609.08144, equation 14).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tformer.data.template import single_template
from tformer.decoding.alignment import links_of
from tformer.decoding.beam_settings import BeamSettings
from tformer.decoding.settings import GenerationSettings
from tformer.decoding.translate_input import LINES, Places, Sentence, SentenceReader, TooLong
from tformer.decoding.translation import EMPTY, OnText, Translation
from tformer.decoding.writer import Writer
from tformer.errors import InputError
from tformer.model import Transformer
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import DecoderTokens


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
