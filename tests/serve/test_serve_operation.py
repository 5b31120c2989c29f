"""A server in operation: health, counts, log, key, limits, signals, clients that leave, models that change."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.random_runs import random_contents
from tests.serve.conftest import GPT, LETTERS, Server, make_gpt, served, silence
from tests.viz.plot_runs import write_run
from tformer.serve.app import make_app
from tformer.serve.models import LOOK_AGAIN_SECONDS
from tformer.serve.options import ServeOptions
from tformer.serve.service import Service, WarningLines
from tformer.serve.work import Owner
from tformer.support.errors import InputError

COMPLETE = "/v1/completions"
LONG_GPT = GPT.replace("max_seq_len: 48", "max_seq_len: 4000")
LONG: dict[str, Any] = {"prompt": "abc", "max_tokens": 3900, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose completions take seconds."""
    from tests.random_runs import random_run

    home = tmp_path_factory.mktemp("long") / "runs"
    return random_run(home, LONG_GPT, arch="gpt", letters=LETTERS, template="gpt", change=silence)


@pytest.fixture(scope="module")
def guarded(long_run: Path) -> Iterator[Server]:
    """A server with a key and small limits."""
    limits = ("--queue", 2, "--deadline", 1.5, "--max-body", "1KB", "--log-texts")
    with served(long_run, *limits, "--cors-origin", "https://a.example", TFORMER_API_KEY="secret") as found:
        yield found


