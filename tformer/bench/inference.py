"""Our models for inference, with random weights, in the number format that a command would give them."""

from __future__ import annotations

import torch

from tformer.bench.task import SEED, Task
from tformer.build import build_model
from tformer.decoding.precision import cast_matrices, prepare_inference
from tformer.model import Transformer
from tformer.nn.hardware import DTYPES
from tformer.training.assemble import matmul_parameters
from tformer.training.flops import head_parameters

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
"""Of a weight of a matrix; what quantised matrices need beside (scales) is left out."""


def inference_model(task: Task, precision: str, *, rows: int | None = None) -> Transformer:
    """Drawn from a fixed seed, in evaluation mode. precision: the task's, or int8: its matrices quantised.

    rows: of a step of decoding; None: many.

    One that is to be compiled keeps its plain matrices: packed ones the compiler cannot look into.
    """
    torch.manual_seed(SEED)
    model = build_model(task.recipe.model, num_labels=len(task.recipe.data.labels) or None, device="cpu")
    model.to(task.device).eval()
    if task.compile:
        cast_matrices(model, DTYPES[task.precision])
        return model
    quantize = "none" if precision == task.precision else precision
    prepare_inference(model, DTYPES[task.precision], quantize=quantize, rows=rows)
    return model


def matrix_parameters(task: Task, *, head: str) -> tuple[int, int]:
    """Parameters of the matrix products that every token meets, and of those of `head`, which reads few of them."""
    labels = len(task.recipe.data.labels) or None
    model = build_model(task.recipe.model, num_labels=labels, device="meta")
    of_stacks = matmul_parameters(model) - sum(map(head_parameters, model.heads.children()))
    return of_stacks, head_parameters(model.heads[head])
