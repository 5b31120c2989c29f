"""Input embeddings of a stack: tokens, or the patches of an image (ViT, arXiv 2010.11929).

    token (· √d) + token type + position → norm → dropout → project

`project` exists when the table is narrower than the model (factorised embeddings: ALBERT 1909.11942, ELECTRA).
FixNorm (1910.05895) gives every token vector the length √d at the input; the tied output uses length 1.
Positions belong to the stack and are an argument, because encoder and decoder may share one token table and have
different positions.
"""

# Shapes: B batch, T positions, E embedding size, D d_model, C channels, P patch side.

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.attention.context import TapSink, tap
from tformer.nn.dropout import dropout
from tformer.nn.linear import Linear
from tformer.nn.norm import NormOptions, build_norm
from tformer.nn.positions.base import Positions


class _Embedding(nn.Module):
    """The steps after the table: positions, norm, dropout, projection."""

    def __init__(self, size: int, d_model: int, *, norm: NormOptions | None, dropout: float) -> None:
        super().__init__()
        self.norm = build_norm(norm, size) if norm is not None else None
        self.dropout = dropout
        self.project = Linear(size, d_model, bias=True) if size != d_model else None

    def finish(self, x_BTE: Tensor, positions: Positions, pos_BT: Tensor, taps: TapSink | None) -> Tensor:
        x_BTE = positions.embed(x_BTE, pos_BT)
        if taps is not None and positions.has_embed:
            taps.put("position_ids", pos_BT)
            taps.put("positions", positions.embed(torch.zeros_like(x_BTE[:1]), pos_BT[:1]))
            taps.put("sum", x_BTE)
        if self.norm is not None:
            x_BTE = tap(taps, "normalised", self.norm(x_BTE))
        if self.dropout:
            x_BTE = dropout(x_BTE, self.dropout, self.training)
        return x_BTE if self.project is None else tap(taps, "projected", self.project(x_BTE))

    def tap_names(self, positions: Positions) -> list[str]:
        """Names of the inner tensors, in the order of their computation."""
        return [
            *self.own_taps(),
            *(("position_ids", "positions", "sum") if positions.has_embed else ()),
            *(("normalised",) if self.norm is not None else ()),
            *(("projected",) if self.project is not None else ()),
        ]

    def own_taps(self) -> list[str]:
        """Names of the inner tensors before positions are added."""
        raise NotImplementedError


