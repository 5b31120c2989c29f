"""What a person sees: plain lines in a pipe, a live line on a terminal, no colour when asked, no foreign escapes."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import Any

import pytest
from rich.console import Console

from tformer.objectives.replaced_token import ReplacedToken
from tformer.training import display as module
from tformer.training.display import TrainingDisplay

RECORD = {
    "split": "train", "step": 5, "loss": 2.5, "lr": 1e-3, "tokens": 80, "tokens_per_second": 12345.0,
    "peak_share": 0.42, "seconds": 1.0, "grad_norm": 1.0,
}  # fmt: skip
VALID = {"split": "valid", "step": 5, "loss": 2.0, "perplexity": 7.39, "bits_per_byte": 2.9, "is_best": True}


def show(*, terminal: bool, colour: bool = True) -> tuple[str, list[dict[str, Any]]]:
    output, written = io.StringIO(), []
    console = Console(file=output, force_terminal=terminal, width=200, no_color=not colour, highlight=False)
    display = TrainingDisplay(
        console,
        max_steps=10,
        write=written.append,
        write_sample=lambda step, text: written.append({"sample": text}),
        seconds_left=lambda step: 65.0,
    )
    with display:
        display.logged(RECORD)
        display.validated(VALID)
        display.sampled(5, "a \x1b[31m sample [bold]")
        display.skipped(6)
    return output.getvalue(), written


def test_plain_lines_in_a_pipe() -> None:
    text, written = show(terminal=False)
    assert "\x1b" not in text
    line = next(line for line in text.splitlines() if line.startswith("step 5/10"))
    for part in ("loss 2.5000", "12.3k tok/s", "42 % of peak", "ETA 1:05"):
        assert part in line
    assert "valid loss 2.0000" in text and "2.900 bits per byte" in text and "(best)" in text
    assert written == [RECORD, VALID, {"sample": "a \x1b[31m sample [bold]"}]


def test_several_processes_show_the_rate_of_all_and_of_each() -> None:
    output = io.StringIO()
    sinks: dict[str, Any] = {"write": lambda record: None, "write_sample": lambda step, text: None}
    with TrainingDisplay(Console(file=output, width=200), max_steps=10, processes=4, **sinks) as display:
        display.logged(RECORD | {"tokens_per_second": 12_000.0})
    assert "12.0k tok/s (3.0k each)  42 % of peak" in output.getvalue()


def test_a_live_line_on_a_terminal() -> None:
    text, _ = show(terminal=True)
    assert "step 5/10" in text and "loss 2.5000" in text and "ETA" in text


def test_what_a_model_writes_cannot_steer_the_terminal() -> None:
    for terminal in (True, False):
        text, _ = show(terminal=terminal)
        assert "\x1b[31m sample" not in text and "\\x1b[31m sample [bold]" in text


def test_no_color_is_honoured() -> None:
    text, _ = show(terminal=True, colour=False)
    assert "\x1b[33m" not in text and "the step is skipped" in text


def test_lines_are_not_written_more_often_than_people_read(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr(module, "PLAIN_INTERVAL_SECONDS", 3600.0)
    written: list[dict[str, Any]] = []
    display = TrainingDisplay(
        Console(file=output, width=200), max_steps=100, write=written.append, write_sample=lambda step, text: None
    )
    with display:
        for step in range(1, 11):
            display.logged(RECORD | {"step": step})
    assert len(written) == 10 and output.getvalue().count("loss") == 1


def test_a_narrow_terminal_shows_steps_and_loss_whole() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=40, color_system=None)
    sinks: dict[str, Any] = {"write": lambda record: None, "write_sample": lambda step, text: None}
    with TrainingDisplay(console, max_steps=100_000, **sinks) as display:
        display.logged(RECORD | {"step": 12_345})
    assert "step 12345/100000" in output.getvalue() and "loss 2.5" in output.getvalue()
    assert "…" not in output.getvalue()


def test_steps_are_counted_between_log_lines_on_a_terminal_and_in_a_pipe() -> None:
    output, reported = io.StringIO(), []
    console = Console(file=output, force_terminal=True, width=200)
    sinks: dict[str, Any] = {"write": lambda record: None, "write_sample": lambda step, text: None}
    with TrainingDisplay(console, max_steps=10, **sinks) as display:
        display.stepped(3)
    assert "step 3/10" in output.getvalue()

    def progress(description: str, total: float | None = None, unit: str = "") -> Any:
        reported.append((description, total, unit))
        return nullcontext(lambda *done: reported.append(done))

    with TrainingDisplay(Console(file=output), max_steps=10, progress=progress, **sinks) as display:
        display.stepped(3)
        display.expect(8)
        display.stepped(4)
    assert reported == [("training", 10, "steps"), (3, 10), (4, 8)]


def test_a_validation_takes_the_place_of_the_live_line() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=200)
    live: list[bool] = []

    def progress(description: str, **_: Any) -> Any:
        assert display._live is not None
        live.append(display._live.is_started)
        return nullcontext(lambda *_: None)

    display = TrainingDisplay(
        console, max_steps=10, write=lambda record: None, write_sample=lambda step, text: None, progress=progress
    )
    with display:
        with display.progress("validating", total=5, unit="pairs"):
            pass
        assert display._live is not None and display._live.is_started
        display.logged(RECORD)
    assert live == [False] and "loss 2.5000" in output.getvalue()


def test_an_objective_adds_metrics_to_the_line_of_a_validation() -> None:
    output = io.StringIO()
    display = TrainingDisplay(
        Console(file=output, width=200),
        max_steps=10,
        write=lambda record: None,
        write_sample=lambda step, text: None,
        shown_metrics=ReplacedToken.shown_metrics,
    )
    with display:
        display.validated(VALID | {"accuracy": 0.91, "replaced_accuracy": 0.42, "generator_accuracy": 0.2})
    assert "accuracy 0.9100, of the replaced tokens 0.4200, generator 0.2000" in output.getvalue()
