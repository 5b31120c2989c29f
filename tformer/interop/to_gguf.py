"""Weights as a GGUF file, which llama.cpp reads (optional): a decoder in fp32, without a vocabulary.

A Hugging Face class that llama.cpp knows gives the names of tensors, and its `Architecture.gguf` how they are stored.
The file has no vocabulary, because llama.cpp's ways to split text do not include that of tformer's tokenizers; texts go
in and out as ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tformer.build import resolve_sizes
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.choose import choose_class
from tformer.interop.weight_files import outgoing
from tformer.nn.positions.rope import RopeOptions, scale_frequencies
from tformer.recipe.model import Model
from tformer.support.errors import InputError

NO_VOCABULARY = "none"  # llama.cpp's name


def write_gguf(path: Path, model: Model, weights: Mapping[str, Tensor], *, family: str) -> None:
    """Write a model that `llama_cpp` loads. It needs the package `gguf`.

    Args:
        model: resolved: the vocabulary has a size.
        weights: tformer's tensors (`state_dict`).
        family: the recipe's `arch`.

    Raises InputError for a model that llama.cpp does not compute equally.
    """
    import gguf

    choice = choose_class(model, family=family)
    known = [name for name, architecture in ARCHITECTURES.items() if architecture.gguf is not None]
    form = choice.architecture.gguf
    if form is None:
        raise InputError(
            f"GGUF: {choice.class_name} is not among the models that llama.cpp computes equally: {', '.join(known)}"
        )
    assert choice.model.decoder is not None
    if (found := choice.model.decoder.feedforward.activation) != form.activation:
        raise InputError(
            f"GGUF: model.decoder.feedforward.activation is {found}, llama.cpp computes {choice.class_name} with "
            f"{form.activation}"
        )
    for step in choice.steps:
        model, weights = step.apply(model, weights)
    assert model.decoder is not None
    links, fixed = choice.architecture.written(model, choice.class_name)
    tensors = outgoing(links, fixed, weights, dtype=torch.float32)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == form.name)
    names = gguf.get_tensor_name_map(architecture, model.decoder.num_layers)
    writer = gguf.GGUFWriter(path, form.name)
    _describe(writer, model)
    for name in tensors.shapes:
        tensor = form.stored(model, name, tensors.make(name))
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, tensor.contiguous().numpy())
    positions = model.decoder.positions
    if isinstance(positions, RopeOptions) and positions.scaling is not None:
        if positions.scaling.kind not in ("llama3", "linear"):
            raise InputError(f"GGUF: model.decoder.positions.scaling.kind: {positions.scaling.kind} is not written")
        size = positions.width(resolve_sizes(model, "decoder").head_dim)
        frequencies = positions.base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        divisors = frequencies / scale_frequencies(frequencies, positions.scaling, base=positions.base)
        writer.add_tensor("rope_freqs.weight", divisors.float().numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _describe(writer: Any, model: Model) -> None:
    """Sizes and constants, under the keys of the writer's architecture."""
    decoder, sizes = model.decoder, resolve_sizes(model, "decoder")
    assert decoder is not None and model.vocab_size is not None
    writer.add_tokenizer_model(NO_VOCABULARY)
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(model.max_seq_len)
    writer.add_embedding_length(model.d_model)
    writer.add_block_count(decoder.num_layers)
    writer.add_feed_forward_length(decoder.feedforward.hidden_size(model.d_model))
    writer.add_head_count(sizes.num_heads)
    writer.add_head_count_kv(sizes.num_kv_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.value_dim)
    add_eps = writer.add_layer_norm_rms_eps if decoder.norm.kind == "rmsnorm" else writer.add_layer_norm_eps
    add_eps(decoder.norm.eps)
    if isinstance(decoder.positions, RopeOptions):
        writer.add_rope_dimension_count(decoder.positions.width(sizes.head_dim))
        writer.add_rope_freq_base(decoder.positions.base)
