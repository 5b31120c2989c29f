"""Input embeddings of a stack: the common base class and tokens; images are in `patches`.

    (token + n-grams) (· √d) + token type → convolution → + position → norm → dropout → project

`project` exists when the table is narrower than the model (factorized embeddings: ALBERT 1909.11942, ELECTRA). It may
stand before the positions instead, then without a bias (OPT-350m, 2205.01068).
The convolution (of CCT on text, 2104.05704) reads each token with its neighbours.
FixNorm (1910.05895) gives every token vector the length √d at the input; the tied output uses length 1.
Positions belong to the stack and are an argument, because encoder and decoder may share one token table and have
different positions.
"""

# Shapes: B batch, T positions, E embedding size, D d_model.

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.dropout import dropout
from tformer.nn.linear import Linear
from tformer.nn.ngrams import NgramEmbedding
from tformer.nn.norm import NormOptions, build_norm
from tformer.nn.positions.base import Positions
from tformer.nn.positions.fixed import TabledPositions
from tformer.nn.taps import Tap, TapSink, tap

NARROW = (torch.bfloat16, torch.float16)


class Embedding(nn.Module):
    """Base class of embeddings: the steps after the table, which are positions, norm, dropout, projection."""

    def __init__(
        self,
        size: int,
        d_model: int,
        *,
        norm: NormOptions | None,
        dropout: float,
        project_first: bool = False,
        norm_first: bool = False,
    ) -> None:
        super().__init__()
        self.norm = build_norm(norm, d_model if project_first else size) if norm is not None else None
        self.dropout = dropout
        self.project = Linear(size, d_model, bias=not project_first) if size != d_model else None
        self.project_first, self.norm_first = project_first, norm_first

    def finish(self, x_BTE: Tensor, positions: Positions, pos_BT: Tensor, taps: TapSink | None) -> Tensor:
        if self.project is not None and self.project_first:
            x_BTE = tap(taps, "projected", self.project(x_BTE))
        if self.norm is not None and self.norm_first:
            x_BTE = tap(taps, "normalized", self.norm(x_BTE))
        if taps is None or not positions.has_embed:
            x_BTE = positions.embed(x_BTE, pos_BT)
        else:
            pos_BT = tap(taps, "position_ids", pos_BT)
            added = positions.embed(torch.zeros_like(x_BTE[:1]), pos_BT)
            replaced = tap(taps, "positions", added)
            x_BTE = positions.embed(x_BTE, pos_BT) if replaced is added else x_BTE + replaced
            x_BTE = tap(taps, "sum", x_BTE)
        if self.norm is not None and not self.norm_first:
            x_BTE = tap(taps, "normalized", self.norm(x_BTE))
        if self.dropout:
            x_BTE = dropout(x_BTE, self.dropout, self.training)
        return x_BTE if self.project is None or self.project_first else tap(taps, "projected", self.project(x_BTE))

    def taps(self, positions: Positions) -> list[Tap]:
        """Inner tensors; the last is the output and has no name."""
        e = "D" if self.project is None else "E"
        declared = self.own_taps(e)
        wide = Tap("projected", "B T D", "projected to the model's width", None, ("project",), title="widened")
        if self.project is not None and self.project_first:
            declared, e = [*declared, wide], "D"
        normalized = Tap("normalized", f"B T {e}", "each vector normalized", parameters=("norm",))
        if self.norm is not None and self.norm_first:
            declared = [*declared, normalized]
        if positions.has_embed:
            rows = "waves" if isinstance(positions, TabledPositions) else "row of the table"
            declared += [
                Tap("position_ids", "1 T", "the number of each position", (), beside=True, title="position"),
                Tap("positions", f"1 T {e}", f"the {rows} of each position", ("position_ids",), ("positions",),
                    beside=True),
                Tap("sum", f"B T {e}", f"with the {positions.kind} vector of each position added"),
            ]  # fmt: skip
        if self.norm is not None and not self.norm_first:
            declared.append(normalized)
        output = Tap("", "B T D", "what enters the first layer", title="input")
        if self.project is None or self.project_first:
            return [*declared, output._replace(dropout_before=self.dropout)]
        return [*declared, wide._replace(dropout_before=self.dropout), output]

    def own_taps(self, e: str) -> list[Tap]:
        """Inner tensors before positions are added; `e` is the letter of their width."""
        raise NotImplementedError