def value_of(server: Server, name: str, **headers: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", server.send("/metrics", **headers).body.decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def log_lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in list(server.log) if line.startswith("{")]


# --- what is seen of it -----------------------------------------------------------------------------------------------


def test_counts_are_in_prometheus_form(server: Server) -> None:
    name = 'tformer_completion_tokens_total{model="gpt-tiny-1"}'
    before = value_of(server, name)
    server.ask(COMPLETE, prompt="abc", max_tokens=5, ignore_eos=True)
    assert value_of(server, name) == before + 5
    reply = server.send("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain")
    for line in reply.body.decode().splitlines():
        assert line.startswith("# ") or re.fullmatch(r'tformer_\w+(\{(\w+="[^"]*",?)+\})? [0-9.e+-]+', line), line
    buckets = re.findall(
        r'tformer_request_seconds_bucket\{path="/v1/completions",le="[^"]+"\} (\d+)', reply.body.decode()
    )
    assert len(buckets) == 14 and sorted(map(int, buckets)) == [*map(int, buckets)]


def test_log_lines_are_objects_without_texts(server: Server) -> None:
    server.ask(COMPLETE, prompt="abcd fed", max_tokens=2)
    until(lambda: "model" in log_lines(server)[-1])
    line = log_lines(server)[-1]
    assert {"time", "id", "method", "path", "status", "seconds", "model", "prompt_tokens"} <= line.keys()
    assert not any("abcd fed" in each for each in server.log)


def test_log_texts_adds_request_and_answer(guarded: Server) -> None:
    key = {"Authorization": "Bearer secret"}
    assert guarded.send(COMPLETE, {"prompt": "abcd fed", "max_tokens": 2}, **key).status == 200
    until(lambda: any("abcd fed" in line for line in guarded.log))


def test_a_warning_is_a_line_of_the_log(server: Server) -> None:
    """uvicorn warns of what is no HTTP, through Python's logging."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"this is no HTTP\r\n\r\n")
        connection.recv(1000)
    until(lambda: any(line.get("warning") == "Invalid HTTP request received." for line in log_lines(server)))
    assert not any(line.startswith("Invalid") for line in server.log)


def test_warnings_of_python_are_lines_of_the_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    WarningLines.start()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("2 texts were cut", stacklevel=1)
    logging.getLogger("a.library").warning("slow %s", "path")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["warning"] for line in lines] == ["2 texts were cut", "slow path"] and all(
        "time" in each for each in lines
    )


# --- key and origins --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", "Basic secret", "Bearer secret2", "Bearer \u00e9"])
def test_without_the_key_only_health_is_answered(given: str | None, guarded: Server) -> None:
    headers = {} if given is None else {"Authorization": given}
    for path in ("/v1/models", "/metrics", "/openapi.json", "/none"):
        reply = guarded.send(path, **headers)
        assert reply.status == 401 and reply.error["code"] == "invalid_api_key"
        assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert guarded.send("/health", **headers).status == 200
    assert guarded.send("/v1/models", Authorization="Bearer secret").status == 200


def test_only_named_origins_may_read_answers(guarded: Server, server: Server) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = guarded.send("/v1/completions", method="OPTIONS", **asked)
    assert allowed.status == 200 and allowed.headers["Access-Control-Allow-Origin"] == "https://a.example"
    refused = guarded.send("/v1/completions", method="OPTIONS", **asked | {"Origin": "https://b.example"})
    assert refused.headers["Access-Control-Allow-Origin"] is None
    assert server.send("/health", Origin="https://a.example").headers["Access-Control-Allow-Origin"] is None


# --- limits -----------------------------------------------------------------------------------------------------------


def test_more_requests_than_the_queue_takes_are_refused_with_429(guarded: Server) -> None:
    def send(_: int) -> Any:
        return guarded.send(COMPLETE, LONG, Authorization="Bearer secret")

    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(send, range(6)))
    refused = [reply for reply in replies if reply.status == 429]
    assert len(refused) == 4 and all(reply.headers["Retry-After"] == "1" for reply in refused)
    assert {reply.error["code"] for reply in refused} == {"queue_full"}


def test_an_answer_has_a_deadline(guarded: Server) -> None:
    reply = guarded.send(COMPLETE, LONG, Authorization="Bearer secret")
    assert reply.status == 504 and reply.error["code"] == "deadline_exceeded"
    streamed = guarded.send(COMPLETE, LONG | {"stream": True}, Authorization="Bearer secret")
    *_, last, end, _ = streamed.body.decode().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded" and end == "data: [DONE]"
    until(lambda: value_of(guarded, "tformer_rows_running", Authorization="Bearer secret") == 0)


def test_a_body_has_its_limit(guarded: Server) -> None:
    reply = guarded.send(COMPLETE, {"prompt": "a" * 2000}, Authorization="Bearer secret")
    assert reply.status == 413 and "1,000 bytes" in reply.error["message"]


def test_short_jobs_do_not_wait_for_a_step_each_and_long_ones_do_not_keep_the_steps_waiting() -> None:
    class Steps:
        count = 0

        def step(self) -> bool:
            self.count += 1
            time.sleep(0.02)
            return self.count < 40

    owner, steps = Owner(), Steps()
    owner.put(lambda: owner.busy(steps)).result()  # type: ignore[arg-type]
    for job in [owner.put(int) for _ in range(100)]:
        job.result(timeout=20)
    assert steps.count < 10
    before = steps.count
    for job in [owner.put(lambda: time.sleep(0.02)) for _ in range(6)]:
        job.result(timeout=20)
    assert steps.count >= before + 4
    owner.close()


@pytest.mark.parametrize("is_left", [False, True])
def test_everything_goes_on_beside_a_long_job_which_ends_when_nobody_waits(is_left: bool) -> None:
    class Steps:
        times: list[float] = []  # noqa: RUF012

        def step(self) -> bool:
            self.times.append(time.monotonic())
            time.sleep(0.005)
            return not over

    owner, steps, over, spans = Owner(), Steps(), list[bool](), list[tuple[float, float]]()

    def long(poll: Callable[[], bool]) -> None:
        began, polls = time.monotonic(), 0
        while polls < (10_000 if is_left else 10) and not poll():
            time.sleep(0.02)
            polls += 1
        spans.append((began, time.monotonic()))

    async def ask() -> None:
        owner.put(lambda: owner.busy(steps))  # type: ignore[arg-type]
        jobs = [asyncio.ensure_future(owner.call_long(long)) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert await owner.call(lambda: 3) == 3 and not spans
        if is_left:
            for job in jobs:
                job.cancel()
        await asyncio.wait(jobs)
        assert await owner.call(lambda: 4) == 4

    asyncio.run(ask())
    over.append(True)
    if is_left:
        assert len(spans) == 1, "the second one did not begin"
    else:
        assert spans[0][1] <= spans[1][0]
        for begin, end in spans:
            inside = [at for at in steps.times if begin < at < end]
            assert max(later - at for at, later in pairwise(inside)) < (end - begin) / 2 and len(inside) > 20
    owner.close()


# --- clients and signals ----------------------------------------------------------------------------------------------


def raw_request(server: Server, body: dict[str, Any], headers: str = "") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    data = json.dumps(body).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    connection.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that is watched below `busy`."""
    folder = tmp_path_factory.mktemp("watched")
    write_run(folder / "first")
    return folder


@pytest.fixture(scope="module")
def busy(long_run: Path, watched: Path) -> Iterator[Server]:
    with served(long_run, "--watch", watched) as found:
        yield found


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(stream: bool, busy: Server) -> None:
    connection = raw_request(busy, LONG | {"stream": stream})
    if stream:
        assert connection.recv(100)
    else:
        until(lambda: value_of(busy, "tformer_requests_running") >= 2)  # with the one that asks
    connection.close()
    until(lambda: value_of(busy, "tformer_requests_running") == 1, seconds=5)
    began = time.monotonic()
    busy.ask(COMPLETE, prompt="abc", max_tokens=2)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("large", [{"n": 128}, {"prompt": ["abc", "b"] * 64}], ids=["samples", "prompts"])
def test_a_small_request_does_not_wait_for_many_texts_of_another_client(large: dict[str, Any], busy: Server) -> None:
    with raw_request(busy, LONG | {"ignore_eos": True} | large) as connection:
        until(lambda: value_of(busy, 'tformer_rows_running{model="gpt-tiny-1"}') == 32)  # not 128: of --batch-size
        busy.ask(COMPLETE, prompt="abc", max_tokens=5)
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(1)  # nothing has been answered yet
    until(lambda: value_of(busy, "tformer_requests_running") == 1)


@pytest.mark.slow
def test_a_client_that_does_not_read_is_left(guarded: Server) -> None:
    key = {"Authorization": "Bearer secret"}
    body = LONG | {"prompt": "a" * 700, "max_tokens": 500, "echo": True, "logprobs": 20, "n": 40, "stream": True}
    with raw_request(guarded, body, "Authorization: Bearer secret\r\n"):
        until(lambda: any("does not read" in line for line in guarded.log))
        assert value_of(guarded, "tformer_requests_running", **key) == 1
        until(lambda: value_of(guarded, 'tformer_rows_running{model="gpt-tiny-1"}', **key) == 0)


@pytest.mark.slow
def test_a_stream_begins_before_it_ends(busy: Server) -> None:
    connection = raw_request(busy, LONG | {"stream": True, "max_tokens": 1500})
    began, first, last = time.monotonic(), 0.0, 0.0
    while part := connection.recv(1 << 16):
        first, last = first or time.monotonic() - began, time.monotonic() - began
        if b"[DONE]" in part:
            break
    assert first < last / 2


@pytest.mark.slow
def test_a_stream_goes_on_while_a_token_is_looked_at(busy: Server) -> None:
    frames: list[float] = []

    def read(connection: socket.socket) -> None:
        while part := connection.recv(1 << 16):
            frames.extend([time.monotonic()] * part.count(b"data: "))

    with raw_request(busy, LONG | {"stream": True}) as connection:
        thread = threading.Thread(target=read, args=(connection,))
        thread.start()
        until(lambda: len(frames) > 5)
        began = time.monotonic()
        assert len(busy.ask("/look", ids=[3, 4] * 64, what="attribution")["scores"]) == 127
        took = time.monotonic() - began
        connection.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert sum(began + 0.25 * took < at < began + 0.75 * took for at in frames) > 10


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_answers_what_was_begun(number: int, long_run: Path) -> None:
    with served(long_run) as server:
        whole = LONG | {"max_tokens": 600}
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(server.send, COMPLETE, whole | {"stream": n % 2 == 0}) for n in range(4)]
            until(lambda: value_of(server, "tformer_requests_running") >= 5)
            server.process.send_signal(number)
            replies = [each.result() for each in waiting]
        assert server.process.wait(30) == 0
        assert all(reply.status == 200 for reply in replies)
        for n, reply in enumerate(replies):
            assert reply.body.endswith(b"data: [DONE]\n\n") if n % 2 == 0 else reply.json["usage"]["completion_tokens"]


@pytest.mark.slow
def test_the_end_after_a_signal_has_a_bound(long_run: Path) -> None:
    with served(long_run, "--grace", 1) as server:
        thread = threading.Thread(target=lambda: raw_request(server, LONG | {"n": 100}).recv(100))
        thread.start()
        until(lambda: value_of(server, "tformer_requests_running") >= 2)
        began = time.monotonic()
        server.stop(signal.SIGTERM)
        assert time.monotonic() - began < 10
        thread.join()


@pytest.mark.slow
def test_a_killed_server_leaves_no_file_and_frees_its_address(long_run: Path, tmp_path: Path) -> None:
    with served(long_run, TMPDIR=str(tmp_path)) as server:
        with raw_request(server, LONG | {"stream": True}) as connection:
            assert connection.recv(100)
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)
    assert not list(tmp_path.iterdir())


