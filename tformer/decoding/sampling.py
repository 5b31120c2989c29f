"""From logits to one token per row: pure functions on fp32 logits.

Legend: B rows, V vocabulary.

The order is that of the field (penalty, n-gram block, temperature, top-k, top-p, min-p, draw), so that settings found
elsewhere mean the same here. A token that is ruled out has the logit -inf; every function leaves at least one token.

Sources: repetition penalty arXiv 1909.05858 (CTRL); n-gram blocking arXiv 1705.04304; top-k arXiv 1805.04833;
top-p (nucleus) arXiv 1904.09751; min-p arXiv 2407.01082.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

NEVER = float("-inf")


def penalise_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by `penalty` and multiply negative ones by it.

    `seen_BV` is bool: the tokens of each row's prompt and completion so far.
    """
    penalised = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalised, logits_BV)


def block_tokens(logits_BV: Tensor, banned: Sequence[Sequence[int]]) -> Tensor:
    """Rule out `banned[row]` in each row; a row in which nothing would be left stays as it was."""
    rows = [row for row, ids in enumerate(banned) for _ in ids]
    if not rows:
        return logits_BV
    columns = [token for ids in banned for token in ids]
    blocked = logits_BV.clone()
    blocked[rows, columns] = NEVER
    empty_B1 = (blocked == NEVER).all(-1, keepdim=True)
    return torch.where(empty_B1, logits_BV, blocked)


def keep_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """Keep exactly the `k` most probable tokens of each row (all of them when the vocabulary is no larger)."""
    if k >= logits_BV.shape[-1]:
        return logits_BV
    values_Bk, indices_Bk = logits_BV.topk(k, dim=-1)
    return torch.full_like(logits_BV, NEVER).scatter(-1, indices_Bk, values_Bk)


def keep_top_p(logits_BV: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose probabilities sum to at least `p`."""
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    probabilities_BV = sorted_BV.softmax(-1)
    mass_before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
    dropped_BV = mass_before_BV >= p
    dropped_BV[:, 0] = False  # the cumulative sum's rounding must not drop the most probable token
    return logits_BV.masked_fill(torch.zeros_like(dropped_BV).scatter(-1, order_BV, dropped_BV), NEVER)


def keep_min_p(logits_BV: Tensor, min_p: float) -> Tensor:
    """Keep tokens at least `min_p` times as probable as the most probable one."""
    floor_B1 = logits_BV.amax(-1, keepdim=True) + math.log(min_p)
    return logits_BV.masked_fill(logits_BV < floor_B1, NEVER)


def reshape(logits_BV: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The logits of the distribution that is sampled from: temperature (> 0), then the three truncations."""
    if temperature != 1.0:
        # The largest logit is moved to 0 first: dividing by a tiny temperature must not overflow to inf - inf.
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature
    if top_k > 0:
        logits_BV = keep_top_k(logits_BV, top_k)
    if top_p < 1.0:
        logits_BV = keep_top_p(logits_BV, top_p)
    if min_p > 0.0:
        logits_BV = keep_min_p(logits_BV, min_p)
    return logits_BV


def draw(logits_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Inverse-CDF sampling: the token at which each row's cumulative probability passes its uniform in [0, 1).

    One number per row decides, so a row's draw does not depend on its neighbours. fp64 keeps the cumulative sum over
    a large vocabulary exact enough that every token keeps its share, and u * total below total.
    """
    cumulative_BV = logits_BV.double().softmax(-1).cumsum(-1)
    targets_B1 = uniforms_B[:, None].to(cumulative_BV) * cumulative_BV[:, -1:]
    # right=True finds the first token with cumulative > target, which never has probability zero.
    return torch.searchsorted(cumulative_BV, targets_B1, right=True).squeeze(-1)


def chosen_logprobs(logits_BV: Tensor, ids_B: Tensor) -> Tensor:
    """log softmax of the logits at the chosen ids, [B]."""
    return logits_BV.gather(-1, ids_B[:, None]).squeeze(-1) - logits_BV.logsumexp(-1)


class UniformStream:
    """The uniforms of one completion: a function of (seed, row, sample) and the step, nothing else."""

    BLOCK = 64

    def __init__(self, seed: int, row: int, sample: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, row, sample))))
        self._block: Iterator[float] = iter(())

    def next(self) -> float:
        """The next number in [0, 1)."""
        value = next(self._block, None)
        if value is None:
            self._block = iter(self._generator.random(self.BLOCK).tolist())
            value = next(self._block)
        return value


class NgramBlocker:
    """Which tokens would complete an n-gram that a sequence already holds."""

    def __init__(self, n: int, history: Sequence[int]) -> None:
        self._n = n
        self._tail: list[int] = []  # the last n - 1 tokens
        self._followers: dict[tuple[int, ...], set[int]] = {}
        for token in history:
            self.push(token)

    def push(self, token: int) -> None:
        """Take note of the sequence's next token."""
        if len(self._tail) == self._n - 1:
            self._followers.setdefault(tuple(self._tail), set()).add(token)
        self._tail = [*self._tail, token][max(0, len(self._tail) + 2 - self._n) :]

    def banned(self) -> list[int]:
        """Tokens that must not come next, in increasing order."""
        if len(self._tail) < self._n - 1:
            return []
        return sorted(self._followers.get(tuple(self._tail), ()))
