"""Position encodings: the hooks through which a kind acts on a model, and the two simplest kinds, none and learned.

A kind overrides the hooks that it needs. All hooks work on position tensors, so left padding, caches and packed
documents need no separate code. Adding a kind: one file like this one, and one row in `positions/__init__.py`.

Shape legend: B batch, T queries, S keys, D d_model, H query heads, K kv heads, h head_dim. Position tensors are long
[B, T], or [1, T] when every row has the same positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.options import require


@dataclass(frozen=True)
class PositionSizes:
    """The sizes of a stack that a kind of positions may need. grid: (rows, columns, has a class token) of an image."""

    d_model: int
    num_heads: int
    head_dim: int
    value_dim: int
    max_seq_len: int
    bidirectional: bool
    grid: tuple[int, int, bool] | None = None


class Positions(nn.Module):
    """Base class of every kind: hooks that change nothing, and facts about the kind.

    The `has_*` flags are derived: each says whether the class overrides that hook.

    Attributes:
        kind: the name in recipes.
        about: one sentence for pages and help.
        per_layer: each layer has its own tables; else one module serves the whole stack.
        trained: it has parameters.
        per_head: one bias for each head, so that all layers must have the same number of heads.
        changes_scores: it adds to the scores of attention or to its output.
        acts_in_attention: it changes scores, or turns queries and keys.
        added_size: root mean square of the vectors that `embed` adds, whatever the size of embeddings; None: they start
            with the standard deviation of embeddings, or nothing is added.
        fixed_length: inputs longer than `max_seq_len` are impossible.
        padding_position: the position of padding; None: the number of real tokens before it.
        max_positions: number of positions that can be encoded; None: any number.
    """

    kind: ClassVar[str]
    about: ClassVar[str]
    per_layer: bool = False
    trained: ClassVar[bool] = False
    per_head: ClassVar[bool] = False
    has_embed: ClassVar[bool] = False
    has_rotate: ClassVar[bool] = False
    has_bias: ClassVar[bool] = False
    has_score: ClassVar[bool] = False
    has_mix: bool = False
    changes_scores: ClassVar[bool] = False
    acts_in_attention: ClassVar[bool] = False
    added_size: ClassVar[float | None] = None
    fixed_length: ClassVar[bool] = False
    padding_position: int | None = None
    max_positions: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.has_embed = cls.embed is not Positions.embed
        cls.has_rotate = cls.rotate is not Positions.rotate
        cls.has_bias = cls.bias is not Positions.bias
        cls.has_score = cls.score is not Positions.score
        cls.has_mix = cls.mix is not Positions.mix
        cls.changes_scores = cls.has_bias or cls.has_score or cls.has_mix
        cls.acts_in_attention = cls.changes_scores or cls.has_rotate

    def embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        """The input of the stack with positions added, in x's dtype."""
        return x_BTD

    def prepare(self, x: Tensor, pos_BT: Tensor, *, heads: int) -> Any:
        """The part of `rotate` that depends on positions only, for tensors like `x`; computed once for all layers."""
        return None

    def rotate(
        self, q_BHTh: Tensor, k_BKTh: Tensor, q_pos_BT: Tensor, k_pos_BT: Tensor, prepared: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and new keys, rotated by their positions; `prepared` serves both when their positions are equal."""
        return q_BHTh, k_BKTh

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        """[B or 1, H, T, S], added to the scaled scores."""
        raise NotImplementedError(f"{type(self).__name__} has no score bias")

    def score(self, q_BHTh: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        """[B, H, T, S], added to q.k before the scale."""
        raise NotImplementedError(f"{type(self).__name__} has no score term")

    def mix(self, weights_BHTS: Tensor, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        """[B, H, T, value_dim], added to the output of attention."""
        raise NotImplementedError(f"{type(self).__name__} has no value term")

    def flops(self, *, num_heads: int, length: float) -> float:
        """Forward operations of this module's own matrix products for `length` queries of one example.

        The products of `score` and `mix` with the rows of their tables: 2 per head, query and table element.
        """
        if not (self.has_score or self.has_mix):
            return 0.0
        return 2.0 * num_heads * length * sum(table.numel() for table in self.parameters())


class NoPositions(Positions):
    """No position information (NoPE): order follows from the causal mask alone (arXiv 2305.19466)."""

    kind = "none"
    about = "No position information: order follows from the causal mask alone (arXiv 2305.19466)."


class LearnedPositions(Positions):
    """A learned vector per position, added to the embeddings (GPT, BERT, BART): weight [max_seq_len + offset, D].

    The caller refuses lengths above `max_seq_len` on the host.
    """

    kind = "learned"
    about = "A learned vector per position, added to the embeddings (GPT, BERT, BART)."
    trained = True
    fixed_length = True

    def __init__(self, options: LearnedOptions, *, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        self.options = options
        self.max_positions = max_seq_len
        if options.ids == "nonpad_cumsum":
            self.padding_position = max(-1, -options.offset)  # without an offset there is no row before the first
        self.weight = nn.Parameter(torch.empty(max_seq_len + options.offset, d_model))
        nn.init.normal_(self.weight, std=0.02)

    def embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        return x_BTD + F.embedding(pos_BT + self.options.offset, self.weight).to(x_BTD.dtype)


@dataclass(frozen=True)
class NoPositionsOptions:
    """No positional encoding (arXiv 2305.19466)."""

    module: ClassVar = NoPositions
    kind: Literal["none"] = "none"

    def build(self, sizes: PositionSizes) -> Positions:
        return NoPositions()


@dataclass(frozen=True)
class LearnedOptions:
    """Learned absolute positions: a vector for each position (arXiv 1705.03122).

    offset: rows at the start of the table without a position: 2 in BART and OPT, after the padding id in RoBERTa.

    ids: the row of padding. arange: the row of the next position. nonpad_cumsum (RoBERTa, arXiv 1907.11692): the row
    before the first position, so that row = cumsum(non-pad) · non-pad + offset − 1.
    """

    module: ClassVar = LearnedPositions
    kind: Literal["learned"] = "learned"
    offset: int = 0  # rows at the start of the table without a position
    ids: Literal["arange", "nonpad_cumsum"] = "arange"  # nonpad_cumsum: padding has no position, as in RoBERTa

    def __post_init__(self) -> None:
        require(self.offset >= 0, f"offset must be at least 0, found {self.offset}")

    def build(self, sizes: PositionSizes) -> Positions:
        return LearnedPositions(self, d_model=sizes.d_model, max_seq_len=sizes.max_seq_len)