def test_broken_connections_change_nothing(busy: Server) -> None:
    for data in (
        b"",
        b"GET",
        b"\x16\x03\x01\x02\x00",
        b"POST / HTTP/9\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 9000,
    ):
        with socket.create_connection(("127.0.0.1", busy.port), timeout=30) as connection:
            connection.sendall(data)
    assert busy.send("/health").status == 200


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /"])
def test_a_connection_without_whole_headers_is_closed(sent: bytes, busy: Server) -> None:
    with socket.create_connection(("127.0.0.1", busy.port), timeout=40) as connection:
        connection.sendall(sent)
        while connection.recv(1 << 16):
            pass


@pytest.mark.slow
def test_a_body_that_does_not_arrive_is_refused_with_408(busy: Server) -> None:
    with socket.create_connection(("127.0.0.1", busy.port), timeout=60) as connection:
        head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Content-Length: 99\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_newer_checkpoint_of_a_run_takes_its_place(tmp_path: Path) -> None:
    from tformer.checkpoint.run import RunDirectory
    from tformer.checkpoint.save import save_checkpoint

    run = make_gpt(tmp_path / "runs")
    body: dict[str, Any] = {"prompt": "abc", "temperature": 0, "max_tokens": 12}
    with served(run, "--checkpoint", "latest") as server:
        before = server.ask(COMPLETE, **body)["choices"][0]["text"]
        contents = random_contents(GPT, letters=LETTERS, template="gpt", change=silence, seed=5, step=9)
        save_checkpoint(RunDirectory(run), 9, contents)
        until(lambda: server.ask(COMPLETE, **body)["choices"][0]["text"] != before)


