"""Continuous batching: requests join and leave the batch between decoding steps.

    submit (any thread)     waiting ──▶ reading ──▶ parked ◀──▶ rows ──▶ result
                                          │  ▲                   │
                            kept prefixes ┘  └───────────────────┘ a full context is read again (`context="slide"`)

One thread owns the model and calls `step`, which reads some tokens of prompts and then decodes one token of every row
(Orca, OSDI 2022). Clients have equal shares of the rows (`_shares`), and use theirs first come, first served; samples
beyond the share are parked with their keys and values. Prompts that are being read take turns in chunks: the one
that has waited longest, then the one with the fewest tokens left, so that neither long nor short ones wait for all
others. Short ones are read side by side. The keys and values of a beginning that another text has are copied.

A completion depends on its prompt and settings alone, up to rounding: every row has its own length, chooser and random
stream. What fails in one request (a callback, logits that are not numbers) ends that one.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count, islice

import torch
from torch import Tensor

from tformer.decoding.compilation import no_compiled_steps
from tformer.decoding.completion import Completion, OnToken, check_prompts
from tformer.decoding.inference import inference
from tformer.decoding.sampling import TokenChooser
from tformer.decoding.settings import FinishReason, Generated, GenerationSettings
from tformer.model import Transformer
from tformer.nn.cache import ModelCache
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.row_cache import RowCache
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.workers.work import ShouldStop, never

SHARED = 16
"""Tokens from which on a common beginning is copied."""
STEP_ROWS = 8
"""A step takes about as long as this number of rows, and its own: the weights are read once for all of them."""
MOST_KEPT = 256
"""Texts that are kept: every prompt is compared with each of them."""


@dataclass(frozen=True)
class TokenEvent:
    """A chosen token of a sample.

    Attributes:
        text: what became final of the text; the pieces of a sample add up to it.
        logprob: under the model's own distribution; None unless the settings ask for it.
        alternatives: the most probable (id, log-probability), best first.
        finish_reason: None while the sample goes on.
    """

    sample: int
    id: int
    text: str
    logprob: float | None
    alternatives: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None


class Request:
    """A prompt in the scheduler. `result`: the future of its samples, in order."""

    def __init__(
        self,
        completions: list[Completion],
        alternatives: int,
        on_token: Callable[[TokenEvent], None] | None,
        client: object,
    ) -> None:
        self.result: Future[list[Generated]] = Future()
        self.completions, self.alternatives, self.on_token = completions, alternatives, on_token
        self.client = self if client is None else client
        self.is_cancelled = False
        self.error: Exception | None = None
        self.result.set_running_or_notify_cancel()  # from here on `cancel` ends it, not the future's method

    def cancel(self) -> None:
        """End the samples at the next step, with the finish reason `interrupted`."""
        self.is_cancelled = True


@dataclass(eq=False)
class _Sequence:
    """A completion and what chooses its tokens; number: in the order of arrival; cache: of a parked row."""

    request: Request
    completion: Completion
    chooser: TokenChooser
    number: int
    cache: ModelCache | None = None


@dataclass(eq=False)
class _Text:
    """A text that is read for some rows, or was read and is kept; `cache` has its first tokens."""

    ids: list[int]
    rows: list[_Sequence] = field(default_factory=list)
    cache: ModelCache | None = None

    @property
    def num_read(self) -> int:
        return 0 if self.cache is None else self.cache.length


class Scheduler:
    """Continuous batching over one decoder; see the module.

    `submit` and `Request.cancel` may be called by any thread, all others by the one that owns the model.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        *,
        max_rows: int = 32,
        chunk: int = 128,
        prefix_bytes: int = 2**28,
    ) -> None:
        """
        Args:
            max_rows: samples at a time.
            chunk: maximum number of prompt tokens that are read between two decoding steps.
            prefix_bytes: maximum size of the keys and values that are kept of texts that ended; 0: none.

        Raises ValueError for a model that `no_scheduler` refuses.
        """
        if (reason := no_scheduler(model)) is not None:
            raise ValueError(f"cannot be scheduled: {reason}")
        self._model, self._tokenizer, self._chunk, self._max_rows = model, tokenizer, chunk, max_rows
        device = next(model.parameters()).device
        self._new_cache = partial(model.new_cache, 1, device=device, dtype=model.compute_dtype)
        assert isinstance(model.embedding, TokenEmbedding)
        self._num_ids = model.embedding.weight.shape[0]
        self._vocab_size = None if tokenizer is None else tokenizer.vocab_size
        self._waiting: list[_Text] = []
        self._reading: list[_Text] = []
        self._parked: list[_Sequence] = []
        self._rows: list[_Sequence] = []  # in the order of the cache
        self._numbers = count()
        self._cache = self._empty_rows()
        self._kept: list[_Text] = []  # the latest last
        self._most_kept = prefix_bytes // self._cache.slot_bytes  # in tokens

    # --- any thread --------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        settings: GenerationSettings,
        *,
        row: int = 0,
        suppressed: Sequence[int] = (),
        alternatives: int = 0,
        on_token: Callable[[TokenEvent], None] | None = None,
        client: object = None,
    ) -> Request:
        """Queue a prompt.

        Args:
            row: number of the prompt in a longer list; it is part of the seed.
            suppressed: see `generate`.
            alternatives: number of most probable tokens that every event lists.
            on_token: called on the model's thread, which waits for it.
            client: requests of one client share its rows; None: the request is its own client.

        Raises InputError for a prompt without tokens or with ids that the model has not, or longer than the context
        where that is an error.
        """
        if settings.stop_texts and self._tokenizer is None:
            raise ValueError("stop texts need a tokenizer")
        longest = self._model.longest_target
        check_prompts([prompt], context=settings.context, max_seq_len=longest, first_row=row)
        if wrong := [token for token in prompt if not 0 <= token < self._num_ids]:
            raise InputError(f"prompt {row + 1} has the id {wrong[0]}, expected 0 to {self._num_ids - 1}")
        completions = [
            Completion(prompt, settings, row=row, sample=sample, max_seq_len=longest, tokenizer=self._tokenizer)
            for sample in range(settings.num_samples)
        ]
        request = Request(completions, alternatives, on_token, client)
        rows = [
            _Sequence(
                request,
                completion,
                TokenChooser(
                    settings,
                    keys=[(row, completion.sample)],
                    histories=[prompt],
                    limits=[completion.limit],
                    vocab_size=self._vocab_size,
                    suppressed=suppressed,
                ),
                next(self._numbers),
            )
            for completion in completions
        ]
        self._waiting.append(_Text(completions[0].window(), rows))
        return request

    @property
    def num_waiting(self) -> int:
        """Requests that have no rows yet."""
        return len(self._waiting)

    @property
    def num_rows(self) -> int:
        """Samples that are decoded together, and texts that are read."""
        return len(self._rows) + len(self._reading)

    # --- the thread that owns the model ------------------------------------------------------------------------------

    def step(self) -> bool:
        """Read up to a chunk of prompts, then decode one token of every row. False if there was nothing to do."""
        if not self._all_rows():
            return False
        with inference(self._model):
            self._end(row.request for row in self._all_rows() if row.request.is_cancelled)
            shares = self._shares()
            self._park(shares)
            self._read(shares)
            self._join(shares)
            if self._rows:
                self._decode()
        return True

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        *,
        first_row: int = 0,
        suppressed: Sequence[int] = (),
        on_token: OnToken | None = None,
        should_stop: ShouldStop = never,
    ) -> Iterator[list[Generated]]:
        """Yield the completions of each prompt, in order, as soon as they are done; arguments as for `generate`.

        Once `should_stop` is true, those that are not done have the finish reason `interrupted`.
        """

        def submitted(row: int, prompt: Sequence[int]) -> Request:
            def tell(event: TokenEvent) -> None:
                if on_token is not None:
                    on_token(row, event.sample, event.id, event.text)

            return self.submit(prompt, settings, row=row, suppressed=suppressed, on_token=tell, client=self)

        rows, requests = enumerate(prompts, start=first_row), deque[Request]()
        try:
            while True:
                more = islice(rows, max(0, self._max_rows - self.num_waiting))
                requests.extend(submitted(row, prompt) for row, prompt in more)
                if not requests:
                    return
                if requests[0].result.done():
                    yield requests.popleft().result.result()
                else:
                    self.close() if should_stop() else self.step()
        finally:
            self.close()  # where the caller wants no more

    def close(self, error: Exception | None = None) -> None:
        """End all requests: interrupted, or with an error."""
        for row in self._all_rows():
            row.request.error = error
        with inference(self._model):
            self._end(row.request for row in self._all_rows())

    def _all_rows(self) -> list[_Sequence]:
        texts = (*self._reading, *self._waiting)
        return [*self._rows, *self._parked, *(row for text in texts for row in text.rows)]

    def _end(self, requests: Iterable[Request]) -> None:
        """Remove requests, and set their results."""
        ended = dict.fromkeys(requests)
        if not ended:
            return
        for index in reversed(range(len(self._rows))):
            if self._rows[index].request in ended:
                self._leave(index)
        self._parked = [row for row in self._parked if row.request not in ended]
        for queue in (self._reading, self._waiting):
            for text in [each for each in queue if each.rows[0].request in ended]:
                queue.remove(text)
        for request in ended:
            if request.error is not None:
                request.result.set_exception(request.error)
                continue
            for completion in request.completions:
                if completion.finish_reason is None:
                    completion.interrupt()
            request.result.set_result([completion.result() for completion in request.completions])

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _read(self, shares: set[_Sequence]) -> None:
        """Read up to a chunk of tokens, from at least two prompts if several wait."""
        for text in [each for each in self._waiting if not shares.isdisjoint(each.rows)]:
            self._waiting.remove(text)
            self._reading.append(text)
        left, is_oldest = self._chunk, True
        while left > 0 and self._reading:
            shortest = min(self._reading, key=lambda each: len(each.ids) - each.num_read)
            text = self._reading[0] if is_oldest else shortest
            most = -(-left // 2) if is_oldest and len(self._reading) > 1 else left
            is_oldest, group = not is_oldest, self._readable_with(text, left)
            try:
                left -= self._read_chunk(text, most) if len(group) == 1 else self._read_whole(group)
            except Exception as error:
                for each in group:
                    each.rows[0].request.error = error
                self._end(each.rows[0].request for each in group)
            self._settle()

    def _readable_with(self, text: _Text, most: int) -> list[_Text]:
        """Texts of up to `most` tokens that one pass reads, with no beginning to copy; else `text` alone."""
        group: list[_Text] = []
        for each in (text, *self._reading):
            others = (other for other in (*self._kept, *self._reading) if other is not each)
            fits = each.cache is None and len(each.ids) <= most and each not in group
            if fits and all(_common(each.ids, other.ids) < SHARED for other in others):
                group.append(each)
                most -= len(each.ids)
        return group if text in group else [text]

    def _read_whole(self, group: Sequence[_Text]) -> int:
        """Read texts side by side in one row that hides them from each other; the number of their tokens."""
        ids = [token for each in group for token in each.ids]
        positions = [position for each in group for position in range(len(each.ids))]
        documents = [number for number, each in enumerate(group) for _ in each.ids]
        inputs = {"input_ids": ids, "position_ids": positions, "document_ids": documents}
        read = self._new_cache(len(ids))
        output = self._model(**{name: self._tensor([row]) for name, row in inputs.items()}, cache=read)
        ends = list(accumulate(len(each.ids) for each in group))
        output.hidden = output.hidden[0, [end - 1 for end in ends], None]
        logits_BV = output.logits_at(-1)
        for text in group:
            text.cache = self._new_cache(len(text.ids))
        if logits_BV.isnan().any():  # perhaps of one text: the weight 0 times NaN is NaN. Each is read by itself
            return len(ids)
        for text, end, logits_1V in zip(group, ends, logits_BV.split(1), strict=True):
            assert text.cache is not None
            text.cache.copy_slots(read, len(text.ids), first=end - len(text.ids))
            self._begin_rows(text, logits_1V)
        return len(ids)

    def _read_chunk(self, text: _Text, most: int) -> int:
        """Read up to `most` tokens of a text, after copying a beginning of another text; returns their number."""
        ids = text.ids
        text.cache = text.cache or self._new_cache(len(ids))
        lengths = [(_common(ids[:-1], each.ids), each) for each in (*self._kept, *self._reading) if each is not text]
        known = [(min(length, each.num_read), each) for length, each in lengths if length >= SHARED and each.cache]
        shared, source = max(known, key=lambda pair: pair[0], default=(0, text))
        if shared > text.cache.length and source.cache is not None:
            text.cache.copy_slots(source.cache, shared)
            if source in self._kept:  # the latest are kept longest
                self._kept.remove(source)
                self._kept.append(source)
        chunk = ids[text.num_read : text.num_read + most]
        output = self._model(input_ids=self._tensor([chunk]), cache=text.cache)
        if text.num_read == len(ids):
            self._begin_rows(text, output.logits_at(-1))
        return len(chunk)

    def _begin_rows(self, text: _Text, logits_1V: Tensor) -> None:
        """Choose the first tokens of the rows of a text that was read."""
        assert text.cache is not None
        self._reading.remove(text)
        self._keep(text.ids, text.cache)
        for row in text.rows:
            self._choose(row, logits_1V)
            row.cache = text.cache
            self._parked.append(row)

    def _keep(self, ids: list[int], cache: ModelCache) -> None:
        """Keep the keys and values of a text; the oldest ones make room."""
        self._kept = [each for each in self._kept if _common(each.ids, ids) < len(each.ids)]
        self._kept.append(_Text(ids, cache=cache))
        while len(self._kept) > MOST_KEPT or sum(len(each.ids) for each in self._kept) > self._most_kept:
            del self._kept[0]

    # --- rows --------------------------------------------------------------------------------------------------------

    def _empty_rows(self) -> RowCache:
        return RowCache(self._new_cache(self._model.longest_target))

    def _shares(self) -> set[_Sequence]:
        """The rows that the batch may have now: equal shares of the clients, what one does not need for the others.

        No client writes more slowly than its part of the time: a step of k clients takes at most k times what the step
        of the smallest one would take alone. Of more clients than `max_rows`, the first ones have a row each.
        """
        clients: dict[object, list[_Sequence]] = {}
        for row in sorted(self._all_rows(), key=lambda row: row.number):
            clients.setdefault(row.request.client, []).append(row)
        served = sorted(islice(clients.values(), self._max_rows), key=len)
        smallest = min(map(len, served), default=0)
        left = min(self._max_rows, len(served) * (STEP_ROWS + smallest) - STEP_ROWS)
        shares: set[_Sequence] = set()
        for others, rows in zip(reversed(range(len(served))), served, strict=True):
            share = rows[: -(-left // (others + 1))]
            shares.update(share)
            left -= len(share)
        return shares

    def _park(self, shares: set[_Sequence]) -> None:
        """Take the rows that no share has out of the batch; they wait with their keys and values."""
        for index in reversed(range(len(self._rows))):
            if (row := self._rows[index]) not in shares:
                row.cache = self._copied(index)
                self._parked.append(row)
                self._leave(index)

    def _join(self, shares: set[_Sequence]) -> None:
        """Put the parked rows of the shares into the batch."""
        for row in [each for each in self._parked if each in shares]:
            assert row.cache is not None
            self._cache.join(row.cache)
            row.cache = None
            self._parked.remove(row)
            self._rows.append(row)
        self._settle()

    def _copied(self, index: int) -> ModelCache:
        """A copy of the keys and values of a row in the batch."""
        cache = self._new_cache(self._cache.lengths[index])
        cache.copy_slots(self._cache, self._cache.lengths[index], row=index)
        return cache

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, device=next(self._model.parameters()).device)

    def _decode(self) -> None:
        """Feed the newest token of every row, and choose the next ones."""
        ids_B1 = self._tensor([row.completion.ids[-1:] for row in self._rows])
        positions_B1 = self._tensor([[length] for length in self._cache.lengths])
        try:
            logits_BV = self._model(input_ids=ids_B1, position_ids=positions_B1, cache=self._cache).logits_at(-1)
        except Exception as error:  # of no single row
            failed, self._rows, self._cache = self._rows, [], self._empty_rows()
            for row in failed:
                row.request.error = error
            self._end(row.request for row in failed)
        else:
            for row, logits_1V in zip(self._rows, logits_BV.split(1), strict=True):
                self._choose(row, logits_1V)
            self._settle()

    def _choose(self, row: _Sequence, logits_1V: Tensor) -> None:
        """Choose the next token of a row. An exception ends its request alone."""
        request, completion = row.request, row.completion
        if request.error is not None:  # by another sample
            return
        try:
            [token], logprobs = row.chooser.choose(logits_1V)
            logprob = None if logprobs is None else logprobs[0]
            piece = completion.take(token, logprob)
            if request.on_token is not None:
                best = _most_probable(logits_1V[:, : self._vocab_size], request.alternatives)
                request.on_token(TokenEvent(completion.sample, token, piece, logprob, best, completion.finish_reason))
        except Exception as error:
            request.error = error

    def _settle(self) -> None:
        """Remove rows that ended, and read those again whose context is full."""
        rows = [*self._rows, *self._parked]
        done = [row for row in rows if row.completion.finish_reason is not None]
        for index in reversed(range(len(self._rows))):
            row, length = self._rows[index], self._cache.lengths[index]
            if row.completion.finish_reason is not None:
                if length <= self._most_kept:
                    self._keep(row.completion.ids[-length - 1 : -1], self._copied(index))
                self._leave(index)
            elif length == self._cache.capacity:
                self._leave(index)
                self._reading.insert(0, _Text(row.completion.window(), [row]))
        self._parked = [row for row in self._parked if row.completion.finish_reason is None]
        ended = [row.request for row in done if all(each.finish_reason for each in row.request.completions)]
        self._end([*ended, *(row.request for row in rows if row.request.error)])

    def _leave(self, index: int) -> None:
        """Remove a row of the batch; the last one takes its place."""
        self._cache.leave(index)
        last = self._rows.pop()
        if index < len(self._rows):
            self._rows[index] = last


def no_scheduler(model: Transformer) -> str | None:
    """Why a model cannot be scheduled; None if it can."""
    if model.compiled_decoder is not None:
        return "its steps are graphs"
    if model.is_encoder_decoder:
        return "it is an encoder-decoder"
    if (reason := no_compiled_steps(model)) is not None:
        return reason
    return None if model.embedding.ngrams is None else "its embedding reads n-grams"


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _most_probable(logits_1V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most probable tokens with their log-probabilities."""
    if not count:
        return ()
    values_1k, ids_1k = logits_1V.float().log_softmax(-1).topk(count)
    return tuple(zip(ids_1k[0].tolist(), values_1k[0].tolist(), strict=True))
