"""Instruction tuning: causal language modelling of the answers in conversations (arXiv 2203.02155, section 3.5).

    loss = - sum over t in answers of log p(x_t | x_(<t))

With `answers_only: false` every id of a conversation is predicted but the first. Packed conversations do not see each
other, so that the loss is that of the same conversations one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from tformer.data.shards.corpus import LEARNED, Example
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import IMAGE_KEYS, LABEL_KEYS, PAIR_KEYS, SOURCE_KEYS, Objective
from tformer.objectives.causal_lm import CausalLm, CausalLmOptions
from tformer.objectives.collate import documents_of


class InstructionTuning(CausalLm):
    """The objective; the label of a sample is the marks of its ids."""

    data = "chat"  # type: ignore[assignment]
    predicts = "the next token of every answer"
    unused_keys = (
        *(key for key in (*PAIR_KEYS, *LABEL_KEYS, *IMAGE_KEYS, *SOURCE_KEYS) if key != "data.overlong"),
        *("data.document_mask", "data.columns.text", "generator"),
        *("tokenizer.special_ids.decoder_start", "tokenizer.special_ids.forced_bos"),
    )

    def _labels_of(self, example: Example) -> np.ndarray:
        if self.options.answers_only:
            return answer_labels(example)
        same_document = np.diff(documents_of(example)) == 0  # all but the first id of each conversation
        return np.where(same_document, example.ids[1:], IGNORED_LABEL)


def answer_labels(example: Example) -> np.ndarray:
    """The label of each id of a sample with marks [t - 1]: the next id if it is learned, else `IGNORED_LABEL`."""
    marks = np.asarray(example.label)
    return np.where(marks[1:] & LEARNED, example.ids[1:], IGNORED_LABEL)


@dataclass(frozen=True)
class ChatOptions(CausalLmOptions):
    """Instruction tuning on conversations."""

    kind: Literal["chat"] = "chat"  # type: ignore[assignment]
    answers_only: bool = True  # learn the answers alone; false: all of a conversation
    objective: ClassVar[type[Objective]] = InstructionTuning
