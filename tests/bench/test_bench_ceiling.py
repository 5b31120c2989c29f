"""Ceilings: measured in the formats that were asked for, and the data sheets of GPUs by their names."""

from __future__ import annotations

import pytest
import torch

from tformer.bench import ceiling
from tformer.bench.ceiling import Ceilings, data_sheet_named, data_sheet_of, measure_ceilings

CPU = torch.device("cpu")


def test_every_known_format_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "PRODUCT_SECONDS", 0.0)
    found = measure_ceilings(["fp32", "int8", "fp32"], CPU, product=(16, 8, 16), buffer_bytes=2**16)
    assert found.flops_per_second.keys() == {"fp32"} and found.product == (16, 8, 16)
    assert found.arithmetic("fp32") > 0 and found.bytes_per_second > 0 and found.data_sheet is None


def test_a_format_without_a_product_of_its_own_is_compared_with_the_best() -> None:
    found = Ceilings({"fp32": 1e11, "bf16": 8e11}, (1, 1, 1), 5e10)
    assert found.arithmetic("fp32") == 1e11 and found.arithmetic("int8") == found.best == 8e11


@pytest.mark.parametrize(
    ("name", "flops", "bytes_per_second"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 2.039e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 1.555e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12),
        ("NVIDIA H100 PCIe", 756e12, 2.0e12),
        ("NVIDIA H200", 989e12, 4.8e12),
        ("NVIDIA L4", 121e12, 300e9),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 1.008e12),
    ],
)
def test_known_gpus(name: str, flops: float, bytes_per_second: float) -> None:
    sheet = data_sheet_named(name)
    assert sheet is not None and (sheet.bf16_flops, sheet.bytes_per_second) == (flops, bytes_per_second)
    assert sheet.source


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA GeForce RTX 3090", "Tesla T4"])
def test_others_have_no_data_sheet(name: str) -> None:
    assert data_sheet_named(name) is None


def test_a_cpu_has_no_data_sheet() -> None:
    assert data_sheet_of(CPU) is None
