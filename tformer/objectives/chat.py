"""Instruction tuning: causal language modelling of the answers in conversations (arXiv 2203.02155, section 3.5).

    loss = - sum over t in answers of log p(x_t | x_(<t))

With `answers_only: false` every id of a conversation is predicted but the first. Packed conversations do not see each
other, so that the loss is that of the same conversations one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from tformer.data.batching.batch import Batch
from tformer.data.shards.chat_tokens import LEARNED
from tformer.data.shards.corpus import Example
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import IMAGE_KEYS, LABEL_KEYS, PAIR_KEYS, SOURCE_KEYS, Objective
from tformer.objectives.causal_lm import CausalLm, CausalLmOptions
from tformer.objectives.collate import documents_of


class Chat(CausalLm):
    """The objective; the ids of its samples are marked, see `chat_tokens`."""

    data = "chat"  # type: ignore[assignment]
    predicts = "the next token of every answer"
    unused_keys = (
        *(key for key in (*PAIR_KEYS, *LABEL_KEYS, *IMAGE_KEYS, *SOURCE_KEYS) if key != "data.overlong"),
        *("data.document_mask", "data.columns.text", "generator"),
        *("tokenizer.special_ids.decoder_start", "tokenizer.special_ids.forced_bos"),
    )

    def originals(self, sample: Any) -> dict[str, np.ndarray]:
        return {"text": sample.ids % LEARNED}

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """As `CausalLm.collate`, with labels on learned ids only."""
        plain = []
        for sample in samples:
            learned = sample.ids >= LEARNED
            if not self.options.answers_only:  # all but the first id of each conversation
                learned = np.diff(documents_of(sample), prepend=-1) == 0
            plain.append(replace(sample, ids=sample.ids % LEARNED, label=learned))
        return super().collate(plain, rng=rng, training=training)

    def _labels_of(self, example: Example) -> np.ndarray:
        return np.where(np.asarray(example.label)[1:], example.ids[1:], IGNORED_LABEL)


@dataclass(frozen=True)
class ChatOptions(CausalLmOptions):
    """Instruction tuning on conversations."""

    kind: Literal["chat"] = "chat"  # type: ignore[assignment]
    answers_only: bool = True  # learn the answers alone; false: all of a conversation
    objective: ClassVar[type[Objective]] = Chat
