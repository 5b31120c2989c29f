"""The live page of curves in a browser: new figures, runs and samples appear, and its state stays."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.browser.waiting import until
from tests.viz.plot_runs import train_record, write_run
from tformer.checkpoint.logs import sample_text
from tformer.checkpoint.run import RunLock
from tformer.workflows.runs import watching
from tformer.workflows.runs.watching import Watch

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of the page of the runs under `tmp_path`."""
    monkeypatch.setattr(watching, "LEAST_REST", 0.0)
    monkeypatch.setattr(watching, "REST", 0)
    watch = Watch([tmp_path])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {"/runs": lambda: watch.page().encode(), "/runs/data": watch.data}.get(self.path)
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "text/html" if self.path == "/runs" else "application/json")
            self.end_headers()
            if found is not None:
                self.wfile.write(found())

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/runs"
        server.shutdown()


@contextmanager
def trained(run: Path) -> Iterator[None]:
    """The run is one that is being trained."""
    lock = RunLock(run)
    yield
    lock.release()


@pytest.mark.slow
def test_figures_samples_and_runs_appear_and_choices_stay(address: str, chromium: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "first", [train_record(10, 4.0)])
    troubles: list[str] = []
    page = chromium.new_page(viewport={"width": 400, "height": 900})
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on(
        "console",
        lambda message: message.type == "error" and "favicon" not in message.text and troubles.append(message.text),
    )
    page.goto(address)
    assert page.locator("#live").text_content() == "No run is being trained."
    page.check("#log-y")
    with trained(run):
        with (run / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(train_record(20, 3.0)) + "\n")
        (run / "samples.txt").write_text(sample_text(20, HOSTILE))
        until(page, "document.querySelector('#live').textContent === 'One run is being trained.'")
        until(page, "document.querySelector('#table').textContent.includes('20')")
        assert page.locator("#samples pre").text_content() == HOSTILE, "text is text, never HTML"
        assert page.locator("#progress tbody td").nth(1).text_content() == "training"
    # The page is loaded again for a new run, and once more if it asked between the files of the run.
    write_run(tmp_path / HOSTILE)
    until(page, "document.querySelectorAll('#progress tbody tr').length === 2 && tformer.data.metrics.length > 1")
    until(page, "document.querySelector('#log-y')?.checked")  # what was chosen stays in the URL
    until(page, "document.documentElement.scrollWidth <= window.innerWidth")  # 400 pixels
    page.close()
    assert troubles == []
