"""Beam search over any `Stepper`: the best continuations of every sentence, by the conventions of fairseq.

At each step a sentence's beams give 2 x beam candidate tokens. Only the first `beam` of them may end a hypothesis; the
others continue, so that ends of sequence never empty the beam. A finished hypothesis's sum of log-probabilities is
divided by a length penalty (`settings`). A sentence leaves the batch as soon as it is done; its search does not depend
on the other sentences.

With groups (diverse beam search, arXiv 1610.02424) each group is a separate beam that avoids the tokens which earlier
groups took at the same step.

The state of a search (live hypotheses, scores, finished hypotheses) is kept on the host in numpy and fp64: a step costs
one copy of a few numbers per row to it and one back.

Legend: S live sentences, b beams = G groups of w, R = S b rows of the stepper, V vocabulary, T tokens, k candidates of
a beam, c candidates of a group.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tformer.decoding.beam_candidates import NEVER, Choice, choose, hold_back, top_candidates
from tformer.decoding.sampling import block_repeated_ngrams, force_token, pad_left, penalize_repetition
from tformer.decoding.settings import BeamSettings, FinishReason, Hypothesis
from tformer.decoding.stepper import Stepper
from tformer.support.errors import InputError, require_finite
from tformer.workers.work import ShouldStop, never


class FinishedHypotheses:
    """The finished hypotheses of each sentence and beam group.

    Attributes:
        counts: number per sentence and group, int [S, G].
        worst_kept: score of the `width`-th best of each group, -inf while there are fewer, float [S, G].
    """

    def __init__(self, settings: BeamSettings, *, num_sentences: int) -> None:
        groups = settings.beam_groups
        self._settings = settings
        self._width = settings.beam_size // groups
        self._found: list[list[Hypothesis]] = [[] for _ in range(num_sentences)]
        self._scores: list[list[list[float]]] = [[[] for _ in range(groups)] for _ in range(num_sentences)]
        self.counts = np.zeros((num_sentences, groups), dtype=np.int64)
        self.worst_kept = np.full((num_sentences, groups), NEVER)

    def add(
        self,
        sentence: int,
        group: int,
        *,
        ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        total: float,
        reason: FinishReason,
    ) -> None:
        """Add a hypothesis. `total`: the sum that ranks it: `logprobs` with penalties."""
        score = total / self._settings.penalty(len(ids))
        self._found[sentence].append(Hypothesis(ids=ids, logprobs=logprobs, score=score, finish_reason=reason))
        scores = self._scores[sentence][group]
        insort(scores, score)
        self.counts[sentence, group] += 1
        if len(scores) >= self._width:
            self.worst_kept[sentence, group] = scores[-self._width]

    def ranked(self) -> list[list[Hypothesis]]:
        """All hypotheses of each sentence, best first; equal scores in the order in which they finished.

        Whole hypotheses come before interrupted ones, whose scores lack their missing tokens. Tokens that two groups
        found are two hypotheses.
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
        self._groups, self._width = settings.beam_groups, settings.beam_size // settings.beam_groups
        self._length = 0  # new tokens of every live hypothesis
        self._sentences_S = np.arange(len(limits))  # their numbers among all sentences
        self._limits_S = np.minimum(np.asarray(limits, dtype=np.int64), settings.max_new_tokens)
        # One empty hypothesis per group: several would all offer the same tokens.
        self._totals_SGw = np.full((len(limits), self._groups, self._width), NEVER)
        self._totals_SGw[:, :, 0] = 0.0
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
        values_SGwk, own_SGwk, tokens_SGwk = self._candidates(logprobs_RV)
        totals_SGwk = self._totals_SGw[..., None] + values_SGwk
        totals_SGwk[self._limits_S <= self._length] = NEVER
        if self._length < settings.min_new_tokens:
            totals_SGwk = hold_back(totals_SGwk, tokens_SGwk, settings.ends)
        choice = choose(totals_SGwk, tokens_SGwk, ends=settings.ends, diversity_penalty=settings.diversity_penalty)
        sentences_S11, groups_1G1, _ = np.ogrid[: len(own_SGwk), : self._groups, :1]
        logprobs_SGc = own_SGwk[sentences_S11, groups_1G1, choice.beams_SGc, choice.slots_SGc]
        for sentence, group, rank in np.argwhere(choice.finishing_SGc).tolist():
            self._finish(
                (sentence, group, int(choice.beams_SGc[sentence, group, rank])),
                last=(int(choice.tokens_SGc[sentence, group, rank]), float(logprobs_SGc[sentence, group, rank])),
                total=float(choice.totals_SGc[sentence, group, rank]),
                reason="eos",
            )
        self._cut(self._blocked(choice), "length")
        parents_Sb = self._continue(choice, logprobs_SGc)
        return self._drop_done(parents_Sb)

    def interrupt(self) -> None:
        """Finish every live hypothesis as interrupted."""
        self._cut(np.ones(self._totals_SGw.shape[:2], dtype=bool), "interrupted")

    def _candidates(self, logprobs_RV: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each beam's best tokens [S, G, w, k]: penalized log-probabilities, the model's own ones, ids."""
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
            # One more than the 2 b candidates, for an end of sequence that `hold_back` rules out. That is enough for
            # groups too: a group's 2 w best are within 2 w + b - w + 2 when the tokens of other groups are penalized.
            # Every further end of sequence may take a place in each beam, and be ruled out.
            ends = max(1, len(settings.ends))
            most = min((1 + ends) * settings.beam_size + ends, scores_RV.shape[1])
            values_Rk, ids_Rk = top_candidates(scores_RV, most)
            own_Rk = values_Rk if scores_RV is logprobs_RV else logprobs_RV.gather(1, ids_Rk)
            packed_3Rk = torch.stack((values_Rk.double(), own_Rk.double(), ids_Rk.double())).cpu().numpy()
        # log softmax is NaN for a row with NaN or +inf; -inf rules a token out.
        require_finite(np.maximum(packed_3Rk.max(), 0.0), "log-probabilities")
        shape = (len(self._sentences_S), self._groups, self._width, packed_3Rk.shape[-1])
        values, own, ids = (
            np.broadcast_to(part[:, None, None], shape) if first else part.reshape(shape) for part in packed_3Rk
        )
        return values, own, ids.astype(np.int64)

    def _blocked(self, choice: Choice) -> np.ndarray:
        """Groups [S, G] that have live hypotheses but no possible token, in sentences without a finished hypothesis."""
        live_SG = (self._totals_SGw > NEVER).any(-1)
        offered_SG = (choice.totals_SGc > NEVER).any(-1)
        empty_S1 = self.finished.counts[self._sentences_S].sum(-1, keepdims=True) == 0
        return live_SG & ~offered_SG & empty_S1

    def _continue(self, choice: Choice, logprobs_SGc: np.ndarray) -> np.ndarray:
        """Put the chosen hypotheses into the beams; the beam that each comes from, [S, b]."""
        alive_SGw, next_SGw = choice.alive_SGw, choice.next_SGw
        parents_SGw = np.broadcast_to(np.arange(self._width), next_SGw.shape)
        if self._length:  # before, all beams are the same
            parents_SGw = np.where(alive_SGw, _pick(choice.beams_SGc, next_SGw), parents_SGw)
        parents_Sb = (parents_SGw + np.arange(self._groups)[:, None] * self._width).reshape(len(alive_SGw), -1)
        tokens_SGw = np.where(alive_SGw, _pick(choice.tokens_SGc, next_SGw), 0)
        self._totals_SGw = np.where(alive_SGw, _pick(choice.totals_SGc, next_SGw), NEVER)
        self._tokens_SbT = _append(self._tokens_SbT, parents_Sb, tokens_SGw)
        self._logprobs_SbT = _append(self._logprobs_SbT, parents_Sb, _pick(logprobs_SGc, next_SGw))
        self._length += 1
        return parents_Sb

    def _drop_done(self, parents_Sb: np.ndarray) -> Moves | None:
        """Cut the hypotheses at their limit, and keep the sentences with a group that still searches."""
        at_limit_S1 = (self._limits_S <= self._length)[:, None]
        self._cut(np.broadcast_to(at_limit_S1, self._totals_SGw.shape[:2]), "length")
        done_SG = self._done() | at_limit_S1
        self._totals_SGw[done_SG] = NEVER
        kept = np.flatnonzero(~done_SG.all(-1))
        shrunk = len(kept) < len(done_SG)
        if shrunk:
            self._sentences_S, self._limits_S = self._sentences_S[kept], self._limits_S[kept]
            self._totals_SGw, parents_Sb = self._totals_SGw[kept], parents_Sb[kept]
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
        """Groups [S, G] that need no further step: their beams are empty, or the stopping rule is met."""
        best_SG = self._totals_SGw.max(-1)
        enough_SG = self.finished.counts[self._sentences_S] >= self._width
        if self._settings.stopping == "heuristic":
            enough_SG &= best_SG / self._penalties[self._length] <= self.finished.worst_kept[self._sentences_S]
        elif self._settings.stopping == "exhaustive":
            # Sums only decrease: no live hypothesis can score more than its sum over the most favourable penalty of the
            # lengths that it may still reach. The penalties are monotonic in the length.
            nearest_S = np.minimum(self._length + 1, self._limits_S)
            bound_SG = (best_SG / self._penalties[np.stack((nearest_S, self._limits_S)), None]).max(0)
            enough_SG &= bound_SG <= self.finished.worst_kept[self._sentences_S]
        return enough_SG | (best_SG == NEVER)

    def _cut(self, groups_SG: np.ndarray, reason: FinishReason) -> None:
        """Finish every live hypothesis of these groups without a further token."""
        for sentence, group, beam in np.argwhere((self._totals_SGw > NEVER) & groups_SG[..., None]).tolist():
            self._finish(
                (sentence, group, beam),
                last=None,
                total=float(self._totals_SGw[sentence, group, beam]),
                reason=reason,
            )

    def _finish(
        self, place: tuple[int, int, int], *, last: tuple[int, float] | None, total: float, reason: FinishReason
    ) -> None:
        """Finish the hypothesis of (sentence, group, beam of the group). `last`: a further token, its logprob."""
        sentence, group, beam = place
        row = sentence, group * self._width + beam
        ids, logprobs = self._tokens_SbT[row][self._start :].tolist(), self._logprobs_SbT[row].tolist()
        self.finished.add(
            int(self._sentences_S[sentence]),
            group,
            ids=tuple(ids if last is None else [*ids, last[0]]),
            logprobs=tuple(logprobs if last is None else [*logprobs, last[1]]),
            total=total,
            reason=reason,
        )


def _pick(values_SGx: np.ndarray, index_SGy: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values_SGx, index_SGy, -1)


def _append(values_SbT: np.ndarray, parents_Sb: np.ndarray, newest_SGw: np.ndarray) -> np.ndarray:
    """Each beam's values: its parent's, and the newest."""
    inherited_SbT = np.take_along_axis(values_SbT, parents_Sb[:, :, None], 1)
    return np.concatenate((inherited_SbT, newest_SGw.reshape(*parents_Sb.shape, 1)), -1)


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
