"""The compiled library of this folder's C files: built on first use, cached per user, checked before it is loaded.

The file name is a digest of sources, flags, compiler and processor. A library is built in a temporary file and renamed,
and so is a file with its size and SHA-256. Only a library that agrees with them and that no other user can write is
loaded; otherwise it is rebuilt. A marker file exists during a process's first calls. If the process dies in them, the
next ones use no kernels for a day.

On systems other than Linux, without a compiler, or with TFORMER_KERNELS=off there is no library, and callers use
PyTorch's operators. TFORMER_KERNELS=avx2 or plain: a library for AVX2 and FMA, or for what every processor of its kind
has.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import torch  # loads the OpenMP library that the kernels link to

from tformer.support import files
from tformer.support.device import default_cache_dir
from tformer.support.errors import InputError, TformerError
from tformer.support.processes import bound_command, process_lock

LOG = logging.getLogger(__name__)
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
RETRY_SECONDS = 24 * 3600  # after a failed build or call: the next commands make no other attempt
MAX_RECORD_BYTES = 10_000
MAPS, PROCESSOR = Path("/proc/self/maps"), Path("/proc/cpuinfo")

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


CALL = struct.Struct("@5Plf5i")
"""`struct call` of linear.h: x, residual, y, gain, shift, rows, epsilon, x_wide, y_wide, norm, activation, gated."""


class AttentionArguments(ctypes.Structure):
    """`struct attention` of attention.h."""

    _fields_ = [
        *((name, POINTER) for name in ("q", "k", "v", "mask", "bias", "new_k", "new_v", "origins", "lengths", "out")),
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


_LOCK = process_lock()  # one thread builds, the others wait
_tried: dict[bool, ctypes.CDLL | None] = {}  # the result of the first call, by `may_build`


def load(*, may_build: bool = True) -> ctypes.CDLL | None:
    """The library, built if necessary (about six seconds of a core, once per machine); None where there is no library.

    may_build: False: use an existing library only; for work that is shorter than a build.
    """
    with _LOCK:
        found = _tried.get(True) or _tried.get(False)
        if found is None and True not in _tried and may_build not in _tried:
            # No home directory, or a folder in the place of a file: not an error for the user.
            with suppress(OSError, RuntimeError, AttributeError, TformerError):
                found = _load(may_build)
            _tried[may_build] = found
        return found


def forget() -> None:
    """Let the next `load` look again, as a new process does."""
    _tried.clear()


def _load(may_build: bool) -> ctypes.CDLL | None:
    compiler = find_compiler()
    if sys.platform != "linux" or compiler is None or os.environ.get(SWITCH, "").lower() in OFF:
        return None
    path = _path(compiler)
    if _ended_a_process(path):
        _say_once(f"{ENDED}; tformer doctor --clean tries them again")
        return None
    if _is_as_built(path):
        with suppress(OSError, AttributeError):  # a file system mounted noexec since
            return _tried_out(path)
    if not (may_build or os.environ.get(SWITCH, "").lower() in ON):
        return None
    failed = path.with_suffix(".failed")
    if _is_recent(failed):
        return None
    try:
        build(compiler, path)
        record = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        files.write_file(path.with_suffix(".json"), [json.dumps(record).encode()])
        return _tried_out(path)
    except (OSError, subprocess.SubprocessError):  # also a file system mounted noexec
        failed.touch(mode=0o600)
        return None


NO_PROC = "missing: /proc, which names the processor and PyTorch's threads, cannot be read"
ENDED = "the C kernels are not used: a process died in its first calls of them"


@cache
def _say_once(text: str) -> None:
    LOG.warning("%s", text)


def state(*, may_build: bool = False) -> str:
    """`ready`, or the reason why there are no kernels; may_build: see `load`."""
    if os.environ.get(SWITCH, "").lower() in OFF:
        return f"off ({SWITCH}={os.environ[SWITCH]})"
    if load(may_build=may_build) is not None:
        chosen = os.environ.get(SWITCH, "").lower()
        return f"ready ({chosen})" if chosen in INSTRUCTIONS else "ready"
    with suppress(OSError, RuntimeError):
        if (compiler := find_compiler()) is not None and _ended_a_process(_path(compiler)):
            return ENDED
    is_readable = all(os.access(path, os.R_OK) for path in (MAPS, PROCESSOR))
    return "missing" if is_readable or sys.platform != "linux" else NO_PROC


def _is_as_built(path: Path) -> bool:
    """Whether nothing has changed a library since `build` made it."""
    record = path.with_suffix(".json")
    if not (_is_ours(path) and _is_ours(record) and path.is_file()):
        return False
    with suppress(InputError):
        expected = files.parse_object(files.read_bounded(record, max_bytes=MAX_RECORD_BYTES), name=str(record))
        return expected == {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _tried_out(path: Path) -> ctypes.CDLL:
    """The library after its first calls, each function on zeros of both formats."""
    source, target = torch.zeros(2**16, dtype=torch.uint8), torch.empty(2**16, dtype=torch.uint8)
    x, y, threads = source.data_ptr(), target.data_ptr(), torch.get_num_threads()
    rows, inner, columns = 5, 130, 40
    with _marked(path.with_suffix(MARKER)):
        library = open_at(path)
        for wide in (0, 1):
            for number in range(4):
                weight = LinearArguments(x, x, x, x, inner, columns, number)
                call = CALL.pack(x, x, y, x, x, rows, 1.0, wide, wide, number % 3, number, 0)
                library.linear(ctypes.addressof(weight), call, threads)
            counts = dict.fromkeys(("rows", "heads", "kv_heads", "num_queries", "num_keys", "head_dim", "value_dim"), 2)
            attention = AttentionArguments(q=x, k=x, v=x, out=y, scale=1.0, wide=wide, **counts)
            library.attend(ctypes.addressof(attention), threads)
            library.round_groups(x, wide, rows, inner, y, y + 2**15, threads)
            library.round_rows(x, wide, rows, inner, y, y + 2**15, threads)
            library.rescale_rows(y, wide, rows, columns, x, x, threads)
        library.top(x, rows, columns, columns, 3, y, y + 2**15, threads)
        library.play(x, 0, threads)
    return library


MARKER = ".trying"


@contextmanager
def _marked(marker: Path) -> Iterator[None]:
    """A file that is locked while this process lives, and removed at the end; none where it cannot be written."""
    temporary = files.temporary_beside(marker)
    with ExitStack() as stack:
        with suppress(OSError):  # a cache that can only be read
            file = stack.enter_context(temporary.open("w+b"))
            fcntl.flock(file, fcntl.LOCK_SH)
            temporary.chmod(0o600)
            temporary.rename(marker)  # no other process sees it without its lock
            stack.callback(marker.unlink, missing_ok=True)  # another process may have been first
        yield


def _ended_a_process(path: Path) -> bool:
    """Whether a process of the last day left its marker beside this library, and has ended."""
    marker = path.with_suffix(MARKER)
    if not _is_recent(marker):
        return False
    with suppress(OSError), marker.open("r+b") as file:  # locked by a process that tries it out now, or gone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_recent(mark: Path) -> bool:
    """Whether a file of this user is less than a day old, and not of the future: the clock may have been set."""
    with suppress(FileNotFoundError):  # another process has removed it meanwhile
        return _is_ours(mark) and 0 <= time.time() - mark.stat().st_mtime < RETRY_SECONDS
    return False


def lacks_compiler() -> bool:
    """True if only a C compiler is missing for a library."""
    return sys.platform == "linux" and find_compiler() is None and os.environ.get(SWITCH, "").lower() not in OFF


def find_compiler() -> str | None:
    """$CC, or the system's C compiler."""
    chosen = [word for word in os.environ.get("CC", "").split() if Path(word).name not in LAUNCHERS][:1]
    return next((found for name in (*chosen, *COMPILERS) if (found := shutil.which(name))), None)


def instructions() -> tuple[str, ...]:
    """The compiler's flags for the processor's instructions, or for the set that `TFORMER_KERNELS` names."""
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
    maps = os.fsdecode(MAPS.read_bytes()).splitlines()  # file names may be any bytes
    paths = {line.split(maxsplit=5)[-1] for line in maps if "/" in line}
    found = sorted(path for path in paths if Path(path).name.startswith(OPENMP))
    own = str(Path(torch.__file__).resolve().parent)  # other packages load such a library, too
    return sorted(found, key=lambda path: not path.startswith((f"{own}/", f"{own}.libs/")))[:1]


def _sources() -> list[Path]:
    return sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".c", ".h"))


def _path(compiler: str) -> Path:
    """The library's place, in a folder of the cache that only this user can write."""
    folder = default_cache_dir() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder):
        raise OSError(f"{folder} can be written by others")
    return folder / f"{_digest(compiler)}.so"


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
    lines = PROCESSOR.read_text().splitlines()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
