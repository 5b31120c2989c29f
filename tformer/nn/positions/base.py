"""Position encodings: the hooks through which a kind acts, and the two simplest kinds, none and learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.options import require


class Positions(nn.Module):
    """No position information; the base of every kind. The `has_*` flags name the hooks that a kind overrides."""

    per_layer: ClassVar[bool] = False  # True: each layer owns its tables; else one module serves the whole stack
    has_embed: ClassVar[bool] = False
    has_rotate: ClassVar[bool] = False
    has_bias: ClassVar[bool] = False
    has_score: ClassVar[bool] = False
    has_mix: bool = False
    padding_position: int | None = None  # where padding stands; None: where counting has come to

    def embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        """The stack's input with positions added, in x's dtype."""
        return x_BTD

    def prepare(self, x: Tensor, pos_BT: Tensor, *, heads: int) -> Any:
        """What `rotate` makes of the positions alone, for tensors like `x`: made once, handed to every layer."""
        return None

    def rotate(
        self, q_BHTh: Tensor, k_BKTh: Tensor, q_pos_BT: Tensor, k_pos_BT: Tensor, prepared: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and (new) keys turned by their positions; `prepared` holds both when they stand at the same."""
        return q_BHTh, k_BKTh

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        """[B or 1, H, T, S], added to the scaled scores."""
        raise NotImplementedError(f"{type(self).__name__} has no score bias")

    def score(self, q_BHTh: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        """[B, H, T, S], added to q.k before the scale."""
        raise NotImplementedError(f"{type(self).__name__} has no score term")

    def mix(self, weights_BHTS: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        """[B, H, T, value_dim], added to the attention's output."""
        raise NotImplementedError(f"{type(self).__name__} has no value term")


MAX_ROWS = 1 << 15  # of a table; positions beyond are computed when they come


class TabledPositions(Positions):
    """A kind whose numbers follow from a formula: a non-persistent fp32 table [rows, width] of its first positions.

    It has `max_seq_len` rows, but at most MAX_ROWS: a context of a million tokens costs no memory until it is used.

    The table is rebuilt, not converted, when the module moves: it stays fp32 in a bf16 model and is filled when a
    meta module gets real storage. Subclasses define `formula` and call `build_table` at the end of `__init__`.
    """

    table: Tensor

    def formula(self, pos: Tensor) -> Tensor:
        """Positions [*] -> fp64 (fp32 where the device has no fp64) rows [*, width]."""
        raise NotImplementedError

    def build_table(self, max_seq_len: int) -> None:
        self.num_rows = min(max_seq_len, MAX_ROWS)
        device = torch.get_default_device()  # where a model is being built
        with torch.device("cpu"):  # arithmetic on the meta device takes a second to load
            table = self.formula(torch.arange(self.num_rows)).float()
        table = torch.empty_like(table, device=device) if device.type == "meta" else table.to(device)
        self.register_buffer("table", table, persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> TabledPositions:
        super()._apply(fn, recurse)
        if self.table.device.type != "meta":
            with torch.device("cpu"):
                table = self.formula(torch.arange(self.num_rows)).float()
            self.table = table.to(self.table.device)
        return self

    def rows(self, pos_BT: Tensor) -> Tensor:
        """The rows [B or 1, T, width] of the given positions, fp32; any position is valid.

        Only eager code on a CPU can see for free that all positions lie in the table; elsewhere computing the formula
        is cheaper than asking.
        """
        on_cpu = pos_BT.device.type == self.table.device.type == "cpu"
        if (
            on_cpu
            and not torch.compiler.is_compiling()
            and (pos_BT.numel() == 0 or int(pos_BT.max()) < self.table.shape[0])
        ):
            return self.table[pos_BT]
        return self.formula(pos_BT).float()


def inverse_frequencies(count: int, denominator: float, base: float, device: torch.device) -> Tensor:
    """base^(-i / denominator) for i < count, fp64 where the device has it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return base ** (-torch.arange(count, device=device, dtype=dtype) / denominator)


@dataclass(frozen=True)
class NoPositionsOptions:
    kind: Literal["none"] = "none"


class NoPositions(Positions):
    """Every hook neutral."""


@dataclass(frozen=True)
class LearnedOptions:
    kind: Literal["learned"] = "learned"
    offset: int = 0
    ids: Literal["arange", "nonpad_cumsum"] = "arange"

    def __post_init__(self) -> None:
        require(self.offset >= 0, f"offset must be at least 0, found {self.offset}")


class LearnedPositions(Positions):
    """weight [max_seq_len + offset, D]. The caller refuses lengths past `max_seq_len`, on the host."""

    has_embed = True

    def __init__(self, options: LearnedOptions, *, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        self.options = options
        self.max_seq_len = max_seq_len
        if options.ids == "nonpad_cumsum":
            self.padding_position = max(-1, -options.offset)  # without an offset there is no row before the first
        self.weight = nn.Parameter(torch.empty(max_seq_len + options.offset, d_model))
        nn.init.normal_(self.weight, std=0.02)

    def embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        return x_BTD + F.embedding(pos_BT + self.options.offset, self.weight).to(x_BTD.dtype)
