"""The one thread that runs all models of a server: jobs in their order, and between them a step of every scheduler.

Everything that touches a model happens in this thread. Coroutines give it functions and get their results; what they
no longer wait for is given up.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tformer.decoding.generate import generate
from tformer.decoding.scheduler import Request, Scheduler, TokenEvent
from tformer.decoding.settings import Generated, GenerationSettings
from tformer.loading import Loaded
from tformer.workers.work import ShouldStop

Result = TypeVar("Result")

JOBS_SECONDS = 0.01
"""Between two steps: short jobs, as the beginnings and ends of requests, do not wait for a step each."""


class Owner:
    """The thread. `call`, `put` and `close` are for any thread; `busy` for functions that run in it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any] | None]] = queue.SimpleQueue()
        self._live: list[Scheduler] = []
        self._long: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name="models", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], Result]) -> Future[Result]:
        """Put a job into the queue; returns its future."""
        future: Future[Result] = Future()
        self._jobs.put((future, job))
        return future

    async def call(self, job: Callable[[], Result]) -> Result:
        """The result of a job, which does not begin once the caller is cancelled."""
        return await asyncio.wrap_future(self.put(job))

    async def call_long(self, job: Callable[[ShouldStop], Result]) -> Result:
        """The result of a long job, which polls the function that it gets: meanwhile everything else goes on.

        The others take turns for as long as the job took since it last polled. True: the caller was cancelled, or the
        thread ends. Long jobs run one after the other.
        """
        future: Future[Result] = Future()
        is_cancelled, began = False, 0.0

        def poll() -> bool:
            nonlocal began
            ends = 2 * time.monotonic() - began
            while (goes_on := self._turn() and not is_cancelled) and self._live and time.monotonic() < ends:
                pass
            began = time.monotonic()
            return not goes_on

        def run() -> None:
            nonlocal began
            began = time.monotonic()
            _settle(future, partial(job, poll))

        self.put(partial(self._long.append, run))
        try:
            return await asyncio.wrap_future(future)
        finally:
            is_cancelled = True

    def busy(self, scheduler: Scheduler) -> None:
        """Step a scheduler until it has no work left."""
        if scheduler not in self._live:
            self._live.append(scheduler)

    def close(self) -> None:
        """End the thread after the job that it runs."""
        self._jobs.put((Future(), None))
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while self._turn():
            if self._long:
                self._long[0]()
                self._long.popleft()

    def _turn(self) -> bool:
        """Run the jobs that wait, then step each scheduler, for as long as the jobs took. False: the thread ends."""
        seconds = self._do_jobs()
        ends = time.monotonic() + (seconds or 0)
        while True:
            for scheduler in list(self._live):
                try:
                    has_more = scheduler.step()
                except Exception as error:
                    scheduler.close(error)
                    has_more = False
                if not has_more:
                    self._live.remove(scheduler)
            if not self._live or time.monotonic() >= ends:
                return seconds is not None

    def _do_jobs(self) -> float | None:
        """Run waiting jobs, or wait for one if there is no other work; returns the seconds. None: the thread ends."""
        begun, is_idle = time.monotonic(), not (self._live or self._long)
        while is_idle or time.monotonic() - begun < JOBS_SECONDS:
            try:
                future, job = self._jobs.get(block=is_idle)
            except queue.Empty:
                break
            if is_idle:
                begun, is_idle = time.monotonic(), False
            if job is None:
                self._jobs.put((future, job))  # a long job may have asked
                return None
            _settle(future, job)
            del future, job  # they may hold a model
        return time.monotonic() - begun


def _settle(future: Future[Result], job: Callable[[], Result]) -> None:
    """Run a job and set its result or error in the future, unless that was cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)


class CompletionStream:
    """The completions of some prompts: an asynchronous iterator of (number of the prompt, event)."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, TokenEvent | list[Generated] | Exception]] = asyncio.Queue()
        self._requests: list[Request] = []
        self._unfinished, self._is_closed = 0, False

    def start(
        self, scheduler: Scheduler, prompts: Sequence[Sequence[int]], settings: GenerationSettings, **options: Any
    ) -> None:
        """Submit the prompts; runs in the thread of the models. options: of `Scheduler.submit`."""
        for number, prompt in enumerate(prompts):
            tell = partial(self._emit, number)
            request = scheduler.submit(prompt, settings, row=number, on_token=tell, client=self, **options)
            self._requests.append(request)
            self._unfinished += 1
            request.result.add_done_callback(partial(self._done, number))

    def start_whole(self, owner: Owner, run: Loaded, prompts: Sequence[Any], *given: Any) -> None:
        """`start` for a model that cannot be scheduled: without alternatives, and one prompt after the other.

        The next one is put when one is done, so that requests take turns.
        """
        self._unfinished = len(prompts)

        def begin(number: int) -> None:
            if number < len(prompts) and not self._is_closed:
                job = owner.put(partial(self._written, run, number, prompts[number], *given))
                job.add_done_callback(partial(self._done, number))
                job.add_done_callback(lambda _: begin(number + 1))

        begin(0)

    def _written(
        self,
        run: Loaded,
        number: int,
        prompt: Sequence[int],
        settings: GenerationSettings,
        suppressed: Sequence[int],
    ) -> list[Generated]:
        chosen: list[TokenEvent] = []

        def take(row: int, sample: int, token: int, text: str) -> None:
            chosen.append(TokenEvent(sample, token, text, None, (), None))
            if not settings.logprobs:  # which come with the result
                self._emit(number, chosen.pop())

        [found] = generate(
            run.model,
            [prompt],
            settings,
            tokenizer=run.text_tokenizer,
            suppressed=suppressed,
            on_token=take,
            should_stop=lambda: self._is_closed,
            first_row=number,
        )
        logprobs = [iter(each.logprobs or ()) for each in found]
        for event in chosen:
            self._emit(number, replace(event, logprob=next(logprobs[event.sample])))
        return found

    def _done(self, number: int, future: Future[list[Generated]]) -> None:
        self._emit(number, future.exception() or future.result())

    def _emit(self, number: int, event: Any) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

    def close(self) -> None:
        """Cancel unfinished requests. A second call has no effect."""
        self._is_closed = True
        for request in self._requests:
            request.cancel()

    def __aiter__(self) -> CompletionStream:
        return self

    async def __anext__(self) -> tuple[int, TokenEvent | list[Generated]]:
        """The next event, or the completions of a finished prompt. Raises the error that ended a prompt."""
        if not self._unfinished:
            raise StopAsyncIteration
        number, event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, list):
            self._unfinished -= 1
        return number, event
