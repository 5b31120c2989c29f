"""The table of attention kinds."""

from __future__ import annotations

from tformer.nn.attention.multi_head import FullAttentionOptions, MultiHeadAttention

AttentionOptions = FullAttentionOptions  # becomes a union with the second kind

ATTENTION: dict[str, type[MultiHeadAttention]] = {"full": MultiHeadAttention}

__all__ = ["ATTENTION", "AttentionOptions", "FullAttentionOptions", "MultiHeadAttention"]
