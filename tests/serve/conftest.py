"""Tiny models of every family, and a server of all of them as the command starts it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.random_runs import random_run

if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
    collect_ignore_glob = ["test_*"]

LETTERS = "abcdefgh .?é"
GPT = """
schema: 1
arch: gpt
model:
  d_model: 8
  max_seq_len: 48
  decoder: {num_layers: 2, num_heads: 2, feedforward: {d_ff: 16}}
  heads: [{kind: lm, bias: true}]
  tie: {output: false}
  init: {std: 0.7}
generation: {max_new_tokens: 12}
training: {precision: fp32}
"""
PAIRS = """
schema: 1
model:
  d_model: 8
  max_seq_len: 24
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
  tie: {source_target: false, output: false}
  heads: [{kind: lm, bias: true}]
  init: {std: 0.7}
objectives: [{kind: seq2seq}]
generation: {beam_size: 3, max_new_tokens: 8}
training: {precision: fp32}
"""
SLIDING = GPT.replace("num_heads: 2,", "num_heads: 2, attention: {kind: sliding_window, window: 4},")
MASKED = """
schema: 1
model:
  d_model: 8
  max_seq_len: 24
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
  heads: [{kind: masked_lm}]
  init: {std: 0.5}
objectives: [{kind: masked_lm}]
training: {precision: fp32}
"""
LABELS = MASKED.replace("[{kind: masked_lm}]\n  init", "[{kind: classifier}]\n  init").replace(
    "objectives: [{kind: masked_lm}]", "objectives: [{kind: classification}]\ndata: {labels: [bad, good]}"
)
TAGS = LABELS.replace("{kind: classifier}", "{kind: token_classifier}").replace(
    "{kind: classification}]\ndata: {labels: [bad, good]}",
    "{kind: token_classification}]\ndata: {labels: [B-X, I-X, O]}",
)
ANSWERS = MASKED.replace("{kind: masked_lm}]\n  init", "{kind: span}]\n  init").replace(
    "objectives: [{kind: masked_lm}]", "objectives: [{kind: question_answering}]"
)


def silence(model: Any, tokenizer: Any) -> None:
    """Visible texts: of the special tokens only the end is ever likely."""
    import torch

    with torch.no_grad():
        bias = model.state_dict()["heads.lm.bias"]
        special = [token for token in range(len(bias)) if tokenizer.is_special(token)]
        bias[[token for token in special if token != tokenizer.special.eos]] = -30.0


def make_gpt(runs: Path, seed: int = 0) -> Path:
    return random_run(runs, GPT, arch="gpt", letters=LETTERS, template="gpt", change=silence, seed=seed)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs: gpt, sliding (which cannot be scheduled), pairs (encoder-decoder), masked, labels, tags and answers."""
    home = tmp_path_factory.mktemp("served") / "runs"
    common: dict[str, Any] = {"letters": LETTERS}
    return {
        "gpt": make_gpt(home),
        "sliding": random_run(home, SLIDING, arch="sliding", template="gpt", change=silence, **common),
        "pairs": random_run(home, PAIRS, arch="pairs", change=silence, **common),
        "masked": random_run(home, MASKED, arch="masked", template="bert", **common),
        "labels": random_run(home, LABELS, arch="labels", template="bert", **common),
        "tags": random_run(home, TAGS, arch="tags", template="bert", **common),
        "answers": random_run(home, ANSWERS, arch="answers", template="bert", **common),
    }


@dataclass
class Reply:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@dataclass
class Server:
    """A running `tformer serve`."""

    process: subprocess.Popen[str]
    url: str
    log: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def send(self, path: str, body: Any = None, *, method: str | None = None, **headers: str) -> Reply:
        """The reply to a request; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} | {key.replace("_", "-"): value for key, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return Reply(reply.status, reply.headers, reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.headers, error.read())

    def ask(self, path: str, **body: Any) -> Any:
        """The answer to a request that must succeed."""
        reply = self.send(path, body)
        assert reply.status == 200, reply.body
        return reply.json

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextlib.contextmanager
def served(*arguments: object, **environment: str) -> Iterator[Server]:
    """`tformer serve` with these arguments on a free port, ready to answer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tformer", "serve", *map(str, arguments), "--port", "0"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TFORMER_KERNELS": "off", "PYTHONFAULTHANDLER": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    server = Server(process, "")
    found = threading.Event()

    def read() -> None:
        for line in process.stderr or ():
            server.log.append(line)
            if match := re.search(r"serving at (http://\S+)/ ", line):
                server.url = match[1]
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(60) and server.url, "".join(server.log)
        while server.send("/health").status == 503:
            time.sleep(0.05)
        yield server
    finally:
        ended = process.poll()
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)
        if process.stderr:
            process.stderr.close()
    assert ended in (None, 0, -signal.SIGKILL), "".join(server.log[-20:])


@pytest.fixture(scope="session")
def server(runs: dict[str, Path]) -> Iterator[Server]:
    """One server of all models."""
    with served(*runs.values()) as found:
        yield found


@pytest.fixture(scope="session")
def names(runs: dict[str, Path]) -> dict[str, str]:
    """The models' names on the server by family."""
    return {family: path.name for family, path in runs.items()}
