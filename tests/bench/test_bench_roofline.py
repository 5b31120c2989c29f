"""What binds: arithmetic near its peak, memory near its rate, overhead where neither is near."""

from __future__ import annotations

import pytest

from tformer.bench.roofline import Roofline, roofline, roofline_line


@pytest.mark.parametrize(
    ("flops", "bytes_read", "shares", "bound"),
    [
        (600e9, 5e9, (0.6, 0.1), "arithmetic"),
        (10e9, 45e9, (0.01, 0.9), "memory"),
        (399e9, 19.9e9, (0.399, 0.398), "overhead"),
        (400e9, 1e9, (0.4, 0.02), "arithmetic"),
    ],
)
def test_one_second_beside_1000_gigaflops_and_50_gigabytes(
    flops: float, bytes_read: float, shares: tuple[float, float], bound: str
) -> None:
    found = roofline(flops, bytes_read, 1.0, flops_per_second=1e12, bytes_per_second=50e9)
    assert (found.arithmetic, found.bandwidth) == pytest.approx(shares)
    assert found.bound == bound and found.share == pytest.approx(max(shares))


def test_twice_the_time_is_half_the_share() -> None:
    slow = roofline(600e9, 5e9, 2.0, flops_per_second=1e12, bytes_per_second=50e9)
    assert slow.arithmetic == pytest.approx(0.3) and slow.bound == "overhead"


def test_the_line_says_both_shares_and_what_binds() -> None:
    assert roofline_line("tformer bf16", Roofline(0.02, 0.71)) == (
        "tformer bf16: 2% of the matrix-product rate, 71% of the memory's read rate: bound by memory"
    )
    assert roofline_line("x", Roofline(0.1, 0.2)).endswith("bound by overhead (neither ceiling above 40%)")
