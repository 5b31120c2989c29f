"""Device, number format, memory allocator and cache directory of this process.

Mixed precision (arXiv 1710.03740) is a property of the modules, without autocast: parameters and optimizer state stay
fp32; the residual stream and every matrix product run in the compute dtype (`tformer.nn.linear` casts the weights);
norms, softmax and the loss accumulate in fp32.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch

from tformer.support import files
from tformer.support.errors import InputError, StorageError
from tformer.support.formatting import whole_number

# PyTorch keeps as many products beside oneDNN's, in each thread; see `bound_products`.
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_GIVEN = CAPACITY in os.environ  # by the user


def bound_products(count: int = 128) -> None:
    """Let oneDNN keep code and memory of the products of `count` shapes; without effect after its first product.

    By default it keeps 1,024, and a training on sentences of all lengths grew by gigabytes. Where the same shapes come
    again, fewer than there are cost a tenth of the time. A value that the user has set stays.
    """
    if not _GIVEN:
        os.environ[CAPACITY] = str(count)


def default_cache_dir() -> Path:
    """$TFORMER_CACHE, else tformer/ in $XDG_CACHE_HOME or ~/.cache."""
    if path := os.environ.get("TFORMER_CACHE"):
        return Path(path).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "tformer"


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # of mallopt(3)
MAX_MALLOPT_VALUE = 2**31 - 1  # bytes; the type of its argument is int
HEAP_GROWTH_BYTES = 2**26  # minimum growth of the heap


def keep_freed_memory() -> None:
    """Make the C library (glibc) keep freed memory for reuse, for processes that compute for long.

    By default glibc returns every large tensor to the system and maps it again: each page is then cleared, which
    costs a model of 100M parameters a third of its training step. Batches of texts have many shapes, and the gaps that
    freed tensors leave add up: `return_free_memory` returns them between long tasks.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        if not tune(M_MMAP_THRESHOLD, MAX_MALLOPT_VALUE):
            tune(M_MMAP_MAX, 0)  # glibc before 2.35 accepts no more than 32 MiB: then no block is mapped at all
        tune(M_TRIM_THRESHOLD, MAX_MALLOPT_VALUE)
        tune(M_TOP_PAD, HEAP_GROWTH_BYTES)


def return_free_memory() -> None:
    """Return the free pages of the allocator to the system; takes some milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of madvise(2); the second since Linux 6.1
LARGE_PAGE = 2**21  # bytes
LARGE_PAGE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
WORTH_LARGE_PAGES = 2**19
"""Minimum size of a tensor in bytes: smaller ones stay in the processor's cache."""


def use_large_pages(tensor: torch.Tensor) -> None:
    """Have a tensor's memory in pages of 2 MiB instead of 4 KiB, on a CPU, where Linux can.

    For a tensor that is read again and again: addresses of small pages take time to find, and the processor does not
    read ahead beyond one. The contents stay; it takes about 0.2 s for each GB. Pages also cover what lies beside it.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < WORTH_LARGE_PAGES or sys.platform != "linux":
        return
    with suppress(OSError, ValueError):
        if int(LARGE_PAGE_FILE.read_text()) != LARGE_PAGE:
            return
        advise = ctypes.CDLL(None).madvise
        start = tensor.data_ptr() // LARGE_PAGE * LARGE_PAGE
        pages = -(-(tensor.data_ptr() + tensor.nbytes - start) // LARGE_PAGE)
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
            advise(
                ctypes.c_void_p(start), ctypes.c_size_t(pages * LARGE_PAGE), advice
            )  # where refused, nothing changes


@cache
def use_one_thread_after_fork() -> None:
    """Let a child of `os.fork` compute with one thread: the others of OpenMP's pool are not copied, and it would wait.

    Called once a process may have computed; the children of a process that only imported use all threads.
    """
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


PrecisionName = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def has_bf16_instructions() -> bool:
    """Whether the CPU multiplies bf16 in hardware (AVX512-BF16 or AMX), and oneDNN may use it (ONEDNN_MAX_CPU_ISA)."""
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    allowed = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return any(probe is not None and probe() for probe in probes) and (allowed is None or allowed())


def instruction_set() -> str:
    """The instructions that matrix products use here: AVX512-BF16 with VNNI, AVX2, NEON, ..."""
    name = torch.backends.cpu.get_cpu_capability()
    if name == "DEFAULT" and platform.machine() in ARM:
        return "NEON"
    if name == "AVX512" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        name = "AVX512-BF16"
    vnni = name.startswith("AVX512") and getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
    return f"{name} with VNNI" if vnni else name


ARM = ("arm64", "aarch64")

PROBE_FLOPS, PROBE_SECONDS = 4e9, 0.5
"""Maximum number of operations of a measured product, and maximum seconds of the first four measurements."""

MIN_SPEEDUP = 1.2
"""Minimum speedup of bf16 products over fp32 for `auto` to choose bf16."""


BF16_CAPABILITY = (8, 0)
"""CUDA's compute capability from which a GPU multiplies bf16 in hardware (Ampere)."""


@dataclass(frozen=True)
class Precision:
    """A resolved number format: `name` is written into the run's recipe, `reason` is shown to the user."""

    name: PrecisionName
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]


