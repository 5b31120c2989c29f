"""`tformer inspect` on what `train` leaves behind and on foreign folders; its memory estimate against a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.quick import first_is_quick

Cli = Callable[..., Any]

MEASURE = """
import json, re, sys
from pathlib import Path
import torch._dynamo
import tformer.training.session
from tests.quick import first_is_quick
from tformer.cli.app import main
def resident(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0
print(json.dumps(resident("VmHWM") - before))
"""


@first_is_quick("name", ["gpt2", "classifier", "t5", "bart"])
def test_a_hugging_face_folder(cli: Cli, folders: Path, name: str) -> None:
    report = json.loads(cli("inspect", folders / name, "--json").out)
    assert report["parameters"] > 0 and report["flops"]["forward_per_token"] > 0
    assert cli("inspect", folders / name, "--shapes").code == 0
    shown = cli("inspect", folders / name, "--shapes", "--text", "a b", "--json")
    assert shown.code == 0 and json.loads(shown.out)["example"]["input_ids"]["tokens"], shown.err
    verified = cli("inspect", folders / name, "--verify")
    assert verified.code == 0 and ": ok (" in verified.out, verified.out


def test_a_damaged_hugging_face_folder(cli: Cli, folders: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "gpt2"
    shutil.copytree(folders / "gpt2", copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    outcome = cli("inspect", copy, "--verify")
    assert outcome.code == 2 and "Traceback" not in outcome.err and len(outcome.out.splitlines()) == 1


@pytest.mark.parametrize("kind", ["single", "image", "electra"])
def test_a_trained_run(cli: Cli, encoder_run: Callable[[str], Path], kind: str) -> None:
    run = encoder_run(kind)
    report = json.loads(cli("inspect", run, "--json").out)
    assert report["parameters"] > 0 and ("generator_parameters" in report) == (kind == "electra")
    assert cli("inspect", run, "--shapes").code == 0
    image = next((run.parent / "data").rglob("*.png")) if kind == "image" else None
    given = ("--text", "the hammer is on the table") if image is None else ("--image", image)
    shown = json.loads(cli("inspect", run, "--shapes", *given, "--json").out)
    assert shown["sections"][0]["steps"][0]["name"] == ("ids" if image is None else "pixels")
    if image is None:
        tokens = shown["example"]["input_ids"]["tokens"]
        assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and shown["sizes"]["T"] == len(tokens)
        assert ("[MASK]" in tokens) == (kind == "electra")
    verified = cli("inspect", run, "--verify")
    assert verified.code == 0, verified.out


def test_the_newest_run_without_a_terminal(cli: Cli, translator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(translator.parents[1])
    outcome = cli("inspect")
    assert outcome.code == 0 and "parameters" in outcome.out and "\x1b" not in outcome.out, outcome.err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark")
def test_memory_of_training_gpt_char_is_what_was_estimated(cli: Cli, tmp_path: Path) -> None:
    """Within 25 % of the growth of the resident set after imports, over two steps on a CPU."""
    text = tmp_path / "text.txt"
    letters = "abcdefghijklmnopqrstuvwxyz ,.\n"
    text.write_text("".join(letters[(i * i + i // 7) % len(letters)] for i in range(200_000)))
    words = ["train", "--arch", "gpt", "--preset", "char", "--data", text, "--out", tmp_path / "run", "--device", "cpu",
             "--max-steps", 2, "--set", "training.eval_every=2", "--set", "training.sample_every=0"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, words)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    asked = cli("inspect", "--arch", "gpt", "--preset", "char", "--vocab-size", 30, "--device", "cpu", "--json")
    estimated = json.loads(asked.out)["memory"]["total_bytes"]
    assert estimated == pytest.approx(measured, rel=0.25)
