"""From logits to the next token of every row: penalties, n-gram blocking, truncation, random draws.

The order is that of the field (penalty, n-gram block, temperature, top-k, top-p, min-p, draw), so that
settings found elsewhere mean the same here. A token that is ruled out has the logit -inf; every function leaves at
least one token.

Sources: repetition penalty arXiv 1909.05858 (CTRL); n-gram blocking arXiv 1705.04304; top-k arXiv 1805.04833;
top-p (nucleus) arXiv 1904.09751; min-p arXiv 2407.01082.

Legend: B rows, V vocabulary, T tokens so far, padded on the left with -1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tformer.decoding.settings import GenerationSettings
from tformer.support.errors import require_finite

NEVER = float("-inf")
NO_TOKEN = -1
LOGIT_ERROR = 2.0**-19
"""Rounding error of two fp32 operations on magnitudes up to 32: of a logit, and of its distance to the largest one."""

# --- rules on repeated and on forced tokens ---------------------------------------------------------------------------


def pad_left(histories: Sequence[Sequence[int]]) -> np.ndarray:
    """Rows of tokens as int64 [B, T]."""
    longest = max(map(len, histories), default=0)
    rows = [[NO_TOKEN] * (longest - len(history)) + list(history) for history in histories]
    return np.array(rows, dtype=np.int64).reshape(len(histories), longest)


def penalize_repetition(logits_BV: Tensor, tokens_BT: np.ndarray, penalty: float, *, exempt: Sequence[int]) -> Tensor:
    """Divide positive logits of tokens that the row already holds by `penalty` and multiply negative ones by it.

    exempt: the ends of sequence, which end a row and cannot repeat.
    """
    if not tokens_BT.shape[1]:
        return logits_BV
    # The padding repeats the row's last token: the same value is written twice. A row of padding alone writes the value
    # of its token 0 back unchanged.
    filled_BT = torch.from_numpy(np.where(tokens_BT == NO_TOKEN, tokens_BT[:, -1:], tokens_BT)).to(logits_BV.device)
    seen_BT = filled_BT != NO_TOKEN
    for token in exempt:
        seen_BT &= filled_BT != token
    columns_BT = filled_BT.clamp_min(0)
    values_BT = logits_BV.gather(1, columns_BT)
    penalized_BT = torch.where(values_BT > 0, values_BT / penalty, values_BT * penalty)
    return logits_BV.scatter(1, columns_BT, torch.where(seen_BT, penalized_BT, values_BT))


def repeated_ngrams(tokens_BT: np.ndarray, n: int) -> list[list[int]]:
    """The tokens that would complete an n-gram that the row already holds, in increasing order."""
    rows, length = tokens_BT.shape
    starts = length - n + 1  # number of n-grams that fit
    if starts <= 0:
        return [[] for _ in range(rows)]
    followers_BN = tokens_BT[:, n - 1 :]
    repeated_BN = followers_BN != NO_TOKEN
    for offset in range(n - 1):
        tail_B1 = tokens_BT[:, length - (n - 1) + offset, None]
        repeated_BN = repeated_BN & (tokens_BT[:, offset : offset + starts] == tail_B1) & (tail_B1 != NO_TOKEN)
    banned: list[set[int]] = [set() for _ in range(rows)]
    for row, start in zip(*np.nonzero(repeated_BN), strict=True):
        banned[row].add(int(followers_BN[row, start]))
    return [sorted(ids) for ids in banned]


def block_repeated_ngrams(logits_BV: Tensor, tokens_BT: np.ndarray, n: int, *, exempt: Sequence[int]) -> Tensor:
    """Rule out the tokens of `repeated_ngrams`; a row without other tokens is unchanged."""
    banned = repeated_ngrams(tokens_BT, n)
    return block_tokens(logits_BV, [[token for token in ids if token not in exempt] for ids in banned])


def block_tokens(logits_BV: Tensor, banned: Sequence[Sequence[int]]) -> Tensor:
    """Rule out `banned[row]` in each row; a row without other tokens is unchanged."""
    rows = [row for row, ids in enumerate(banned) for _ in ids]
    if not rows:
        return logits_BV
    columns = [token for ids in banned for token in ids]
    blocked = logits_BV.clone()
    blocked[rows, columns] = NEVER
    empty_B1 = (blocked == NEVER).all(-1, keepdim=True)
    return torch.where(empty_B1, logits_BV, blocked)


def force_token(logits_BV: Tensor, rows_B: Tensor, token: int, *, counts: bool) -> Tensor:
    """Rule out all tokens but `token` in these rows (bool [B]).

    counts: it keeps its logit; otherwise it is certain: log-probability 0.
    """
    forced_BV = torch.full_like(logits_BV, NEVER)
    forced_BV[:, token] = logits_BV[:, token] if counts else 0.0
    return torch.where(rows_B[:, None], forced_BV, logits_BV)


# --- truncation and draws ---------------------------------------------------------------------------------------------


def keep_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """Keep exactly the `k` most probable tokens of each row (all of them when the vocabulary is no larger)."""
    if k >= logits_BV.shape[-1]:
        return logits_BV
    values_Bk, indices_Bk = logits_BV.topk(k, dim=-1)
    return torch.full_like(logits_BV, NEVER).scatter(-1, indices_Bk, values_Bk)


def keep_top_p(logits_BV: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose probabilities sum to at least `p`.

    The sums are fp64, so that only the rounding of a logit to fp32 is left: exp(log 0.5) + exp(log 0.3) is 0.8 - 4e-8.
    A sum S moves by at most 2 S (1 - S) d when no logit moves by more than d: a sum that close to `p` counts as equal
    to it. The tolerance does not grow for bf16 logits, which are exact in fp32: the set is that of the distribution
    that is drawn from.
    """
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    mass_BV = (sorted_BV - sorted_BV[:, :1]).exp().cumsum(-1, dtype=torch.float64)
    last_B1 = torch.searchsorted(mass_BV, mass_BV[:, -1:] * (p - 2.0 * p * (1.0 - p) * LOGIT_ERROR))
    dropped_BV = torch.arange(mass_BV.shape[-1], device=mass_BV.device) > last_B1
    return logits_BV.scatter(-1, order_BV, sorted_BV.masked_fill(dropped_BV, NEVER))


