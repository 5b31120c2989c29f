"""The routes of a page that follows trainings: the page itself and its data."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from tformer.support.errors import InputError


def watch_routes(page: Callable[[], str], data: Callable[[], bytes]) -> list[Route]:
    """`/` and `/data`; 503 with the reason while the runs cannot be read."""

    def show(request: Request) -> Response:
        return _answered(lambda: HTMLResponse(page()))

    def send(request: Request) -> Response:
        return _answered(lambda: Response(data(), media_type="application/json"))

    return [Route("/", show), Route("/data", send)]


def _answered(answer: Callable[[], Response]) -> Response:
    try:
        response = answer()
    except InputError as error:
        response = Response(error.message, status_code=503, media_type="text/plain")
    response.headers.update({"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
    return response
