"""Random features of Performer (FAVOR+, arXiv 2009.14794, section 2.4): softmax's kernel as a mean over directions.

    exp(q . k) = E_w[exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2)],  w ~ N(0, I)

Every term is positive, so no weight of the approximated attention is negative. Rows of the table are orthogonal within
each block of h, which lowers the variance, and as long as independent Gaussian vectors, which keeps the mean.

A key's feature can be any number from 0 to exp(|w|^2 / 2): it is held as a number in [0, 1] and the logarithm of the
factor that all features of this key share, its level. Sums are taken relative to the highest level seen so far.

Shape legend: * leading dimensions, h head_dim, m features.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Kernel = Literal["softmax", "relu"]

MASK_64 = (1 << 64) - 1
RELU_FLOOR = 1.0e-3  # added to relu features, so that no query sees nothing (the paper's code)


def default_features(head_dim: int) -> int:
    """d ln d: what the paper's theorem asks for, for a given error at any length."""
    return max(1, int(head_dim * math.log(head_dim)))


def mixed_seed(*parts: int) -> int:
    """A 63-bit seed from numbers, near ones giving unrelated seeds: SplitMix64's mixing of one after the other."""
    state = 0
    for part in parts:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & MASK_64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK_64
        state ^= state >> 31
    return state >> 1


def draw_directions(features: int, head_dim: int, *, seed: int) -> Tensor:
    """A table [m, h], fp32, on the CPU; equal seeds give equal tables. No stream of torch's is read or moved."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    blocks = []
    for _ in range(-(-features // head_dim)):
        gaussian = torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64, device="cpu")
        q, r = torch.linalg.qr(gaussian)
        # LAPACK's signs are not random: without this no row would point anywhere with equal probability.
        blocks.append((q * r.diagonal().sign()).T)
    gaussian = torch.randn(features, head_dim, generator=generator, dtype=torch.float64, device="cpu")
    norms = torch.linalg.vector_norm(gaussian, dim=1, keepdim=True)
    return (torch.cat(blocks)[:features] * norms).float()


def query_features(x: Tensor, table_mh: Tensor, *, kernel: Kernel) -> Tensor:
    """Features [*, m] of queries [*, h], up to a factor of each query, which normalising takes out again.

    table: the directions times the square root of the scale, here and for keys.
    """
    products = x @ table_mh.T
    if kernel == "relu":
        return products.relu_() + RELU_FLOOR
    return products.sub_(products.detach().amax(-1, keepdim=True)).exp_()


def key_features(x: Tensor, table_mh: Tensor, *, scale: float, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Features [*, m] of keys [*, h], and their levels [*]: the kernel's features are exp(level) times these."""
    products = x @ table_mh.T
    if kernel == "relu":
        return products.relu_() + RELU_FLOOR, x.new_zeros(x.shape[:-1])
    highest = products.detach().amax(-1, keepdim=True)
    level = highest.squeeze(-1) - x.square().sum(-1) * (scale / 2)
    return products.sub_(highest).exp_(), level
