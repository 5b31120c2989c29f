"""The compiled library of this room's C files: built on first use, kept per user, checked before it is trusted.

A library is named by the digest of everything it is made of: sources, flags, compiler and processor. It is built in a
file of its own and appears whole. Only files that nobody else can have written are loaded. On another system than
Linux, without a compiler, or with TFORMER_KERNELS=off there is no library, and PyTorch's operators do the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch  # whose threads are ours

from tformer.device import default_cache_dir

SWITCH, OFF, ON = "TFORMER_KERNELS", ("off", "0", "no", "false"), ("on", "1", "yes", "true")
COMPILERS = ("cc", "gcc", "clang")
LAUNCHERS = ("ccache", "sccache", "distcc")  # stand before a compiler in $CC
# No exceptions of floating-point arithmetic are read here; without that promise its loops stay scalar.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
OPENMP = ("libgomp", "libiomp", "libomp.", "libomp-")
BUILD_SECONDS = 60
RETRY_SECONDS = 24 * 3600  # after a build that failed, which the next commands then need not wait for

POINTER, LONG, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


class LinearArguments(ctypes.Structure):
    """`struct linear` of linear.h."""

    _fields_ = [
        ("weight", POINTER),
        ("bias", POINTER),
        ("scales", POINTER),
        ("totals", POINTER),
        ("inner", LONG),
        ("columns", LONG),
        ("wide", INT),
    ]


class AttentionArguments(ctypes.Structure):
    """`struct attention` of attention.h."""

    _fields_ = [
        *((name, POINTER) for name in ("q", "k", "v", "mask", "bias", "out")),
        *((name, LONG) for name in ("rows", "heads", "kv_heads", "num_queries", "num_keys", "head_dim", "value_dim")),
        ("q_strides", LONG * 3),
        ("k_strides", LONG * 3),
        ("v_strides", LONG * 3),
        ("mask_strides", LONG * 4),
        ("bias_strides", LONG * 4),
        ("scale", ctypes.c_float),
    ]


SIGNATURES = {
    "linear_bf16": (None, [POINTER, POINTER, POINTER, LONG, INT]),
    "linear_int8": (INT, [POINTER, POINTER, INT, POINTER, LONG, INT]),
    "round_rows": (None, [POINTER, INT, LONG, LONG, POINTER, POINTER, INT]),
    "rescale_rows": (None, [POINTER, INT, LONG, LONG, POINTER, POINTER, INT]),
    "attend": (INT, [POINTER, INT]),
    "top": (INT, [POINTER, LONG, LONG, LONG, LONG, POINTER, POINTER, INT]),
}


@cache
def load(*, may_build: bool = True) -> ctypes.CDLL | None:
    """The library, built if need be (a second or two, once per machine); None where there is none.

    may_build: false where the work is not worth the wait, so that only a library that is there already is used.
    """
    compiler = find_compiler()
    if sys.platform != "linux" or compiler is None or os.environ.get(SWITCH, "").lower() in OFF:
        return None
    try:
        kept = _folder() / f"{_digest(compiler)}.so"
        if _is_ours(kept):
            with suppress(OSError, AttributeError):  # damaged: it is made anew
                return open_at(kept)
        if not (may_build or os.environ.get(SWITCH, "").lower() in ON):
            return None
        failed = kept.with_suffix(".failed")
        if _is_ours(failed) and time.time() - failed.stat().st_mtime < RETRY_SECONDS:
            return None
        try:
            build(compiler, kept)
            return open_at(kept)
        except (OSError, subprocess.SubprocessError):  # also a file system from which nothing may be run
            failed.touch(mode=0o600)
            return None
    except (OSError, RuntimeError, AttributeError):
        return None  # no home, or none that can be written: nothing that a user must repair


def find_compiler() -> str | None:
    """$CC, or the system's C compiler."""
    chosen = [word for word in os.environ.get("CC", "").split() if Path(word).name not in LAUNCHERS][:1]
    return next((found for name in (*chosen, *COMPILERS) if (found := shutil.which(name))), None)


def build(compiler: str, target: Path, flags: Sequence[str] = FLAGS) -> None:
    """Compile this room into `target`. SubprocessError when the compiler fails or takes too long."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=".so")
    os.close(handle)
    try:
        sources = [str(path) for path in _sources() if path.suffix == ".c"]
        command = [compiler, *flags, *sources, "-o", name, "-Wl,--as-needed", *_threads_of_pytorch(), "-lm"]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=BUILD_SECONDS)
        os.chmod(name, 0o700)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def open_at(path: Path) -> ctypes.CDLL:
    """A library that `build` made. OSError or AttributeError for another file."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _threads_of_pytorch() -> list[str]:
    """The OpenMP library that PyTorch has loaded: with another of its own, two sets of threads would wait for work."""
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()  # names of files may be any bytes
    paths = {line.split(maxsplit=5)[-1] for line in maps if "/" in line}
    found = sorted(path for path in paths if Path(path).name.startswith(OPENMP))
    own = str(Path(torch.__file__).resolve().parent)  # other packages bring such a library too
    return sorted(found, key=lambda path: not path.startswith((f"{own}/", f"{own}.libs/")))[:1]


def _sources() -> list[Path]:
    return sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".c", ".h"))


def _folder() -> Path:
    """A folder of the cache that belongs to this user alone."""
    folder = default_cache_dir() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder):
        raise OSError(f"{folder} can be written by others")
    return folder


def _is_ours(path: Path) -> bool:
    """Whether it is there, and only this user can have written it."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(compiler: str) -> str:
    found = Path(compiler).resolve()
    machine = [platform.machine(), _processor(), *_threads_of_pytorch()]
    parts = [*FLAGS, str(found), str(found.stat().st_mtime_ns), *machine]
    digest = hashlib.sha256(os.fsencode("\0".join(parts)))
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What tells instruction sets apart: homes are shared between machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
