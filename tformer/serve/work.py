"""The one thread that runs all models of a server: jobs in their order, and between them a step of every text begun.

Everything that touches a model happens in this thread. Coroutines give it functions and get their results; what they
no longer wait for is cancelled.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from tformer.decoding.generate import generate
from tformer.decoding.settings import FinishReason, Generated, GenerationSettings
from tformer.model import Transformer
from tformer.tokenizer import Tokenizer

Result = TypeVar("Result")


@dataclass(frozen=True)
class TokenEvent:
    """A token that was chosen, with the text that became final; see `Scheduler.submit`."""

    sample: int
    id: int
    text: str
    logprob: float | None
    alternatives: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None


class Ticket(Protocol):
    """A request of an engine."""

    result: Future[list[Generated]]

    def cancel(self) -> None: ...


class Engine(Protocol):
    """What writes texts with one model."""

    @property
    def num_rows(self) -> int: ...
    def submit(
        self,
        prompt: Sequence[int],
        settings: GenerationSettings,
        *,
        row: int = 0,
        suppressed: Sequence[int] = (),
        alternatives: int = 0,
        on_token: Callable[[TokenEvent], None] = lambda event: None,
    ) -> Ticket: ...
    def step(self) -> bool: ...
    def close(self, error: Exception | None = None) -> None: ...


class Whole:
    """An engine for models that cannot be scheduled: one prompt after the other, each to its end in one step."""

    num_rows = 0

    @dataclass
    class Ticket:
        run: Callable[[Callable[[], bool]], list[Generated]]
        result: Future[list[Generated]]
        cancelled: bool = False

        def cancel(self) -> None:
            self.cancelled = True

    def __init__(self, model: Transformer, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer, self._waiting = model, tokenizer, deque[Whole.Ticket]()

    def submit(
        self,
        prompt: Sequence[int],
        settings: GenerationSettings,
        *,
        row: int = 0,
        suppressed: Sequence[int] = (),
        alternatives: int = 0,
        on_token: Callable[[TokenEvent], None] = lambda event: None,
    ) -> Whole.Ticket:
        """See `Scheduler.submit`. Tokens have no alternatives; with log-probabilities they come when all are chosen."""
        chosen: list[TokenEvent] = []

        def token(_row: int, sample: int, token: int, text: str) -> None:
            chosen.append(TokenEvent(sample, token, text, None, (), None))
            if not settings.logprobs:
                on_token(chosen.pop())

        def run(should_stop: Callable[[], bool]) -> list[Generated]:
            texts: dict[str, Any] = {"tokenizer": self._tokenizer, "suppressed": suppressed, "first_row": row}
            [found] = generate(self._model, [prompt], settings, on_token=token, should_stop=should_stop, **texts)
            logprobs = [iter(each.logprobs or ()) for each in found]
            for event in chosen:
                on_token(replace(event, logprob=next(logprobs[event.sample])))
            return found

        ticket = Whole.Ticket(run, Future())
        self._waiting.append(ticket)
        return ticket

    def step(self) -> bool:
        if self._waiting:
            ticket = self._waiting.popleft()
            try:
                found = [] if ticket.cancelled else ticket.run(lambda: ticket.cancelled)
            except Exception as error:
                ticket.result.set_exception(error)
            else:
                ticket.result.set_result(found)
        return bool(self._waiting)

    def close(self, error: Exception | None = None) -> None:
        while self._waiting:
            self._waiting.popleft().result.set_exception(error or RuntimeError("closed"))


class Owner:
    """The thread. `call` and `put` are for any thread; `busy` for functions that run in it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: list[Engine] = []
        self._thread = threading.Thread(target=self._run, name="models", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Run a job, which must not raise, after those that were put before."""
        self._jobs.put(job)

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of a function that runs in the thread, unless the caller is cancelled before."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def deliver(setter: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                setter(value)

        def job() -> None:
            if future.done():
                return
            try:
                given: tuple[Callable[[Any], None], Any] = future.set_result, function(*arguments)
            except BaseException as error:
                given = future.set_exception, error
            loop.call_soon_threadsafe(deliver, *given)

        self.put(job)
        return await future

    def busy(self, engine: Engine) -> None:
        """Step an engine until it has no work left."""
        if engine not in self._live:
            self._live.append(engine)

    def close(self) -> None:
        """End the thread after the job that it runs."""
        self._jobs.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(block=not self._live)
            except queue.Empty:
                pass
            else:
                if job is None:
                    return
                job()
            for engine in list(self._live):
                try:
                    goes_on = engine.step()
                except Exception as error:
                    engine.close(error)
                    goes_on = False
                if not goes_on:
                    self._live.remove(engine)


class Generation:
    """The completions of some prompts: an asynchronous iterator of (number of the prompt, event)."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, TokenEvent | list[Generated] | BaseException]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._unfinished = 0

    def start(self, engine: Engine, prompts: Sequence[Sequence[int]], settings: Any, **options: Any) -> None:
        """Submit the prompts; runs in the thread of the models."""
        for number, prompt in enumerate(prompts):
            emit = partial(self._emit, number)
            ticket = engine.submit(prompt, settings, row=number, on_token=emit, **options)
            self._tickets.append(ticket)
            self._unfinished += 1
            ticket.result.add_done_callback(partial(self._done, number))

    def _done(self, number: int, future: Future[list[Generated]]) -> None:
        self._emit(number, future.exception() or future.result())

    def _emit(self, number: int, event: Any) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

    def close(self) -> None:
        """Give up what is not finished. A second call does nothing."""
        for ticket in self._tickets:
            ticket.cancel()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> tuple[int, TokenEvent | list[Generated]]:
        """The next event, or, of a prompt that is done, its completions. Raises what ended a prompt."""
        if not self._unfinished:
            raise StopAsyncIteration
        number, event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, list):
            self._unfinished -= 1
        return number, event
