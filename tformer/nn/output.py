"""What a forward pass returns: hidden states, and the predictions and losses that are formed of them on demand.

Logits over a vocabulary are the largest tensor of a small model, so they exist only for the positions asked for.
"""

# Shapes: B batch, T queries, S keys of the encoder, D d_model, V vocabulary, N = B T.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tformer.nn.heads import VocabularyHead
from tformer.nn.losses import IGNORED_LABEL, LOGIT_ELEMENTS, CrossEntropy, cross_entropy_of, linear_cross_entropy

MASKED = "masked_lm"  # the head whose labels are ignored for the most part
FEW = 1 / 8  # of the labels: so many ignored ones cost less than leaving them out


@dataclass
class Output:
    """What a forward pass found.

    Attributes:
        hidden: last hidden states of the decoder if there is one, else of the encoder [B, T, D].
        encoder_hidden: last hidden states of the encoder beside a decoder [B, S, D].
        taps: the tensors that were asked for, by name.
        compiled: a compiler made the forward pass: then the loss of a GPU is compiled too.
    """

    hidden: Tensor
    heads: nn.ModuleDict = field(repr=False)
    mask: Tensor | None = field(default=None, repr=False)  # real positions of `hidden` [B, T]; None: all
    encoder_hidden: Tensor | None = None
    taps: dict[str, Tensor] = field(default_factory=dict)
    compiled: bool = False

    @property
    def logits(self) -> Tensor:
        """The first head's predictions on all positions, fp32: [B, T, V] for a language model."""
        return self.head(next(iter(self.heads)))

    def head(self, name: str) -> Tensor:
        """The predictions of the head called `name`, fp32."""
        return self._head(name)(self.hidden, self.mask)

    def logits_at(self, index: int | Tensor = -1) -> Tensor:
        """The first head's logits [B, V] at one position: an int for all rows, or a tensor [B]."""
        if isinstance(index, int):
            hidden_BD = self.hidden[:, index]
        else:
            hidden_BD = self.hidden[torch.arange(len(index), device=index.device), index]
        return self._head(next(iter(self.heads)))(hidden_BD)

    def loss_terms(
        self, name: str, labels_BT: Tensor, *, num_labels: int | None = None, **options: Any
    ) -> CrossEntropy:
        """(loss sum, unsmoothed loss sum, count, correct) of a vocabulary head against labels [B, T].

        `options` go to `losses.linear_cross_entropy`. Where more than a few labels are ignored (masked LM, padding),
        the head sees the other positions only. A frozen head's loss is that of its own product, without gradient.
        `num_labels`: how many are not ignored, if that is known; else a GPU has to be asked, and waited for.
        """
        head = self._vocabulary_head(name)
        hidden_ND, labels_N = self.hidden.flatten(0, 1), labels_BT.flatten()
        kept_N = labels_N != IGNORED_LABEL
        if options.get("reduction", "sum") == "sum" and _leaves_out(name, kept_N):
            places_n = _places(kept_N, num_labels)
            hidden_ND, labels_N = hidden_ND.index_select(0, places_n), labels_N.index_select(0, places_n)
        if head.product is not None:
            return cross_entropy_of(head, hidden_ND, labels_N, classes=head.weight.shape[0], **options)
        return linear_cross_entropy(
            head.features(hidden_ND),
            head.matrix(),
            labels_N,
            bias=head.bias,
            softcap=head.softcap,
            compiled=self.compiled and hidden_ND.device.type == "cuda",
            **options,
        )

    def logit_chunks(self, name: str, places_BT: Tensor, *, count: int | None = None) -> Iterator[Tensor]:
        """The fp32 logits of a vocabulary head where `places_BT` is True, in order: parts [n, V] of bounded size.

        `count`: how many places that are, if it is known; else a GPU has to be waited for.
        """
        head = self._vocabulary_head(name)
        hidden_ND = self.hidden.flatten(0, 1).index_select(0, _places(places_BT.flatten(), count))
        size = max(1, LOGIT_ELEMENTS // head.weight.shape[0])
        for start in range(0, max(1, len(hidden_ND)), size):
            yield head(hidden_ND[start : start + size])

    def _vocabulary_head(self, name: str) -> VocabularyHead:
        head = self._head(name)
        if not isinstance(head, VocabularyHead):
            raise ValueError(f"'{name}' is a {type(head).__name__}, expected a head over the vocabulary")
        return head

    def _head(self, name: str) -> nn.Module:
        if name not in self.heads:
            raise ValueError(f"the model has no head '{name}'; it has: {', '.join(self.heads) or 'none'}")
        return self.heads[name]


def _leaves_out(name: str, kept_N: Tensor) -> bool:
    """Whether ignored positions are dropped before the head. Counting them would stall any device but a CPU."""
    if kept_N.device.type != "cpu":
        return name == MASKED
    return int(kept_N.sum()) < (1 - FEW) * len(kept_N)


def _places(kept_N: Tensor, count: int | None) -> Tensor:
    """Where `kept_N` is True, long [n]. With `count`, which must be right, no device is asked how many these are."""
    if count is None or kept_N.device.type == "cpu":
        return kept_N.nonzero().squeeze(1)
    return counted_places(kept_N, count)


def counted_places(kept_N: Tensor, count: int) -> Tensor:
    """The places [count] of the `count` True elements, in order, by operations whose sizes are known beforehand."""
    numbers_N = torch.arange(len(kept_N), device=kept_N.device)
    rank_N = torch.where(kept_N, kept_N.cumsum(0) - 1, count)  # one further cell takes those that are not kept
    return numbers_N.new_zeros(count + 1).scatter_(0, rank_N, numbers_N)[:count]
