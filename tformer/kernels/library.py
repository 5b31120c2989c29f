"""The compiled library of this folder's C files: built on first use, cached per user, checked before it is loaded.

The file name is a digest of sources, flags, compiler and processor. A library is built in a temporary file and renamed.
Only files that no other user can write are loaded. On systems other than Linux, without a compiler, or with
TFORMER_KERNELS=off there is no library, and callers use PyTorch's operators. TFORMER_KERNELS=avx2 or plain: a library
for AVX2 and FMA, or for what every processor of its kind has.
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
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch  # loads the OpenMP library that the kernels link to

from tformer import files
from tformer.device import default_cache_dir
from tformer.processes import bound_command

SWITCH, OFF, ON = "TFORMER_KERNELS", ("off", "0", "no", "false"), ("on", "1", "yes", "true", "avx2", "plain")
COMPILERS = ("cc", "gcc", "clang")
LAUNCHERS = ("ccache", "sccache", "distcc")  # may precede a compiler in $CC
# Without -fno-math-errno and -fno-trapping-math loops stay scalar; floating-point exceptions are not used here.
FLAGS: tuple[str, ...] = ("-std=gnu11", "-O3", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS += ("-mno-mmx",)  # without AVX2, GCC copies through MMX registers: later results of the x87 unit are NaN
# By the switch: the instructions of a processor with AVX2 and FMA, or only those that every processor has.
INSTRUCTIONS = {"avx2": ("-march=x86-64-v3",), "plain": ()}
NATIVE = ("-march=native",)
OPENMP = ("libgomp", "libiomp", "libomp.", "libomp-")
BUILD_SECONDS = 60
RETRY_SECONDS = 24 * 3600  # after a failed build: the next commands do not wait for another attempt

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
        ("format", INT),
    ]


class CallArguments(ctypes.Structure):
    """`struct call` of linear.h."""

    _fields_ = [
        *((name, POINTER) for name in ("x", "residual", "y", "gain", "shift")),
        ("rows", LONG),
        ("epsilon", ctypes.c_float),
        *((name, INT) for name in ("x_wide", "y_wide", "norm", "activation", "gated")),
    ]


class AttentionArguments(ctypes.Structure):
    """`struct attention` of attention.h."""

    _fields_ = [
        *((name, POINTER) for name in ("q", "k", "v", "mask", "bias", "new_k", "new_v", "origins", "out")),
        *((name, LONG) for name in ("new_stride", "origin_stride")),
        *((name, LONG) for name in ("rows", "heads", "kv_heads", "num_queries", "num_keys", "head_dim", "value_dim")),
        ("q_strides", LONG * 3),
        ("k_strides", LONG * 3),
        ("v_strides", LONG * 3),
        ("mask_strides", LONG * 4),
        ("bias_strides", LONG * 4),
        ("scale", ctypes.c_float),
        ("wide", INT),
    ]


SIGNATURES = {
    "linear": (INT, [POINTER, POINTER, INT]),
    "round_groups": (None, [POINTER, INT, LONG, LONG, POINTER, POINTER, INT]),
    "round_rows": (None, [POINTER, INT, LONG, LONG, POINTER, POINTER, INT]),
    "rescale_rows": (None, [POINTER, INT, LONG, LONG, POINTER, POINTER, INT]),
    "attend": (INT, [POINTER, INT]),
    "play": (INT, [POINTER, LONG, INT]),
    "top": (INT, [POINTER, LONG, LONG, LONG, LONG, POINTER, POINTER, INT]),
}


@cache
def load(*, may_build: bool = True) -> ctypes.CDLL | None:
    """The library, built if necessary (one or two seconds, once per machine); None where there is no library.

    may_build: False: use an existing library only; for work that is shorter than a build.
    """
    compiler = find_compiler()
    if sys.platform != "linux" or compiler is None or os.environ.get(SWITCH, "").lower() in OFF:
        return None
    try:
        path = _folder() / f"{_digest(compiler)}.so"
        if _is_ours(path):
            with suppress(OSError, AttributeError):  # damaged: rebuild it
                return open_at(path)
        if not (may_build or os.environ.get(SWITCH, "").lower() in ON):
            return None
        failed = path.with_suffix(".failed")
        if _is_ours(failed) and 0 <= time.time() - failed.stat().st_mtime < RETRY_SECONDS:  # else the clock was set
            return None
        try:
            build(compiler, path)
            return open_at(path)
        except (OSError, subprocess.SubprocessError):  # also a file system mounted noexec
            failed.touch(mode=0o600)
            return None
    except (OSError, RuntimeError, AttributeError):
        return None  # no home directory, or it is read-only: not an error for the user


def lacks_compiler() -> bool:
    """Whether a C compiler is all that is missing for a library."""
    return sys.platform == "linux" and find_compiler() is None and os.environ.get(SWITCH, "").lower() not in OFF


def find_compiler() -> str | None:
    """$CC, or the system's C compiler."""
    chosen = [word for word in os.environ.get("CC", "").split() if Path(word).name not in LAUNCHERS][:1]
    return next((found for name in (*chosen, *COMPILERS) if (found := shutil.which(name))), None)


def instructions() -> tuple[str, ...]:
    """The compiler's flags for the processor's instructions, or for those that the switch names."""
    return INSTRUCTIONS.get(os.environ.get(SWITCH, "").lower(), NATIVE)


def build(compiler: str, target: Path, flags: Sequence[str] | None = None) -> None:
    """Compile this folder into `target`. SubprocessError when the compiler fails or takes too long.

    flags: in addition to FLAGS; by default those of `instructions`.
    """
    chosen = [*FLAGS, *(instructions() if flags is None else flags)]
    sources = [str(path) for path in _sources() if path.suffix == ".c"]
    with files.replacing(target) as made:
        command = [compiler, *chosen, *sources, "-o", str(made), "-Wl,--as-needed", *_threads_of_pytorch(), "-lm"]
        subprocess.run(
            bound_command(command), check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=BUILD_SECONDS
        )
        os.chmod(made, 0o700)
        files.sync_file(made)


def open_at(path: Path) -> ctypes.CDLL:
    """Load a library made by `build`. OSError or AttributeError for any other file."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _threads_of_pytorch() -> list[str]:
    """Path of the OpenMP library that PyTorch has loaded: a second one would add a second pool of threads."""
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()  # file names may be any bytes
    paths = {line.split(maxsplit=5)[-1] for line in maps if "/" in line}
    found = sorted(path for path in paths if Path(path).name.startswith(OPENMP))
    own = str(Path(torch.__file__).resolve().parent)  # other packages load such a library, too
    return sorted(found, key=lambda path: not path.startswith((f"{own}/", f"{own}.libs/")))[:1]


def _sources() -> list[Path]:
    return sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".c", ".h"))


def _folder() -> Path:
    """A folder of the cache that only this user can write."""
    folder = default_cache_dir() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder):
        raise OSError(f"{folder} can be written by others")
    return folder


def _is_ours(path: Path) -> bool:
    """Whether the path exists and only this user can write it."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(compiler: str) -> str:
    found = Path(compiler).resolve()
    machine = [platform.machine(), _processor(), *_threads_of_pytorch()]
    parts = [*FLAGS, *instructions(), str(found), str(found.stat().st_mtime_ns), *machine]
    digest = hashlib.sha256(os.fsencode("\0".join(parts)))
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Model and instruction sets of the processor: home directories are shared between machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
