"""A server on this machine that speaks the part of the Hugging Face hub's API that a download uses.

`GET /api/models/NAME/revision/REVISION` names the commit, `GET /api/models/NAME/tree/COMMIT` lists its files,
`GET NAME/resolve/COMMIT/FILE` gives one, whole or from a byte on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """What the server has, and what it was asked for.

    Attributes:
        commits: files of each commit of each repository, by name; the last commit is `main`.
        tags: other names of commits, of all repositories.
        token: what a request has to bring for a repository in `private`.
        gated: repositories with terms that the user has not accepted.
        cut: files that end after half their bytes, and how often.
        asked: (method, path, Range) of each request, in order.
    """

    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    token: str = "secret"
    cut: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def commit(self, name: str, folder: Path, **changes: bytes) -> str:
        """Add a commit with the files of a folder (and others); returns its hash."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        files |= changes
        sha = hashlib.sha1(b"".join(files[path] for path in sorted(files))).hexdigest()
        self.commits.setdefault(name, {})[sha] = files
        return sha

    def files_sent(self) -> list[str]:
        """Names of the files whose bytes were asked for, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("Range")))
            api = re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/([^/]+))?", path)
            file = re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path)
            name, revision = (api[1], api[3]) if api else (file[1], file[2]) if file else ("", "")
            if (refusal := refused(name, self.headers.get("Authorization"))) is not None:
                return self.send(*refusal, body=body)
            commits = hub.commits[name]
            last = list(commits)[-1]
            sha = {"main": last, **hub.tags, **{each: each for each in commits}}.get(revision or "main")
            if sha is None:
                return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)
            files = commits[sha]
            if api and api[2] == "tree":
                tree = [
                    {"type": "file", "path": each, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for each, data in files.items()
                ]
                return self.send(200, json.dumps(tree).encode(), body=body)
            if api:
                names = [{"rfilename": each} for each in files]
                about = {"_id": "1", "id": name, "sha": sha, "siblings": names, "private": False, "tags": []}
                return self.send(200, json.dumps(about).encode(), body=body)
            assert file is not None
            if file[3] not in files:
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)
            data = files[file[3]]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
            found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            if found:
                start = int(found[1])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                return self.send(206, data[start:], headers, body=body)
            ends = body and hub.cut.get(file[3], 0) > 0
            if ends:
                hub.cut[file[3]] -= 1
            self.send(200, data, headers, body=body, ends_early=ends)

        def send(
            self,
            status: int,
            data: bytes,
            headers: Mapping[str, str] = {},
            *,
            body: bool = True,
            ends_early: bool = False,
        ) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data[: len(data) // 2] if ends_early else data)
            self.close_connection = self.close_connection or ends_early

    def refused(name: str, authorization: str | None) -> tuple[int, bytes, Mapping[str, str]] | None:
        """Status, body and headers for a repository that is not there, or not for everybody."""
        if name not in hub.commits or (name in hub.private and authorization != f"Bearer {hub.token}"):
            return 401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}
        if name in hub.gated:
            return 403, b"", {"X-Error-Code": "GatedRepo"}
        return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
