"""Long lines: every command that reads lines takes memory <= base + k x the longest line, and refuses above a limit.

Each command runs in a separate process, forked from one that has imported everything. What is measured is the growth
of its peak memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.test_loading_encode import TAGGER, TRANSLATOR, written
from tformer.data.sources.files import MAX_ROW_CHARACTERS

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

SMALL_MB, LARGE_MB = 3, 30
MASKED = TAGGER.replace("classifier, num_labels: 2", "masked_lm").replace("classification", "masked_lm")
LANGUAGE_MODEL = TRANSLATOR.replace("arch: transformer", "arch: gpt").replace("seq2seq", "causal_lm")

PROBE = """
import json, os, sys
import torch, tformer.cli.app, tformer.cli.generate_run, tformer.cli.classify, tformer.evaluation.classifier
import tformer.workflows.tokenizing, tformer.tasks, tformer.data.sources.parquet, tformer.decoding.translate

def kilobytes(name):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(name)).split()[1])

torch.set_num_threads(1)
for words in json.loads(sys.argv[1]):
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 0
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open("err.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = kilobytes("VmRSS")
        try:
            tformer.cli.app.main(words)
        except SystemExit as exit_:
            code = exit_.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writing, json.dumps([code, (kilobytes("VmHWM") - before) / 1024]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        answer = file.read()
    os.waitpid(child, 0)
    print(json.dumps([*json.loads(answer or "[-1, 0]"), open("out.txt").read()[-2000:], open("err.txt").read()]))
"""


@dataclass(frozen=True)
class Measured:
    """How a command ended, and the growth of its peak memory."""

    code: int
    megabytes: float
    out: str
    err: str


def measure(cases: dict[Any, list[str]], folder: Path) -> dict[Any, Measured]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "300"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(list(cases.values()))],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = (Measured(*json.loads(line)) for line in done.stdout.splitlines())
    return dict(zip(cases, found, strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model of each kind that reads lines, and a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    recipes: dict[str, tuple[str, str]] = {
        "translator": (TRANSLATOR, "seq2seq"),
        "language model": (LANGUAGE_MODEL.replace(f"encoder: {stack_of(TRANSLATOR)}, ", ""), "gpt"),
        "classifier": (TAGGER, "bert"),
        "masked": (MASKED, "bert"),
    }  # fmt: skip
    found = {
        name: str(written(folder / name.replace(" ", "-"), recipe, template, model="byte-bpe", vocab_size=280))
        for name, (recipe, template) in recipes.items()
    }
    return {**found, "tokenizer": f"{found['classifier']}/tokenizer.json"}


def stack_of(recipe: str) -> str:
    return recipe.split("encoder: ")[1].split("}}")[0] + "}}"


def words(size: int) -> str:
    return ("bad cab fed a head. " * (size // 20 + 1))[:size]


def write_inputs(folder: Path, megabytes: int) -> dict[str, str]:
    """Files of three lines, of which the second is long."""
    long = words(megabytes * 1_000_000)
    contents = {
        "lines.txt": f"a bad cab\n{long}\nhead\n",
        "masks.txt": f"a [MASK] cab\n[MASK] {long}\nhead [MASK]\n",
        "pairs.txt": f"a bad cab\thead\n{long}\t{long[: len(long) // 2]}\nhead\tcab\n",
        "labels.csv": f"text,label\na bad cab,no\n{long},yes\nhead,no\n",
        "labels.jsonl": "".join(
            json.dumps({"text": text, "label": label}) + "\n"
            for text, label in (("a bad cab", "no"), (long, "yes"), ("head", "no"))
        ),
        "sources.txt": f"a bad cab\n{long}\nhead\n",
        "targets.txt": "cab\nbad\nhead\n",
    }
    for name, content in contents.items():
        (folder / name).write_text(content)
    return {name: str(folder / name) for name in contents}


def quick_cases(models: dict[str, str], files: dict[str, str]) -> dict[str, list[str]]:
    """The words of each command, by name."""
    lines = files["lines.txt"]
    return {
        "translate, refused": ["generate", models["translator"], "--input", lines],
        "classify": ["classify", models["classifier"], "--input", lines],
    }


def all_cases(models: dict[str, str], files: dict[str, str]) -> dict[str, list[str]]:
    """The words of each command that reads lines, by name."""
    lines, few = files["lines.txt"], ["--max-new-tokens", "2"]
    parallel = ["--source", files["sources.txt"], "--target", files["targets.txt"]]
    return {
        **quick_cases(models, files),
        "generate, slide": ["generate", models["language model"], "--input", lines, *few],
        "evaluate labels": ["evaluate", models["classifier"], "--data", files["labels.jsonl"]],
        "tokenize, cut": ["tokenize", models["classifier"], "--input", lines],
        "translate, cut": ["generate", models["translator"], "--input", lines, "--too-long", "cut", *few],
        "generate, error": ["generate", models["language model"], "--input", lines, "--context", "error", *few],
        "generate, beam": ["generate", models["language model"], "--input", lines, "--beam-size", "2", *few],
        "fill masks": ["generate", models["masked"], "--input", files["masks.txt"]],
        "classify csv": ["classify", models["classifier"], "--input", files["labels.csv"]],
        "classify jsonl": ["classify", models["classifier"], "--input", files["labels.jsonl"]],
        "evaluate csv": ["evaluate", models["classifier"], "--data", files["labels.csv"]],
        "evaluate continuations": ["evaluate", models["language model"], "--score", *parallel],
        "evaluate pairs": ["evaluate", models["translator"], *parallel],
        "train-tokenizer": ["train-tokenizer", lines, "--vocab-size", "300", "--out", "made.json", "--force"],
    }


REFUSED = ("translate, refused", "generate, error", "fill masks", "evaluate continuations")
ONCE_MB, GROWTH = 50, 8
"""Peak memory <= that of short lines + once + growth x longest line, in MB. The second pays for what long lines need
once."""


def require_bounded(
    cases: Callable[..., dict[str, list[str]]], models: dict[str, str], folder: Path, megabytes: int
) -> None:
    """Measure the commands in one process: with short lines, and with one line of `megabytes`."""
    commands: dict[tuple[str, int], list[str]] = {}
    for size in (0, megabytes):
        (folder / str(size)).mkdir()
        files = write_inputs(folder / str(size), size)
        commands |= {(name, size): words for name, words in cases(models, files).items()}
    measurements = measure(commands, folder)
    for (name, size), measured in measurements.items():
        if size == 0:
            continue
        bound = measurements[name, 0].megabytes + ONCE_MB + GROWTH * megabytes
        assert measured.megabytes <= bound, (name, bound, measured)
        assert measured.code == (2 if name in REFUSED else 0), (name, measured)
        if name in REFUSED:
            assert re.search(r"error: \S+:2: |error: prompt 2 ", measured.err), measured.err
            assert re.search(r"more than 3[23] tokens \([\d,]{9,} characters\)", measured.err), measured.err


def test_memory_is_bounded_by_the_longest_line_and_not_by_its_tokens(models: dict[str, str], tmp_path: Path) -> None:
    require_bounded(quick_cases, models, tmp_path, SMALL_MB)


@pytest.mark.slow
def test_memory_of_every_command_is_bounded_by_the_longest_line(models: dict[str, str], tmp_path: Path) -> None:
    """Its quick twin is the test above."""
    require_bounded(all_cases, models, tmp_path, LARGE_MB)


@pytest.mark.slow
def test_a_line_above_the_limit_is_refused_before_the_rest_of_it_is_read(
    models: dict[str, str], tmp_path: Path
) -> None:
    """A line of 200 MB of 100,000, and standard input of which no line ends."""
    path = tmp_path / "lines.txt"
    with path.open("w") as file:
        file.write("a bad cab\n" * 20)
        file.write(words(200_000_000) + "\n")
        file.write("head\n" * 100_000)
    runs = {name: models[name] for name in ("translator", "language model", "classifier", "tokenizer")}
    commands = {"translator": "generate", "language model": "generate", "tokenizer": "tokenize"}
    found = measure(
        {name: [commands.get(name, "classify"), run, "--input", str(path)] for name, run in runs.items()}, tmp_path
    )
    for name, measured in found.items():
        assert measured.code == 2 and measured.megabytes <= 100 + 4 * MAX_ROW_CHARACTERS / 1e6, (name, measured)
        assert f"error: {path}:21: a line has more than {MAX_ROW_CHARACTERS:,} characters" in measured.err
    endless = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    joined = subprocess.Popen(["tr", "-d", "\\n"], stdin=endless.stdout, stdout=subprocess.PIPE)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tformer", "classify", models["classifier"], "--input", "-"],
            stdin=joined.stdout, capture_output=True, text=True,
        )  # fmt: skip
    finally:
        for process in (endless, joined):
            process.kill()
            process.wait()
    assert done.returncode == 2
    assert f"error: standard input:1: a line has more than {MAX_ROW_CHARACTERS:,} characters" in done.stderr
