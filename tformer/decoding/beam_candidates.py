"""The best next tokens of one step of beam search: of every row on the device, then of every sentence on the host.

Only a few numbers per row leave the device, in one copy. The sums are fp64 from there on: exact sums of the fp32
log-probabilities, so that a hypothesis's score does not depend on how it was batched or ordered. Equal candidates are
ordered by token id, then by beam.

Legend: R rows, V vocabulary, N chunks of C tokens, k candidates of a row; S sentences, b beams, c = up to 2b candidates
of a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tformer.kernels.functions import find

NEVER = float("-inf")
CHUNK = 64


def top_candidates(logprobs_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` (<= V) largest fp32 values of each row and their ids, [R, k] each: largest first, equal ones by id.

    NaN counts as larger than any number, so that it is found.
    """
    kernels = find(may_build=False) if logprobs_RV.device.type == "cpu" else None
    if kernels is not None:
        return kernels.top(logprobs_RV, k)
    return _top_by_chunks(logprobs_RV, k)


def _top_by_chunks(logprobs_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_candidates` by PyTorch's operators.

    The k largest values lie in the k chunks with the largest maxima. Finding these reads the memory once at full speed,
    several times faster than `topk` over a whole vocabulary.
    """
    num_rows, vocab_size = logprobs_RV.shape
    chunks = vocab_size // CHUNK
    if chunks <= k:
        return _first_by_key(logprobs_RV, torch.arange(vocab_size, device=logprobs_RV.device).expand_as(logprobs_RV), k)
    whole = chunks * CHUNK
    values_RNC = logprobs_RV[:, :whole].unflatten(1, (chunks, CHUNK))
    chunks_RN = torch.arange(chunks, device=logprobs_RV.device).expand(num_rows, -1)
    _, best_Rk = _first_by_key(values_RNC.amax(-1), chunks_RN, k)
    # In increasing order of ids, as `_first_by_key` needs them.
    best_Rk1 = best_Rk.sort(-1).values[:, :, None]
    columns_RX = (best_Rk1 * CHUNK + torch.arange(CHUNK, device=logprobs_RV.device)).flatten(1)
    if whole < vocab_size:
        rest = torch.arange(whole, vocab_size, device=logprobs_RV.device).expand(num_rows, -1)
        columns_RX = torch.cat((columns_RX, rest), 1)
    return _first_by_key(logprobs_RV.gather(1, columns_RX), columns_RX, k)


def _first_by_key(values_RX: Tensor, ids_RX: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_candidates` of values whose ids increase along the row, by one int64 key that holds value and place."""
    bits_RX = (values_RX + 0.0).contiguous().view(torch.int32)  # + 0.0: -0.0 equals 0.0
    ordered_RX = torch.where(bits_RX < 0, bits_RX ^ 0x7FFFFFFF, bits_RX)  # integers in the order of the floats
    ordered_RX = ordered_RX.masked_fill(values_RX.isnan(), torch.iinfo(torch.int32).max)
    width = values_RX.shape[1]
    place_X = torch.arange(width - 1, -1, -1, device=values_RX.device)
    top_Rk = (ordered_RX.long() * (1 << 32) + place_X).topk(k, dim=-1, sorted=True).values
    index_Rk = width - 1 - (top_Rk & 0xFFFFFFFF)
    return values_RX.gather(1, index_Rk), ids_RX.gather(1, index_Rk)


@dataclass(frozen=True, slots=True)
class RankedCandidates:
    """The candidates of each sentence, in order of rank.

    beams_Sc, slots_Sc: each candidate's beam, and its place among the candidates of that beam.
    tokens_Sc, totals_Sc: its token and its new sum.
    finishing_Sc: candidates that end their hypothesis.
    next_Sb, alive_Sb: the candidates that the beams continue with; beams that are not alive have none.
    """

    beams_Sc: np.ndarray
    slots_Sc: np.ndarray
    tokens_Sc: np.ndarray
    totals_Sc: np.ndarray
    finishing_Sc: np.ndarray
    next_Sb: np.ndarray
    alive_Sb: np.ndarray


def hold_back(totals_Sbk: np.ndarray, tokens_Sbk: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Rule out `tokens`, except in a sentence without other candidates."""
    held_Sbk = np.where(np.isin(tokens_Sbk, tokens), NEVER, totals_Sbk)
    empty_S11 = (held_Sbk == NEVER).all((1, 2), keepdims=True)
    return np.where(empty_S11, totals_Sbk, held_Sbk)


def choose(totals_Sbk: np.ndarray, tokens_Sbk: np.ndarray, *, ends: Sequence[int]) -> RankedCandidates:
    """Every sentence's best 2b candidates (fairseq): an end of sequence among the first b finishes, the others
    continue.

    Each beam has one end of sequence, so b of 2b candidates continue; with e `ends`, b of (1 + e)b. A sum of -inf is
    never chosen.
    """
    sentences, beams, slots = totals_Sbk.shape
    beams_X, slots_X = (grid.ravel() for grid in np.indices((beams, slots)))
    totals_SX, tokens_SX = totals_Sbk.reshape(sentences, -1), tokens_Sbk.reshape(sentences, -1)
    order_SX = np.lexsort((np.broadcast_to(beams_X, totals_SX.shape), tokens_SX, -totals_SX), axis=-1)
    order_Sc = order_SX[:, : (1 + max(1, len(ends))) * beams]
    tokens_Sc = np.take_along_axis(tokens_SX, order_Sc, -1)
    totals_Sc = np.take_along_axis(totals_SX, order_Sc, -1)
    possible_Sc = totals_Sc > NEVER
    ends_Sc = np.isin(tokens_Sc, ends)
    finishing_Sc = possible_Sc & ends_Sc
    finishing_Sc[:, beams:] = False
    continues_Sc = possible_Sc & ~ends_Sc
    continues_Sc &= continues_Sc.cumsum(-1) <= beams
    next_Sb = np.argsort(~continues_Sc, axis=-1, kind="stable")[:, :beams]
    alive_Sb = np.take_along_axis(continues_Sc, next_Sb, -1)
    return RankedCandidates(beams_X[order_Sc], slots_X[order_Sc], tokens_Sc, totals_Sc, finishing_Sc, next_Sb, alive_Sb)
