"""Pseudo-perplexity of a masked language model (Salazar et al., arXiv 1910.14659, equation 4).

    PPPL = exp( -1/N * sum over sentences, sum over t of log P(w_t | the sentence with w_t alone masked) )

Each of the N tokens costs a row of its own: a sequence of n tokens is copied n times, each copy with another token
masked. Special tokens of the template are neither masked nor counted. The figure is no perplexity of a distribution
over texts, but compares masked models of one tokenizer.

Shapes: M masked copies of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from tformer.data.batch import IGNORED_LABEL
from tformer.data.padding import pad_layout
from tformer.errors import InputError
from tformer.evaluation.predict import default_batch_tokens
from tformer.metrics import perplexity
from tformer.tokenizer.special import SpecialIds


def pseudo_perplexity(
    model: nn.Module,
    sequences: Sequence[np.ndarray],
    special_ids: SpecialIds,
    *,
    head: str = "masked_lm",
    max_tokens: int | None = None,
    batch_tokens: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    progress: Callable[..., None] | None = None,
) -> dict[str, float]:
    """{"pseudo_perplexity", "loss" (nats per token), "tokens"} of sequences of ids, their special tokens included.

    `max_tokens`: count at most so many, evenly spread over all; `batch_tokens`: of a batch, with padding; None: what
    suits the device. `should_stop` is polled before every batch; when it says so, the figures are those of the tokens
    so far (NaN for none), the longest sequences first.

    Raises InputError for a tokenizer without a mask token, and for nothing to predict.
    """
    if special_ids.mask is None:
        raise InputError("pseudo-perplexity needs a tokenizer with a mask token, this one has none")
    row_of, place_of = _targets(sequences, special_ids, max_tokens)
    total, tokens = len(row_of), 0
    if not total:
        raise InputError("there is nothing to evaluate: the text has no tokens")
    device = next(model.parameters()).device
    budget = batch_tokens or default_batch_tokens(device)
    nll = torch.zeros((), dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            while tokens < total and not (should_stop is not None and should_stop()):
                count = max(1, budget // len(sequences[row_of[tokens]]))
                chosen = slice(tokens, tokens + count)
                rows = [sequences[row] for row in row_of[chosen]]
                nll += _masked_nll(model, rows, place_of[chosen], special_ids.mask, head, device)
                tokens += len(rows)
                if progress is not None:
                    progress(tokens, total)
    finally:
        model.train(was_training)
    loss = nll.item() / tokens if tokens else float("nan")
    return {"pseudo_perplexity": perplexity(loss), "loss": loss, "tokens": tokens}


def _targets(
    sequences: Sequence[np.ndarray], special_ids: SpecialIds, max_tokens: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """(sequence, place in it) of every token to predict, longest sequences first."""
    template = (special_ids.pad, special_ids.bos, special_ids.eos, special_ids.cls, special_ids.sep)
    left_out = [token for token in template if token is not None]
    places = [np.flatnonzero(~np.isin(ids, left_out)) for ids in sequences]
    row_of = np.repeat(np.arange(len(places)), [len(part) for part in places])
    place_of = np.concatenate([np.zeros(0, dtype=np.int64), *places])
    if max_tokens is not None and max_tokens < len(row_of):
        kept = np.arange(max_tokens) * len(row_of) // max_tokens
        row_of, place_of = row_of[kept], place_of[kept]
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    order = np.argsort(-lengths[row_of], kind="stable")
    return row_of[order], place_of[order]


def _masked_nll(
    model: nn.Module, rows: list[np.ndarray], places: np.ndarray, mask_id: int, head: str, device: torch.device
) -> torch.Tensor:
    """Sum of -log P of the token at each row's place, that token masked."""
    layout = pad_layout([len(row) for row in rows])
    ids_MT, mask = layout.fill(rows, 0), layout.mask()
    labels_MT = np.full_like(ids_MT, IGNORED_LABEL)
    index_M = np.arange(len(rows))
    labels_MT[index_M, places] = ids_MT[index_M, places]
    ids_MT[index_M, places] = mask_id
    output = model(
        torch.from_numpy(ids_MT).to(device),
        attention_mask=None if mask is None else torch.from_numpy(mask).to(device),
    )
    nll: torch.Tensor = output.loss_terms(head, torch.from_numpy(labels_MT).to(device)).nll
    return nll
