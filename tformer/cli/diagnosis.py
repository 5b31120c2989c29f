"""`tformer doctor`: versions, machine, kernels, caches, extras and a short speed check, as data and as advice.

Meant to be pasted into a bug report: it names no user and no host, and writes the home directory as `~`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tformer.bench.machine import measure_ceilings
from tformer.data.shards.caches import cache_sizes
from tformer.decoding.inference import inference_dtype
from tformer.kernels import library
from tformer.support import __version__
from tformer.support.device import (
    CPU_INFO,
    DTYPES,
    default_cache_dir,
    device_name,
    has_bf16_instructions,
    instruction_set,
    resolve_precision,
)
from tformer.support.formatting import amount
from tformer.support.processes import available_cores

INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8", "asimd",
                    "bf16", "i8mm", "sve")  # fmt: skip
"""Names in /proc/cpuinfo of the instructions that PyTorch and the kernels use."""

VARIABLES = ("TFORMER_CACHE", "TFORMER_KERNELS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
             "PYTHONDONTWRITEBYTECODE", "NO_COLOR")  # fmt: skip
"""Environment variables that change results or speed."""

NOT_FOR_USERS = "test"
PRODUCT = (512, 1024, 1024)  # a GFLOP: a tenth of a second where bf16 is emulated
LITTLE_DISK = 1_000_000_000  # bytes
MEMORY_INFO = Path("/proc/meminfo")


def diagnosis(*, with_speed: bool = True) -> dict[str, Any]:
    """Everything that `tformer doctor` shows, as JSON data."""
    home = default_cache_dir()
    cache_disk = next((path for path in (home, *home.parents) if path.is_dir()), None)  # the cache need not exist yet
    needed, extras = requirements()
    of_bf16 = inference_dtype("auto", trained_in="bf16", device=torch.device("cpu"))
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    compiler = library.find_compiler()
    found: dict[str, Any] = {
        "versions": {"tformer": __version__, **{name: installed(name) for name in needed}},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "precision": {  # what `--precision auto` chooses on this CPU
            "training": resolve_precision("auto", torch.device("cpu"), rows=2048, d_model=192, d_ff=768).name,
            "inference": next(name for name, dtype in DTYPES.items() if dtype is of_bf16),  # if trained in bf16
        },
        "memory": _memory(),
        "threads": {"used": torch.get_num_threads(), "available": available_cores()},
        "gpus": [
            {
                "name": gpu.name,
                "memory_bytes": gpu.total_memory,
                "capability": f"{gpu.major}.{gpu.minor}",
                "cuda": torch.version.cuda,
            }
            for gpu in gpus
        ],
        "kernels": {
            "compiler": None if compiler is None else _version_of(compiler),
            "state": library.state(may_build=True),
        },
        "cache": {
            "folder": without_home(home),
            "free_bytes": None if cache_disk is None else shutil.disk_usage(cache_disk).free,
            "kinds": {kind: asdict(size) for kind, size in cache_sizes(home).items()},
        },
        "extras": {
            extra: {name: installed(name) for name in names}
            for extra, names in extras.items()
            if extra != NOT_FOR_USERS
        },
        "environment": {name: without_home(os.environ[name]) for name in VARIABLES if name in os.environ},
        "speed": _speed() if with_speed else None,
    }
    return {**found, "advice": list(_advice(found))}


# --- versions ---------------------------------------------------------------------------------------------------------


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """The names of the required packages, and of each extra's packages."""
    try:
        lines = metadata.requires("tformer") or []
        plain = [line for line in lines if "extra ==" not in line]
        extras: dict[str, list[str]] = {}
        for line in lines:
            if found := re.search(r"extra == ['\"]([\w-]+)", line):
                extras.setdefault(found[1], []).append(line)
    except metadata.PackageNotFoundError:  # a checkout
        file = Path(__file__).resolve().parents[2] / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"] if file.is_file() else {}
        plain, extras = project.get("dependencies", []), project.get("optional-dependencies", {})
    return _names(plain), {extra: _names(lines) for extra, lines in extras.items()}


def _names(lines: Iterable[str]) -> list[str]:
    return [found[0] for line in lines if (found := re.match(r"[\w.-]+", line))]


def installed(package: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- machine ----------------------------------------------------------------------------------------------------------


def _processor() -> dict[str, Any]:
    text = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return {
        "name": device_name(torch.device("cpu")),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in present],
        "pytorch_uses": torch.backends.cpu.get_cpu_capability(),
        "best": instruction_set(),
        "bf16_instructions": has_bf16_instructions(),
    }


def _memory() -> dict[str, int]:
    """Total bytes, and bytes that are free or can be freed."""
    text = MEMORY_INFO.read_text() if MEMORY_INFO.exists() else ""
    lines = {name: int(count) * 1024 for name, count in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    total = lines.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"total_bytes": total, **({"available_bytes": lines["MemAvailable"]} if "MemAvailable" in lines else {})}


