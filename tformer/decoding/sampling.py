"""From logits to the next token: penalties, n-gram blocking, truncation, random draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tformer.decoding.settings import GenerationSettings
from tformer.errors import TformerError

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


NO_TOKEN = -1


def pad_left(histories: Sequence[Sequence[int]]) -> np.ndarray:
    """int64 [R, T]."""
    longest = max(map(len, histories), default=0)
    rows = [[NO_TOKEN] * (longest - len(history)) + list(history) for history in histories]
    return np.array(rows, dtype=np.int64).reshape(len(histories), longest)


def repeated_ngrams(tokens_RT: np.ndarray, n: int) -> list[list[int]]:
    """The tokens that would complete an n-gram that the row already holds, in increasing order (`NgramBlocker`)."""
    rows, length = tokens_RT.shape
    banned: list[set[int]] = [set() for _ in range(rows)]
    tail_Rm = tokens_RT[:, length - (n - 1) :] if n > 1 else tokens_RT[:, :0]
    starts = length - n + 1  # how many n-grams there is room for
    if starts <= 0:
        return [[] for _ in range(rows)]
    followers_RN = tokens_RT[:, n - 1 :]
    repeated_RN = followers_RN != NO_TOKEN
    for offset in range(n - 1):
        tail_R1 = tail_Rm[:, offset, None]
        repeated_RN = repeated_RN & (tokens_RT[:, offset : offset + starts] == tail_R1) & (tail_R1 != NO_TOKEN)
    for row, start in zip(*np.nonzero(repeated_RN), strict=True):
        banned[row].add(int(followers_RN[row, start]))
    return [sorted(ids) for ids in banned]


def block_repeated_ngrams(logprobs_RV: Tensor, tokens_RT: np.ndarray, n: int, *, exempt: Sequence[int] = ()) -> Tensor:
    """Rule out the tokens of `repeated_ngrams`; a row in which nothing would be left stays as it was."""
    banned = repeated_ngrams(tokens_RT, n)
    return block_tokens(logprobs_RV, [[token for token in ids if token not in exempt] for ids in banned])


def penalise_repeated(
    logprobs_RV: Tensor, tokens_RT: np.ndarray, penalty: float, *, exempt: Sequence[int] = ()
) -> Tensor:
    """Multiply the log-probabilities of tokens that the row already holds by `penalty` (arXiv 1909.05858)."""
    if not tokens_RT.shape[1]:
        return logprobs_RV
    # The padding repeats the row's last token: what is written twice must be the same twice. A row of padding alone
    # writes its token 0 back as it was.
    filled_RT = torch.from_numpy(np.where(tokens_RT == NO_TOKEN, tokens_RT[:, -1:], tokens_RT)).to(logprobs_RV.device)
    seen_RT = filled_RT != NO_TOKEN
    for token in exempt:
        seen_RT &= filled_RT != token
    columns_RT = filled_RT.clamp_min(0)
    return logprobs_RV.scatter(1, columns_RT, penalise_repetition(logprobs_RV.gather(1, columns_RT), seen_RT, penalty))


def force_token(scores_RV: Tensor, rows_R: Tensor, token: int) -> Tensor:
    """In these rows (bool [R]) `token` is certain: log-probability 0, the others ruled out."""
    certain_V = torch.full_like(scores_RV[0], NEVER)
    certain_V[token] = 0.0
    return torch.where(rows_R[:, None], certain_V, scores_RV)


class TokenChooser:
    """Holds, per sequence, what the settings look back on: seen tokens, n-grams, and the stream of random numbers."""

    def __init__(
        self,
        settings: GenerationSettings,
        *,
        keys: Sequence[tuple[int, int]],
        histories: Sequence[Sequence[int]],
        limits: Sequence[int] | None = None,
        vocab_size: int | None = None,
        suppressed: Sequence[int] = (),
    ) -> None:
        """
        Args:
            keys: (row, sample) of each sequence.
            histories: what the settings look back on before its first token.
            limits: the most tokens of each sequence, where an end is forced; None: `settings.max_new_tokens`.
            vocab_size: larger ids are not chosen.
            suppressed: nor are these.
        """
        self._settings = settings
        self._vocab_size = vocab_size
        self._suppressed_N = torch.tensor(suppressed, dtype=torch.long)  # goes where the first logits are
        self._limits = [settings.max_new_tokens] * len(keys) if limits is None else list(limits)
        self._num_chosen = 0  # tokens of every live sequence
        self._histories = histories
        self._seen_BV: Tensor | None = None  # made with the first logits, which tell V and the device
        self._blockers = (
            [NgramBlocker(settings.no_repeat_ngram, ids) for ids in histories] if settings.no_repeat_ngram else []
        )
        self._uniforms = [] if settings.greedy else [UniformStream(settings.seed, *key) for key in keys]
        self._checked = False

    def choose(self, logits_BV: Tensor) -> tuple[list[int], list[float] | None]:
        """One token per sequence, and its log-probability under the model when the settings ask for it."""
        settings = self._settings
        logits_BV = logits_BV[:, : self._vocab_size].float()
        self._check_once(logits_BV)
        scores_BV = self._without_suppressed(logits_BV)
        if settings.repetition_penalty != 1.0:
            scores_BV = penalise_repetition(scores_BV, self._seen(logits_BV), settings.repetition_penalty)
        if self._blockers:
            scores_BV = block_tokens(scores_BV, [self._banned(blocker) for blocker in self._blockers])
        if settings.ends and self._num_chosen < settings.min_new_tokens:
            scores_BV = block_tokens(scores_BV, [self._ends(scores_BV)] * len(scores_BV))
        self._num_chosen += 1
        if settings.forced_eos is not None and self._num_chosen in self._limits:
            at_last_B = torch.tensor([limit == self._num_chosen for limit in self._limits], device=scores_BV.device)
            scores_BV = force_token(scores_BV, at_last_B, settings.forced_eos)
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
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, ids_B[:, None], True)
        ids = ids_B.tolist()
        for blocker, token in zip(self._blockers, ids, strict=False):
            blocker.push(token)
        return ids, chosen_logprobs(logits_BV, ids_B).tolist() if settings.logprobs else None

    def compact(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        self._limits = [self._limits[row] for row in rows]
        self._blockers = [self._blockers[row] for row in rows] if self._blockers else []
        self._uniforms = [self._uniforms[row] for row in rows] if self._uniforms else []
        if self._seen_BV is not None:
            self._seen_BV = self._seen_BV[list(rows)]

    def _without_suppressed(self, logits_BV: Tensor) -> Tensor:
        if not len(self._suppressed_N):
            return logits_BV
        self._suppressed_N = self._suppressed_N[self._suppressed_N < logits_BV.shape[-1]].to(logits_BV.device)
        return logits_BV.index_fill(-1, self._suppressed_N, NEVER)

    def _banned(self, blocker: NgramBlocker) -> list[int]:
        return [token for token in blocker.banned() if token not in self._settings.ends]

    def _ends(self, logits_BV: Tensor) -> list[int]:
        return [token for token in self._settings.ends if token < logits_BV.shape[-1]]

    def _seen(self, logits_BV: Tensor) -> Tensor:
        if self._seen_BV is None:
            seen_BV = torch.zeros(logits_BV.shape, dtype=torch.bool)
            for row, ids in enumerate(self._histories):
                seen_BV[row, list(ids)] = True
            seen_BV[:, self._ends(logits_BV)] = False
            self._seen_BV = seen_BV.to(logits_BV.device)
        return self._seen_BV

    def _check_once(self, logits_BV: Tensor) -> None:
        if not self._checked:
            self._checked = True
            if bool(logits_BV.isnan().any()):
                raise TformerError(
                    "the model's logits are not numbers (NaN)", hint="its weights are damaged, or training diverged"
                )