class TokenEmbedding(Embedding):
    """Rows of a [vocabulary, E] table.

    Args:
        vocab_size: number of rows.
        d_model: width of the stack.
        size: width of the table, E; None: d_model.
        scale: multiply the rows by √d_model (`rounded`: that number in the dtype of the stream), or by a number.
        fixnorm: give the rows the length √d_model (instead of `scale`).
        token_types: number of segments (BERT: 2); 0: none.
        ngrams: adds vectors of the n-grams that end at each token; None: no n-grams.
        convolution: tokens that a convolution with ReLU reads together; 0: none.
        norm: of the sum (BERT, BART, Bloom); None: no norm.
        dropout: of the sum.
        project_first: widen narrow rows before positions are added, else after the dropout.
        norm_first: normalize before positions are added, else their sum.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        size: int | None = None,
        scale: bool | float | Literal["rounded"] = False,
        fixnorm: bool = False,
        token_types: int = 0,
        ngrams: NgramEmbedding | None = None,
        convolution: int = 0,
        norm: NormOptions | None = None,
        dropout: float = 0.0,
        project_first: bool = False,
        norm_first: bool = False,
    ) -> None:
        size = d_model if size is None else size
        super().__init__(size, d_model, norm=norm, dropout=dropout, project_first=project_first, norm_first=norm_first)
        self.weight = nn.Parameter(torch.empty(vocab_size, size))
        self.token_types = nn.Parameter(torch.empty(token_types, size)) if token_types else None
        self.ngrams = ngrams
        self.convolution = convolution
        self.convolve = Linear(convolution * size, size, bias=True) if convolution else None
        self.fixnorm = fixnorm
        number = scale if isinstance(scale, float) and not fixnorm else None
        self.factor_is_root = number is None
        self.factor = number or (math.sqrt(d_model) if scale or fixnorm else 1.0)
        # The factor by the dtype of the stream, where it is rounded: Gemma in bf16 multiplies by a bf16 number.
        narrow = NARROW if scale == "rounded" else ()
        self.rounded = {dtype: torch.tensor(self.factor, dtype=dtype, device="cpu").item() for dtype in narrow}

    def forward(
        self,
        ids_BT: Tensor,
        *,
        positions: Positions,
        pos_BT: Tensor,
        token_type_ids: Tensor | None = None,
        real_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        before_BN: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        taps: TapSink | None = None,
    ) -> Tensor:
        """The input of a stack, [B, T, D] in `dtype`; `token_type_ids` default to segment 0.

        real_BT, document_ids_BT: the convolution reads zeros where the first is False and beyond the token's document;
            n-grams leave out the same places, see `NgramEmbedding`.
        before_BN: the ids before the first position, for n-grams of decoding with a cache.
        """
        ids_BT = tap(taps, "ids", ids_BT)
        x_BTE = F.embedding(ids_BT, self.weight)
        x_BTE = tap(taps, "tokens", x_BTE.to(torch.promote_types(x_BTE.dtype, dtype)))  # a frozen table may be narrower
        if self.fixnorm:
            x_BTE = tap(taps, "unit", F.normalize(x_BTE, dim=-1))
        if self.ngrams is not None:
            added = self.ngrams(ids_BT, real_BT=real_BT, document_ids_BT=document_ids_BT, before_BN=before_BN)
            x_BTE = x_BTE + tap(taps, "ngrams", added)
        if self.factor != 1.0:
            x_BTE = tap(taps, "scaled", x_BTE * self.rounded.get(dtype, self.factor))
        if self.token_types is not None:
            segment = self.token_types[0] if token_type_ids is None else F.embedding(token_type_ids, self.token_types)
            x_BTE = x_BTE + tap(taps, "segments", segment)
        elif token_type_ids is not None:
            raise ValueError("token_type_ids were given, but the model has no token types (embedding.token_types: 0)")
        x_BTE = x_BTE.to(dtype)
        if self.convolve is not None:
            near_BTW = neighbours(x_BTE, self.convolution, real_BT=real_BT, document_ids_BT=document_ids_BT)
            x_BTE = tap(taps, "convolved", F.relu(self.convolve(near_BTW)))
        return self.finish(x_BTE, positions, pos_BT, taps)

    def own_taps(self, e: str) -> list[Tap]:
        optional = [
            (self.fixnorm, Tap("unit", f"B T {e}", "each row at length 1 (FixNorm)", title="unit vectors")),
            (
                self.ngrams is not None,
                Tap("ngrams", f"B T {e}", "the vectors of the n-grams that end at each token, added", (), ("ngrams",),
                    beside=True, title="n-grams"),
            ),
            (
                self.factor != 1.0,
                Tap("scaled", f"B T {e}", f"times {'√D = ' if self.factor_is_root else ''}{self.factor:.4g}"),
            ),
            (
                self.token_types is not None,
                Tap("segments", f"B T {e}", "the vector of each token's segment, added", (), ("token_types",),
                    beside=True),
            ),
            (
                self.convolve is not None,
                Tap("convolved", f"B T {e}", "each token with its neighbours: one product and ReLU",
                    parameters=("convolve",)),
            ),
        ]  # fmt: skip
        return [
            Tap("ids", "B T", "token numbers", ()),
            Tap("tokens", f"B T {e}", "the table's row of each token", parameters=("weight",)),
            *(declared for exists, declared in optional if exists),
        ]


def neighbours(x_BTE: Tensor, width: int, *, real_BT: Tensor | None, document_ids_BT: Tensor | None) -> Tensor:
    """[B, T, width·E]: each vector between those before and after it, (width - 1) // 2 of them before.

    Zeros stand for places outside the text, where `real_BT` is False, and for tokens of another document.
    """
    before, length = (width - 1) // 2, x_BTE.shape[1]
    after = width - 1 - before
    if real_BT is not None:
        x_BTE = x_BTE * real_BT.unsqueeze(-1).to(x_BTE.dtype)
    padded = F.pad(x_BTE, (0, 0, before, after))
    shifted = [padded[:, start : start + length] for start in range(width)]
    if document_ids_BT is not None:
        numbers = F.pad(document_ids_BT, (before, after), value=-1)
        same = [(numbers[:, start : start + length] == document_ids_BT).unsqueeze(-1) for start in range(width)]
        shifted = [part * near.to(part.dtype) for part, near in zip(shifted, same, strict=True)]
    return torch.cat(shifted, dim=-1)