class TokenEmbedding(_Embedding):
    """Rows of a [vocabulary, E] table.

    Args:
        vocab_size: number of rows.
        d_model: width of the stack.
        size: width of the table, E; None: d_model.
        scale: multiply the rows by √d_model.
        fixnorm: give the rows the length √d_model (instead of `scale`).
        token_types: number of segments (BERT: 2); 0: none.
        norm: of the sum (BERT, BART, Bloom); None: no norm.
        dropout: of the sum.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        size: int | None = None,
        scale: bool = False,
        fixnorm: bool = False,
        token_types: int = 0,
        norm: NormOptions | None = None,
        dropout: float = 0.0,
    ) -> None:
        size = d_model if size is None else size
        super().__init__(size, d_model, norm=norm, dropout=dropout)
        self.weight = nn.Parameter(torch.empty(vocab_size, size))
        self.token_types = nn.Parameter(torch.empty(token_types, size)) if token_types else None
        self.fixnorm = fixnorm
        self.factor = math.sqrt(d_model) if scale or fixnorm else 1.0

    def forward(
        self,
        ids_BT: Tensor,
        *,
        positions: Positions,
        pos_BT: Tensor,
        token_type_ids: Tensor | None = None,
        mask_BT: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        taps: TapSink | None = None,
    ) -> Tensor:
        """The input of a stack, [B, T, D] in `dtype`; `token_type_ids` default to segment 0.

        mask_BT: False where the row of a token is replaced by zeros (token cut-off, arXiv 2009.13818).
        """
        tap(taps, "ids", ids_BT)
        x_BTE = F.embedding(ids_BT, self.weight)
        if mask_BT is not None:
            x_BTE = x_BTE * mask_BT.unsqueeze(-1)
        x_BTE = tap(taps, "tokens", x_BTE)
        if self.fixnorm:
            x_BTE = tap(taps, "unit", F.normalize(x_BTE, dim=-1))
        if self.factor != 1.0:
            x_BTE = tap(taps, "scaled", x_BTE * self.factor)
        if self.token_types is not None:
            segment = self.token_types[0] if token_type_ids is None else F.embedding(token_type_ids, self.token_types)
            x_BTE = x_BTE + tap(taps, "segments", segment)
        elif token_type_ids is not None:
            raise ValueError("token_type_ids were given, but the model has no token types (embedding.token_types: 0)")
        return self.finish(x_BTE.to(dtype), positions, pos_BT, taps)

    def own_taps(self) -> list[str]:
        optional = {"unit": self.fixnorm, "scaled": self.factor != 1.0, "segments": self.token_types is not None}
        return ["ids", "tokens", *(name for name, exists in optional.items() if exists)]


class PatchEmbedding(_Embedding):
    """An image cut into squares, each projected to d_model; optionally a learned class token in front.

    `stem` conv keeps the kernel [D, C, P, P] as published ViTs store it; linear keeps [D, C·P·P]: the same product.
    """

    def __init__(
        self,
        d_model: int,
        *,
        image_size: int,
        size: int,
        channels: int,
        cls: bool,
        stem: Literal["linear", "conv"] = "conv",
        norm: NormOptions | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model, d_model, norm=norm, dropout=dropout)
        if image_size % size:
            raise ValueError(f"the patch size must divide the image size, found {size} and {image_size}")
        self.image_size, self.channels, self.size = image_size, channels, size
        shape = (d_model, channels, size, size) if stem == "conv" else (d_model, channels * size * size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(d_model))
        self.cls = nn.Parameter(torch.empty(d_model)) if cls else None

    @property
    def seq_len(self) -> int:
        """Number of positions an image becomes, the class token included."""
        return (self.image_size // self.size) ** 2 + (self.cls is not None)

    def forward(
        self,
        pixels_BCHW: Tensor,
        *,
        positions: Positions,
        pos_BT: Tensor,
        dtype: torch.dtype = torch.float32,
        taps: TapSink | None = None,
    ) -> Tensor:
        """[B, C, height, width] → [B, T, D] in `dtype`, row by row."""
        expected = (self.channels, self.image_size, self.image_size)
        if tuple(pixels_BCHW.shape[1:]) != expected:
            raise ValueError(f"pixel_values must have the shape [batch, {', '.join(map(str, expected))}], "
                             f"found {list(pixels_BCHW.shape)}")  # fmt: skip
        patches = tap(taps, "patches", cut_patches(tap(taps, "pixels", pixels_BCHW).to(dtype), self.size))
        x_BTD = F.linear(patches, self.weight.flatten(1).to(dtype), self.bias.to(dtype))
        tap(taps, "patch_vectors", x_BTD)
        if self.cls is not None:
            x_BTD = torch.cat([self.cls.to(dtype).expand(x_BTD.shape[0], 1, -1), x_BTD], dim=1)
            tap(taps, "with_cls", x_BTD)
        return self.finish(x_BTD, positions, pos_BT, taps)

    def own_taps(self) -> list[str]:
        return ["pixels", "patches", "patch_vectors", *(("with_cls",) if self.cls is not None else ())]


def cut_patches(pixels_BCHW: Tensor, size: int) -> Tensor:
    """[B, C, height, width] → [B, T, C·P·P], row by row: `F.unfold` without overlap, by moving memory alone."""
    batch, channels, height, width = pixels_BCHW.shape
    rows, columns = height // size, width // size
    cut = pixels_BCHW.reshape(batch, channels, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(batch, rows * columns, channels * size * size)
