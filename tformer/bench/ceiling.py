"""What the machine can do at most: its matrix-product rate and its memory's read rate, measured, and of known GPUs the
data sheet's.

A reading is over buffers far larger than the caches, filled beforehand: pages that were never written are all one page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tformer.nn.hardware import DTYPES
from tformer.training.precision import matmul_flops_per_second

PRODUCT_SECONDS = 0.5
BUFFER_BYTES = {"cpu": 2**29, "cuda": 2**32}
READ_TRIES = 6
MATRIX = 4096  # rows and columns of the matrices that vectors are multiplied with


@dataclass(frozen=True)
class DataSheet:
    """Of a GPU, dense: without sparsity, fp32 accumulation."""

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
"""By a part of the device's name; the first that fits."""


@dataclass(frozen=True)
class Ceilings:
    """flops_per_second by number format, of the product [rows, inner] x [inner, columns]; bytes_per_second read."""

    flops_per_second: dict[str, float]
    product: tuple[int, int, int]
    bytes_per_second: float
    data_sheet: DataSheet | None = None

    def arithmetic(self, precision: str) -> float:
        """FLOP/s in a contender's format; of one that has no product here (int8) the best of those measured."""
        return self.flops_per_second.get(precision, self.best)

    @property
    def best(self) -> float:
        return max(self.flops_per_second.values())


def measure_ceilings(
    precisions: Iterable[str], device: torch.device, *, product: tuple[int, int, int], buffer_bytes: int | None = None
) -> Ceilings:
    """Every format that is named and known to PyTorch, at the model's own shape, and memory."""
    rows, inner, columns = product
    rates = {
        precision: matmul_flops_per_second(
            DTYPES[precision], device, rows=rows, inner=inner, columns=columns, seconds=PRODUCT_SECONDS
        )
        for precision in dict.fromkeys(precisions)
        if precision in DTYPES
    }
    return Ceilings(rates, product, read_bytes_per_second(device, buffer_bytes=buffer_bytes), data_sheet_of(device))


def read_bytes_per_second(device: torch.device, *, buffer_bytes: int | None = None) -> float:
    """Best rate of ways to read a buffer once: a sum of whole numbers, products of bf16 matrices and a vector."""
    size = buffer_bytes or BUFFER_BYTES[device.type]
    numbers = torch.ones(size // 8, dtype=torch.int64, device=device)
    side = min(MATRIX, int((size // 2) ** 0.5))
    matrices = torch.ones(max(1, size // (2 * side * side)), side, side, dtype=torch.bfloat16, device=device)
    vector = torch.ones(side, dtype=torch.bfloat16, device=device)

    def multiply() -> None:
        for matrix in matrices:
            torch.mv(matrix, vector)

    ways: dict[Callable[[], Any], int] = {
        numbers.sum: numbers.nbytes,
        multiply: matrices.nbytes,
    }
    return max(count / _quickest(way, device) for way, count in ways.items())


def _quickest(way: Callable[[], Any], device: torch.device) -> float:
    best = float("inf")
    for _ in range(READ_TRIES):
        start = time.perf_counter()
        way()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def data_sheet_of(device: torch.device) -> DataSheet | None:
    """What the maker says of a known GPU; None for others and for a CPU."""
    if device.type != "cuda":
        return None
    return data_sheet_named(torch.cuda.get_device_name(device))


def data_sheet_named(name: str) -> DataSheet | None:
    words = set(name.replace("-", " ").split())
    return next((sheet for part, sheet in DATA_SHEETS.items() if part in name and _whole(part, words)), None)


def _whole(part: str, words: set[str]) -> bool:
    """Whether a one-word part is a word of its own: an L4 is no L40."""
    return not part.isalnum() or part in words
