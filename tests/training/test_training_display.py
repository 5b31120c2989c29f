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


def show(*, terminal: bool, colour: bool = True) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=200, no_color=not colour, highlight=False)
    display = TrainingDisplay(
        console,
        max_steps=10,
        seconds_left=lambda step: 65.0,
    )
    with display:
        display.log(RECORD)
        display.log(VALID)
        display.sample("a \x1b[31m sample [bold]")
        display.skipped(6)
    return output.getvalue()


def test_plain_lines_in_a_pipe() -> None:
    text = show(terminal=False)
    assert "\x1b" not in text
    line = next(line for line in text.splitlines() if line.startswith("step 5/10"))
    for part in ("loss 2.5000", "12.3k tok/s", "42 % of peak", "ETA 1:05"):
        assert part in line
    assert "valid loss 2.0000" in text and "2.900 bits per byte" in text and "(best)" in text


def test_several_processes_show_the_rate_of_all_and_of_each() -> None:
    output = io.StringIO()
    with TrainingDisplay(Console(file=output, width=200), max_steps=10, processes=4) as display:
        display.log(RECORD | {"tokens_per_second": 12_000.0})
    assert "12.0k tok/s (3.0k each)  42 % of peak" in output.getvalue()


def test_a_live_line_on_a_terminal() -> None:
    text = show(terminal=True)
    assert "step 5/10" in text and "loss 2.5000" in text and "ETA" in text


def test_what_a_model_writes_cannot_steer_the_terminal() -> None:
    for terminal in (True, False):
        text = show(terminal=terminal)
        assert "\x1b[31m sample" not in text and "\\x1b[31m sample [bold]" in text


def test_no_color_is_honoured() -> None:
    text = show(terminal=True, colour=False)
    assert "\x1b[33m" not in text and "the step is skipped" in text


def test_lines_are_not_written_more_often_than_people_read(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr(module, "PLAIN_INTERVAL_SECONDS", 3600.0)
    display = TrainingDisplay(Console(file=output, width=200), max_steps=100)
    with display:
        for step in range(1, 11):
            display.log(RECORD | {"step": step})
    assert output.getvalue().count("loss") == 1


def test_a_narrow_terminal_shows_steps_and_loss_whole() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=40, color_system=None)
    with TrainingDisplay(console, max_steps=100_000) as display:
        display.log(RECORD | {"step": 12_345})
    assert "step 12345/100000" in output.getvalue() and "loss 2.5" in output.getvalue()
    assert "…" not in output.getvalue()


def test_steps_are_counted_between_log_lines_on_a_terminal_and_in_a_pipe() -> None:
    output, reported = io.StringIO(), []
    console = Console(file=output, force_terminal=True, width=200)
    with TrainingDisplay(console, max_steps=10) as display:
        display.stepped(3)
    assert "step 3/10" in output.getvalue()

    def progress(description: str, total: float | None = None, unit: str = "") -> Any:
        reported.append((description, total, unit))
        return nullcontext(lambda *done: reported.append(done))

    with TrainingDisplay(Console(file=output), max_steps=10, progress=progress) as display:
        display.stepped(3)
        display.set_last_step(8)
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

    display = TrainingDisplay(console, max_steps=10, progress=progress)
    with display:
        with display.progress("validating", total=5, unit="pairs"):
            pass
        assert display._live is not None and display._live.is_started
        display.log(RECORD)
    assert live == [False] and "loss 2.5000" in output.getvalue()


def test_an_objective_adds_metrics_to_the_line_of_a_validation() -> None:
    output = io.StringIO()
    display = TrainingDisplay(
        Console(file=output, width=200),
        max_steps=10,
        shown_metrics=ReplacedToken.shown_metrics,
    )
    with display:
        display.log(VALID | {"accuracy": 0.91, "replaced_accuracy": 0.42, "generator_accuracy": 0.2})
    assert "accuracy 0.9100, of the replaced tokens 0.4200, generator 0.2000" in output.getvalue()
