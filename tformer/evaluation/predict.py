"""Scores of many examples at once, in their order: sorted by length inside, so that little of a batch is padding.

Padding changes no score, and neither does what else is in a batch, to within the rounding of matrix products of
different sizes (fp32: 1e-5).

Shapes: N samples, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from tformer.data.batch import Batch

# Tokens of a batch, padding included. A CPU is a fifth slower with 16384, which its caches do not hold.
BATCH_TOKENS = {"cpu": 4096}
ACCELERATOR_BATCH_TOKENS = 32768


class Samples(Protocol):
    """What predictions are made of. `lengths` in tokens; None: each has `seq_len`."""

    @property
    def seq_len(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray | None: ...

    def __len__(self) -> int: ...
    def examples(self, epoch: int, indices: Any, /) -> Sequence[Any]: ...


def predict_scores(
    model: nn.Module,
    samples: Samples,
    collate: Callable[..., Batch],
    *,
    head: str,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    progress: Callable[..., None] | None = None,
) -> np.ndarray:
    """fp32 [N, L]: what `head` says of each sample (before softmax or sigmoid).

    The model runs as it is (its `compute_dtype`, on its device), in evaluation mode.

    Args:
        collate: an objective's; asked for batches that are not for training.
        batch_size: samples at a time; None: as many as make `batch_tokens` tokens with their padding.
        batch_tokens: None: what suits the model's device.
        should_stop: polled before every batch; when it says so, the scores of the rest are NaN.
        progress: called with (samples done, samples in all).
    """
    total = len(samples)
    rng = np.random.default_rng(0)  # random padding needs one; no score depends on where the padding is
    done: list[np.ndarray] = []
    scores: list[torch.Tensor] = []
    device = next(model.parameters()).device
    batches = length_sorted_batches(
        samples, batch_size=batch_size, batch_tokens=batch_tokens or default_batch_tokens(device)
    )
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for indices in batches:
                if should_stop is not None and should_stop():
                    break
                batch = collate(samples.examples(0, indices), rng=rng, training=False).to(device)
                scores.append(model(**batch.model_inputs()).head(head).float())
                done.append(indices)
                if progress is not None:
                    progress(sum(map(len, done)), total)
    finally:
        model.train(was_training)
    if not scores:
        return np.full((total, 0), np.nan, dtype=np.float32)
    found_NL = torch.cat(scores).cpu().numpy()  # one copy from the device, at the end
    result_NL = np.full((total, found_NL.shape[1]), np.nan, dtype=np.float32)
    result_NL[np.concatenate(done)] = found_NL
    return result_NL


def default_batch_tokens(device: torch.device) -> int:
    """Tokens of a batch that keep a device busy."""
    return BATCH_TOKENS.get(device.type, ACCELERATOR_BATCH_TOKENS)


def length_sorted_batches(
    samples: Samples, *, batch_size: int | None = None, batch_tokens: int = ACCELERATOR_BATCH_TOKENS
) -> Iterator[np.ndarray]:
    """Every sample once, longest first: what does not fit into memory fails at once, not after an hour.

    `batch_size` samples at a time, None: as many as make `batch_tokens` tokens with their padding, and one at least.
    """
    total, lengths = len(samples), samples.lengths
    if lengths is None:
        order, sizes = np.arange(total), np.full(total, samples.seq_len)
    else:
        order = np.argsort(-lengths, kind="stable")
        sizes = lengths[order]
    start = 0
    while start < total:
        count = batch_size or max(1, batch_tokens // max(1, int(sizes[start])))
        yield order[start : start + count]
        start += count
