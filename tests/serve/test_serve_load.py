"""Many requests at a time, good and broken: each is answered, and memory stays level."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import urllib.error
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Server, served
from tests.serve.test_serve_operation import log_lines, until

COMPLETE = "/v1/completions"
GRACE = 600  # seconds
HEAD = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def resident_bytes(server: Server) -> int:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * 4096


def num_threads(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/task"))


def rows_running(server: Server) -> int:
    rows = re.findall(r"^tformer_rows_running\S* (\d+)$", server.send("/metrics").body.decode(), re.MULTILINE)
    assert rows
    return sum(map(int, rows))


def raw(server: Server, *parts: bytes) -> None:
    """Send bytes and leave without reading an answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)


def good(names: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (COMPLETE, {"prompt": "abc", "max_tokens": 12}),
        (COMPLETE, {"prompt": ["abc", "de"], "max_tokens": 8, "n": 2, "stream": True}),
        (COMPLETE, {"prompt": "abcd", "max_tokens": 1, "echo": True, "logprobs": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
        ("/v1/embeddings", {"input": ["abc", "d"]}),
        ("/translate", {"text": "abc", "model": names["pairs"]}),
        ("/classify", {"text": "abc", "model": names["labels"]}),
        ("/fill", {"text": "a[MASK]", "model": names["masked"]}),
        ("/score", {"source": "abc", "target": "d"}),
    ]


def broken(server: Server) -> list[Callable[[], int | None]]:
    """Functions that send something broken, and return the status if there is an answer."""
    long = b'{"prompt": "abc", "max_tokens": 40, "stream": true, "ignore_eos": true}'
    whole = f"{HEAD}Content-Length: {len(long)}\r\n\r\n".encode() + long
    return [
        lambda: server.send(COMPLETE, b'{"prompt": ').status,
        lambda: server.send(COMPLETE, b'{"prompt": "\xff\xfe"}').status,
        lambda: server.send(COMPLETE, {"prompt": {"a": 1}}).status,
        lambda: server.send(COMPLETE, {"prompt": "a", "model": "none"}).status,
        lambda: server.send(COMPLETE, {"prompt": "a" * 4_100_000}).status,
        lambda: server.send("/none", {}).status,
        lambda: raw(server, whole),
        lambda: raw(server, f"{HEAD}Content-Length: 1000\r\n\r\n".encode(), b"{"),
        lambda: raw(server, b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 9000),
        lambda: raw(server, b"\x00\xff" * 2000),
    ]


@pytest.mark.slow
def test_a_load_of_good_and_broken_requests_is_answered_and_memory_is_level(
    runs: dict[str, Path], names: dict[str, str]
) -> None:
    with served(*runs.values()) as server:
        draw = random.Random(0)
        whole, wrong = good(names), broken(server)

        def one(number: int) -> str:
            if number % 10 == 0:
                status = wrong[number // 10 % len(wrong)]()
                return "broken" if status is None or 400 <= status < 500 else f"broken: {status}"
            path, body = whole[number % len(whole)]
            reply = server.send(path, body)
            ended = not body.get("stream") or reply.body.endswith(b"data: [DONE]\n\n")
            return "good" if reply.status == 200 and ended else f"{path}: {reply.status} {reply.body[:200]!r}"

        def load(count: int) -> Counter[str]:
            numbers = draw.sample(range(count), count)
            with ThreadPoolExecutor(16) as pool:
                return Counter(pool.map(one, numbers))

        load(700)  # caches fill: level from here on
        before, threads = resident_bytes(server), num_threads(server)
        assert load(1000) == {"good": 900, "broken": 100}
        assert resident_bytes(server) < 1.05 * before and num_threads(server) <= threads + 2
        until(lambda: rows_running(server) == 0)
        assert "Traceback" not in "".join(server.log)
        assert server.stop() == 0


@pytest.mark.slow
def test_sigterm_in_the_middle_of_a_load_loses_none_that_was_begun(
    runs: dict[str, Path], names: dict[str, str]
) -> None:
    """Each request is answered whole or refused before the first byte, and the server has begun no other.

    Within --grace, which a busy machine does not reach here; what happens after it is tested with one request, by
    `test_the_end_after_a_signal_has_a_bound`.
    """
    with served(*runs.values(), "--grace", GRACE) as server:
        long = {"prompt": "abc", "max_tokens": 44, "n": 40, "stream": True, "ignore_eos": True}
        whole, wrong = [*good(names), (COMPLETE, long)], broken(server)[:6]  # without those that leave
        done: Counter[str] = Counter()

        def answered(path: str, body: dict[str, Any]) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=GRACE)
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()  # whose body raises IncompleteRead where it is cut
            text = reply.read()
            is_whole = text.endswith(b"data: [DONE]\n\n") if body.get("stream") else json.loads(text)
            assert reply.status == 200 and is_whole and b"error" not in text, text

        def one(number: int) -> None:
            try:
                if number % 10 == 0:
                    wrong[number // 10 % len(wrong)]()
                else:
                    answered(*whole[number % len(whole)])
                    done["good"] += 1
            except (ConnectionError, urllib.error.URLError) as error:
                reason = getattr(error, "reason", error)
                assert isinstance(reason, ConnectionError), error
                done["refused"] += 1
            if done["good"] == 200 and server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(one, random.Random(0).sample(range(800), 800)))
        assert server.process.wait(GRACE) == 0
        assert done["good"] > 200 and done["refused"] > 200
    begun = [line for line in log_lines(server) if line["status"] == 200 and line["method"] == "POST"]
    assert len(begun) == done["good"] and "Traceback" not in "".join(server.log)
