"""Requests that are refused: the right status, OpenAI's form of an error, and the field that is wrong."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Server

COMPLETE, CHAT, EMBED = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
USER = {"role": "user", "content": "a"}
NESTED = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"

# (path, body, status, param, words of the message)
WRONG: list[tuple[str, Any, int, str | None, str]] = [
    (COMPLETE, b"", 400, None, "not valid JSON"),
    (COMPLETE, b'{"prompt": "a"', 400, None, "not valid JSON"),
    (COMPLETE, b'{"prompt": "a"} x', 400, None, "not valid JSON"),
    (COMPLETE, b'{"prompt": "a", "temperature": NaN}', 400, None, "not valid JSON"),
    (COMPLETE, b'{"prompt": "a", "temperature": Infinity}', 400, None, "not valid JSON"),
    (COMPLETE, b'{"prompt": "a", "temperature": 1e999}', 400, "temperature", "finite"),
    (COMPLETE, b'{"prompt": "\xff"}', 400, None, "not valid JSON"),
    (COMPLETE, b'{"prompt": "\\ud800"}', 400, None, "not valid JSON"),
    (COMPLETE, b'{"prompt": "a", "seed": ' + b"1" * 6000 + b"}", 400, None, "not valid JSON"),
    (COMPLETE, NESTED, 400, None, "recursion"),
    (COMPLETE, b"[1]", 400, None, "expected a JSON object"),
    (COMPLETE, b"null", 400, None, "expected a JSON object"),
    (COMPLETE, {}, 400, "prompt", "prompt is missing"),
    (COMPLETE, {"prompt": None}, 400, "prompt", "found null"),
    (COMPLETE, {"prompt": 3}, 400, "prompt", "found 3"),
    (COMPLETE, {"prompt": []}, 400, "prompt", "at least 1"),
    (COMPLETE, {"prompt": [[]]}, 400, "prompt", "expected"),
    (COMPLETE, {"prompt": ["a", 3]}, 400, "prompt", "expected"),
    (COMPLETE, {"prompt": [1, -2]}, 400, "prompt", "expected"),
    (COMPLETE, {"prompt": [10**6]}, 400, "prompt", "found the id 1000000"),
    (COMPLETE, {"prompt": [2**70]}, 400, "prompt", "found the id"),
    (COMPLETE, {"prompt": "a" * 49}, 400, "prompt", "context holds 48"),
    (COMPLETE, {"prompt": [3] * 49}, 400, "prompt", "context holds 48"),
    (COMPLETE, {"prompt": "a", "model": "none"}, 404, "model", "no model 'none'"),
    (COMPLETE, {"prompt": "a", "model": "../secret"}, 404, "model", "no model"),
    (COMPLETE, {"prompt": "a", "model": 3}, 400, "model", "found 3"),
    (COMPLETE, {"prompt": "a", "model": "PAIRS"}, 422, "model", "cannot generate"),
    (COMPLETE, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    (COMPLETE, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens", "expected at least 0"),
    (COMPLETE, {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens", "integer"),
    (COMPLETE, {"prompt": "a", "max_tokens": 2.5}, 400, "max_tokens", "integer"),
    (COMPLETE, {"prompt": "a", "temperature": -0.1}, 400, "temperature", "expected at least 0"),
    (COMPLETE, {"prompt": "a", "temperature": True}, 400, "temperature", "number"),
    (COMPLETE, {"prompt": "a", "top_p": 0}, 400, "top_p", "expected more than 0"),
    (COMPLETE, {"prompt": "a", "top_p": 1.5}, 400, "top_p", "expected at most 1"),
    (COMPLETE, {"prompt": "a", "n": 0}, 400, "n", "expected at least 1"),
    (COMPLETE, {"prompt": "a", "n": 10**9}, 400, "n", "expected at most 128"),
    (COMPLETE, {"prompt": ["a"] * 100, "n": 2}, 400, "n", "200 completions"),
    (COMPLETE, {"prompt": "a", "logprobs": 50}, 400, "logprobs", "expected at most 20"),
    (COMPLETE, {"prompt": "a", "logprobs": True}, 400, "logprobs", "integer"),
    (COMPLETE, {"prompt": "a", "stop": ""}, 400, "stop", "empty text"),
    (COMPLETE, {"prompt": "a", "stop": ["b", ""]}, 400, "stop", "empty text"),
    (COMPLETE, {"prompt": "a", "stop": [1]}, 400, "stop", "expected text"),
    (COMPLETE, {"prompt": "a", "seed": -1}, 400, "seed", "expected at least 0"),
    (COMPLETE, {"prompt": "a", "stream": "yes"}, 400, "stream", "true or false"),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
    (COMPLETE, {"prompt": "a", "logit_bias": {"3": 5}}, 400, "logit_bias", "not supported"),
    (COMPLETE, {"prompt": "a", "frequency_penalty": 1}, 400, "frequency_penalty", "not supported"),
    (COMPLETE, {"prompt": "a", "min_tokens": 20, "max_tokens": 5}, 400, None, "min_new_tokens"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    (CHAT, {"messages": [{"role": "alien", "content": "a"}]}, 400, "messages", "'system'"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "content is missing"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "expected"),
    (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}, 400, "tools", "tools is not supported"),
    (CHAT, {"messages": [USER], "response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
    (CHAT, {"messages": [USER], "top_logprobs": 99}, 400, "top_logprobs", "expected at most 20"),
    (EMBED, {"input": []}, 400, "input", "at least 1"),
    (EMBED, {"input": "a", "dimensions": 99}, 400, None, "dimensions must be between 1 and 8"),
    (EMBED, {"input": "a", "encoding_format": "hex"}, 400, "encoding_format", "'float' or 'base64'"),
    (EMBED, {"input": ["a"] * 1025}, 400, "input", "at most 1024"),
    (EMBED, {"input": [10**6]}, 400, None, "ids: found 1000000"),
    ("/generate", {"prompt": []}, 400, "prompt", "at least 1"),
    ("/generate", {"prompt": "a", "alternatives": 3}, 400, "alternatives", "stream and logprobs"),
    ("/translate", {"text": "a"}, 422, "model", "cannot translate"),
    ("/translate", {"text": "a" * 99, "model": "PAIRS"}, 400, None, "101 tokens"),
    ("/translate", {"text": "a", "model": "PAIRS", "beam_size": 2, "n_best": 3}, 400, None, "n_best 3"),
    ("/translate", {"text": "a", "model": "PAIRS", "source_language": "de"}, 400, None, "no token for the language"),
    ("/translate", {"text": "a", "model": "PAIRS", "target_language": "de"}, 400, None, "no token for the language"),
    ("/classify", {"text": ["a", "b"], "text2": ["a"], "model": "LABELS"}, 400, "text2", "found 2 and 1 texts"),
    ("/classify", {"text": "a", "text2": "b", "model": "LABELS"}, 400, None, "trained on single texts"),
    ("/classify", {"text": "a", "threshold": 2, "model": "LABELS"}, 400, "threshold", "expected at most 1"),
    ("/fill", {"text": "a b", "model": "MASKED"}, 400, None, "no mask"),
    ("/score", {"source": "a", "target": ["b", "c"]}, 400, "target", "found 1 and 2 texts"),
    ("/score", {"source": "a", "target": "b" * 60}, 400, None, "the model's context holds 48"),
]


def test_forty_wrong_inputs_are_tried() -> None:
    assert len({(path, str(body)) for path, body, *_ in WRONG}) == len(WRONG) >= 40


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), WRONG)
def test_a_wrong_request_gets_its_status_and_an_error_of_openais_form(
    path: str, body: Any, status: int, param: str | None, words: str, server: Server, runs: dict[str, Path]
) -> None:
    if isinstance(body, dict) and str(body.get("model")).isupper():
        body = body | {"model": runs[body["model"].lower()].name}
    reply = server.send(path, body)
    assert reply.status == status, reply.body
    assert words in reply.error["message"] and reply.error["param"] == param
    assert str(runs["gpt"].parent) not in reply.error["message"], "a path of the machine"
    assert reply.error["type"] and "--" not in reply.error["message"] and "Traceback" not in reply.error["message"]


def test_paths_methods_types_and_hosts_are_refused(server: Server) -> None:
    body = {"prompt": "a"}
    assert server.send("/v1/nothing", body).status == 404
    assert server.send("/v1/models/none").error["code"] == "model_not_found"
    wrong = server.send(COMPLETE)
    assert wrong.status == 405 and "POST" in wrong.headers["Allow"] and wrong.error["message"]
    assert server.send("/health", body).status == 405
    assert server.send(COMPLETE, body, Content_Type="text/plain").status == 415
    assert server.send(COMPLETE, body, Content_Type="application/json; charset=utf-8").status == 200
    assert server.send("/health", Host="evil.example").error["code"] == "foreign_host"
    assert server.send("/health", Host="localhost:8000").status == 200
    assert server.send("/health", Host="[::1]:8000").status == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: Server) -> None:
    assert server.send(COMPLETE, {"prompt": "a" * 5_000_000}).error["code"] == "body_too_large"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:  # without its length
        head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with pytest.raises(OSError):
            for _ in range(2000):
                connection.sendall(part)
            raise AssertionError("128 MB were taken")
    assert server.send("/health").status == 200


def test_unknown_fields_are_ignored_and_named_in_the_log(server: Server) -> None:
    server.ask(COMPLETE, prompt="a", max_tokens=1, service_tier="auto", xyz={"a": 1})
    server.send("/metrics")  # by then the line is written
    time.sleep(0.3)
    lines = (json.loads(line) for line in list(server.log) if line.startswith("{"))
    assert any(line.get("ignored") == ["service_tier", "xyz"] for line in lines)


def test_a_failing_request_harms_no_other(server: Server) -> None:
    for path, body, *_ in WRONG[:20]:
        server.send(path, body)
    assert server.ask(COMPLETE, prompt="abc", temperature=0, max_tokens=3)["choices"][0]["text"]
