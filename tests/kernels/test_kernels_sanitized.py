"""Every test of the kernels' functions once more, with libraries that check each address and each operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import SETS, has_avx2
from tformer.kernels import library
from tformer.kernels.library import _sources, build, find_compiler

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")


@pytest.mark.slow
def test_no_kernel_reads_or_writes_beside_its_tensors_on_any_instruction_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = find_compiler()
    if compiler is None or sys.platform != "linux":
        pytest.skip("no compiler for kernels here")
    name = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(name).is_absolute():
        pytest.skip("this compiler has no sanitizers")
    monkeypatch.setattr(library, "BUILD_SECONDS", 600)
    for instructions, flags in SETS.items():
        if instructions != "avx2" or has_avx2():
            build(compiler, tmp_path / f"{instructions}.so", [*flags, *FLAGS])
    surroundings = {
        "LD_PRELOAD": name,
        "ASAN_OPTIONS": "detect_leaks=0",
        "TFORMER_SANITIZED_KERNELS": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    folder = Path(__file__).parent
    tests = [str(folder / f"test_kernels_{part}.py") for part in ("functions", "fused", "tape", "threads")]
    tests.append(f"{folder.parent / 'test_threads.py'}::test_answers_of_several_threads_are_those_of_one_to_the_bit")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=os.environ | surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "[100%]" in done.stdout


@pytest.mark.slow
def test_threads_that_call_the_kernels_share_nothing_that_they_write(tmp_path: Path) -> None:
    """GCC's thread sanitizer on a program of C alone: the threads of Python and OpenMP would hide what it reports."""
    compiler = find_compiler()
    if compiler is None or sys.platform != "linux":
        pytest.skip("no compiler for kernels here")
    sources = [str(path) for path in _sources() if path.suffix == ".c"]
    program = tmp_path / "threads"
    flags = ["-std=gnu11", "-O1", "-g", "-fopenmp-simd", "-fsanitize=thread", "-Wno-unknown-pragmas", "-march=native"]
    command = [compiler, *flags, str(Path(__file__).with_name("threads.c")), *sources, "-o", str(program)]
    # A stand-in for <omp.h>: without OpenMP each call runs in the thread that makes it.
    (tmp_path / "omp.h").write_text("static inline int omp_get_thread_num(void) { return 0; }\n")
    command += [f"-I{tmp_path}", f"-I{Path(library.__file__).parent}", "-lm", "-lpthread"]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode and "tsan" in made.stderr:
        pytest.skip("this compiler has no thread sanitizer")
    assert made.returncode == 0, made.stderr
    # Without a fixed layout of addresses the sanitizer may find its own memory taken.
    done = subprocess.run(["setarch", "-R", str(program)], capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