def keep_min_p(logits_BV: Tensor, min_p: float) -> Tensor:
    """Keep tokens at least `min_p` times as probable as the most probable one."""
    floor_B1 = logits_BV.amax(-1, keepdim=True) + math.log(min_p)
    return logits_BV.masked_fill(logits_BV < floor_B1, NEVER)


def reshape(
    logits_BV: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
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


# --- the choice of the next tokens ------------------------------------------------------------------------------------


class TokenChooser:
    """Chooses the next token of every live sequence; holds the tokens so far and the random state.

    Repetition penalty and n-gram blocking leave the ends of sequence alone: an end is written once.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        *,
        keys: Sequence[tuple[int, int]],
        histories: Sequence[Sequence[int]],
        limits: Sequence[int],
        vocab_size: int | None = None,
        suppressed: Sequence[int] = (),
    ) -> None:
        """
        Args:
            keys: (row, sample) of each sequence.
            histories: the tokens before its first one.
            limits: maximum number of tokens of each sequence, where an end is forced.
            vocab_size: ids from this number on are not chosen.
            suppressed: further ids that are not chosen.
        """
        self._settings = settings
        self._vocab_size = vocab_size
        self._suppressed_N = torch.tensor(suppressed, dtype=torch.long)  # moves to the device of the first logits
        self._limits = list(limits)
        self._num_chosen = 0  # tokens of every live sequence
        looks_back = bool(settings.no_repeat_ngram) or settings.repetition_penalty != 1.0
        self._tokens_BT = pad_left(histories) if looks_back else None
        self._uniforms = [] if settings.greedy else [UniformStream(settings.seed, *key) for key in keys]

    def choose(self, logits_BV: Tensor) -> tuple[list[int], list[float] | None]:
        """One token per sequence, and its log-probability under the model when the settings ask for it."""
        settings = self._settings
        logits_BV = logits_BV[:, : self._vocab_size].float()
        require_finite(logits_BV.amax(-1), "logits")  # the largest shows NaN and +inf; -inf rules a token out
        scores_BV = logits_BV
        if len(self._suppressed_N):
            self._suppressed_N = self._suppressed_N[self._suppressed_N < logits_BV.shape[-1]].to(logits_BV.device)
            scores_BV = logits_BV.index_fill(-1, self._suppressed_N, NEVER)
        scores_BV = self._with_rules(scores_BV)
        if settings.greedy:
            ids_B = scores_BV.argmax(-1)
        else:
            scores_BV = reshape(
                scores_BV,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                min_p=settings.min_p,
            )
            uniforms = [stream.next() for stream in self._uniforms]
            ids_B = draw(scores_BV, torch.tensor(uniforms, dtype=torch.float64, device=scores_BV.device))
        ids = ids_B.tolist()
        if self._tokens_BT is not None:
            self._tokens_BT = np.concatenate((self._tokens_BT, np.array(ids, dtype=np.int64)[:, None]), axis=1)
        return ids, chosen_logprobs(logits_BV, ids_B).tolist() if settings.logprobs else None

    def compact(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        self._limits = [self._limits[row] for row in rows]
        self._uniforms = [self._uniforms[row] for row in rows] if self._uniforms else []
        if self._tokens_BT is not None:
            self._tokens_BT = self._tokens_BT[list(rows)]

    def _with_rules(self, scores_BV: Tensor) -> Tensor:
        """The scores with repeated tokens penalized, and with ends of sequence ruled out or forced."""
        settings = self._settings
        ends = [token for token in settings.ends if token < scores_BV.shape[-1]]
        if self._tokens_BT is not None and settings.repetition_penalty != 1.0:
            scores_BV = penalize_repetition(scores_BV, self._tokens_BT, settings.repetition_penalty, exempt=ends)
        if self._tokens_BT is not None and settings.no_repeat_ngram:
            scores_BV = block_repeated_ngrams(scores_BV, self._tokens_BT, settings.no_repeat_ngram, exempt=ends)
        if ends and self._num_chosen < settings.min_new_tokens:
            scores_BV = block_tokens(scores_BV, [ends] * len(scores_BV))
        self._num_chosen += 1
        if settings.last_token is not None and self._num_chosen in self._limits:
            at_limit_B = torch.tensor([limit == self._num_chosen for limit in self._limits], device=scores_BV.device)
            scores_BV = force_token(scores_BV, at_limit_B, settings.last_token, counts=False)
        return scores_BV
