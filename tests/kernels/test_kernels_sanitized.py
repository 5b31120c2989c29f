"""Every test of the kernels' functions once more, with libraries that check each address and each operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tformer.kernels.library import find_compiler

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g -O1"


@pytest.mark.slow
def test_no_kernel_reads_or_writes_beside_its_tensors_on_any_instruction_set() -> None:
    compiler = find_compiler()
    if compiler is None or sys.platform != "linux":
        pytest.skip("no compiler for kernels here")
    name = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(name).is_absolute():
        pytest.skip("this compiler has no sanitizers")
    surroundings = {
        "LD_PRELOAD": name,
        "ASAN_OPTIONS": "detect_leaks=0",
        "TFORMER_SANITIZE_KERNELS": FLAGS,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "kernels or library"]
    tests = Path(__file__).with_name("test_kernels_functions.py")
    done = subprocess.run([*command, str(tests)], env=os.environ | surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
