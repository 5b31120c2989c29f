"""What a token costs: floating-point operations of training and of the forward pass alone.

A matrix product with N weights takes 2 N operations a token forward and twice that backward: 6 N. Attention's scores
and weighted sum take 4 d a key and layer forward, so over T keys 12 L d T (arXiv 2204.02311, appendix B; nanoGPT).
Norms, softmax and activations are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

BACKWARD_AND_FORWARD = 3
"""The backward pass costs two forward passes: one for the inputs' gradients, one for the weights'."""


def flops_per_token(
    num_matmul_params: int, num_layers: int, d_attention: int, seq_len: float, *, causal: bool = False
) -> float:
    """Operations per trained token, 6 N + 12 L d T.

    num_matmul_params: weights that take part in products, output projection included, embedding look-ups not.
    d_attention: query heads times head size. `causal` counts only the keys that a query may see, (T + 1) / 2 on
    average, which is what a kernel that skips the others has to do; shares of peak are by custom reported without it.
    """
    keys = (seq_len + 1) / 2 if causal else seq_len
    return BACKWARD_AND_FORWARD * forward_flops_per_token(num_matmul_params, num_layers, d_attention, keys)


def forward_flops_per_token(num_matmul_params: int, num_layers: int, d_attention: int, num_keys: float) -> float:
    """Operations to process one token that attends to `num_keys` keys, 2 N + 4 L d S: one step of decoding."""
    return 2.0 * num_matmul_params + 4.0 * num_layers * d_attention * num_keys


def attention_flops(layers: Iterable[tuple[float, float]]) -> float:
    """Operations of all layers' attention for one query, forward: the sum of 4 d S over each layer's (d, S).

    d: query heads times head size. S: keys that the query looks at, or what else a kind does in keys' worth of work.
    """
    return sum(4.0 * count * d_attention * keys for (d_attention, keys), count in Counter(layers).items())
