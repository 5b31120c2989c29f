"""Vectors of texts, pairs of texts and images: a model's hidden states, pooled.

Inputs are prepared as in training (template, truncation, token types, image statistics). An encoder-decoder gives its
encoder's states, any other model those of its only stack.

Shapes: N inputs, B of a batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tformer.data.batching.batch import Batch
from tformer.data.batching.mixture import Samples
from tformer.data.encoding import EncodedText
from tformer.decoding.inference import prepare_loaded
from tformer.decoding.lines import Text
from tformer.evaluation.classifier import image_context, image_samples
from tformer.evaluation.predict import GivenSamples, predict
from tformer.evaluation.vector_options import EmbedOptions
from tformer.loading import Loaded, load, weights_hash
from tformer.nn.classification_heads import POOLINGS, PooledHead
from tformer.nn.heads import ModelOutput
from tformer.objectives.labelled import collate_images
from tformer.recipe.recipe import Recipe
from tformer.support.device import resolve_device
from tformer.support.errors import InputError
from tformer.workers.work import QUIET, Work

LAST = "last"  # the pooling eos under the name that others use


def load_for_vectors(run: str | None, options: EmbedOptions, *, hashed: bool = True) -> tuple[Loaded, str]:
    """(the model of a path, prepared to embed texts, the hash of its weights). Raises InputError for one of images."""

    def usable(recipe: Recipe) -> bool:
        return recipe.model.patches is None

    device = resolve_device(options.device)
    loaded = load(run, device=device, which=options.checkpoint, usable=usable, lazily=not hashed)
    if not usable(loaded.recipe):
        raise InputError(f"{loaded.path} reads images, expected a model of texts", hint="in Python: run.embed(paths)")
    sha256 = weights_hash(loaded) if hashed else ""
    prepare_loaded(loaded, options.precision, options.quantize)
    return loaded, sha256


def embed_texts(
    loaded: Loaded,
    texts: Sequence[Text],
    options: EmbedOptions,
    *,
    on_cut: Callable[[int, int], None] = lambda count, length: None,
    work: Work = QUIET,
) -> np.ndarray:
    """fp32 [N, D]: a vector for each text, or pair of texts, in order. Raises Interrupted once the work is stopped.

    on_cut: called with (number of texts that are longer than in training, that length in tokens). They are cut.
    work: see `predict`.
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

    vectors_ND = _embed(loaded, samples, collate, options, work)
    work.raise_if_stopped("while embedding")
    return vectors_ND


def embed_images(loaded: Loaded, paths: Sequence[Path], options: EmbedOptions) -> np.ndarray:
    """fp32 [N, D]: a vector for each image file, in order."""
    collate = partial(collate_images, images=image_context(loaded.recipe))
    return _embed(loaded, image_samples(loaded.recipe, paths), collate, options)


def _embed(
    loaded: Loaded, samples: Samples, collate: Callable[..., Batch], options: EmbedOptions, work: Work = QUIET
) -> np.ndarray:
    model, width = loaded.model, loaded.recipe.model.d_model
    side, stack = ("decoder", model.decoder) if model.encoder is None else ("encoder", model.encoder)
    assert stack is not None
    pool, taps = _pooling(loaded, options), []
    if options.layer is not None:
        count = len(stack.layers)
        if not -count <= options.layer < count:
            raise InputError(f"--layer must be between {-count} and {count - 1}, found {options.layer}")
        taps = [f"{side}.{options.layer % count}.hidden"]
    if options.dimensions is not None and not 0 < options.dimensions <= width:
        raise InputError(f"--dimensions must be between 1 and {width}, found {options.dimensions}")

    def read(output: ModelOutput, batch: Batch) -> torch.Tensor:
        hidden_BTD = output.encoder_hidden if model.is_encoder_decoder else output.hidden
        for name in taps:
            hidden_BTD = output.taps[name]
        assert hidden_BTD is not None
        return pool(hidden_BTD, batch.attention_mask)

    if not len(samples):
        return np.zeros((0, options.dimensions or width), dtype=np.float32)
    return predict(model, samples, collate, read, taps=taps, batch_size=options.batch_size, work=work)


def pooling_named(name: str) -> str:
    """The key of `POOLINGS` of a value of --pooling. Raises InputError for another, and for one that is learned."""
    known = [each for each, kind in POOLINGS.items() if not kind.is_learned]
    if name not in (LAST, *known):
        raise InputError(f"--pooling: found {name!r}, expected {', '.join(map(repr, known))} or {LAST!r}")
    return "eos" if name == LAST else name


def _pooling(loaded: Loaded, options: EmbedOptions) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """A function of hidden states and mask that gives vectors.

    Without a named pooling it is that of the model's embedding, classifier or regression head, else the mean.
    """
    heads = loaded.recipe.model.heads
    named = sorted((head for head in heads if hasattr(head, "pooling")), key=lambda head: head.kind != "embedding")
    how, unit_length = options.pooling, options.normalize
    if how is None and named:
        module = loaded.model.heads[named[0].kind]
        assert isinstance(module, PooledHead)
        pool, unit_length = module.pool, unit_length or module.unit_length
    else:
        pool = POOLINGS[pooling_named(how or "mean")].pool

    def vectors(hidden_BTD: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
        vectors_BD = pool(hidden_BTD, mask_BT).float()[:, : options.dimensions]
        return F.normalize(vectors_BD, dim=-1) if unit_length else vectors_BD

    return vectors
