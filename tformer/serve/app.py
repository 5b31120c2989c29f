"""The web application: routes, the gate that every request passes, bodies, errors and streams.

An error has OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, under the status of HTTP. Pages of
other sites cannot call the server: a body must be application/json, which browsers do not send to another site
unasked, and a name that is not the server's own in `Host` is refused (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import secrets
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tformer.serve.endpoints import ENDPOINTS, Endpoint, openapi
from tformer.serve.host import watch_routes
from tformer.serve.models import ModelRegistry
from tformer.serve.openai import Answer
from tformer.serve.requests import RequestError, read_body
from tformer.serve.service import Call, Service
from tformer.support.errors import InputError, NotFiniteError, OutOfMemoryError
from tformer.support.keywords import with_keywords
from tformer.support.options import parse_bytes
from tformer.viz.page import render_page
from tformer.workflows.runs.watching import Watch

HEADER_SECONDS, BODY_SECONDS = 15.0, 30.0
"""Time for a client to send the headers of a request, and its body."""
DISCARDED = 4
"""A body up to this number of times the limit is read and forgotten, so that its client gets to read the answer."""
RETRY_SECONDS = 1
OPEN_PATHS = ("/", "/health")
"""What is answered without a key."""
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
JSON_TYPE = "application/json"
PAGE = """\
<div id="key-row" class="row" hidden></div>
<div id="controls" class="controls"></div>
<div id="ask" class="ask"></div>
<div id="sides" class="panels"></div>
<section id="detail" aria-live="polite"></section>
<div id="request"></div>
"""


def make_app(service: Service) -> Starlette:
    """The application of a service."""
    options = service.options

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(service.prepare())
        yield
        loading.cancel()
        service.owner.close()

    def health(request: Request) -> Response:
        if service.is_ready:
            return JSONResponse({"status": "ok"})
        return error_response(RequestError("the first model is not loaded yet", 503, code="loading", retry_after=1))

    def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in service.models.entries]})

    def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in service.models.entries:
            return error_response(RequestError(f"there is no model {name[:80]!r}", 404, code="model_not_found"))
        return JSONResponse(card(name))

    def card(name: str) -> dict[str, Any]:
        entry = service.models.entries[name]
        found = {"id": name, "object": "model", "created": entry.created, "owned_by": "tformer"}
        return found | {"uses": entry.uses, "loaded": entry.served is not None}

    document = openapi()
    page = render_page(
        title="tformer",
        subtitle="Write, translate, classify, fill masks, and look inside",
        body=PAGE,
        scripts=("play.js",),
        style="tokens.css",
        data={},
        without=("lines.js",),
        live=True,
    )
    routes: list[BaseRoute] = [
        Route("/", lambda request: HTMLResponse(page, headers={"X-Content-Type-Options": "nosniff"})),
        Route("/health", health),
        Route("/metrics", lambda request: PlainTextResponse(service.metrics_text())),
        Route("/openapi.json", lambda request: JSONResponse(document)),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        *(Route(path, _handler(service, endpoint), methods=["POST"]) for path, endpoint in ENDPOINTS.items()),
    ]
    if options.watch:
        folders = [folder.absolute() for folder in options.watch]
        names = {str(folder): folder.name for folder in folders}
        routes.append(Mount("/runs", routes=watch_routes(Watch(folders), names)))
    middleware = [Middleware(Gate, service=service)]
    if options.cors_origins:
        allowed: Any = {"allow_headers": ["Authorization", "Content-Type"], "allow_methods": ["GET", "POST"]}
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=options.cors_origins, **allowed))
    handlers: Any = {HTTPException: _http_error}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


# --- errors -----------------------------------------------------------------------------------------------------------


def error_response(error: RequestError) -> JSONResponse:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return JSONResponse(error_document(error), error.status, headers)


def error_document(error: RequestError) -> dict[str, Any]:
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    message = error.message + (f" (hint: {error.hint})" if error.hint else "")
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"there is no {request.url.path[:200]}", 405: f"{request.method} is not allowed here"}
    response = error_response(RequestError(messages.get(error.status_code, error.detail), error.status_code))
    response.headers.update(error.headers or {})
    return response


def as_request_error(error: Exception, models: ModelRegistry) -> RequestError:
    """The error response to an exception, without paths of this machine. Logs errors that the client did not cause."""
    if isinstance(error, InputError | NotFiniteError):
        if isinstance(error, RequestError):
            found = error
            if error.status == 500:
                print(error.__cause__, file=sys.stderr, flush=True)
        else:
            status, code = (400, "invalid_request") if isinstance(error, InputError) else (500, "model_failed")
            found = RequestError(with_keywords(error.message), status, code=code)
            found.hint = error.hint and with_keywords(error.hint)
        found.message = models.without_paths(found.message)
        found.hint = found.hint and models.without_paths(found.hint)
        return found
    if isinstance(error, TimeoutError):
        return RequestError("the answer took longer than the server allows", 504, code="deadline_exceeded")
    if isinstance(error, ClientDisconnect):
        return RequestError("the client is gone", 499, code="client_closed_request")
    if isinstance(error, OutOfMemoryError | MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return RequestError("out of memory", 503, code="out_of_memory", retry_after=RETRY_SECONDS)
    traceback.print_exception(error, file=sys.stderr)
    return RequestError("internal error, see the server's log", 500, code="internal_error")


# --- requests ---------------------------------------------------------------------------------------------------------


def _handler(service: Service, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """The route of an endpoint: reads the body, waits for the answer or streams it."""
    most = parse_bytes(service.options.max_body, "--max-body")

    async def handle(request: Request) -> Response:
        call: Call = request.scope["tformer.call"]
        ends_at = time.monotonic() + service.options.deadline
        try:
            data = await _body(request, most)
            body = read_body(data, endpoint.body)
            if body.unknown:
                call.notes["ignored"] = body.unknown
            if service.options.log_texts:
                call.notes["request"] = body.model_dump(exclude_none=True)
            work = asyncio.ensure_future(endpoint.answer(service, body, call))
            gone = asyncio.ensure_future(_disconnected(request))
            answer = await _until_done(work, gone, ends_at - time.monotonic())
            if isinstance(answer, dict):
                if service.options.log_texts:
                    call.notes["answer"] = answer
                return JSONResponse(answer)
        except Exception as error:
            return error_response(as_request_error(error, service.models))
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        frames = _frames(answer, ends_at, service.models)
        return StreamingResponse(frames, media_type="text/event-stream", headers=headers)

    return handle


async def _body(request: Request, most: int) -> bytes:
    """Read a body of at most `most` bytes. Raises RequestError for a wrong type, size or speed."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
        raise RequestError(f"the Content-Type must be {JSON_TYPE}", 415, code="unsupported_media_type")
    too_large = RequestError(f"the body is larger than {most:,} bytes", 413, code="body_too_large")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > DISCARDED * most:
        raise too_large
    found, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > DISCARDED * most:
                    raise too_large
                if size <= most:
                    found += part
    except TimeoutError:
        raise RequestError("the body did not arrive in time", 408, code="slow_body") from None
    if size > most:
        raise too_large
    return bytes(found)


