"""Peak memory, ceilings and data sheets of GPUs, the roofline model."""

from __future__ import annotations

import pytest
import torch

from tformer.bench import machine
from tformer.bench.machine import (
    Ceilings,
    Roofline,
    data_sheet_named,
    measure_ceilings,
    peak_of_process,
    roofline_line,
)

CPU = torch.device("cpu")


def test_where_the_system_keeps_no_status_the_peak_comes_from_its_accounts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = peak_of_process()
    monkeypatch.setattr(machine, "peak_resident_bytes", lambda: None)
    monkeypatch.setattr(machine.sys, "platform", "linux")
    assert known / 2 < peak_of_process() < known * 8


def test_every_known_format_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PRODUCT_SECONDS", 0.0)
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


@pytest.mark.parametrize(
    ("shares", "bound"),
    [
        ((0.6, 0.1), "arithmetic"),
        ((0.01, 0.9), "memory"),
        ((0.399, 0.398), "overhead"),
        ((0.4, 0.02), "arithmetic"),
        ((0.3, 0.05), "overhead"),
    ],
)
def test_the_nearer_ceiling_binds_where_work_comes_close_to_it(shares: tuple[float, float], bound: str) -> None:
    found = Roofline(*shares)
    assert found.bound == bound and found.share == max(shares)


def test_the_line_says_both_shares_and_what_binds() -> None:
    assert roofline_line("tformer bf16", Roofline(0.02, 0.71)) == (
        "tformer bf16: 2% of the matrix-product rate, 71% of the memory's read rate: bound by memory"
    )
    assert roofline_line("x", Roofline(0.1, 0.2)).endswith("bound by overhead (neither ceiling above 40%)")
