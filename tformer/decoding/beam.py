"""Beam search over any `Stepper`: the best continuations of every sentence, by the conventions of fairseq.

At each step every sentence's beams offer their best tokens, 2 x beam candidates of which the first `beam` may end a
hypothesis and the others go on, so that ends of sequence never starve the beam. Sums of log-probabilities are divided
by a length penalty when a hypothesis finishes (`length_penalty`). A sentence leaves the batch the moment it is done.
Nothing of a sentence's search depends on the other sentences.

With groups (diverse beam search, arXiv 1610.02424) each group is a beam of its own that shuns the tokens which earlier
groups took at the same step.

Legend: S sentences, R rows of the stepper (S x beam size), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tformer.decoding.beam_settings import BeamSettings, Hypothesis
from tformer.decoding.beam_state import BeamState
from tformer.decoding.stepper import Stepper
from tformer.errors import InputError


def beam_search(
    stepper: Stepper,
    settings: BeamSettings,
    *,
    limits: Sequence[int] | None = None,
    histories: Sequence[Sequence[int]] | None = None,
    never: Sequence[int] = (),
    should_stop: Callable[[], bool] | None = None,
) -> list[list[Hypothesis]]:
    """All hypotheses that finished, for each sentence of the stepper, best first; at least one.

    limits: the most new tokens of each sentence, where less than `settings.max_new_tokens`; the stepper's rooms bound
    them too. Hypotheses that get there come back with the finish reason `length`, and so do those that the model
    offers no token (probability zero for all) when their sentence has no others.
    histories: each sentence's prompt or prefix, which n-gram blocking and the repetition penalty look back on. Neither
    ever rules out or penalises the end of sequence: it is written once, and what was written does not forbid ending.
    never: tokens that are not offered (`unwritten`); the probabilities of the others stay as they are.
    should_stop: polled before every step; what is not finished then comes back with the finish reason `interrupted`,
    after what is.

    Raises InputError for a beam larger than the vocabulary, TformerError when the model's numbers are NaN.
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
    state = BeamState(settings, limits=bounds, histories=histories, never=never)
    stops = should_stop or (lambda: False)
    if not stops():
        logprobs_RV = stepper.start(settings.beam_size)
        device = logprobs_RV.device
        while (moves := state.advance(logprobs_RV)) is not None and not stops():
            if moves.kept is not None:
                stepper.keep(torch.from_numpy(moves.kept).to(device))
            if moves.rows_R is not None:
                stepper.reorder(torch.from_numpy(moves.rows_R).to(device))
            logprobs_RV = stepper.step(torch.from_numpy(moves.tokens_R).to(device))
    state.interrupt()
    return state.finished.ranked()
