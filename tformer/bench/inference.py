"""Our models for inference, with random weights, in the number format that a command would give them."""

from __future__ import annotations

import torch

from tformer.bench.task import SEED, Task
from tformer.build import build_model
from tformer.decoding.compiled import compile_decoding, no_compiled_steps, require_compiler
from tformer.decoding.precision import cast_matrices, prepare_inference
from tformer.errors import InputError
from tformer.model import Transformer
from tformer.nn.hardware import DTYPES
from tformer.training.assemble import matmul_parameters
from tformer.training.flops import head_parameters

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
"""Of a weight of a matrix; what quantised matrices need beside (scales) is left out."""


def inference_model(task: Task, precision: str, *, rows: int | None = None) -> Transformer:
    """Drawn from a fixed seed, in evaluation mode. precision: the task's, or int8: its matrices quantised.

    rows: of a step of decoding; None: many.

    One that is to be compiled keeps its plain matrices: packed ones the compiler cannot look into. The caller
    compiles the whole, or (`decoding_model`) its steps.
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


def decoding_model(task: Task, precision: str, *, rows: int | None = None) -> Transformer:
    """The same, for decoding: what is compiled is the step."""
    model = inference_model(task, precision, rows=rows)
    if task.compile:
        compile_decoding(model, DTYPES[task.precision])
    return model


def check_compiled_steps(task: Task) -> None:
    """Raise InputError for steps that are to be compiled and cannot be."""
    if not task.compile:
        return
    model = build_model(task.recipe.model, num_labels=len(task.recipe.data.labels) or None, device="meta")
    if (reason := no_compiled_steps(model)) is not None:
        raise InputError(f"--compile: {reason}", hint="leave it out")
    require_compiler(task.device)


def matrix_parameters(task: Task, *, head: str) -> tuple[int, int]:
    """Parameters of the matrix products that every token meets, and of those of `head`, which reads few of them."""
    labels = len(task.recipe.data.labels) or None
    model = build_model(task.recipe.model, num_labels=labels, device="meta")
    of_stacks = matmul_parameters(model) - sum(map(head_parameters, model.heads.children()))
    return of_stacks, head_parameters(model.heads[head])
