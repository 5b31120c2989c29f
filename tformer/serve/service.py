"""A server's models, limits and counts, and the steps that its endpoints share."""

from __future__ import annotations

import json
import logging
import secrets
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from tformer.decoding.completion import check_prompts
from tformer.decoding.prompts import encode_prompts, suppressed_tokens
from tformer.decoding.settings import GenerationSettings
from tformer.serve.metrics import Metrics
from tformer.serve.models import ModelEntry, ModelRegistry, Served, sizes_of
from tformer.serve.options import ServeOptions
from tformer.serve.requests import MOST_ROWS, ChatRequest, RequestBody, RequestError, Sampling
from tformer.serve.work import CompletionStream, Owner
from tformer.support.errors import InputError
from tformer.workers.work import Work

Result = TypeVar("Result")

OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Defaults of OpenAI's API, in place of the model's own."""
TEXTS_AT_ONCE = 32  # in one job of the models' thread


def log(facts: Mapping[str, Any]) -> None:
    """Write a line of the log, a JSON object, to standard error."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    print(json.dumps({"time": now, **facts}), file=sys.stderr, flush=True)


class WarningLines(logging.Handler):
    """Writes the warnings of Python and of libraries as lines of the log."""

    def emit(self, record: logging.LogRecord) -> None:
        log({record.levelname.lower(): self.format(record)})

    @classmethod
    def start(cls) -> None:
        logging.getLogger().addHandler(cls(logging.WARNING))
        warnings.showwarning = lambda message, *_, **__: log({"warning": str(message)})


@dataclass
class Call:
    """Facts about one request for its log line and the counts; `held` is closed after the answer."""

    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    held: ExitStack = field(default_factory=ExitStack)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def usage(self) -> dict[str, int]:
        read, written = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


@dataclass(frozen=True)
class Writing:
    """Texts that are being written: the prompts as ids and as texts, and the events of their completions."""

    run: Served
    prompts: list[list[int]]
    texts: list[str]
    events: CompletionStream


