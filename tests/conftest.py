"""Fixtures shared by all rooms: a private cache, the command line in-process and as a process, and tiny data."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis.errors import UnsatisfiedAssumption

from tformer.kernels.library import find_compiler
from tformer.recipe import sizes
from tformer.support.processes import available_cores

os.environ.setdefault("CUDA_VISIBLE_DEVICES", os.environ.get("TFORMER_TEST_CUDA", ""))
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and tests send it

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # more threads than processors would wait for each other
    threads = max(1, available_cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", str(threads))))

# A short training waits for the disk as long as it computes. The order of syncs is tested with recorded calls.
os.fsync = lambda descriptor: None

# `--hypothesis-profile thorough` draws more examples; continuous integration runs the property tests with it again.
settings.register_profile("quick", max_examples=30, deadline=None)
settings.register_profile("thorough", max_examples=300, deadline=None)
settings.load_profile("quick")
PROPERTY_SECONDS = 15.0  # of processor time; where a test takes longer, its other examples are not tried

TINY_RECIPE = """\
arch: gpt
tokenizer: {train: {model: char, template: none}}
model:
  d_model: 16
  max_seq_len: 16
  decoder: {num_layers: 2, num_heads: 2, feedforward: {d_ff: 32}, dropout: 0.1, attention_dropout: 0.1}
  embedding: {dropout: 0.1}
optimizer: {lr: 0.01}
schedule: {kind: cosine, warmup_steps: 2}
training: {max_steps: 12, batch_size: 4, eval_every: 6, save_every: 4, log_every: 3,
           precision: fp32, device: cpu, threads: 1}
generation: {max_new_tokens: 20}
"""


def pytest_configure(config: pytest.Config) -> None:
    """Let each process of pytest-xdist begin with consecutive tests, so that few fixtures are made in two of them.

    Kernels are compiled once for all processes and runs: by `tests/keeping_cc.py`.
    """
    kept, compiler = config.rootpath / ".pytest_cache" / "kernels", Path(__file__).with_name("keeping_cc.py")
    if find_compiler() is not None and os.environ.get("CC") != str(compiler):
        kept.mkdir(parents=True, exist_ok=True)
        os.environ |= {"TFORMER_TEST_CC": os.environ.get("CC", ""), "TFORMER_KEPT_LIBRARIES": str(kept)}
        os.environ["CC"] = str(compiler)
    if config.getoption("dist", "no") == "load":
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that hypothesis drives as `property`."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Bound the time of a test that hypothesis drives."""
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is not None:
        original = getattr(handle.inner_test, "unbounded", handle.inner_test)
        handle.inner_test = within_seconds(original, PROPERTY_SECONDS)


def within_seconds(test: Callable[..., None], seconds: float) -> Callable[..., None]:
    """A test that passes at once after this processor time, unless an example has failed: that one is made smaller."""
    end, has_failed = time.process_time() + seconds, False

    @functools.wraps(test)
    def bounded(*arguments: Any, **keywords: Any) -> None:
        nonlocal has_failed
        if has_failed or time.process_time() < end:
            try:
                test(*arguments, **keywords)
            except UnsatisfiedAssumption:
                raise
            except Exception:
                has_failed = True
                raise

    bounded.unbounded = test  # type: ignore[attr-defined]
    return bounded


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _private_surroundings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's cache or measures the machine, and none reaches for a network."""
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(sizes, "SLOW_OPERATIONS", 0.0)  # however busy this machine is
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TFORMER_KERNELS", "on")  # also for models that would not be worth compiling them


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """`cli("train", "--arch", "gpt", ...)` runs the command in this process."""

    def run(*arguments: object) -> Outcome:
        from tformer.cli.app import main

        if "--devices" in arguments and torch.version.cuda is not None:
            pytest.skip("this PyTorch cannot compute gradients in a fork of a process that has computed some")
        capfd.readouterr()
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture
def figures(cli: Callable[..., Outcome]) -> Callable[..., dict[str, Any]]:
    """`figures(run, *arguments)`: the JSON report of an evaluation that must succeed."""

    def run(*arguments: object) -> dict[str, Any]:
        outcome = cli("evaluate", *arguments, "--json")
        assert outcome.code == 0, outcome.err
        [line] = outcome.out.splitlines()
        document: dict[str, Any] = json.loads(line)
        return document

    return run


@pytest.fixture
def cli_process() -> Callable[..., subprocess.Popen[str]]:
    """`cli_process("train", ..., cwd=...)` starts the command as a user's shell would."""

    def start(*arguments: object, cwd: Path, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tformer", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A few kilobytes of words in lines."""
    return write_text(tmp_path / "text.txt")


def write_text(path: Path) -> Path:
    """The text of `text_file` at this path, for fixtures of a module."""
    draw = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run"]
    lines = [" ".join(draw.choices(words, k=draw.randint(3, 9))) for _ in range(200)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def tiny_recipe(tmp_path: Path) -> Path:
    """A recipe that trains in a second."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY_RECIPE, encoding="utf-8")
    return path
