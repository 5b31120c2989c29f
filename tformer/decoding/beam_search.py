"""Beam search over any `Stepper`: the best continuations of every sentence, by the conventions of fairseq.

At each step a sentence's beams give 2 x beam candidate tokens. Only the first `beam` of them may end a hypothesis; the
others continue, so that ends of sequence never empty the beam. A finished hypothesis's sum of log-probabilities is
divided by a length penalty (`settings`). A sentence leaves the batch as soon as it is done; its search does not depend
on the other sentences.

The state of a search (live hypotheses, scores, finished hypotheses) is kept on the host in numpy and fp64: a step costs
one copy of a few numbers per row to it and one back.

Legend: S live sentences, b beams, R = S b rows of the stepper, V vocabulary, T tokens, k candidates of a beam, c
candidates of a sentence.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tformer.decoding.beam_candidates import NEVER, RankedCandidates, choose, hold_back, top_candidates
from tformer.decoding.sampling import block_repeated_ngrams, force_token, pad_left, penalize_repetition
from tformer.decoding.settings import BeamSettings, FinishReason, Hypothesis
from tformer.decoding.stepper import Stepper
from tformer.support.errors import InputError, require_finite
from tformer.workers.work import ShouldStop, never


class FinishedHypotheses:
    """The finished hypotheses of each sentence.

    Attributes:
        counts: number per sentence, int [S].
        worst_kept: score of the `beam_size`-th best of each sentence, -inf while there are fewer, float [S].
    """

    def __init__(self, settings: BeamSettings, *, num_sentences: int) -> None:
        self._settings = settings
        self._found: list[list[Hypothesis]] = [[] for _ in range(num_sentences)]
        self._scores: list[list[float]] = [[] for _ in range(num_sentences)]
        self.counts = np.zeros(num_sentences, dtype=np.int64)
        self.worst_kept = np.full(num_sentences, NEVER)

    def add(
        self,
        sentence: int,
        *,
        ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        total: float,
        reason: FinishReason,
    ) -> None:
        """Add a hypothesis. `total`: the sum that ranks it: `logprobs` with penalties."""
        score = total / self._settings.penalty(len(ids))
        self._found[sentence].append(Hypothesis(ids=ids, logprobs=logprobs, score=score, finish_reason=reason))
        scores = self._scores[sentence]
        insort(scores, score)
        self.counts[sentence] += 1
        if len(scores) >= self._settings.beam_size:
            self.worst_kept[sentence] = scores[-self._settings.beam_size]

    def ranked(self) -> list[list[Hypothesis]]:
        """All hypotheses of each sentence, best first; equal scores in the order in which they finished.

        Whole hypotheses come before interrupted ones, whose scores lack their missing tokens.
        """
        return [sorted(found, key=lambda h: (h.finish_reason == "interrupted", -h.score)) for found in self._found]


@dataclass(frozen=True, slots=True)
class Moves:
    """The next calls of the stepper.

    Attributes:
        kept: sentences to keep; None: all.
        rows_R: the row that each row becomes; None: itself.
        tokens_R: the token of each row.
    """

    kept: np.ndarray | None
    rows_R: np.ndarray | None
    tokens_R: np.ndarray


class BeamState:
    """The live hypotheses of the live sentences, and the finished ones. An empty beam has the sum -inf."""

    def __init__(
        self,
        settings: BeamSettings,
        *,
        limits: Sequence[int],
        histories: Sequence[Sequence[int]],
        suppressed: Sequence[int] = (),
    ) -> None:
        """`limits`: maximum number of new tokens of each sentence; `histories`: the tokens before them."""
        self._settings, self._suppressed = settings, suppressed
        self._length = 0  # new tokens of every live hypothesis
        self._sentences_S = np.arange(len(limits))  # their numbers among all sentences
        self._limits_S = np.minimum(np.asarray(limits, dtype=np.int64), settings.max_new_tokens)
        # One empty hypothesis: several would all offer the same tokens.
        self._totals_Sb = np.full((len(limits), settings.beam_size), NEVER)
        self._totals_Sb[:, 0] = 0.0
        self._looks_back = bool(settings.no_repeat_ngram) or settings.repetition_penalty != 1.0
        history_ST = pad_left(histories if self._looks_back else [()] * len(limits))
        self._start = history_ST.shape[1]
        self._tokens_SbT = history_ST[:, None, :].repeat(settings.beam_size, axis=1)
        self._logprobs_SbT = np.empty((len(limits), settings.beam_size, 0))  # of the new tokens, without penalties
        self._penalties = np.array([settings.penalty(length) for length in range(int(self._limits_S.max()) + 1)])
        self.finished = FinishedHypotheses(settings, num_sentences=len(limits))

    def advance(self, logprobs_RV: Tensor) -> Moves | None:
        """Extend every live hypothesis by a token. None when all sentences are done.

        logprobs_RV: after the newest tokens; at the first step [S, V].
        """
        settings = self._settings
        values_Sbk, own_Sbk, tokens_Sbk = self._candidates(logprobs_RV)
        totals_Sbk = self._totals_Sb[..., None] + values_Sbk
        totals_Sbk[self._limits_S <= self._length] = NEVER
        if self._length < settings.min_new_tokens:
            totals_Sbk = hold_back(totals_Sbk, tokens_Sbk, settings.ends)
        choice = choose(totals_Sbk, tokens_Sbk, ends=settings.ends)
        logprobs_Sc = own_Sbk[np.arange(len(own_Sbk))[:, None], choice.beams_Sc, choice.slots_Sc]
        for sentence, rank in np.argwhere(choice.finishing_Sc).tolist():
            self._finish(
                (sentence, int(choice.beams_Sc[sentence, rank])),
                last=(int(choice.tokens_Sc[sentence, rank]), float(logprobs_Sc[sentence, rank])),
                total=float(choice.totals_Sc[sentence, rank]),
                reason="eos",
            )
        self._cut(self._blocked(choice), "length")
        parents_Sb = self._continue(choice, logprobs_Sc)
        return self._drop_done(parents_Sb)

    def interrupt(self) -> None:
        """Finish every live hypothesis as interrupted."""
        self._cut(np.ones(len(self._totals_Sb), dtype=bool), "interrupted")

    def _candidates(self, logprobs_RV: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each beam's best tokens [S, b, k]: penalized log-probabilities, the model's own ones, ids."""
        settings = self._settings
        first = self._length == 0  # one row per sentence, which all its beams share
        with torch.inference_mode():
            scores_RV = logprobs_RV = logprobs_RV.float()
            for token in self._suppressed:  # in place: copying a whole vocabulary would cost more
                if token < logprobs_RV.shape[1]:
                    logprobs_RV[:, token] = NEVER
            if self._looks_back:
                tokens_RT = self._tokens_SbT[:, : 1 if first else None].reshape(len(logprobs_RV), -1)
                if settings.repetition_penalty != 1.0:
                    scores_RV = penalize_repetition(
                        scores_RV, tokens_RT, settings.repetition_penalty, exempt=settings.ends
                    )
                if settings.no_repeat_ngram:
                    scores_RV = block_repeated_ngrams(
                        scores_RV, tokens_RT, settings.no_repeat_ngram, exempt=settings.ends
                    )
            at_last_S = self._limits_S == self._length + 1
            if settings.last_token is not None and at_last_S.any():
                at_last_R = torch.from_numpy(at_last_S).to(scores_RV.device)
                at_last_R = at_last_R.repeat_interleave(len(scores_RV) // len(at_last_S))
                scores_RV = force_token(scores_RV, at_last_R, settings.last_token, counts=settings.at_limit == "end")
            # One more than the 2 b candidates, for an end of sequence that `hold_back` rules out. Every further end of
            # sequence may take a place in each beam, and be ruled out.
            ends = max(1, len(settings.ends))
            most = min((1 + ends) * settings.beam_size + ends, scores_RV.shape[1])
            values_Rk, ids_Rk = top_candidates(scores_RV, most)
            own_Rk = values_Rk if scores_RV is logprobs_RV else logprobs_RV.gather(1, ids_Rk)
            packed_3Rk = torch.stack((values_Rk.double(), own_Rk.double(), ids_Rk.double())).cpu().numpy()
        # log softmax is NaN for a row with NaN or +inf; -inf rules a token out.
        require_finite(np.maximum(packed_3Rk.max(), 0.0), "log-probabilities")
        shape = (*self._totals_Sb.shape, packed_3Rk.shape[-1])
        values, own, ids = (
            np.broadcast_to(part[:, None], shape) if first else part.reshape(shape) for part in packed_3Rk
        )
        return values, own, ids.astype(np.int64)

    def _blocked(self, choice: RankedCandidates) -> np.ndarray:
        """Sentences [S] that have live hypotheses, but no possible token and no finished hypothesis."""
        live_S = (self._totals_Sb > NEVER).any(-1)
        offered_S = (choice.totals_Sc > NEVER).any(-1)
        return live_S & ~offered_S & (self.finished.counts[self._sentences_S] == 0)

    def _continue(self, choice: RankedCandidates, logprobs_Sc: np.ndarray) -> np.ndarray:
        """Put the chosen hypotheses into the beams; the beam that each comes from, [S, b]."""
        alive_Sb, next_Sb = choice.alive_Sb, choice.next_Sb
        parents_Sb = np.broadcast_to(np.arange(next_Sb.shape[1]), next_Sb.shape)
        if self._length:  # before, all beams are the same
            parents_Sb = np.where(alive_Sb, _pick(choice.beams_Sc, next_Sb), parents_Sb)
        tokens_Sb = np.where(alive_Sb, _pick(choice.tokens_Sc, next_Sb), 0)
        self._totals_Sb = np.where(alive_Sb, _pick(choice.totals_Sc, next_Sb), NEVER)
        self._tokens_SbT = _append(self._tokens_SbT, parents_Sb, tokens_Sb)
        self._logprobs_SbT = _append(self._logprobs_SbT, parents_Sb, _pick(logprobs_Sc, next_Sb))
        self._length += 1
        return parents_Sb

    def _drop_done(self, parents_Sb: np.ndarray) -> Moves | None:
        """Cut the hypotheses at their limit, and keep the sentences that still search."""
        at_limit_S = self._limits_S <= self._length
        self._cut(at_limit_S, "length")
        done_S = self._done() | at_limit_S
        kept = np.flatnonzero(~done_S)
        shrunk = len(kept) < len(done_S)
        if shrunk:
            self._sentences_S, self._limits_S = self._sentences_S[kept], self._limits_S[kept]
            self._totals_Sb, parents_Sb = self._totals_Sb[kept], parents_Sb[kept]
            self._tokens_SbT, self._logprobs_SbT = self._tokens_SbT[kept], self._logprobs_SbT[kept]
        if not len(kept):
            return None
        beams = parents_Sb.shape[1]
        moved = bool((parents_Sb != np.arange(beams)).any())
        return Moves(
            kept=kept if shrunk else None,
            rows_R=(parents_Sb + np.arange(len(kept))[:, None] * beams).ravel() if moved else None,
            tokens_R=self._tokens_SbT[:, :, -1].ravel(),
        )

    def _done(self) -> np.ndarray:
        """Sentences [S] that need no further step: their beams are empty, or the stopping rule is met."""
        best_S = self._totals_Sb.max(-1)
        enough_S = self.finished.counts[self._sentences_S] >= self._settings.beam_size
        if self._settings.stopping == "heuristic":
            enough_S &= best_S / self._penalties[self._length] <= self.finished.worst_kept[self._sentences_S]
        elif self._settings.stopping == "exhaustive":
            # Sums only decrease: no live hypothesis can score more than its sum over the most favourable penalty of the
            # lengths that it may still reach. The penalties are monotonic in the length.
            nearest_S = np.minimum(self._length + 1, self._limits_S)
            bound_S = (best_S / self._penalties[np.stack((nearest_S, self._limits_S))]).max(0)
            enough_S &= bound_S <= self.finished.worst_kept[self._sentences_S]
        return enough_S | (best_S == NEVER)

    def _cut(self, sentences_S: np.ndarray, reason: FinishReason) -> None:
        """Finish every live hypothesis of these sentences without a further token."""
        for sentence, beam in np.argwhere((self._totals_Sb > NEVER) & sentences_S[:, None]).tolist():
            self._finish((sentence, beam), last=None, total=float(self._totals_Sb[sentence, beam]), reason=reason)

    def _finish(
        self, row: tuple[int, int], *, last: tuple[int, float] | None, total: float, reason: FinishReason
    ) -> None:
        """Finish the hypothesis of (sentence, beam). `last`: a further token, its logprob."""
        ids, logprobs = self._tokens_SbT[row][self._start :].tolist(), self._logprobs_SbT[row].tolist()
        self.finished.add(
            int(self._sentences_S[row[0]]),
            ids=tuple(ids if last is None else [*ids, last[0]]),
            logprobs=tuple(logprobs if last is None else [*logprobs, last[1]]),
            total=total,
            reason=reason,
        )


def _pick(values_Sx: np.ndarray, index_Sy: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values_Sx, index_Sy, -1)


def _append(values_SbT: np.ndarray, parents_Sb: np.ndarray, newest_Sb: np.ndarray) -> np.ndarray:
    """Each beam's values: its parent's, and the newest."""
    inherited_SbT = np.take_along_axis(values_SbT, parents_Sb[:, :, None], 1)
    return np.concatenate((inherited_SbT, newest_Sb[:, :, None]), -1)


def beam_search(
    stepper: Stepper,
    settings: BeamSettings,
    *,
    limits: Sequence[int] | None = None,
    histories: Sequence[Sequence[int]] | None = None,
    suppressed: Sequence[int] = (),
    should_stop: ShouldStop = never,
) -> list[list[Hypothesis]]:
    """All finished hypotheses of each sentence of the stepper, best first; at least one.

    Args:
        limits: maximum number of new tokens of each sentence, where less than `settings.max_new_tokens`; the stepper's
            `rooms` limit them too. Hypotheses at their limit have the finish reason `length`, and so do those whose
            tokens are all impossible (probability zero) when their sentence has no others.
        histories: each sentence's prompt or prefix, for n-gram blocking and the repetition penalty. Neither ever rules
            out or penalizes the end of sequence.
        suppressed: tokens that are not offered (`suppressed_tokens`); the probabilities of the others do not change.
        should_stop: polled before every step; unfinished hypotheses then come last, with the finish reason
            `interrupted`.

    Raises InputError for a beam larger than the vocabulary, NotFiniteError for NaN or infinity.
    """
    if settings.beam_size > stepper.vocab_size:
        raise InputError(
            f"beam size {settings.beam_size} is larger than the vocabulary of {stepper.vocab_size}",
            hint="choose a smaller --beam-size",
        )
    sentences = stepper.num_sentences
    if not sentences:
        return []
    rooms = stepper.rooms[:sentences]
    bounds = rooms if limits is None else [min(pair) for pair in zip(limits, rooms, strict=True)]
    histories = [()] * sentences if histories is None else histories
    state = BeamState(settings, limits=bounds, histories=histories, suppressed=suppressed)
    if not should_stop():
        logprobs_RV = stepper.start(settings.beam_size)
        device = logprobs_RV.device
        while (moves := state.advance(logprobs_RV)) is not None and not should_stop():
            if moves.kept is not None:
                stepper.keep(torch.from_numpy(moves.kept).to(device))
            if moves.rows_R is not None:
                stepper.reorder(torch.from_numpy(moves.rows_R).to(device))
            logprobs_RV = stepper.step(torch.from_numpy(moves.tokens_R).to(device))
    state.interrupt()
    return state.finished.ranked()
