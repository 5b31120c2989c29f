"""What a beam's own tokens forbid or discourage: repeated n-grams and repeated tokens; and the token that is forced.

The rules are those of `sampling`, for many rows that change places at every step: they look at the rows' tokens afresh
instead of keeping a state per row.

`exempt` are the ends of sequence, to which neither applies: one ends a row and cannot repeat.

Legend: R rows, V vocabulary, T tokens so far, padded on the left with -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tformer.decoding.sampling import block_tokens, penalise_repetition

NO_TOKEN = -1
NEVER = float("-inf")


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
