"""Every test of the kernels' functions once more, with libraries that check each address and each operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import SETS, has_avx2
from tformer.kernels.library import build, find_compiler

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")


@pytest.mark.slow
def test_no_kernel_reads_or_writes_beside_its_tensors_on_any_instruction_set(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None or sys.platform != "linux":
        pytest.skip("no compiler for kernels here")
    name = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(name).is_absolute():
        pytest.skip("this compiler has no sanitizers")
    for instructions, flags in SETS.items():
        if instructions != "avx2" or has_avx2():
            build(compiler, tmp_path / f"{instructions}.so", [*flags, *FLAGS])
    surroundings = {
        "LD_PRELOAD": name,
        "ASAN_OPTIONS": "detect_leaks=0",
        "TFORMER_SANITIZED_KERNELS": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    tests = [str(Path(__file__).with_name(f"test_kernels_{part}.py")) for part in ("functions", "fused", "tape")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=os.environ | surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "[100%]" in done.stdout
