"""BigBird (arXiv 2007.14062): a window of blocks, global blocks and random blocks, under one softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.attention.mechanism import ProjectionOptions


@dataclass(frozen=True)
class BigBirdOptions(ProjectionOptions):
    """Options of BigBird's block-sparse attention."""

    kind: Literal["bigbird"] = "bigbird"
    block: int = 64  # positions of a block
    window_blocks: int = 3  # blocks in sight around a query's own; odd
    global_blocks: int = 1  # so many first and so many last blocks see all and are seen by all (causal: first only)
    random_blocks: int = 3  # further blocks per block of queries, drawn once for every layer
    seed: int = 0  # of that draw
