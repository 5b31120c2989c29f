"""Position encodings computed by a formula; fixed sines and cosines of a position or of an image patch.

The paper: PE(pos, 2i) = sin(pos / base^(2i/D)), PE(pos, 2i+1) = cos(pos / base^(2i/D)). Three layouts are published:
- interleaved: the paper's.
- halves: [sin | cos], the same frequencies (Marian); a permutation of the paper's columns.
- fairseq: [sin | cos] with exponent i / (D/2 - 1), so that the last wavelength is exactly base (tensor2tensor).

Image patches (MAE, arXiv 2111.06377; Beyer et al., arXiv 2205.01580): the first half of the features encodes the
column of a patch, the second its row, each as [sin | cos] with frequencies base^(-i / (D/4)). Patches are numbered row
by row; a class token, if there is one, comes first and gets zeros.

Shape legend: B batch, T positions, D d_model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tformer.nn.options import require, require_positive
from tformer.nn.positions.base import Positions, PositionSizes

MAX_ROWS = 1 << 15  # of a table; later positions are computed when they are needed


class TabledPositions(Positions):
    """Base class of kinds computed by a formula: a non-persistent fp32 table [rows, width] of the first positions.

    The table has `max_seq_len` rows, but at most MAX_ROWS: a context of a million tokens costs no memory until it is
    used. It is rebuilt, not converted, when the module moves: it stays fp32 in a bf16 model and is filled when a meta
    module gets real storage. Subclasses define `formula` and call `build_table` at the end of `__init__`.
    """

    table: Tensor

    def formula(self, pos: Tensor) -> Tensor:
        """Positions [*] -> fp64 (fp32 where the device has no fp64) rows [*, width]."""
        raise NotImplementedError

    def build_table(self, max_seq_len: int) -> None:
        self.num_rows = min(max_seq_len, MAX_ROWS)
        device = torch.get_default_device()  # where a model is being built
        with torch.device("cpu"):  # arithmetic on the meta device takes a second to load
            table = self.formula(torch.arange(1 if device.type == "meta" else self.num_rows)).float()
        if device.type == "meta":
            table = torch.empty(self.num_rows, *table.shape[1:], device=device)
        self.register_buffer("table", table.to(device), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> TabledPositions:
        super()._apply(fn, recurse)
        if self.table.device.type != "meta":
            with torch.device("cpu"):
                table = self.formula(torch.arange(self.num_rows)).float()
            self.table = table.to(self.table.device)
        return self

    def rows(self, pos_BT: Tensor) -> Tensor:
        """The rows [B or 1, T, width] of the given positions, fp32; any position is valid.

        Only eager code on a CPU can check at no cost that all positions lie in the table; elsewhere computing the
        formula is cheaper than the check.
        """
        on_cpu = pos_BT.device.type == self.table.device.type == "cpu"
        if (
            on_cpu
            and not torch.compiler.is_dynamo_compiling()
            and (pos_BT.numel() == 0 or int(pos_BT.max()) < self.table.shape[0])
        ):
            return self.table[pos_BT]
        return self.formula(pos_BT).float()


def inverse_frequencies(count: int, denominator: float, base: float, device: torch.device) -> Tensor:
    """base^(-i / denominator) for i < count, fp64 where the device has it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return base ** (-torch.arange(count, device=device, dtype=dtype) / denominator)


def sinusoids(pos: Tensor, dim: int, *, layout: str, base: float) -> Tensor:
    """Positions [*] -> [*, dim], fp64 (fp32 on devices without it)."""
    half = dim // 2
    denominator = max(half - 1, 1) if layout == "fairseq" else half
    angles = pos.unsqueeze(-1) * inverse_frequencies(half, denominator, base, pos.device)
    if layout == "interleaved":
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class SinusoidalPositions(TabledPositions):
    """Adds the sinusoid of each position to the embeddings. ValueError when d_model is odd."""

    kind = "sinusoidal"
    about = "Sines and cosines of geometrically spaced wavelengths, added to the embeddings (arXiv 1706.03762)."
    added_size = math.sqrt(0.5)  # sin² + cos² = 1

    def __init__(self, options: SinusoidalOptions, *, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"d_model must be even for sinusoidal positions, found {d_model}")
        self.options = options
        self.d_model = d_model
        self.build_table(max_seq_len)

    def formula(self, pos: Tensor) -> Tensor:
        return sinusoids(pos + self.options.offset, self.d_model, layout=self.options.layout, base=self.options.base)

    def embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        return x_BTD + self.rows(pos_BT).to(x_BTD.dtype)


class Patch2dPositions(TabledPositions):
    """Adds sinusoids of the column and row of each patch. ValueError when d_model is not a multiple of 4.

    grid: (rows, columns, has a class token).
    """

    kind = "patch2d"
    about = "Sines and cosines of a patch's column and row, for images (arXiv 2111.06377)."
    added_size = math.sqrt(0.5)

    def __init__(self, options: Patch2dOptions, *, d_model: int, grid: tuple[int, int, bool]) -> None:
        super().__init__()
        if d_model % 4:
            raise ValueError(f"d_model must be a multiple of 4 for patch2d positions, found {d_model}")
        self.options = options
        self.d_model = d_model
        self.num_columns, self.has_cls = grid[1], grid[2]
        self.build_table(grid[0] * grid[1] + grid[2])

    def formula(self, pos: Tensor) -> Tensor:
        patch = pos - int(self.has_cls)
        row = patch.div(self.num_columns, rounding_mode="floor")
        halves = [
            sinusoids(at, self.d_model // 2, layout="halves", base=self.options.base)
            for at in (patch - row * self.num_columns, row)
        ]
        return torch.cat(halves, dim=-1) * (patch >= 0).unsqueeze(-1)

    def embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        return x_BTD + self.rows(pos_BT).to(x_BTD.dtype)


@dataclass(frozen=True)
class SinusoidalOptions:
    """Fixed sines and cosines added to the embeddings (arXiv 1706.03762)."""

    module: ClassVar = SinusoidalPositions
    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves", "fairseq"] = "interleaved"  # order of sines and cosines
    base: float = 10000.0  # base of the wavelengths 2 pi base^(2i/d)
    offset: int = 0  # number of the first position (fairseq: 2)

    def __post_init__(self) -> None:
        require_positive(base=self.base)
        require(self.offset >= 0, f"offset must be at least 0, found {self.offset}")

    def build(self, sizes: PositionSizes) -> Positions:
        return SinusoidalPositions(self, d_model=sizes.d_model, max_seq_len=sizes.max_seq_len)


@dataclass(frozen=True)
class Patch2dOptions:
    """Fixed sines and cosines of a patch's row and column (arXiv 2205.01580)."""

    module: ClassVar = Patch2dPositions
    kind: Literal["patch2d"] = "patch2d"
    base: float = 10000.0  # base of the wavelengths

    def __post_init__(self) -> None:
        require_positive(base=self.base)

    def build(self, sizes: PositionSizes) -> Positions:
        if sizes.grid is None:
            raise ValueError("patch2d needs model.patches: it encodes the grid of an image")
        return Patch2dPositions(self, d_model=sizes.d_model, grid=sizes.grid)
