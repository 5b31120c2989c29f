"""A web server of files in memory, which can fail in chosen ways."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Store:
    """The files of a server.

    Attributes:
        files: content by name.
        cuts: number of further answers that are cut off in their middle.
        statuses: of the next answers, in order, instead of the files.
        ranges: whether parts of files are sent.
        tags: whether answers have an ETag.
        sent: bytes of content that were sent.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    cuts: int = 0
    statuses: list[int] = field(default_factory=list)
    ranges: bool = True
    tags: bool = True
    sent: int = 0
    url: str = ""


@contextmanager
def serving(store: Store) -> Iterator[Store]:
    """The store at a port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(store))
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(store: Store) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def _answer(self, *, with_content: bool) -> None:
            content = store.files.get(self.path.lstrip("/"))
            status = store.statuses.pop(0) if store.statuses else 200 if content is not None else 404
            if status != 200 or content is None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            tag = hashlib.sha256(content).hexdigest()
            asked = self.headers.get("Range")
            if asked is not None and store.ranges:
                first, last = asked.removeprefix("bytes=").split("-")
                content = content[int(first) : int(last) + 1]
                self.send_response(206)
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            if store.tags:
                self.send_header("ETag", f'"{tag}"')
            self.end_headers()
            if not with_content:
                return
            if store.cuts:
                store.cuts -= 1
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
                return
            self.wfile.write(content)
            store.sent += len(content)

        def log_message(self, *_: Any) -> None: ...

    return Handler
