"""What training needs in memory: exact for weights and optimizer, tensor by tensor for what the backward pass keeps.

Optimizer state and gradients are fp32. Activations are what autograd saves of every layer (`kept.py`), of the embedding
and of the head, in the compute dtype; `copies` are the weights in that dtype, where it is narrower than fp32. The
workspace comes and goes: the largest step of a layer, or the loss. On a CPU freed memory stays with the C library
between blocks that are in use (`held`): a share of the activations, measured, not derived.

Gradients fill up while activations are freed, so that the sum is what is needed at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tformer.build import layer_sizes, resolve_sizes
from tformer.nn.losses import LOGIT_ELEMENTS
from tformer.recipe.model import Model, Stack, layer_sections
from tformer.training.kept import FP32_BYTES, Shape, kept_by_layer, workspace_of_layer

MOMENTS = {"adamw": 2, "adam": 2, "muon": 1}  # muon keeps one, for the hidden matrices; the rest is little
HELD_SHARE = 0.4  # of the activations, on a CPU under glibc: what its heap holds beyond what is in use
CHUNK_COPIES = 3  # fp32 tensors of a chunk of logits, off the CPU: there the loss goes through them in small blocks


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    teacher: int = 0
    copies: int = 0
    workspace: int = 0
    held: int = 0

    @property
    def total(self) -> int:
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.teacher, self.copies)
        return sum(parts) + self.workspace + self.held

    def to_json(self) -> dict[str, int]:
        some = {"teacher": self.teacher, "copies": self.copies, "workspace": self.workspace, "held": self.held}
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
    optimizer: str,
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
    """Bytes that training allocates for one process at these sizes; a teacher has weights in `dtype` and no more.

    Args:
        tokens_per_micro_batch: positions of a forward pass on the encoder's side, or of the only stack.
        seq_len: of a row; None: model.max_seq_len. target_seq_len: of the decoder beside an encoder; None: the same.
        on_cpu: whether it runs there, where dropout of attention, norms and the loss keep other things.
        labelled_share: of the positions, those that a head over the vocabulary predicts.
    """
    length = min(seq_len or model.max_seq_len, tokens_per_micro_batch)
    rows = max(1, tokens_per_micro_batch // length)
    weights, itemsize = num_parameters * FP32_BYTES, dtype.itemsize
    kept = workspace = 0
    both = model.encoder is not None and model.decoder is not None
    for side in ("encoder", "decoder"):
        if getattr(model, side) is None:
            continue
        beside = both and side == "decoder"
        shape = Shape(rows, (target_seq_len or length) if beside else length, dtype, on_cpu)
        source = length if beside else None
        side_kept, side_workspace = _stack(model, side, shape, source, checkpointing=activation_checkpointing)
        kept, workspace = kept + side_kept, max(workspace, side_workspace)
        last = shape
    width = resolve_sizes(model, "decoder" if model.decoder is not None else "encoder").d_model
    head, head_workspace = _head(model, width, last, labelled_share)
    return MemoryEstimate(
        weights=weights * (2 if ema else 1),
        gradients=weights,
        optimizer=weights * MOMENTS[optimizer],
        activations=kept + head,
        teacher=teacher_parameters * itemsize,
        copies=num_parameters * itemsize if itemsize < FP32_BYTES else 0,
        workspace=max(workspace, head_workspace),
        held=int(HELD_SHARE * (kept + head)) if on_cpu else 0,
    )


def _stack(model: Model, side: str, shape: Shape, source: int | None, *, checkpointing: bool) -> tuple[int, int]:
    """Bytes kept by the embedding and the layers of a stack, and the workspace of its largest layer."""
    section: Stack = getattr(model, side)
    width = section.d_model or model.d_model
    layers = list(zip(layer_sections(section, path=f"model.{side}"), layer_sizes(model, side), strict=True))
    each = [
        kept_by_layer(layer, sizes, shape, max_seq_len=model.max_seq_len, causal=side == "decoder",
                      source_length=source)
        for layer, sizes in layers
    ]  # fmt: skip
    workspace = max(workspace_of_layer(layer, sizes, shape, source_length=source) for layer, sizes in layers)
    stream = shape.tokens * width * shape.itemsize
    embedding = stream * ((model.embedding.dropout > 0) + model.embedding.norm + section.final_norm)
    if checkpointing:  # the stream at each layer's start, and one layer made again
        return len(each) * stream + embedding, max(each) + workspace
    return sum(each) + embedding, workspace


def _head(model: Model, width: int, shape: Shape, share: float) -> tuple[int, int]:
    """Bytes kept by the head (its input's gradient and, in fp32, its matrix's), and while the loss is formed."""
    tokens = int(shape.tokens * share)
    if not any(head.kind in ("lm", "masked_lm") for head in model.heads):
        return shape.tokens * width * shape.itemsize, 0
    rows = model.target_vocab_size or model.vocab_size or 0
    chunk = min(tokens * rows, LOGIT_ELEMENTS)
    wide = 0 if shape.on_cpu else CHUNK_COPIES * FP32_BYTES
    kept = tokens * width * shape.itemsize + rows * (model.embedding.size or width) * FP32_BYTES
    return kept, chunk * (shape.itemsize + wide)
