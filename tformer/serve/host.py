"""An application of starlette, answered at one address until it is interrupted; and the routes of `tformer watch`."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from tformer.support.errors import InputError, require_package

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from tformer.workflows.runs.watching import Watch

ANY_PORT = 0


def require_packages(command: str) -> None:
    """Raise InputError where starlette or uvicorn is not installed."""
    for package in ("starlette", "uvicorn"):
        require_package(package, extra="serve", user=f"tformer {command}")


def own_names(host: str) -> list[str]:
    """The names in `Host:` that a service at this address answers to.

    A page of another site can send requests to 127.0.0.1 under that site's name (DNS rebinding). For an address that
    others reach, every name is allowed.
    """
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return ["localhost", "127.0.0.1", "[::1]", host] if local else ["*"]


def serve(app: Starlette, host: str, port: int, *, ready: Callable[[str], None], **options: Any) -> None:
    """Answer requests until SIGINT or SIGTERM; `ready` receives the URL when connections are accepted.

    Args:
        port: `ANY_PORT` takes a free one.
        options: of `uvicorn.Config`.

    Raises InputError for an address that cannot be used.
    """
    import uvicorn

    class Server(uvicorn.Server):
        """A server that ends by itself after a signal; uvicorn's own raises the signal again."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self.handle_exit, number, None)
            yield

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot listen on {host}, port {port}: {reason}", hint=f"--port {ANY_PORT} takes a free port"
        ) from error
    with closing(listener):
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        ready(f"http://{shown}:{listener.getsockname()[1]}/")
        config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, **options)
        Server(config).run(sockets=[listener])


def watch_routes(watched: Watch, names: Mapping[str, str] | None = None) -> list[Route]:
    """`/` and `/data` of a page that follows trainings; 503 with the reason while the runs cannot be read.

    names: what stands in answers in place of a path.
    """
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    def route(path: str, content: Callable[[], str], media_type: str) -> Route:
        def answer(request: Request) -> Response:
            kind, status = media_type, 200
            try:
                text = content()
            except InputError as error:
                text, kind, status = error.message, "text/plain", 503
            for place, name in (names or {}).items():
                text = text.replace(place, name)
            headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
            return Response(text, status, headers, kind)

        return Route(path, answer)

    return [
        route("/", watched.page, "text/html"),
        route("/data", lambda: watched.data().decode(), "application/json"),
    ]
