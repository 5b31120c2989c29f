"""What a command imports beyond torch, counted in modules: a busy machine changes times, not this count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MEASURE = """
import json, os, sys
import torch
before = set(sys.modules)
for number, words in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child == 0:
        from tformer.cli.app import main
        code = 0
        try:
            main(words)
        except SystemExit as end:
            code = end.code or 0
        open(f"modules-{number}", "w").write("\\n".join(sorted(set(sys.modules) - before)))
        sys.stderr.flush()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, words
"""
HEAVY = {"torch._dynamo", "torch._inductor", "matplotlib", "PIL", "sacrebleu", "transformers", "huggingface_hub"}
"""Packages that take long to import, and that no command below needs."""


MOST: dict[str, tuple[list[str], int, tuple[str, ...]]] = {
    "inspect": ([], 420, ("tformer.tasks", "tformer.decoding", "tformer.training", "tformer.viz")),
    "generate": (["--prompt", "a", "--max-new-tokens", "1", "--device", "cpu"], 400, ("tformer.tasks", "tformer.viz")),
}
"""The options of a command, the most modules beyond torch that it may import, and some that it may not."""


def test_a_command_imports_only_what_it_needs(decoder: Path, tmp_path: Path) -> None:
    """Each is measured in a fork of a process that has imported torch."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    commands = [[name, str(decoder), *options] for name, (options, *_) in MOST.items()]
    program = [sys.executable, "-c", MEASURE, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    for number, (name, (_, most, unneeded)) in enumerate(MOST.items()):
        found = set((tmp_path / f"modules-{number}").read_text().split())
        parents = {module.rpartition(".")[0] for module in found} | found
        assert not HEAVY & parents, HEAVY & parents
        assert not set(unneeded) & found
        foreign = {module for module in found if module.startswith("tformer.interop.architectures")}
        assert name == "inspect" or not foreign, "only a Hugging Face folder and the formats of export need these"
        assert len(found) <= most, f"{name}: {len(found)} modules beyond torch, {most} at most"
