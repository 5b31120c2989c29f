"""Loss of predicted tokens by their position in the sequence."""

# Shapes: B examples of a batch, T tokens.

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tformer.data.batching.batch import Batch
from tformer.data.batching.mixture import Samples
from tformer.decoding.inference import inference
from tformer.evaluation.predict import length_sorted_batches
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import Objective
from tformer.workers.work import Work


def sums_by_position(
    model: nn.Module, objective: Objective, samples: Samples, *, batch_size: int | None, seed: int, work: Work
) -> np.ndarray:
    """fp64 [3, T]: number of predictions at each position, the sum of their loss in nats, and how many are correct.

    The batches, and with them the masks of a masked model, are those of `tally_objective`. Of an encoder-decoder the
    positions are the decoder's; they begin anew with a document that sees itself alone.
    """
    device = next(model.parameters()).device
    head = objective.members[0].head.kind
    found: list[np.ndarray] = [np.zeros((3, 1))]
    done = 0

    def sums(item: tuple[int, np.ndarray]) -> Tensor:
        number, indices = item
        draw = np.random.default_rng([seed, number])
        batch = objective.collate(samples.examples(0, indices), rng=draw, training=False).to(device)
        labels: Any = batch.labels
        losses = model(**batch.model_inputs()).loss_terms(head, labels, reduction="none")
        labelled_N = labels.flatten() != IGNORED_LABEL
        places_n = _positions(batch).flatten()[labelled_N]
        columns = (torch.ones_like(losses.nll), losses.nll, losses.correct)
        return torch.stack([torch.bincount(places_n, column[labelled_N].double()) for column in columns]).cpu()

    with inference(model):
        for (_, indices), sums_3T in work.worker.divide(
            enumerate(length_sorted_batches(samples, batch_size=batch_size)),
            sums,
            should_stop=work.should_stop,
            to_json=Tensor.tolist,
            from_json=partial(torch.tensor, dtype=torch.float64),
        ):
            found.append(sums_3T.numpy())
            done += len(indices)
            work.report(done, len(samples))
    longest = max(each.shape[1] for each in found)
    return np.sum([np.pad(each, ((0, 0), (0, longest - each.shape[1]))) for each in found], axis=0)


def _positions(batch: Batch) -> Tensor:
    """int64 [B, T]: the position of each label among the tokens of its sequence, without padding."""
    labels: Any = batch.labels
    if batch.decoder_input_ids is None and batch.position_ids is not None:
        return batch.position_ids
    mask = batch.attention_mask if batch.decoder_input_ids is None else batch.decoder_attention_mask
    places = torch.ones_like(labels) if mask is None else mask.long()
    return (places.cumsum(dim=1) - 1).clamp(min=0)
