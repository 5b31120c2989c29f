"""Table of attention kinds. To add one: a file with its mechanism and its options, and those in the union below."""

from __future__ import annotations

from typing import get_args

from tformer.nn.attention.additive import AdditiveOptions
from tformer.nn.attention.bigbird import BigBirdOptions
from tformer.nn.attention.context import AttentionContext
from tformer.nn.attention.core import FullAttentionOptions
from tformer.nn.attention.disentangled import DisentangledOptions
from tformer.nn.attention.linformer import LinformerOptions
from tformer.nn.attention.mechanism import AttentionSizes, Mechanism, ProjectionOptions
from tformer.nn.attention.performer import PerformerOptions
from tformer.nn.attention.sliding_window import SlidingWindowOptions

AttentionOptions = (
    FullAttentionOptions
    | AdditiveOptions
    | DisentangledOptions
    | SlidingWindowOptions
    | BigBirdOptions
    | LinformerOptions
    | PerformerOptions
)

ATTENTION: dict[str, type[ProjectionOptions]] = {options.kind: options for options in get_args(AttentionOptions)}
"""The options of each kind, by its name in recipes; `options.mechanism` is its class."""


def cross_attention_options(options: ProjectionOptions) -> ProjectionOptions:
    """Options of cross-attention beside self-attention of a kind: the same, or full attention if it cannot cross."""
    if options.mechanism.cross:
        return options
    return FullAttentionOptions(
        qkv_bias=options.qkv_bias,
        out_bias=options.out_bias,
        scale=options.scale,
        qk_norm=options.qk_norm,
        qk_norm_eps=options.qk_norm_eps,
        softcap=options.softcap,
    )


__all__ = [
    "ATTENTION",
    "AttentionContext",
    "AttentionOptions",
    "AttentionSizes",
    "FullAttentionOptions",
    "Mechanism",
    "ProjectionOptions",
    "cross_attention_options",
]
