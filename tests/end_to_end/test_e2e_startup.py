"""What a command imports beyond torch, counted in modules: a busy machine changes times, not this count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import sys
import torch
before = set(sys.modules)
from tformer.cli.app import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
finally:
    open("modules", "w").write("\\n".join(sorted(set(sys.modules) - before)))
"""
HEAVY = {"torch._dynamo", "torch._inductor", "matplotlib", "PIL", "sacrebleu", "transformers", "huggingface_hub"}
"""Packages that take long to import, and that no command below needs."""


def imported(run: Path, cwd: Path, *words: str) -> set[str]:
    """The modules that a command imports after torch, measured in a separate process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", MEASURE, words[0], str(run), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return set((cwd / "modules").read_text().split())


@pytest.mark.parametrize(
    ("words", "most", "unneeded"),
    [
        (("inspect",), 420, ("tformer.tasks", "tformer.decoding", "tformer.training", "tformer.viz")),
        (
            ("generate", "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu"),
            400,
            ("tformer.tasks", "tformer.viz"),
        ),
    ],
)
def test_a_command_imports_only_what_it_needs(
    words: tuple[str, ...], most: int, unneeded: tuple[str, ...], decoder: Path, tmp_path: Path
) -> None:
    found = imported(decoder, tmp_path, *words)
    parents = {module.rpartition(".")[0] for module in found} | found
    assert not HEAVY & parents, HEAVY & parents
    assert not set(unneeded) & found
    foreign = {module for module in found if module.startswith("tformer.interop.architectures")}
    assert words[0] == "inspect" or not foreign, "only a Hugging Face folder and the formats of export need these"
    assert len(found) <= most, f"{len(found)} modules beyond torch, {most} at most"