@pytest.mark.slow
def test_a_model_whose_files_are_gone_or_damaged_fails_alone_and_a_loaded_one_goes_on(tmp_path: Path) -> None:
    loaded, gone, broken = (make_gpt(tmp_path / "runs", seed) for seed in range(3))
    odd = gone.rename(os.fsdecode(os.fsencode(gone) + b"<i>\xff"))  # no UTF-8
    for weights in broken.rglob("model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-20] + b"\xff" * 20)  # NaN
    with served(loaded, odd, broken) as server:
        names = [each["id"] for each in server.send("/v1/models").json["data"]]
        assert names[1] == gone.name + "<i>\N{REPLACEMENT CHARACTER}"
        shutil.rmtree(loaded)
        shutil.rmtree(odd)
        time.sleep(1.1 * LOOK_AGAIN_SECONDS)
        replies = [server.send(COMPLETE, {"prompt": "a", "model": name}) for name in names]
        assert [reply.status for reply in replies] == [200, 500, 500]
        for reply in replies[1:]:
            assert reply.error["code"] == "model_failed" and str(tmp_path) not in reply.error["message"]
        assert "Traceback" not in "".join(server.log) and any(str(tmp_path) in line for line in server.log)


def test_health_is_503_until_the_first_model_is_loaded(runs: dict[str, Path]) -> None:
    service = Service(ServeOptions(runs=(str(runs["gpt"]),)))
    [health] = [route.endpoint for route in make_app(service).routes if getattr(route, "path", "") == "/health"]  # type: ignore[attr-defined]
    loading = health(None)
    assert loading.status_code == 503 and loading.headers["Retry-After"] and b"not loaded yet" in loading.body
    asyncio.run(service.prepare())
    assert health(None).status_code == 200
    service.owner.close()


@pytest.mark.slow
def test_a_first_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    broken, good = (make_gpt(tmp_path / "runs", seed) for seed in range(2))
    for weights in broken.rglob("model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-20] + b"\xff" * 20)
    command = [sys.executable, "-m", "tformer", "serve", broken, good, "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2 and re.search(r"^error: .*model.safetensors is damaged", ended.stderr, re.MULTILINE)
    assert "Traceback" not in ended.stderr and ended.stderr.count("is damaged") == 1


WRONG_OPTIONS = [
    (ServeOptions(api_key=key), "--api-key: expected printable ASCII") for key in ("", " a", "a ", "a\n", "é")
]


@pytest.mark.parametrize(("options", "words"), WRONG_OPTIONS)
def test_options_that_cannot_be_are_refused_before_anything_is_loaded(options: ServeOptions, words: str) -> None:
    with pytest.raises(InputError, match=words):
        options.check()


@pytest.mark.slow
def test_models_make_room_for_each_other(runs: dict[str, Path]) -> None:
    with served(*runs.values(), "--memory", "12KB") as server:

        def loaded() -> list[str]:
            return [each["id"] for each in server.send("/v1/models").json["data"] if each["loaded"]]

        assert loaded() == [runs["gpt"].name]
        server.ask("/fill", text="a[MASK]", model=runs["masked"].name)
        server.ask("/translate", text="a", model=runs["pairs"].name)
        assert runs["pairs"].name in loaded() and len(loaded()) < 3
        assert server.ask(COMPLETE, prompt="a", max_tokens=1)["model"] == runs["gpt"].name
        assert runs["gpt"].name in loaded()


@pytest.mark.slow
def test_models_in_use_leave_no_memory_for_another_one(long_run: Path, runs: dict[str, Path]) -> None:
    with served(long_run, runs["gpt"], "--memory", "140KB") as server:  # 134 KB and 7 KB
        other = {"prompt": "a", "model": server.send("/v1/models").json["data"][1]["id"]}
        with raw_request(server, LONG | {"stream": True}) as connection:
            assert connection.recv(100)
            refused = server.send(COMPLETE, other)
            assert (refused.status, refused.error["code"], refused.headers["Retry-After"]) == (503, "no_memory", "5")
        until(lambda: server.send(COMPLETE, other).status == 200)


def test_runs_are_watched_below_the_server(busy: Server, watched: Path) -> None:
    page = busy.send("/runs/")
    assert "connect-src" in page.body.decode()
    data = busy.send("/runs/data")
    assert [run["name"] for run in data.json["runs"]] == ["first"]
    assert busy.send("/runs/first").status == 404
    shutil.rmtree(watched)
    time.sleep(1.1)  # Watch rests between its readings
    gone = busy.send("/runs/data")
    assert gone.status == 503 and b"does not exist" in gone.body
    assert not any(str(watched).encode() in reply.body for reply in (page, data, gone))


def test_a_key_and_watched_runs_exclude_each_other(cli: Any, tmp_path: Path) -> None:
    outcome = cli("serve", "--watch", tmp_path, "--api-key", "k")
    assert outcome.code == 2 and "--watch: a browser sends no key" in outcome.err