def matmul_flops_per_second(
    dtype: torch.dtype, device: torch.device, *, rows: int, inner: int, columns: int, seconds: float = 0.05
) -> float:
    """Highest measured rate of a [rows, inner] x [inner, columns] product, in FLOP/s, over about `seconds`.

    On a CPU the number of rows is limited by `PROBE_FLOPS`: more rows hardly change the rate.
    """
    if device.type == "cpu":
        inner, columns = min(inner, 8192), min(columns, 8192)
        rows = max(16, min(rows, int(PROBE_FLOPS / (2 * inner * columns))))
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(columns, inner, device=device).to(dtype)
    best = float("inf")
    calls = 20 if device.type == "cuda" else 1  # between two synchronizations, so that launch overhead is hidden
    began = time.perf_counter()
    tries = 0
    while tries < 1 or (tries < 200 and time.perf_counter() - began < (PROBE_SECONDS if tries < 4 else seconds)):
        start = time.perf_counter()
        for _ in range(calls):
            torch.nn.functional.linear(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - start) / calls)
        tries += 1
    return 2.0 * rows * inner * columns / best


def resolve_precision(name: str, device: torch.device, *, rows: int, d_model: int, d_ff: int) -> Precision:
    """The number format of a training; `auto` takes bf16 where the device has instructions for it.

    Elsewhere it measures both on the product [rows, d_model] x [d_model, d_ff].
    """
    if name == "fp32":
        return Precision("fp32", "as given")
    if name == "bf16":
        return Precision("bf16", "as given")
    if name == "fp16":
        return Precision("fp16", "as given; the loss is scaled dynamically")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= BF16_CAPABILITY:
        # Not measured: small products take the time of their start in either format.
        return Precision("bf16", "this GPU has bf16 instructions")
    if device.type == "cpu" and has_bf16_instructions():
        return Precision("bf16", "this CPU has bf16 instructions")
    shape = {"rows": min(rows, 8192), "inner": d_model, "columns": d_ff}
    # Emulated bf16 is slow, so the measurement is short.
    slow = matmul_flops_per_second(torch.float32, device, **shape, seconds=0.02)
    fast = matmul_flops_per_second(torch.bfloat16, device, **shape, seconds=0.02)
    is_faster = fast >= MIN_SPEEDUP * slow
    times = fast / slow if is_faster else slow / fast
    faster = "as fast" if times < MIN_SPEEDUP else f"{times:.{0 if times >= 2 else 1}f} times as fast"
    return Precision("bf16" if is_faster else "fp32", f"{faster} as {'fp32' if is_faster else 'bf16'} on this machine")


SPEED_FOLDER = "speed"  # in the cache
MAX_SPEED_BYTES = 10_000
LEAST_JUDGED, LEAST_COMPUTED = 0.1, 0.7
"""A measurement of this number of seconds in which the process computed for a smaller part is of a busy machine."""


def measured_once(key: object, measure: Callable[[], float]) -> float:
    """A duration of this machine that is measured once and then read from the cache.

    A second measurement differs by some percent, but a choice that depends on it must not. One file for each key,
    device, number of threads, instruction set and PyTorch keeps the first that no other process has slowed down.
    """
    place = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA")
    name = device_name(torch.device("cpu")), torch.__version__, *place, key
    file = default_cache_dir() / SPEED_FOLDER / f"{hashlib.sha256(repr(name).encode()).hexdigest()[:16]}.json"
    found = _stored_seconds(file)
    if found is None:
        began, computed = time.perf_counter(), time.process_time()
        measured = measure()
        seconds, computed = time.perf_counter() - began, time.process_time() - computed
        if seconds >= LEAST_JUDGED and computed < LEAST_COMPUTED * seconds:
            return measured
        found = _stored_seconds(file) or measured  # another process may have been first
        with suppress(StorageError, OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            files.write_file(file, [json.dumps({"seconds": found}).encode()])
    return found


def products_per_second(device: torch.device) -> float:
    """Mean FLOP/s of fp32 products, less while the machine is busy; infinite for a GPU."""
    if device.type != "cpu":
        return math.inf

    def seconds_of_one() -> float:
        left, calls, began = torch.ones(256, 256), 0, time.perf_counter()
        while not calls or time.perf_counter() - began < PROBE_SECONDS:
            torch.mm(left, left)
            calls += 1
        return (time.perf_counter() - began) / calls

    return 2.0 * 256**3 / measured_once("products", seconds_of_one)


def _stored_seconds(file: Path) -> float | None:
    """The duration in a file of the cache; None where there is none, or a damaged one."""
    try:
        seconds = files.parse_object(files.read_bounded(file, max_bytes=MAX_SPEED_BYTES), name=str(file)).get("seconds")
    except (InputError, OSError):
        return None
    return seconds if isinstance(seconds, float) and 0 < seconds < float("inf") else None


def resolve_device(name: str) -> torch.device:
    """The device `auto`, `cpu`, `cuda` or `cuda:1`. Raises InputError for an unknown name and a missing device."""
    # cuDNN's attention plans anew for every length, 10 ms for each that decoding or a batch brings (H100, torch 2.11).
    torch.backends.cuda.enable_cudnn_sdp(False)
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = name.partition(":")
    number = whole_number(index or "0")
    if kind not in ("cpu", "cuda") or number is None or (kind == "cpu" and index):
        raise InputError(f"unknown device '{name}'", hint="use auto, cpu, cuda or cuda:0")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if number >= count:
            raise InputError(f"device '{name}' not found: {count} CUDA devices found", hint="use --device cpu")
    return torch.device(name)
