"""The table of attention kinds."""

from __future__ import annotations

from tformer.nn.attention.multi_head import FullAttentionOptions

AttentionOptions = FullAttentionOptions  # becomes a union with the second kind
