"""The thread of the models: requests take turns, whatever number of prompts they have."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

import tformer.serve.work as work
from tformer.decoding.settings import GenerationSettings
from tformer.serve.plain import translate
from tformer.serve.requests import TranslateRequest
from tformer.serve.service import Call, Service
from tformer.serve.work import CompletionStream, Owner


@pytest.fixture
def owner() -> Iterator[Owner]:
    thread = Owner()
    yield thread
    thread.close()


def test_requests_to_a_model_that_cannot_be_scheduled_take_turns(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    may_go_on = threading.Event()

    def generate(model: str, prompts: Sequence[int], *_: Any, **__: Any) -> list[Any]:
        assert may_go_on.wait(10)
        written.append(model)
        return [[SimpleNamespace(logprobs=None)] for _ in prompts]

    async def both() -> None:
        async def finished(model: str, prompts: int) -> None:
            events = CompletionStream()
            run: Any = SimpleNamespace(model=model, text_tokenizer=None)
            events.start_whole(owner, run, [[1]] * prompts, GenerationSettings(), ())
            async for _ in events:
                pass

        many = asyncio.create_task(finished("many", 20))
        await asyncio.sleep(0)  # it has put what it puts
        few = asyncio.create_task(finished("few", 3))
        await asyncio.sleep(0)
        may_go_on.set()
        await asyncio.wait_for(asyncio.gather(many, few), 10)

    monkeypatch.setattr(work, "generate", generate)
    asyncio.run(both())
    assert written == ["many", "few"] * 3 + ["many"] * 17


def test_a_request_that_is_given_up_begins_no_further_prompt(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    async def first_of_many() -> None:
        events = CompletionStream()

        def generate(*_: Any, first_row: int, **__: Any) -> list[Any]:
            written.append(first_row)
            events.close()
            return [[SimpleNamespace(logprobs=None)]]

        monkeypatch.setattr(work, "generate", generate)
        run: Any = SimpleNamespace(model="", text_tokenizer=None)
        events.start_whole(owner, run, [[1]] * 20, GenerationSettings(), ())
        await anext(events)

    asyncio.run(first_of_many())
    owner.put(lambda: None).result(10)
    assert written == [0]


def test_schedulers_have_as_much_time_as_the_jobs(owner: Owner) -> None:
    """Beside jobs that never end, a scheduler does not make one step for each of them."""
    steps, jobs = [0.0], [0.0]

    class Steps:
        def step(self) -> bool:
            time.sleep(0.002)
            steps[0] += 0.002
            return jobs[0] < 0.4

    def job() -> None:
        time.sleep(0.05)
        jobs[0] += 0.05
        if jobs[0] < 0.4:
            owner.put(job)

    owner.busy(cast(Any, Steps()))
    owner.put(job)
    while owner._live:
        time.sleep(0.01)
    assert steps[0] > 0.1  # and not 0.02


def test_translations_go_in_small_blocks() -> None:
    blocks: list[int] = []

    async def on_model(_: str, function: partial[Any]) -> list[Any]:
        blocks.append(len(function.args[0]))
        return list(function.args[0])

    service: Any = SimpleNamespace(chosen=lambda *_: "model", on_model=on_model)
    service.in_blocks = partial(Service.in_blocks, service)
    asyncio.run(translate(service, TranslateRequest(text=["a"] * 20), Call()))
    assert blocks == [8, 8, 4]
