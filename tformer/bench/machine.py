"""The machine: its description, peak memory of a process, measured hardware limits (ceilings), the roofline model.

Ceilings: rate of matrix products, and rate of reading buffers far larger than the caches. The buffers are filled first:
all pages that were never written are one page.

Roofline model (Williams et al., 2009): work of F operations that reads B bytes takes at least max(F / peak,
B / bandwidth) seconds. The measured time as a share of either tells what bounds the work; where both shares are low,
the time went elsewhere: starting kernels, Python, copies, activations.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tformer.support.device import (
    DTYPES,
    device_name,
    instruction_set,
    matmul_flops_per_second,
)
from tformer.support.formatting import plural
from tformer.support.processes import peak_resident_bytes


def environment_line(device: torch.device, *, dtype: str) -> str:
    """Version of PyTorch, number format, and processor, threads and instructions or GPU, in one line."""
    about = f"torch {torch.__version__}, {dtype}, {device_name(device)}"
    if device.type == "cuda":
        return about
    return f"{about}, {plural(torch.get_num_threads(), 'thread')}, {instruction_set()}"


def peak_of_process() -> int:
    """Largest resident set of this process in bytes."""
    found = peak_resident_bytes()
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


PRODUCT_SECONDS = 0.5
BUFFER_BYTES = {"cpu": 2**29, "cuda": 2**32}
READ_TRIES = 6
MATRIX = 4096  # rows and columns of the matrices that vectors are multiplied with


@dataclass(frozen=True)
class DataSheet:
    """Rates of a GPU by its maker: dense products (no sparsity) with fp32 accumulation, and memory."""

    bf16_flops: float
    bytes_per_second: float
    source: str


DATA_SHEETS: dict[str, DataSheet] = {
    "H200 NVL": DataSheet(835e12, 4.8e12, "NVIDIA H200 Tensor Core GPU data sheet (NVL)"),
    "H200": DataSheet(989e12, 4.8e12, "NVIDIA H200 Tensor Core GPU data sheet (SXM)"),
    "H100 NVL": DataSheet(835e12, 3.9e12, "NVIDIA H100 Tensor Core GPU data sheet (NVL)"),
    "H100 PCIe": DataSheet(756e12, 2.0e12, "NVIDIA H100 Tensor Core GPU data sheet (PCIe)"),
    "H100": DataSheet(989e12, 3.35e12, "NVIDIA H100 Tensor Core GPU data sheet (SXM)"),
    "A100-SXM4-80GB": DataSheet(312e12, 2.039e12, "NVIDIA A100 Tensor Core GPU data sheet (80 GB SXM)"),
    "A100 80GB PCIe": DataSheet(312e12, 1.935e12, "NVIDIA A100 Tensor Core GPU data sheet (80 GB PCIe)"),
    "A100": DataSheet(312e12, 1.555e12, "NVIDIA A100 Tensor Core GPU data sheet (40 GB)"),
    "L4": DataSheet(121e12, 300e9, "NVIDIA L4 Tensor Core GPU data sheet"),
    "4090": DataSheet(165.2e12, 1.008e12, "NVIDIA Ada GPU architecture white paper, appendix A"),
}
"""By a part of the device's name; the first match counts."""


@dataclass(frozen=True)
class Ceilings:
    """Measured limits.

    flops_per_second: by number format, of the product [rows, inner] x [inner, columns] (`product`).
    bytes_per_second: of reading memory.
    """

    flops_per_second: dict[str, float]
    product: tuple[int, int, int]
    bytes_per_second: float
    data_sheet: DataSheet | None = None

    def arithmetic(self, precision: str) -> float:
        """FLOP/s in a number format; the fastest measured one for a format without a product here (int8)."""
        return self.flops_per_second.get(precision, self.best)

    @property
    def best(self) -> float:
        return max(self.flops_per_second.values())


def measure_ceilings(
    precisions: Iterable[str], device: torch.device, *, product: tuple[int, int, int], buffer_bytes: int | None = None
) -> Ceilings:
    """Measure products in each format that PyTorch has, at the model's own shape, and reading memory."""
    rows, inner, columns = product
    rates = {
        precision: matmul_flops_per_second(
            DTYPES[precision], device, rows=rows, inner=inner, columns=columns, seconds=PRODUCT_SECONDS
        )
        for precision in dict.fromkeys(precisions)
        if precision in DTYPES
    }
    sheet = data_sheet_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Ceilings(rates, product, read_bytes_per_second(device, buffer_bytes=buffer_bytes), sheet)


def read_bytes_per_second(device: torch.device, *, buffer_bytes: int | None = None) -> float:
    """The faster of two ways to read a buffer once: a sum of integers, products of bf16 matrices and a vector."""
    size = buffer_bytes or BUFFER_BYTES[device.type]
    numbers = torch.ones(size // 8, dtype=torch.int64, device=device)
    side = min(MATRIX, int((size // 2) ** 0.5))
    matrices = torch.ones(max(1, size // (2 * side * side)), side, side, dtype=torch.bfloat16, device=device)
    vector = torch.ones(side, dtype=torch.bfloat16, device=device)

    def multiply() -> None:
        for matrix in matrices:
            torch.mv(matrix, vector)

    fastest = 0.0
    ways: list[tuple[Callable[[], Any], int]] = [(numbers.sum, numbers.nbytes), (multiply, matrices.nbytes)]
    for way, count in [way for way in ways for _ in range(READ_TRIES)]:
        start = time.perf_counter()
        way()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = max(fastest, count / (time.perf_counter() - start))
    return fastest


def data_sheet_named(name: str) -> DataSheet | None:
    """Data sheet of a GPU by its name. A part of one word must match a whole word: an L4 is not an L40."""
    words = set(name.replace("-", " ").split())
    return next(
        (sheet for part, sheet in DATA_SHEETS.items() if part in name and (not part.isalnum() or part in words)), None
    )


BOUND_SHARE = 0.4
"""Minimum share of a ceiling at which it bounds the work."""

Bound = Literal["arithmetic", "memory", "overhead"]


@dataclass(frozen=True)
class Roofline:
    """Shares of the two ceilings, and which of them bounds the work."""

    arithmetic: float
    bandwidth: float

    @property
    def bound(self) -> Bound:
        if max(self.arithmetic, self.bandwidth) < BOUND_SHARE:
            return "overhead"
        return "arithmetic" if self.arithmetic >= self.bandwidth else "memory"

    @property
    def share(self) -> float:
        """Share of the nearer ceiling."""
        return max(self.arithmetic, self.bandwidth)


def roofline_line(name: str, found: Roofline) -> str:
    """One line: shares of both ceilings, and what bounds the work."""
    bounds = {
        "arithmetic": "bound by arithmetic",
        "memory": "bound by memory",
        "overhead": f"bound by overhead (neither ceiling above {BOUND_SHARE:.0%})",
    }
    return (
        f"{name}: {found.arithmetic:.0%} of the matrix-product rate, {found.bandwidth:.0%} of the memory's read rate: "
        f"{bounds[found.bound]}"
    )
