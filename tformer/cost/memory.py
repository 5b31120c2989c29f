"""Memory in bytes of training (weights, optimizer, activations) and of the decoding cache.

Optimizer state and gradients are fp32; `copies` are the weights in the compute dtype where it is narrower than fp32.
Activations are the tensors that autograd saves until the backward pass, in the compute dtype, a token and layer:

    norm            its input, in fp32 where the kind or the device widens it
    projections     their inputs: the normalized stream, the joined heads
    attention       Q, K, V of one product; rotated or normalized Q and K beside them; the weights where a call is so
                    small that they are not recomputed (`attend_chunked`, `attend_blocked`)
    feed-forward    the inputs of the activation and of the last product: 2 d_ff, for relu d_ff, gated 4 d_ff
    dropout         one number for each that it may drop

Larger calls of attention recompute their scores in the backward pass. `saved_values` of an attention kind counts
what it saves in addition to Q, K, V and the output; `saved_bytes` of a norm is what it saves of its input. The
workspace is temporary: the largest step of a layer, or the loss. On a CPU the C library keeps freed memory between
blocks in use (`held`), a measured fraction of the activations. Gradients fill up while activations are freed, so the
sum is an upper bound.

A step on fake tensors (FakeTensorMode) takes as many operations as a real one: 36 seconds of a core for `gpt/small`,
where these formulas take 5 milliseconds. Of `bert/classify`, `vit/tiny` and `longformer/classify` it shows 1 to 10 %
more activations.
"""

# Shapes: N tokens of a forward pass, B rows of T, S keys, H heads, K kv heads, W d_model.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import torch

from tformer.build import Sizes, layer_sizes, patch_embedding, resolve_sizes
from tformer.cost.flops import labelled_share
from tformer.model import Transformer
from tformer.nn.attention.routes import CHUNK_ELEMENTS, KEPT_ELEMENTS, QUERY_BLOCK
from tformer.nn.heads import VocabularyHead
from tformer.nn.init import hidden_matrices
from tformer.nn.layer_norm import FP32_BYTES
from tformer.nn.lora import BYTES, BaseFormat, frozen_form
from tformer.nn.losses import LOGIT_ELEMENTS
from tformer.nn.norm import NORMS
from tformer.nn.positions import PositionSizes
from tformer.optim.optimizers import OPTIMIZERS, algorithm_of
from tformer.recipe.model import Model, Stack, layer_sections
from tformer.recipe.recipe import Recipe

HELD_SHARE = 0.4  # of the activations, on a CPU under glibc: what its heap holds beyond what is in use
CHUNK_COPIES = 3  # fp32 tensors of a chunk of logits on a GPU; on a CPU the loss goes through them in small blocks


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose.

    process: what the process holds without the model, on a CPU: Python, its libraries and the data.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    teacher: int = 0
    copies: int = 0
    workspace: int = 0
    held: int = 0
    process: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def to_json(self) -> dict[str, int]:
        always = ("weights", "gradients", "optimizer", "activations")
        some = {name: count for name, count in asdict(self).items() if name not in always}
        return {
            "weights_bytes": self.weights,
            "gradients_bytes": self.gradients,
            "optimizer_bytes": self.optimizer,
            "activations_bytes": self.activations,
            **{f"{name}_bytes": count for name, count in some.items() if count},
            "total_bytes": self.total,
        }


