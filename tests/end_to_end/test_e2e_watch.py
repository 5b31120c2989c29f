"""`tformer watch` as a process: its page, its data, what it refuses, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.viz.plot_runs import write_run

pytest.importorskip("uvicorn")


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def watched(tmp_path: Path, cli_process: Callable[..., subprocess.Popen[str]]) -> Iterator[str]:
    """The URL of a page of one run; the command must end well by Ctrl-C."""
    write_run(tmp_path / "runs" / "first")
    process = cli_process("watch", "--port", 0, cwd=tmp_path)
    assert process.stderr is not None
    found = re.search(r"http://127\.0\.0\.1:\d+/", line := process.stderr.readline())
    assert found is not None, line
    yield found[0]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.slow
def test_page_data_and_what_is_refused(watched: str, tmp_path: Path) -> None:
    status, page = get(watched)
    assert status == 200 and "connect-src 'self'" in page and "<h1" in page
    write_run(tmp_path / "runs" / "second")
    status, text = get(watched + "data")
    data = json.loads(text)
    assert status == 200 and {run["name"] for run in data["progress"]} >= {"first"}
    assert get(watched + "../../etc/passwd")[0] == 404 and get(watched + "runs/first/metrics.jsonl")[0] == 404
    assert get(watched, Host="evil.example")[0] == 400, "a request under the name of another site"
    request = urllib.request.Request(watched + "data", data=b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(request, timeout=30)


def test_mistakes_are_one_line(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, told in (
        ((), "runs does not exist"),
        (("absent",), "absent does not exist"),
        ((tmp_path, "--port", 70_000), "--port must be 0 to 65,535, found 70000"),
        ((tmp_path, "--host", "nowhere.invalid"), "cannot listen on nowhere.invalid, port 8078"),
    ):
        outcome = cli("watch", *arguments)
        assert outcome.code == 2 and outcome.err.startswith(f"error: {told}"), outcome.err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = cli("watch", tmp_path, "--port", taken.getsockname()[1])
    assert outcome.code == 2 and "Address already in use" in outcome.err and "hint: --port 0" in outcome.err


def test_a_missing_package_is_named(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = cli("watch", tmp_path)
    assert outcome.code == 2 and "pip install 'tformer[serve]'" in outcome.err
