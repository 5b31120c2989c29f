"""Vectors of texts, pairs of texts and images: a model's hidden states, pooled.

Inputs are prepared as in training (template, truncation, token types, image statistics). An encoder-decoder gives its
encoder's states, any other model those of its only stack.

Shapes: N inputs, B of a batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from tformer.data.batching.batch import Batch
from tformer.data.batching.mixture import Samples
from tformer.data.encoding import EncodedText
from tformer.decoding.lines import Text
from tformer.evaluation.classifier import image_context, image_samples
from tformer.evaluation.predict import GivenSamples, predict
from tformer.loading import Loaded
from tformer.nn.classification_heads import (
    POOLINGS,
    ClassifierHeadOptions,
    PooledHead,
    Pooling,
    RegressionHeadOptions,
)
from tformer.nn.heads import Output
from tformer.objectives.labelled import collate_images
from tformer.support.errors import InputError
from tformer.support.options import MACHINE, Panel, Precision, Quantize, check_quantize

VECTOR = Panel("The vector")


@dataclass(frozen=True)
class EmbedOptions:
    """The options of `run.embed`."""

    pooling: Annotated[
        Pooling | None,
        VECTOR(
            "--pooling",
            help="One vector of many: cls, mean, max or eos.",
            default="that of the model's head, else mean",
        ),
    ] = None
    layer: Annotated[
        int | None,
        VECTOR("--layer", help="States after this layer, from 0; negative: from the end.", default="the model's last"),
    ] = None
    batch_size: Annotated[int | None, MACHINE("--batch-size", help="Inputs per batch. Affects only the speed.")] = None
    precision: Precision = "auto"
    quantize: Quantize = "none"

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is computed."""
        check_quantize(self.quantize, self.precision)


def embed_texts(
    loaded: Loaded, texts: Sequence[Text], options: EmbedOptions, *, on_cut: Callable[[int, int], None]
) -> np.ndarray:
    """fp32 [N, D]: a vector for each text, or pair of texts, in order.

    on_cut: called with (number of texts that are longer than in training, that length in tokens). They are cut.
    """
    reader, seq_len = loaded.reader, loaded.recipe.seq_len
    encoded = [reader.encode(text, text2, cut=True, count_cut=False) for text, text2 in texts]
    on_cut(sum(text.num_cut > 0 for text in encoded), seq_len)
    samples = GivenSamples(encoded, seq_len, np.array([len(text.ids) for text in encoded]))
    uses_types = loaded.recipe.model.embedding.token_types > 1
    # A decoder beside the encoder reads its start tokens only: its output is not used.
    start = torch.tensor([loaded.decoder_tokens.prefix]) if loaded.model.is_encoder_decoder else None

    def collate(examples: Sequence[EncodedText], **_: Any) -> Batch:
        arrays = {name: torch.from_numpy(array) for name, array in reader.batch(examples).items()}
        mask_BT = arrays["attention_mask"].bool()
        return Batch(
            input_ids=arrays["input_ids"],
            attention_mask=None if bool(mask_BT.all()) else mask_BT,
            token_type_ids=arrays["token_type_ids"] if uses_types else None,
            decoder_input_ids=None if start is None else start.expand(len(examples), -1),
        )

    return _embed(loaded, samples, collate, options)


def embed_images(loaded: Loaded, paths: Sequence[Path], options: EmbedOptions) -> np.ndarray:
    """fp32 [N, D]: a vector for each image file, in order."""
    collate = partial(collate_images, images=image_context(loaded.recipe))
    return _embed(loaded, image_samples(loaded.recipe, paths), collate, options)


def _embed(loaded: Loaded, samples: Samples, collate: Callable[..., Batch], options: EmbedOptions) -> np.ndarray:
    model = loaded.model
    side, stack = ("decoder", model.decoder) if model.encoder is None else ("encoder", model.encoder)
    assert stack is not None
    pooled, taps = _pooling(loaded, options.pooling), []
    if options.layer is not None:
        count = len(stack.layers)
        if not -count <= options.layer < count:
            raise InputError(f"--layer must be between {-count} and {count - 1}, found {options.layer}")
        taps = [f"{side}.{options.layer % count}.hidden"]

    def read(output: Output, batch: Batch) -> torch.Tensor:
        hidden_BTD = output.encoder_hidden if model.is_encoder_decoder else output.hidden
        for name in taps:
            hidden_BTD = output.taps[name]
        assert hidden_BTD is not None
        return pooled(hidden_BTD, batch.attention_mask)

    if not len(samples):
        return np.zeros((0, loaded.recipe.model.d_model), dtype=np.float32)
    return predict(model, samples, collate, read, taps=taps, batch_size=options.batch_size)


def _pooling(loaded: Loaded, how: Pooling | None) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """A function of hidden states and mask; None: that of the model's classifier or regression head, else the mean."""
    heads = loaded.recipe.model.heads
    own = (head.kind for head in heads if isinstance(head, ClassifierHeadOptions | RegressionHeadOptions))
    if how is None and (name := next(own, None)) is not None:
        module = loaded.model.heads[name]
        assert isinstance(module, PooledHead)
        return module.pool
    return POOLINGS[how or "mean"].pool