def estimate_memory(
    model: Model,
    *,
    num_parameters: int,
    num_trained: int | None = None,
    table_is_trained: bool = True,
    optimizer: int,
    tokens_per_micro_batch: int,
    dtype: torch.dtype,
    activation_checkpointing: bool,
    ema: bool,
    teacher_parameters: int = 0,
    seq_len: int | None = None,
    target_seq_len: int | None = None,
    on_cpu: bool = False,
    labelled_share: float = 1.0,
) -> MemoryEstimate:
    """Bytes that training allocates in one process at these sizes; a teacher counts with its weights in `dtype`.

    Args:
        num_trained: parameters with a gradient; None: all.
        table_is_trained: whether the matrix of a head over the vocabulary has a gradient.
        optimizer: bytes of its state (`optimizer_bytes`).
        tokens_per_micro_batch: positions of a forward pass in the encoder, or in the only stack.
        seq_len: of a row; None: model.max_seq_len. target_seq_len: of the decoder beside an encoder; None: the same.
        on_cpu: training on a CPU, where attention dropout, norms and the loss save other tensors.
        labelled_share: share of the positions that a head over the vocabulary predicts.
    """
    length = min(seq_len or model.max_seq_len, tokens_per_micro_batch)
    rows = max(1, tokens_per_micro_batch // length)
    both = model.is_encoder_decoder
    activations = workspace = 0
    for side in ("encoder", "decoder"):
        if getattr(model, side) is None:
            continue
        beside = both and side == "decoder"
        shape = _Shape(rows, (target_seq_len or length) if beside else length, dtype, on_cpu)
        source = length if beside else None
        saved, temporary = _stack_bytes(model, side, shape, source, checkpointing=activation_checkpointing)
        activations, workspace = activations + saved, max(workspace, temporary)
        last = shape
    width = resolve_sizes(model, "decoder" if model.decoder is not None else "encoder").d_model
    weights, itemsize = num_parameters * FP32_BYTES, dtype.itemsize
    trained = weights if num_trained is None else num_trained * FP32_BYTES
    if not any(head.over_vocabulary for head in model.heads):
        activations += last.tokens * width * itemsize
    else:  # the loss saves the gradients of its input and, in fp32, of its matrix
        tokens, classes = int(last.tokens * labelled_share), model.target_vocab_size or model.vocab_size or 0
        matrix = classes * (model.embedding.size or width) * FP32_BYTES if table_is_trained else 0
        activations += tokens * width * itemsize + matrix
        wide = 0 if on_cpu else CHUNK_COPIES * FP32_BYTES
        workspace = max(workspace, min(tokens * classes, LOGIT_ELEMENTS) * (itemsize + wide))
    # Convolutions before the first layer: of images, or over tokens (windows, and their ReLU).
    if model.patches is not None:
        with torch.device("meta"):
            activations += rows * patch_embedding(model).saved_bytes(itemsize)
    elif model.embedding.convolution:
        window = (model.embedding.convolution + 1) * (model.embedding.size or model.d_model)
        activations += rows * length * window * itemsize
    return MemoryEstimate(
        weights=weights + (trained if ema else 0),
        gradients=trained,
        optimizer=optimizer,
        activations=activations,
        teacher=teacher_parameters * itemsize,
        copies=num_parameters * itemsize if itemsize < FP32_BYTES else 0,
        workspace=workspace,
        held=int(HELD_SHARE * activations) if on_cpu else 0,
    )


def optimizer_bytes(kind: str, models: Iterable[Transformer]) -> int:
    """Bytes of the optimizer's state, by parameter; of Adafactor without its few numbers for rows, columns and vectors.

    A parameter of two models counts once, a frozen one not at all.
    """
    found: dict[int, int] = {}
    for model in models:
        hidden = hidden_matrices(model)
        for name, parameter in model.named_parameters():
            algorithm = algorithm_of(kind, is_hidden=name in hidden and parameter.ndim == 2)
            if parameter.requires_grad:
                found.setdefault(id(parameter), FP32_BYTES * parameter.numel() * OPTIMIZERS[algorithm].moments)
    return sum(found.values())


def training_memory(
    recipe: Recipe,
    models: Sequence[Transformer],
    *,
    teacher_parameters: int = 0,
    **options: Any,
) -> MemoryEstimate:
    """`estimate_memory` of a recipe's model, with its generator beside it.

    models: both, on any device. options: of `estimate_memory`, what the recipe does not say: sizes of a pass, device.
    """
    every = {id(parameter): parameter for model in models for parameter in model.parameters()}.values()
    outputs = [head.weight for head in models[0].heads.values() if isinstance(head, VocabularyHead)]
    options |= {
        "activation_checkpointing": recipe.training.activation_checkpointing,
        "ema": recipe.training.ema_decay is not None,
        "labelled_share": labelled_share(recipe),
    }
    found = estimate_memory(
        recipe.model,
        num_parameters=sum(each.numel() for each in every),
        num_trained=sum(each.numel() for each in every if each.requires_grad),
        table_is_trained=any(weight.requires_grad for weight in outputs),
        optimizer=optimizer_bytes(recipe.optimizer.kind, models),
        teacher_parameters=teacher_parameters,
        **options,
    )
    if recipe.lora is not None:  # products widen one rounded matrix at a time
        forms: Counter[BaseFormat] = Counter()
        for name, each in models[0].named_parameters():
            held = "fp32" if each.requires_grad else frozen_form(models[0], name, recipe.lora.weights)
            forms[held] += each.numel()
        saved = sum(count * (FP32_BYTES - BYTES[form]) for form, count in forms.items())
        copies = min(found.copies, forms["fp32"] * options["dtype"].itemsize)
        return replace(found, weights=found.weights - int(saved), copies=copies)
    if recipe.generator is None:
        return found
    beside = estimate_memory(recipe.generator, num_parameters=0, optimizer=0, **options)
    return replace(
        found,
        activations=found.activations + beside.activations,
        workspace=max(found.workspace, beside.workspace),
        held=found.held + beside.held,
    )


@dataclass(frozen=True)
class _Shape:
    """One forward pass of a stack: `rows` sequences of `length` positions."""

    rows: int
    length: int
    dtype: torch.dtype
    on_cpu: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def _stack_bytes(model: Model, side: str, shape: _Shape, source: int | None, *, checkpointing: bool) -> tuple[int, int]:
    """(bytes saved by the embedding and the layers of a stack, workspace of its largest layer)."""
    section: Stack = getattr(model, side)
    layers = list(zip(layer_sections(section, path=f"model.{side}"), layer_sizes(model, side), strict=True))
    each = [
        _layer_bytes(layer, sizes, shape, max_seq_len=model.max_seq_len, causal=side == "decoder", source_length=source)
        for layer, sizes in layers
    ]
    workspace = max(_layer_workspace(layer, sizes, shape, source_length=source) for layer, sizes in layers)
    stream = shape.tokens * (section.d_model or model.d_model) * shape.itemsize
    embedding = stream * ((model.embedding.dropout > 0) + model.embedding.norm + section.final_norm)
    if checkpointing:  # the stream at each layer's start, and one layer recomputed
        return len(each) * stream + embedding, max(each) + workspace
    return sum(each) + embedding, workspace


def _layer_bytes(
    layer: Stack, sizes: Sizes, shape: _Shape, *, max_seq_len: int, causal: bool, source_length: int | None
) -> int:
    """Bytes that one layer saves until its backward pass. source_length: positions of the encoder that it reads."""
    width, options = sizes.d_model, layer.feedforward
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    values, joined = sizes.num_kv_heads * sizes.value_dim, sizes.num_heads * sizes.value_dim
    dropped = width if layer.dropout else 0  # by the dropout of a function's output
    # Numbers of a token. Self-attention: input, Q K V, rotated or normalized Q and K, joined heads, and the kind's own.
    numbers: float = width + queries + keys + values + joined + dropped
    normed = NORMS["groupnorm"].fp32_copies * FP32_BYTES / shape.itemsize  # numbers that a norm of heads saves
    if layer.attention.qk_norm != "groupnorm":
        normed = bool(layer.attention.qk_norm)
    numbers += (queries + keys) * (normed + layer.positions.module.has_rotate)
    numbers += layer.attention.saved_values(
        queries=queries, keys=keys, values=values, itemsize=shape.itemsize, max_seq_len=max_seq_len
    )
    # Feed-forward: input, and the inputs of the activation and of the last product.
    numbers += width + (options.saved_copies + (layer.activation_dropout > 0)) * options.hidden_size(width) + dropped
    saved = int(shape.tokens * numbers) * shape.itemsize + _weight_bytes(layer, sizes, shape, shape.length, causal)
    functions = 2
    if source_length is not None:
        saved += shape.tokens * (width + queries + joined + dropped) * shape.itemsize
        saved += shape.rows * source_length * (keys + values) * shape.itemsize
        saved += _weight_bytes(layer, sizes, shape, source_length, causal=False)
        functions = 3
    norm = NORMS[layer.norm.kind].saved_bytes(width, shape.itemsize, on_cpu=shape.on_cpu)
    if layer.convolution:  # its inputs, its product and the sum
        saved += shape.tokens * (layer.convolution + 1) * width * shape.itemsize + shape.tokens * norm
    norms = 2 if layer.norm.place == "sandwich" else 1
    return saved + functions * norms * shape.tokens * norm


def _layer_workspace(layer: Stack, sizes: Sizes, shape: _Shape, *, source_length: int | None) -> int:
    """Temporary bytes of the largest step of a layer's forward or backward: its feed-forward or its scores."""
    d_ff = layer.feedforward.hidden_size(sizes.d_model) * (2 if layer.feedforward.gated else 1)
    products = 2 * shape.tokens * (d_ff + sizes.d_model) * shape.itemsize
    keys = max(shape.length, source_length or 0)
    scores = shape.rows * sizes.num_heads * shape.length * keys
    chunk = min(scores, CHUNK_ELEMENTS) if _forms_scores(layer, shape) else min(scores, KEPT_ELEMENTS) // 8
    return max(products, chunk * (2 * FP32_BYTES + 3 * shape.itemsize))


def _forms_scores(layer: Stack, shape: _Shape) -> bool:
    """Whether attention takes the explicit path, which stores scores; fused kernels store none (`core.attend`)."""
    positions = layer.positions.module
    if positions.has_bias and shape.itemsize >= FP32_BYTES:  # if it is learned, as a module of the smallest sizes shows
        smallest = layer.positions.build(PositionSizes(4, 1, 4, 4, 1, bidirectional=False, grid=(1, 1, False)))
        adds_bias = any(True for _ in smallest.parameters())
    else:
        adds_bias = positions.has_bias
    return (
        (layer.attention_dropout > 0 and shape.on_cpu)
        or positions.has_score
        or positions.has_mix
        or adds_bias
        or layer.attention.softcap is not None
        or layer.attention.mechanism.forms_scores
    )


def _weight_bytes(layer: Stack, sizes: Sizes, shape: _Shape, num_keys: int, causal: bool) -> int:
    """Bytes of the attention weights that one call saves: all of them where it is small, else none."""
    if not layer.attention.mechanism.cross and layer.attention.softcap is None:
        return 0
    scores = shape.rows * sizes.num_heads * shape.length * num_keys
    if _forms_scores(layer, shape):
        size = sizes.head_dim if layer.attention.mechanism.forms_scores else 1
        if shape.length > max(1, CHUNK_ELEMENTS // max(1, shape.rows * sizes.num_heads * num_keys * size)):
            return 0
        narrow = shape.itemsize if shape.itemsize < FP32_BYTES else 0
        kept = FP32_BYTES if layer.attention.softcap is None else 2 * FP32_BYTES  # weights, and tanh of the scores
        return scores * (kept + (2 * shape.itemsize if layer.attention_dropout else narrow))
    if shape.on_cpu and shape.dtype == torch.bfloat16 and scores <= KEPT_ELEMENTS:
        seen = (shape.length + min(QUERY_BLOCK, shape.length)) / (2 * shape.length) if causal else 1.0
        return int(scores * seen) * shape.itemsize
    return 0


# --- decoding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodingCacheSize:
    """Bytes of the decoding cache for one sequence.

    per_token: for each generated token; constant: at any length; per_source_token: for each position of the encoder.
    """

    per_token: int
    constant: int
    per_source_token: int

    def at(self, length: int, source_length: int) -> int:
        """Bytes with `length` tokens generated and a source of `source_length`."""
        return self.per_token * length + self.constant + self.per_source_token * source_length

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes_per_token": self.per_token,
            "bytes_constant": self.constant,
            "bytes_per_source_token": self.per_source_token,
        }


def cache_size(model: Transformer, dtype: torch.dtype) -> DecodingCacheSize | None:
    """The decoding cache of a model on any device, also meta; None for a model that does not decode."""
    if model.decoder is None:
        return None
    per_token = constant = per_source = 0
    for block in model.decoder.layers:
        of_layer = block.self_attention.mechanism.state_bytes(dtype)
        per_token, constant = per_token + of_layer.per_token, constant + of_layer.constant
        if block.cross_attention is not None:
            cross = block.cross_attention
            per_source += cross.num_kv_heads * (cross.head_dim + cross.value_dim) * dtype.itemsize
    return DecodingCacheSize(per_token, constant, per_source)
