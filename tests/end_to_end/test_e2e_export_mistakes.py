"""`tformer export` asked for what it cannot do: one clear line, exit code 2, nothing written; and interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.translate_runs import DECODER, refusal
from tformer.support import files


def test_a_model_that_neither_a_class_nor_the_own_code_computes_is_refused_by_field(
    cli: Callable[..., Any], random_run: Callable[..., Path], tmp_path: Path
) -> None:
    stack = "{num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}"
    run = random_run(DECODER.replace(stack, f"{stack}, positions: {{kind: shaw}}"))
    message = refusal(cli("export", run, "--out", tmp_path / "hf"))
    assert "no class of Hugging Face" in message and "model.decoder.positions.kind: shaw" in message


def test_out_is_asked_for_and_never_replaced(
    cli: Callable[..., Any], trained: Callable[[str], Path], tmp_path: Path
) -> None:
    assert "exists already" in refusal(cli("export", trained("gpt"), "--out", tmp_path))
    inside = trained("gpt") / "checkpoints" / "hf"
    assert "among the checkpoints of a run" in refusal(cli("export", trained("gpt"), "--out", inside))


def test_a_signal_leaves_nothing(
    cli: Callable[..., Any], trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent while the weights are written: few further parts are."""
    run, write, found = trained("gpt"), files.write, []

    def interrupted(descriptor: int, data: Any) -> None:
        write(descriptor, data)
        found.append([path.name for path in tmp_path.iterdir()])
        if len(found) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(files, "write", interrupted)
    outcome = cli("export", run, "--out", tmp_path / "hf")
    assert outcome.code == 130 and "nothing written" in outcome.err and "Traceback" not in outcome.err
    assert found[3] == [".tmp-hf"] and len(found) < 100 and not list(tmp_path.iterdir())
