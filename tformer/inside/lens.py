"""Logit lens: the answers of a model that ends after each of its layers (arXiv 2303.08112, section 2).

    logits after layer l = head(final_norm(h_l))

The final norm computes its statistics for each state anew, and all that follows the last layer applies (scale, bias,
soft cap; the dense layer of a masked language model; pooling of a classifier), so the last row is the model's answer.
A model without a final norm (post-norm) has normalized states already. The layers of an encoder beside a decoder
answer through the decoder, whose cross-attention reads them in place of the encoder's output: DecoderLens (arXiv
2310.03686). A translator of states before the final norm makes it a tuned lens (`tuned`).

Logits are formed for one layer and a block of positions at a time.
"""

# Shapes: R rows (the input and each layer), T positions, N shown positions, D d_model, V vocabulary or labels, K top.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.decoding.inference import inference
from tformer.inside.logits import Contributions
from tformer.model import Transformer
from tformer.nn.classification_heads import PooledHead
from tformer.nn.heads import VocabularyHead
from tformer.nn.losses import LOGIT_ELEMENTS
from tformer.support.errors import require_finite

INPUT = "input"  # the row of the states that enter the first layer
OWN = -1  # in place of a target: the token or label that the model answers
MEASURES = ("probability", "rank", "entropy", "kl")
BLOCK_ELEMENTS = LOGIT_ELEMENTS // 8  # logits of a block; a few tensors of this size exist at once

Translate = Callable[[Tensor], Tensor]
"""States [R, T, D] before the final norm -> states [R, T, D]."""


@dataclass(frozen=True)
class Lens:
    """Answers after each layer. A classifier answers once, so N is 1, and tokens are labels.

    Attributes:
        rows: `input`, then the number of each layer.
        top_ids, top_probabilities: the most probable tokens, best first [R, N, K].
        targets: ids whose probability and rank follow [N].
        probability: of the target [R, N].
        rank: of the target: number of tokens with a larger logit [R, N].
        entropy: of the answer, in nats [R, N]; of several labels the sum.
        kl: KL(model's answer || answer after the layer), in nats [R, N].
    """

    rows: tuple[str, ...]
    top_ids: np.ndarray
    top_probabilities: np.ndarray
    targets: np.ndarray
    probability: np.ndarray
    rank: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray


@dataclass(frozen=True)
class LensReport:
    """Report of `tformer lens` and `Run.lens`. Shapes as in `Lens`.

    Attributes:
        lens: the logit lens, or the tuned one that was asked for.
        logit_lens: the logit lens.
        tokens: that were read at the shown positions [N].
        positions: numbers of these positions [N].
        words: texts of the ids of tokens, or names of labels.
        parts: what each part of the model adds to the logits of the targets; None where no sum divides them.
        without_parts: why there are none.
        against: the token whose logit was subtracted; None: the logit itself is divided.
        tuned_kl: nats of each row of the logit lens and of the tuned one on held-out text [2, R - 1].
        pools: there is one answer, of a classifier. every: a terminal shows all positions, else the last.
        stack: whose layers are shown.
        model: name, step and hash.
    """

    lens: Lens
    logit_lens: Lens
    tokens: tuple[str, ...]
    positions: tuple[int, ...]
    words: dict[int, str]
    parts: Contributions | None
    without_parts: str
    against: str | None
    tuned_kl: np.ndarray | None
    pools: bool
    every: bool
    stack: str
    model: dict[str, str | int]
    texts: dict[str, str]
    notes: tuple[str, ...]
    command: str = ""

    @property
    def targets(self) -> list[str]:
        """The words whose probability and rank follow [N]."""
        return [self.words[token] for token in self.lens.targets.tolist()]

    @property
    def top(self) -> np.ndarray:
        """The most probable words after each layer [R, N, K]."""
        return np.vectorize(self.words.__getitem__, otypes=[object])(self.lens.top_ids)


def states_of(model: Transformer, inputs: Mapping[str, Tensor], side: str) -> Tensor:
    """The stream of a batch before the first and after each layer of a stack [R, B T, D]."""
    layers = range(len(getattr(model, side).layers))
    names = [f"{side}.embedding", *(f"{side}.{layer}.hidden" for layer in layers)]
    tapped = model(**inputs, taps=names).taps
    return torch.stack([tapped[name].flatten(0, 1) for name in names])


