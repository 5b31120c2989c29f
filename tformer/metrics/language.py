"""How well a model predicts text: perplexity, and bits per byte, which does not depend on the tokenizer."""

from __future__ import annotations

import math


def perplexity(mean_nll_nats: float) -> float:
    """exp of the mean negative log-likelihood per token; infinite where a float cannot hold it."""
    try:
        return math.exp(mean_nll_nats)
    except OverflowError:
        return math.inf


def bits_per_byte(nll_sum_nats: float, num_bytes: int) -> float:
    """nats / ln 2 / bytes: the bits a coder with this model spends on each UTF-8 byte of the text."""
    if num_bytes <= 0:
        raise ValueError(f"bits per byte needs at least one byte, found {num_bytes}")
    return nll_sum_nats / math.log(2) / num_bytes
