"""The choice of the next token for a batch of sequences: settings applied, and the state that they need.

What looks back (repetition penalty, n-gram blocking) leaves the end of sequence alone: it is written once, and what was
written does not forbid ending.

Legend: B live sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tformer.decoding.beam_rules import force_token
from tformer.decoding.sampling import (
    NEVER,
    NgramBlocker,
    UniformStream,
    block_tokens,
    chosen_logprobs,
    draw,
    penalise_repetition,
    reshape,
)
from tformer.decoding.settings import GenerationSettings
from tformer.errors import TformerError


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
        never: Sequence[int] = (),
    ) -> None:
        """
        Args:
            keys: (row, sample) of each sequence.
            histories: what the settings look back on before its first token.
            limits: the most tokens of each sequence, where an end is forced; None: `settings.max_new_tokens`.
            vocab_size: larger ids are not chosen.
            never: nor are these.
        """
        self._settings = settings
        self._vocab_size = vocab_size
        self._never_N = torch.tensor(never, dtype=torch.long)  # goes where the first logits are
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
        scores_BV = self._without_never(logits_BV)
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

    def _without_never(self, logits_BV: Tensor) -> Tensor:
        if not len(self._never_N):
            return logits_BV
        self._never_N = self._never_N[self._never_N < logits_BV.shape[-1]].to(logits_BV.device)
        return logits_BV.index_fill(-1, self._never_N, NEVER)

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
