"""Next-token log-probabilities for beam search, one token of every hypothesis at a time; ensembles.

A `Stepper` holds the models, their caches and padding; the search only sees log-probabilities. It starts with one row
for each sentence, then has `beams` rows for each, side by side (sentence 0's, sentence 1's, ...). The search decides
which hypothesis a row continues (`reorder`) and which sentences are done (`keep`).

The encoder runs once, and cross-attention's keys and values exist once per sentence (`ModelCache.fan_out`): a reorder
moves only the keys and values of self-attention.

Legend: S sentences, b beams, R = S b rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from tformer.decoding.buckets import BucketedCache
from tformer.decoding.completion import check_prompts
from tformer.decoding.generate import check_sources, feed, read_prompts
from tformer.decoding.inference import inference
from tformer.model import Transformer
from tformer.nn.cache import ModelCache
from tformer.nn.heads import VocabularyHead
from tformer.support.errors import InputError, require_finite


class Stepper(Protocol):
    """Gives a beam search its log-probabilities."""

    @property
    def vocab_size(self) -> int:
        """V: larger ids are not offered."""
        ...

    @property
    def num_sentences(self) -> int:
        """S: the sentences still kept."""
        ...

    @property
    def rooms(self) -> Sequence[int]:
        """Maximum number of tokens of each of the first S sentences: a longer prefix leaves less of the context.

        A sentence may be stepped past its own room; its numbers then mean nothing.
        """
        ...

    def start(self, beams: int) -> Tensor:
        """Log-probabilities, fp32 [S, V], of the token after each prefix; then every sentence has `beams` equal rows.

        The caller may change them in place, also those of `step`.
        """
        ...

    def step(self, ids_R: Tensor) -> Tensor:
        """Append a token, long [R], to each row: log-probabilities, fp32 [R, V], of the next one."""
        ...

    def reorder(self, rows_R: Tensor) -> None:
        """Replace row i by a copy of row `rows_R[i]` of the same sentence; rows_R: long [R]."""
        ...

    def keep(self, sentences: Tensor) -> None:
        """Keep only these sentences, long and ascending, with all their rows."""
        ...


class ModelStepper:
    """The stepper of one model: a decoder that continues prompts, alone or beside an encoder that reads sources."""

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        *,
        sources: Sequence[Sequence[int]] | None = None,
        capacity: int,
        vocab_size: int | None = None,
    ) -> None:
        """
        Args:
            model: used in evaluation mode, without gradients.
            prompts: the decoder's token ids, at least one each (its start token); lengths may differ.
            sources: the encoder's, at least one id each.
            capacity: maximum number of tokens after a prompt; the context may hold fewer.
            vocab_size: the (target) tokenizer's, where the model's was rounded up; None: the model's.

        Raises:
            InputError: a prompt or source without tokens, or a prompt longer than the context; messages count from 1.
            ValueError: sources for a model without an encoder or a decoder, or not one prompt for each source.
        """
        if sources is not None:
            check_sources(model, sources, prompts)
        check_prompts(prompts, context="error", max_seq_len=model.longest_target)
        self._model, self._prompts, self._sources = model, prompts, sources
        self._device = next(model.parameters()).device
        # The last token of a hypothesis is chosen, not read: it needs no place in the context.
        self.rooms = [min(capacity, model.longest_target - len(prompt) + 1) for prompt in prompts]
        self.num_sentences = len(prompts)
        if vocab_size is None:
            head = next(iter(model.heads.values()))
            assert isinstance(head, VocabularyHead), "a stepper needs a model whose first head is over the vocabulary"
            vocab_size = head.weight.shape[0]
        self.vocab_size = vocab_size

    def start(self, beams: int) -> Tensor:
        """See `Stepper`. NotFiniteError for NaN or infinity."""
        longest = max(map(len, self._prompts))
        self.num_sentences, self._beams = len(self._prompts), beams
        self._sentence_rows = torch.arange(self.num_sentences * beams, device=self._device)
        with inference(self._model):
            read = self._model.new_cache(
                self.num_sentences, longest, device=self._device, dtype=self._model.compute_dtype
            )
            logits_SV, mask_ST = read_prompts(self._model, self._prompts, read, sources=self._sources)
            capacity = longest + max(self.rooms) - 1
            self._cache: ModelCache | BucketedCache = read  # every row becomes `beams` rows
            if self._model.compiled_decoder is None:
                read.fan_out(beams, capacity=capacity)
            else:
                self._cache = self._model.compiled_decoder.begin(read, capacity=capacity, beams=beams)
            # Position of the next token, [1, 1] for all rows or [R, 1].
            if mask_ST is None:
                self._positions = torch.full((1, 1), longest, device=self._device)
            else:
                self._positions = mask_ST.sum(dim=1, keepdim=True).repeat_interleave(beams, dim=0)
            require_finite(logits_SV.amax(-1), "logits")
        return self._log_probabilities(logits_SV)

    def step(self, ids_R: Tensor) -> Tensor:
        """See `Stepper`."""
        with inference(self._model):
            # Sentences past their own room stay in the batch: their positions must stay within the table of positions.
            positions = self._positions.clamp(max=self._model.longest_target - 1)
            logits_RV = feed(self._model, ids_R.unsqueeze(1), positions, self._cache)
            self._positions = self._positions + 1
        return self._log_probabilities(logits_RV)

    def reorder(self, rows_R: Tensor) -> None:
        """See `Stepper`."""
        # A comparison is cheap on a CPU; elsewhere it would wait for the device.
        if self._beams == 1 or (rows_R.device.type == "cpu" and torch.equal(rows_R, self._sentence_rows)):
            return
        with torch.inference_mode():
            self._cache.reorder_beams(rows_R)

    def keep(self, sentences: Tensor) -> None:
        """See `Stepper`."""
        if len(sentences) == self.num_sentences:
            return
        with torch.inference_mode():
            self._cache.keep_sentences(sentences)
            if self._positions.shape[0] > 1:
                self._positions = self._positions.unflatten(0, (-1, self._beams))[sentences].flatten(0, 1)
        self.num_sentences = len(sentences)
        self._sentence_rows = self._sentence_rows[: self.num_sentences * self._beams]

    @torch.no_grad()
    def _log_probabilities(self, logits: Tensor) -> Tensor:
        # Outside of inference mode, so that a caller outside of it may change them in place.
        return logits[:, : self.vocab_size].log_softmax(dim=-1)


class EnsembleStepper:
    """Steppers of the same sentences over the same target vocabulary, behind the interface of one (`Stepper`)."""

    def __init__(self, steppers: Sequence[Stepper]) -> None:
        """Raises InputError for different vocabulary sizes, ValueError for different sentences or none."""
        if not steppers:
            raise ValueError("an ensemble needs at least one stepper")
        sizes = [stepper.vocab_size for stepper in steppers]
        if len(set(sizes)) > 1:
            raise InputError(
                f"the models of an ensemble have vocabularies of {', '.join(map(str, sizes))} tokens, expected one",
                hint="combine checkpoints that were trained with the same tokenizer",
            )
        if len({stepper.num_sentences for stepper in steppers}) > 1:
            raise ValueError("the steppers of an ensemble were given different numbers of sentences")
        self._steppers = list(steppers)
        self.vocab_size = sizes[0]
        self.rooms = [min(rooms) for rooms in zip(*(stepper.rooms for stepper in steppers), strict=True)]

    @property
    def num_sentences(self) -> int:
        return self._steppers[0].num_sentences

    def start(self, beams: int) -> Tensor:
        return mean_log_probabilities([stepper.start(beams) for stepper in self._steppers])

    def step(self, ids_R: Tensor) -> Tensor:
        return mean_log_probabilities([stepper.step(ids_R) for stepper in self._steppers])

    def reorder(self, rows_R: Tensor) -> None:
        for stepper in self._steppers:
            stepper.reorder(rows_R)

    def keep(self, sentences: Tensor) -> None:
        for stepper in self._steppers:
            stepper.keep(sentences)


def mean_log_probabilities(logprobs: Sequence[Tensor]) -> Tensor:
    """Logarithm of the mean of the probabilities whose logarithms are given, tensors of one shape; -inf is 0."""
    if len(logprobs) == 1:
        return logprobs[0]
    return reduce(torch.logaddexp, logprobs) - math.log(len(logprobs))