async def _until_done(work: asyncio.Task[Answer], gone: asyncio.Task[None], seconds: float) -> Answer:
    """The result of a task. Raises ClientDisconnect when the client is gone, TimeoutError when the time is over."""
    try:
        await asyncio.wait({work, gone}, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if gone.done():
            raise ClientDisconnect
        raise TimeoutError
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _frames(chunks: AsyncIterator[dict[str, Any]], ends_at: float, models: ModelRegistry) -> AsyncIterator[str]:
    """The chunks as server-sent events; an error, also of the deadline, is the last one."""
    try:
        while True:
            async with asyncio.timeout_at(ends_at):  # which ends no wait for the client outside of this function
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    except Exception as error:
        yield f"data: {json.dumps(error_document(as_request_error(error, models)))}\n\n"
    yield "data: [DONE]\n\n"


class Protocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose first line and headers do not arrive in time."""

    _waits: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._waits = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_idle = self.cycle is None or self.cycle.response_complete
        if self._waits is not None and not is_idle:
            self._waits.cancel()
            self._waits = None
        elif self._waits is None and is_idle:  # a part of the next request's headers
            self._waits = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waits is not None:
            self._waits.cancel()
        super().connection_lost(exc)


class Gate:
    """Middleware: refuses foreign hosts, wrong keys and too many requests; counts and logs what was answered."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        names = (*service.options.allow_hosts, "localhost", socket.gethostname())
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, call, status = self._service, Call(), 499
        scope["tformer.call"] = call
        name = f"req-{secrets.token_hex(8)}"

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            async with asyncio.timeout(service.options.deadline):  # for a client that does not read
                await send(message)

        service.running += 1
        try:
            refusal = self._refusal(Request(scope))
            await (self._app if refusal is None else error_response(refusal))(scope, receive, sending)
        except TimeoutError:  # the connection is closed
            call.notes["error"] = "the client does not read the answer"
        finally:
            service.running -= 1
            call.held.close()
            route = getattr(scope.get("route"), "path", "other")
            service.count(call, route=route, method=scope["method"], status=status, name=name)

    def _refusal(self, request: Request) -> RequestError | None:
        options, host = self._service.options, request.headers.get("host", "")
        if not self._is_own(host):
            hint = f"--allow-host {host[:80]}"
            return RequestError(f"the host {host[:80]!r} is not this server's ({hint})", 400, code="foreign_host")
        if request.url.path in OPEN_PATHS:
            return None
        if options.key is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode(), options.key.encode())
            if scheme.lower() != "bearer" or not right:
                return RequestError("the API key is missing or wrong", 401, code="invalid_api_key")
        if request.method == "POST" and self._service.running > options.queue:
            message = f"{options.queue} requests are being answered: try again later"
            return RequestError(message, 429, code="queue_full", retry_after=RETRY_SECONDS)
        return None

    def _is_own(self, host: str) -> bool:
        """Whether a Host header has an IP address or a name of this server (DNS can point other names here)."""
        name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        with suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return name.lower() in self._names