class Service:
    """Models, worker thread, counts and options, shared by all endpoints."""

    def __init__(self, options: ServeOptions) -> None:
        """Raises InputError for a path without a model."""
        self.options = options
        self.models = ModelRegistry(options)
        self.owner = Owner()
        self.metrics = Metrics()
        self.is_ready, self.running = False, 0
        self.failure: BaseException | None = None  # with which the server ends

    async def prepare(self) -> None:
        """Load the first model. Where that fails, the server ends as by a signal, and the command with the error."""
        first = next(iter(self.models.entries.values()))
        try:
            await self.owner.call(partial(self.models.get, first))
            self.is_ready = True
        except Exception as error:
            self.failure = (isinstance(error, RequestError) and error.__cause__) or error
            signal.raise_signal(signal.SIGTERM)

    def chosen(self, body: RequestBody, use: str, call: Call) -> ModelEntry:
        """The model that a request asks for; `call` has its name. Raises RequestError where there is none."""
        entry = self.models.find(body.model, use)
        call.model = entry.name
        return entry

    async def on_model(self, entry: ModelEntry, function: Callable[[Served], Result]) -> Result:
        """The result of a function of a model, in the thread of the models."""
        with self.models.used(entry):
            return await self.owner.call(lambda: function(self.models.get(entry)))

    async def on_model_in_slices(self, entry: ModelEntry, function: Callable[[Served, Work], Result]) -> Result:
        """The same for long work, which polls `should_stop` between its slices: others go on meanwhile."""
        with self.models.used(entry):
            return await self.owner.call_long(lambda poll: function(self.models.get(entry), Work(should_stop=poll)))

    async def in_blocks(
        self,
        body: RequestBody,
        use: str,
        call: Call,
        texts: Sequence[Any],
        function: Callable[..., list[Any]],
        *,
        at_once: int = TEXTS_AT_ONCE,
    ) -> dict[str, Any]:
        """`results`: one for each text, by a function of some texts and the model; others go on between such blocks."""
        entry, results = self.chosen(body, use, call), list[Any]()
        for start in range(0, len(texts), at_once):
            results += await self.on_model(entry, partial(function, texts[start : start + at_once]))
        return {"model": call.model, "results": results}

    async def write(
        self,
        entry: ModelEntry,
        body: Sampling,
        call: Call,
        prompts: Callable[[Served], tuple[list[list[int]], list[str]]],
        *,
        max_new_tokens: int | None,
        is_openai: bool = True,
        ends: Callable[[Served], tuple[int, ...]] = lambda run: (),
        logprobs: bool = False,
        alternatives: int = 0,
    ) -> Writing:
        """Begin the completions that a request asks for; they are given up when `call` ends.

        Args:
            prompts: gives the ids and texts of the prompts.
            max_new_tokens: None: what the context holds, or without `is_openai` the recipe's; 0: nothing is written.
            is_openai: OpenAI's defaults take the place of the recipe's.
            ends: further tokens that end a text.
        """
        events, field = CompletionStream(), "messages" if isinstance(body, ChatRequest) else "prompt"
        call.held.enter_context(self.models.used(entry))
        for give_up in (partial(self.owner.put, events.close), events.close):  # `begin` may be running
            call.held.callback(give_up)

        def begin() -> Writing:
            run = self.models.get(entry)
            try:
                ids, texts = prompts(run)
                check_prompts(ids, context="error", max_seq_len=run.model.longest_target)
            except InputError as error:
                raise RequestError(error.message, param=field, code="invalid_prompt") from error
            if (rows := len(ids) * (body.n or 1)) > MOST_ROWS:
                raise RequestError(f"n: found {rows} completions in all, expected at most {MOST_ROWS}", param="n")
            size = run.text_tokenizer.vocab_size
            if wrong := [token for each in ids for token in each if token >= size]:
                raise RequestError(f"{field}: found the id {wrong[0]}, expected 0 to {size - 1}", param=field)
            if max_new_tokens != 0:
                settings = settings_of(body, run, max_new_tokens, ends(run), is_openai=is_openai, logprobs=logprobs)
                special = run.text_tokenizer.special
                suppressed = suppressed_tokens(special, eos=settings.eos_id, suppressed=settings.suppress_tokens)
                if run.scheduler is None:
                    events.start_whole(self.owner, run, ids, settings, suppressed)
                else:
                    most = min(alternatives, size)
                    self.owner.busy(run.scheduler)
                    events.start(run.scheduler, ids, settings, suppressed=suppressed, alternatives=most)
            call.prompt_tokens = sum(map(len, ids))
            return Writing(run, ids, texts, events)

        return await self.owner.call(begin)

    def count(self, call: Call, *, route: str, method: str, status: int, name: str) -> None:
        """Count an answered request, and write its line to the log, a JSON object."""
        seconds, metrics = time.perf_counter() - call.started, self.metrics
        metrics.add("tformer_requests_total", path=route, status=str(status))
        metrics.observe("tformer_request_seconds", seconds, path=route)
        line: dict[str, Any] = {"id": name, "method": method, "path": route, "status": status}
        line["seconds"] = round(seconds, 4)
        if call.model:
            for kind in ("prompt_tokens", "completion_tokens"):
                metrics.add(f"tformer_{kind}_total", getattr(call, kind), model=call.model)
            line |= {"model": call.model, **call.usage}
        if call.first_token is not None:
            first = call.first_token - call.started
            metrics.observe("tformer_first_token_seconds", first, model=call.model)
            line["first_token_seconds"] = round(first, 4)
        log(line | call.notes)

    def metrics_text(self) -> str:
        """All counts, and the gauges of this moment."""
        gauges: dict[Any, float] = {("tformer_requests_running", ()): self.running}
        loaded = [entry for entry in self.models.entries.values() if entry.served is not None]
        for name, size in sizes_of(loaded).items():
            gauges["tformer_model_bytes", (("model", name),)] = size
        for entry in loaded:
            if (run := entry.served) is not None:
                labels = (("model", entry.name),)
                gauges["tformer_rows_running", labels] = 0 if run.scheduler is None else run.scheduler.num_rows
        return self.metrics.text(gauges)


def settings_of(
    body: Sampling,
    run: Served,
    max_new_tokens: int | None,
    ends: Sequence[int] = (),
    *,
    is_openai: bool = True,
    logprobs: bool = False,
) -> GenerationSettings:
    """The settings of a request. Raises InputError for what cannot be decoded with."""
    generation, tokenizer = run.recipe.generation, run.text_tokenizer
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if is_openai:
        given = OPENAI | given
        max_new_tokens = max_new_tokens or run.model.longest_target
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if "" in stop:
        raise RequestError("stop: found an empty text", param="stop", code="invalid_value")
    ignores = bool(body.ignore_eos)
    return GenerationSettings.from_recipe(
        generation,
        **given,
        eos_id=None if ignores else tokenizer.special.eos,
        forced_eos=None if ignores else run.recipe.tokenizer.special_ids.forced_eos,
        stop_tokens=(*(() if ignores else (*generation.stop_tokens, *ends)), *(body.stop_token_ids or ())),
        stop_texts=stop or None,
        max_new_tokens=max_new_tokens,
        min_new_tokens=body.min_tokens,
        num_samples=body.n or 1,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        logprobs=logprobs,
        context="error",
    )


def encoded(run: Served, texts: Sequence[str]) -> list[list[int]]:
    """The ids of prompts. Raises InputError for one that is longer than the context."""
    return encode_prompts(run.text_tokenizer, texts, context="error", max_seq_len=run.model.longest_target)