def final_states(
    model: Transformer, inputs: Mapping[str, Tensor], side: str, *, translate: Translate | None = None
) -> Tensor:
    """Inputs of the head if the stack `side` ended after each of its layers, [R, T, D], for one example."""
    states_RTD = states_of(model, inputs, side)
    if translate is not None:
        states_RTD = translate(states_RTD)
    final_norm = getattr(model, side).final_norm
    if final_norm is not None:
        states_RTD = final_norm(states_RTD)
    if side == "decoder" or model.decoder is None:
        return states_RTD
    ids_RT = inputs["decoder_input_ids"].expand(len(states_RTD), -1)
    return model(decoder_input_ids=ids_RT, encoder_hidden=states_RTD).hidden


def read_lens(
    model: Transformer,
    inputs: Mapping[str, Tensor],
    *,
    side: str,
    head: str,
    places: Sequence[int],
    targets: Sequence[int],
    top_k: int = 10,
    translate: Translate | None = None,
) -> Lens:
    """The lens of one example, on the stack `encoder` or `decoder`.

    Args:
        inputs: of `Transformer.forward`, one row each.
        head: name of a head over the vocabulary, or of a classifier.
        places: positions [N]; of a classifier any one.
        targets: an id, or OWN, for each of them.

    Raises NotFiniteError for logits that are NaN or infinite.
    """
    module = model.heads[head]
    device = next(model.parameters()).device
    with inference(model):
        states_RTD = final_states(model, inputs, side, translate=translate)
        if isinstance(module, VocabularyHead):
            size = max(1, BLOCK_ELEMENTS // len(module.weight))
            blocks = states_RTD[:, list(places)].split(size, dim=1)  # the head reads [n, D] of each row
        else:
            size, blocks = 1, (states_RTD.unsqueeze(1),)  # the head reads [1, T, D] of each row
        parts = torch.tensor(targets, device=device).split(size)
        found = [_measure(module, block, part, top_k) for block, part in zip(blocks, parts, strict=True)]
    columns = {name: torch.cat([each[name] for each in found], dim=1).cpu().numpy() for name in found[0]}
    rows = (INPUT, *map(str, range(len(states_RTD) - 1)))
    return Lens(rows, **columns | {"targets": columns["targets"][-1]})


def log_probabilities(head: nn.Module, states: Tensor) -> Tensor:
    """Logarithms of the probabilities of an answer [N, V, O]; O: outcomes that sum to 1 with others of their label.

    O is 1 where tokens or labels exclude each other, else 2: the label holds, or not.
    """
    logits_NV = head(states)
    require_finite(logits_NV.detach(), "logits")
    if isinstance(head, PooledHead) and head.label_kind == "labels":
        return torch.stack([F.logsigmoid(logits_NV), F.logsigmoid(-logits_NV)], dim=-1)
    return logits_NV.log_softmax(dim=-1).unsqueeze(-1)


def divergence(answer_NVO: Tensor, other_NVO: Tensor) -> Tensor:
    """KL(answer || other) in nats [N] of two `log_probabilities`."""
    return (answer_NVO.exp() * (answer_NVO - other_NVO)).sum((1, 2))


def _measure(head: nn.Module, block: Tensor, targets_N: Tensor, top_k: int) -> dict[str, Tensor]:
    """The columns of a lens, [R, N, ...], for a block of positions: one input of the head for each row."""
    final_NVO = log_probabilities(head, block[-1])
    shares_NVO = final_NVO.exp()
    targets_N = torch.where(targets_N == OWN, final_NVO[..., 0].argmax(dim=-1), targets_N)
    rows = []
    for states in block:
        logs_NVO = log_probabilities(head, states)
        logs_NV = logs_NVO[..., 0]  # as ordered as the logits
        target_N1 = logs_NV.gather(1, targets_N.unsqueeze(1))
        best = logs_NV.topk(min(top_k, logs_NV.shape[1]), dim=-1)
        rows.append(
            {
                "top_ids": best.indices,
                "top_probabilities": best.values.exp(),
                "targets": targets_N,
                "probability": target_N1.squeeze(1).exp(),
                "rank": (logs_NV > target_N1).sum(dim=-1),
                "entropy": -(logs_NVO.exp() * logs_NVO).sum((1, 2)),
                "kl": (shares_NVO * (final_NVO - logs_NVO)).sum((1, 2)),
            }
        )
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
