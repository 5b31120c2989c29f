"""What models that restore text (BERT, ELECTRA, T5, BART, ...) are measured on: every token of some corpora, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tformer.data.batching.windows import MaskedWindows
from tformer.data.shards.corpus import Example, TokenCorpus
from tformer.data.shards.template import single_template
from tformer.evaluation.predict import Samples
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer


class Joined:
    """Several sets of samples, one after the other."""

    def __init__(self, parts: list[MaskedWindows]) -> None:
        self.parts, self.seq_len = parts, parts[0].seq_len
        self._starts = np.cumsum([0, *(len(part) for part in parts)])
        lengths = [np.full(len(part), part.seq_len) if part.lengths is None else part.lengths for part in parts]
        self.lengths: np.ndarray | None = np.concatenate(lengths)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def examples(self, epoch: int, indices: np.ndarray | Sequence[int]) -> list[Example]:
        """The samples at these indices, counted through all parts."""
        part_of = np.searchsorted(self._starts, np.asarray(indices), side="right") - 1
        pairs = zip(indices, part_of, strict=True)
        return [self.parts[part].examples(epoch, [int(index - self._starts[part])])[0] for index, part in pairs]


def masked_samples(
    recipe: Recipe, corpora: Sequence[TokenCorpus], tokenizer: Tokenizer, *, room: int | None = None
) -> Joined:
    """Windows as in training. Raises InputError when the template leaves no room for text.

    room: tokens of bare text, which an objective of an encoder-decoder frames once it is damaged; None: an encoder's
    windows, inside the template's special tokens.
    """
    template, data = single_template(tokenizer), recipe.data
    prefix, suffix = (template.prefix, template.suffix) if room is None else ((), ())
    return Joined(
        [
            MaskedWindows(
                corpus,
                recipe.seq_len if room is None else room,
                packing=data.packing,
                seed=recipe.seed,
                prefix=prefix,
                suffix=suffix,
                document_mask=data.document_mask,
            )
            for corpus in corpora
        ]
    )


def single_sequences(samples: Samples, *, most: int) -> list[np.ndarray]:
    """The ids of samples, of pairs of texts the first text alone; `most` samples at most, evenly spread."""
    count = min(len(samples), most)
    examples: Sequence[Any] = samples.examples(0, np.arange(count) * len(samples) // count)
    return [
        example.ids if example.token_type_ids is None else example.ids[example.token_type_ids == 0]
        for example in examples
    ]