def _version_of(compiler: str) -> str:
    """The first line of `cc --version`; the name of the program where that fails."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return Path(compiler).name


def _speed() -> list[dict[str, Any]]:
    """Rates of matrix products and of reading memory, of the processor and of the first GPU."""
    devices = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
    rates = ((device, measure_ceilings(("fp32", "bf16"), device, product=PRODUCT)) for device in devices)
    return [
        {"device": device.type, "flops_per_second": found.flops_per_second, "bytes_per_second": found.bytes_per_second}
        for device, found in rates
    ]


# --- text -------------------------------------------------------------------------------------------------------------


def without_home(path: Path | str) -> str:
    """The path with `~` for the home directory."""
    home = str(Path.home())
    text = str(path)
    return "~" + text[len(home) :] if home != "/" and (text == home or text.startswith(home + os.sep)) else text


def _advice(found: Mapping[str, Any]) -> Iterator[str]:
    """Advice: causes of slow or impossible work on this machine, and the remedies."""
    missing = [name for name, version in found["versions"].items() if version is None]
    if missing:
        yield f"{', '.join(missing)}: required and not installed"
    kernels, threads, cache = found["kernels"], found["threads"], found["cache"]
    if sys.platform == "linux" and kernels["compiler"] is None:
        yield "no C compiler (cc, gcc, clang): decoding on this processor uses PyTorch's operators, which are slower"
    elif sys.platform == "linux" and kernels["state"] == "missing":
        yield "the C kernels could not be compiled; a folder of your own for the cache is set by TFORMER_CACHE=DIR"
    elif kernels["state"] == library.NO_PROC:
        yield f"C kernels {library.NO_PROC}: mount it; decoding on this processor is slower"
    elif kernels["state"] == library.ENDED:
        yield f"{library.ENDED}; decoding is slower; tformer doctor --clean tries them again"
    if threads["used"] > threads["available"]:
        yield f"{threads['used']} threads on {threads['available']} processors: set OMP_NUM_THREADS"
    if cache["free_bytes"] is not None and cache["free_bytes"] < LITTLE_DISK:
        yield f"{amount(cache['free_bytes'], 'B')} free on the cache's disk: TFORMER_CACHE=DIR names another folder"
    if "PYTHONDONTWRITEBYTECODE" in found["environment"]:
        yield "PYTHONDONTWRITEBYTECODE is set: every start compiles Python files again"


def diagnosis_lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, text) of everything in a diagnosis."""
    versions = {"python": found["python"], **found["versions"]}
    yield "versions", ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    yield "system", found["platform"]
    processor = found["processor"]
    sets = ", ".join(processor["instruction_sets"]) or "unknown instructions"
    used = f"PyTorch uses {processor['pytorch_uses']}, products {processor['best']}"
    yield "processor", f"{processor['name']}; {sets}; {used}"
    chosen = found["precision"]
    yield "precision", f"training {chosen['training']}; inference {chosen['inference']} for models trained in bf16"
    memory = found["memory"]
    free = f", {amount(memory['available_bytes'], 'B')} available" if "available_bytes" in memory else ""
    yield "memory", amount(memory["total_bytes"], "B") + free
    yield "threads", f"{found['threads']['used']} of {found['threads']['available']} processors"
    for gpu in found["gpus"]:
        yield "gpu", f"{gpu['name']}, {amount(gpu['memory_bytes'], 'B')}, CUDA {gpu['cuda']}, {gpu['capability']}"
    if not found["gpus"]:
        yield "gpu", "none"
    yield "kernels", f"{found['kernels']['state']}; compiler: {found['kernels']['compiler'] or 'none'}"
    yield "cache", cache_line(found["cache"]["kinds"], found["cache"]["folder"])
    for extra, packages in found["extras"].items():
        yield f"[{extra}]", ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())
    for rates in found["speed"] or ():
        products = ", ".join(f"{name} {amount(rate, 'FLOP/s')}" for name, rate in rates["flops_per_second"].items())
        yield "speed", f"{rates['device']}: {products}; reads {amount(rates['bytes_per_second'], 'B/s')}"
    if found["environment"]:
        yield "settings", ", ".join(f"{name}={value}" for name, value in found["environment"].items())
    for text in found["advice"]:
        yield "advice", text


def cache_line(kinds: Mapping[str, Mapping[str, int]], folder: str) -> str:
    """The folder, with the size of each kind of content."""
    held = (f"{kind} {amount(size['bytes'], 'B')}" for kind, size in kinds.items() if size["entries"])
    return f"{folder}: {', '.join(held) or 'empty'}"
